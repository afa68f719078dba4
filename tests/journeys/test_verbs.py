"""Each verb of the command line, in the order in which somebody with a file of clicks would meet it."""

from __future__ import annotations

import re

import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from click_files import write_shop
from shell import fetch, pick_port

VERBS = """
doctor                                                                                    | processor
settings train                                                                            | train.epochs
settings plan.memory.dram                                                                 | Default
settings learning rate                                                                    | embedding.lr
inspect clicks.csv                                                                        | user
inspect clicks.parquet                                                                    | user
plan clicks.yaml --dram 8KiB                                                              | samples/s
plan clicks.yaml --world 2x2 --uplink 1Gbit                                               | item
train clicks.yaml --run runs/one --set train.publish=published                            | test
train --data parquet --path clicks.parquet --model lr --batch-size 50 --run runs/two      | runs/two
train clicks.yaml --run runs/three --model dlrm --ranks 2 --epochs 1                      | runs/three
evaluate runs/one                                                                         | log loss
evaluate runs/one --at last --part validation                                             | validation
inspect runs/one                                                                          | 540
verify runs/one                                                                           | intact
predict runs/one --path test.csv --output scores.csv                                      | 500 samples
predict runs/one --part test --output scores.parquet                                      | 500 samples
compare runs/one runs/two                                                                 | log loss
compare runs/one runs/three --output compared.html                                        | compared.html
report runs/one --output one.html                                                         | one.html
towers runs/three --towers 2                                                              | tower
export runs/one exported --hub                                                            | exported
inspect exported                                                                          | user
verify exported                                                                           | intact
verify published                                                                          | intact
demo --samples 20000 --run runs/demo                                                      | runs/demo
report runs/demo                                                                          | report.html
train --data gowalla --path places --run runs/places --epochs 1 --set model.dim=8         | runs/places
recommend runs/places --users users.csv --k 3 --output best.parquet                       | 2 users
"""
"""A command on each line, and words that it prints."""


@pytest.mark.slow
@pytest.mark.budget(300)
def test_each_verb(shell):
    write_shop(shell)
    clicks = pyarrow.csv.read_csv(shell.folder / "clicks.csv")
    pq.write_table(clicks, shell.folder / "clicks.parquet")
    lines = (" ".join(map(str, [user, *range(user % 5, 40, 5)])) for user in range(60))
    shell.write("places/train.txt", "\n".join(lines) + "\n")
    shell.write("places/valid.txt", "".join(f"{user} {user % 5}\n" for user in range(60)))
    shell.write_table("users.csv", "user,history", [(1, "1|6"), (2, "2|7")])
    problems = []
    for line in VERBS.strip().splitlines():
        command, _, words = line.partition("|")
        process = shell.start(f"colonnade {command}")
        output = process.wait(status=None)
        if process.status or words.strip() not in output or "Traceback" in output:
            problems.append(f"status {process.status}, wanted {words.strip()!r}: {process}")
    assert not problems, "\n\n".join(problems)

    port = pick_port()
    server = shell.start(f"colonnade serve published --port {port}")
    address = f"http://127.0.0.1:{port}"
    server.wait_until(lambda: fetch(f"{address}/v2/health/ready") is not None, "a ready server")
    server.press_ctrl_c()
    assert "Traceback" not in server.wait(status=None)


@pytest.mark.slow
@pytest.mark.budget(60)
def test_help_of_each_verb(shell):
    """Every verb that the help lists is in a journey, and explains itself."""
    verbs = re.findall(r"^. ([a-z]+)  ", shell.run("colonnade --help"), re.MULTILINE)
    assert {line.split()[0] for line in VERBS.strip().splitlines()} == {*verbs} - {"serve", "bench"}
    for verb in verbs:
        assert f"Usage: colonnade {verb}" in shell.run(f"colonnade {verb} --help")
    assert "Error" not in shell.run("colonnade --version")
    assert "train" in shell.run("colonnade trian", status=2)


@pytest.mark.slow
@pytest.mark.budget(40)
def test_mistakes_of_a_first_hour_have_one_line_of_advice(shell):
    """Nothing is trained, nothing is written, and no traceback is shown."""
    write_shop(shell, 100)
    for command in (
        "colonnade train clicks.csv --run run",
        "colonnade train missing.yaml --run run",
        "colonnade train clicks.yaml --run run --set train.epoch=2",
        "colonnade train --data csv --path missing.csv --run run",
        "colonnade predict missing --path test.csv --output scores.csv",
        "colonnade predict . --path test.csv --output scores.csv",
        "colonnade evaluate missing",
        "colonnade report missing",
        "colonnade verify missing",
        "colonnade serve missing --port 0",
        "colonnade export missing exported",
    ):
        output = shell.run(command, status=2)
        assert "Traceback" not in output and 0 < len(output.splitlines()) <= 6, output
    assert {path.name for path in shell.folder.iterdir()} == {
        "clicks.csv",
        "test.csv",
        "clicks.yaml",
        "logs",
    }
