"""A model is served and exported: scores are those of `colonnade predict`, and the server follows what is published."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Callable

import pytest
from click_files import write_shop
from shell import Process, Shell, fetch, pick_port

TRAIN = "colonnade train clicks.yaml --run"


def start_server(shell: Shell, command: str, is_ready: bool = True) -> tuple[Process, str]:
    """Start a server on a free port, and return it with its address once it answers."""
    port = pick_port()
    process = shell.start(f"{command} --port {port}")
    address = f"http://127.0.0.1:{port}"
    if is_ready:
        wait_until_ready(process, address)
    return process, address


def wait_until_ready(process: Process, address: str) -> None:
    process.wait_until(lambda: fetch(f"{address}/v2/health/ready") is not None, "a ready server")


def read_records(shell: Shell, count: int) -> list[dict[str, object]]:
    """Return the first samples of the test file as the server wants them, without the label."""
    with (shell.folder / "test.csv").open() as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    return [{"user": r["user"], "item": r["item"], "price": float(r["price"])} for r in rows]


def wait_for_step(address: str, server: Process, is_wanted: Callable[[int], bool]) -> int:
    """Wait until the server scores with a wanted step, and return it."""
    steps = []

    def score() -> bool:
        answer = fetch(f"{address}/score", [{"user": "u1", "item": "i1", "price": 1.5}])
        steps.extend([] if answer is None else [answer["step"]])
        return bool(steps) and is_wanted(steps[-1])

    server.wait_until(score, "another step")
    return steps[-1]


@pytest.mark.smoke
@pytest.mark.budget(30)
def test_served_scores_are_those_of_predict(shell):
    write_shop(shell, 2_000)
    shell.run(f"{TRAIN} run")
    records = read_records(shell, 20)  # a batch of the run's size has the bits of predict's
    scores = [float(score) for (score,) in shell.read_scores(shell.predict("run"))[:20]]
    server, address = start_server(shell, "colonnade serve run")
    answer = fetch(f"{address}/score", records)
    assert answer["scores"] == scores
    assert answer["step"] in shell.list_checkpoints("run")  # the best one
    one = {"user": {"user": "u7"}, "candidates": [{"item": "i1", "price": 2.5}] * 3}
    assert len(set(fetch(f"{address}/score", one)["scores"])) == 1
    server.terminate()
    assert "Traceback" not in server.wait()


@pytest.mark.smoke
@pytest.mark.budget(40)
def test_export_scores_alone(shell):
    """The export scores as the run does, also after the run and its data are gone, in PyTorch's own format, too."""
    write_shop(shell, 2_000)
    shell.run(f"{TRAIN} run")
    shell.run("colonnade export run exported --torch")
    shell.check_same_scores("run", "exported")
    for folder in ("run", "clicks.csv"):
        (shell.folder / folder).rename(shell.folder / f"{folder}.gone")
    shell.run("colonnade verify exported")
    shell.run("colonnade predict exported --path test.csv --output alone.csv")
    assert shell.are_same_files("alone.csv", "run.csv")
    output = shell.run_python(SCORE_WITH_TORCH)
    assert "same scores" in output


SCORE_WITH_TORCH = """
import torch
from colonnade import Predictor
from colonnade.data import open_source
from colonnade.export import list_model_inputs, to_tensors

program = torch.export.load("exported/model.pt2").module()
predictor = Predictor.open("exported")
splits = open_source("csv", "test.csv", schema=predictor.config.data.options["schema"])
batch = next(iter(splits.train.batches(20)))
scores = program(to_tensors(batch, list_model_inputs(predictor)))
assert torch.equal(scores, predictor(batch)), (scores, predictor(batch))
print("same scores")
"""


@pytest.mark.slow
@pytest.mark.budget(120)
def test_server_follows_a_run_that_is_killed_and_resumed(shell):
    """A server starts first, follows two ranks that publish, survives their death, rolls back and follows again."""
    write_shop(shell)
    shell.write("token.txt", "a-token-of-thirty-two-characters\n")
    command = f"{TRAIN} run --ranks 2 --set train.publish=published --set train.publish_at=last"
    server, address = start_server(
        shell,
        "colonnade serve published --wait --token-file token.txt --state state --access-log log.jsonl",
        is_ready=False,
    )
    training = shell.start(command)
    shell.wait_for_checkpoint("run", 100, training)
    wait_until_ready(server, address)
    first = wait_for_step(address, server, lambda step: step >= 25)
    training.kill()
    wait_for_step(address, server, lambda step: step >= first)
    shell.resume(command, "run")
    last = shell.list_checkpoints("run")[-1]
    wait_for_step(address, server, lambda step: step == last)

    records = read_records(shell, 20)
    scores = [float(score) for (score,) in shell.read_scores(predict_last(shell))[:20]]
    assert fetch(f"{address}/score", records)["scores"] == scores

    token = "a-token-of-thirty-two-characters"
    fetch(f"{address}/admin/rollback", {}, token)
    before = wait_for_step(address, server, lambda step: step < last)
    server.kill()  # what an administrator has set outlives the server
    server, address = start_server(
        shell, "colonnade serve published --token-file token.txt --state state"
    )
    assert wait_for_step(address, server, lambda step: True) == before
    fetch(f"{address}/admin/follow", {}, token)
    wait_for_step(address, server, lambda step: step == last)
    shell.run("colonnade verify published")

    labels = [index % 2 for index in range(20)]
    fetch(f"{address}/feedback", {"scores": scores, "labels": labels})
    assert "colonnade_feedback_auc" in fetch(f"{address}/metrics")
    fetch(f"{address}/admin/shutdown", {}, token)
    assert "Traceback" not in server.wait()
    assert json.loads((shell.folder / "log.jsonl").read_text().splitlines()[-1])


def predict_last(shell: Shell) -> str:
    shell.run("colonnade predict run --at last --path test.csv --output last.csv")
    return "last.csv"


@pytest.mark.slow
@pytest.mark.budget(90)
def test_copy_of_a_publication_is_served_by_workers_that_may_die(shell):
    """Two worker processes serve a publication while one of them is killed."""
    write_shop(shell, 2_000)
    shell.run(f"{TRAIN} run --set train.publish=published")
    server, address = start_server(shell, "colonnade serve published --workers 2")
    record = [{"user": "u1", "item": "i1", "price": 1.5}]
    score = fetch(f"{address}/score", record)["scores"]
    os.kill(server.list_workers()[-1], signal.SIGKILL)

    def is_restarted() -> bool:
        answer = fetch(f"{address}/score", record)  # None: the connection was the dead worker's
        assert answer is None or answer["scores"] == score
        metrics = fetch(f"{address}/metrics") or ""
        return "colonnade_worker_restarts_total 1" in metrics

    server.wait_until(is_restarted, "a new worker")
    assert fetch(f"{address}/score", record)["scores"] == score
    server.terminate()
    assert "Traceback" not in server.wait()
