"""Recipes: papers as run configurations, short enough to read at once, that run."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import start_child, store_in

RECIPES = Path(__file__).parents[2] / "recipes"
SECONDS = 240


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a recipe as torchrun would, with torch imported, and returns what rank 0 prints."""

    def run_ranks(name: str, *arguments: str, num_ranks: int = 1) -> str:
        path = RECIPES / name
        assert len(path.read_text().splitlines()) <= 40
        folder = tmp_path / "-".join([*arguments, "ranks"]).replace("/", "_")
        folder.mkdir()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if num_ranks > 1:
            size = str(num_ranks)
            environment |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **store_in(folder)}
        children = [
            start_child(
                folder / f"errors-{rank}",
                environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}),
                run_recipe,
                folder / f"output-{rank}",
                [str(path), *arguments],
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        try:
            for child in children:
                child.process.join(SECONDS)
        finally:
            codes = [child.code for child in children]
            for child in children:
                child.kill()
        errors = "".join((folder / f"errors-{rank}").read_text() for rank in range(num_ranks))
        assert codes == [0] * num_ranks, errors
        return (folder / "output-0").read_text()

    return run_ranks


def run_recipe(output: Path, words: list[str]) -> None:
    """Run the script `words[0]` in this process, as a program that prints into `output`."""
    sys.argv = words
    with output.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(words[0], run_name="__main__")


def test_mtrains_reads_rows_from_files_and_beats_the_prior(run, tmp_path):
    output = run("mtrains.py", str(tmp_path / "run"))
    rows = dict(line.removeprefix("rows ").split(": ") for line in output.splitlines()[1:])
    count = {name: int(number.replace(",", "")) for name, number in rows.items()}
    assert list(count) == ["resident", "born", "read", "copied"]
    assert count["resident"] > count["born"] > 0 and count["read"] > 0
    record_bytes = 2 * 8 * 4  # a row and its Adagrad state
    assert count["born"] * record_bytes > 2 * (256 << 10)  # memory holds less than half of them
    words = output.splitlines()[0].split()
    metrics = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    assert metrics["test_auc"] > 0.65 and metrics["test_normalized_entropy"] < 0.97  # prior: 1
    assert list((tmp_path / "run-rows").rglob("segment-*"))
    assert (tmp_path / "run" / "summary.json").exists()


def test_des_sends_partials(run):
    """Partials are of the other rank's 250 samples: FM's 17 floats, the first layer's 32 and one of first-order
    weights."""
    output = run("des.py", num_ranks=2)
    assert "bytes a step: 50,000 of partials, 50,000 of their gradients" in output
    assert float(output.split("test_auc ")[1].split()[0]) > 0.6


def test_persia_trains_late_beside_a_server_and_is_followed(run, tmp_path):
    output = run("persia.py", str(tmp_path / "run"), num_ranks=3)
    assert float(output.split("test_auc ")[1].split()[0]) > 0.58
    assert "published step 63: [0." in output


def test_100_trillion_parameters_train_here(run, tmp_path):
    """Memory and files follow the rows that were trained: at rest 16 bytes beside a record at most, of two
    checkpoints."""
    output = run("hundred_trillion.py", str(tmp_path / "run")).splitlines()
    assert [line.split(": ")[0] for line in output] == [
        "100,000,000,000,000 parameters, step 16, from None",
        "100,000,000,000,000 parameters, step 32, from 16",
    ]
    for line in output:
        words = line.split(": ")[1].replace(",", "").split()
        rows, memory, files = int(words[0]), int(words[3]), int(words[9])
        assert rows == 2 * 16_384 and memory <= 8 << 20
        assert files <= 2 * rows * (128 * 4 + 4 + 8 + 16) + (1 << 20)


def test_churn_grows_with_the_epochs(run):
    churn = []
    for line in run("churn.py").splitlines():
        measured = dict(part.strip().rsplit(" ", 3)[:2] for part in line.split(":")[1].split(","))
        assert float(measured["log loss 1"]) == pytest.approx(
            float(measured["log loss 2"]), abs=0.03
        )
        churn.append(float(measured["churn"]))
    assert 0.01 < churn[0] < churn[1] < 0.2


def test_gplvmf_finds_the_context_that_matters_and_nears_the_noise(run):
    for line in run("gplvmf.py").splitlines():
        words = line.split()
        metrics = dict(zip(words[1::2], map(float, words[2::2]), strict=True))
        assert 0.3 < metrics["rmse"] < 0.45  # all ratings have a deviation of 0.77
        assert metrics["relevance_shelf"] < 0.1 * metrics["relevance_place"]


@pytest.mark.slow  # five processes that each load torch
def test_codistilled_groups_agree(run, tmp_path):
    """Without a teacher (weight 0) their churn is 0.021, and their log loss 0.481 and 0.486."""
    output = run("codistill.py", str(tmp_path / "run"))
    cells = [[cell.strip() for cell in line.split("│")] for line in output.splitlines()]
    measured = {cell[1]: float(cell[2]) for cell in cells if len(cell) == 5}
    assert 0 < measured["churn"] < 0.018
    assert max(measured["log loss 1"], measured["log loss 2"]) < 0.483


def test_dct_learns_with_fewer_bytes(run):
    output = run("dct.py", num_ranks=2)
    assert float(output.split("test_auc ")[1].split()[0]) > 0.75
    sent, exact = (int(word.replace(",", "")) for word in output.split()[-8:] if word[0].isdigit())
    assert 0 < sent < 0.2 * exact


def test_mrmn_tells_types_apart_and_ranks_better_than_popularity(run):
    output = run("mrmn.py", num_ranks=2)
    ndcg, popularity = map(float, re.findall(r"ndcg@10 ([\d.]+)", output))
    assert ndcg > 3 * popularity > 0
    buy, cart, view = map(float, re.findall(r"strength of \w+ ([\d.]+)", output))
    assert min(buy, cart) > view


def test_lemmas_advise_a_batch_by_the_noise_of_a_run(run, tmp_path):
    output = run("lemmas.py", str(tmp_path / "run"))
    assert "\nranks: " in output and "\nservers: 1 for 4 trainers: link " in output
    assert "by the gradients of steps" in " ".join(output.split())


def test_dmt_learns_as_much_with_half_of_the_floats(run):
    """Modules inside the towers: what travels between two ranks is half as much."""
    output = run("dmt.py", num_ranks=2)
    flat, towered = (float(line.split()[1]) for line in output.splitlines()[::2])
    assert flat > 0.65 and towered > flat - 0.01
    assert "64 floats of a sample leave them of 128 (CR 2.00)" in output
    flat_bytes, towered_bytes = (
        int(line.split()[-2].replace(",", "")) for line in output.splitlines()[1::2]
    )
    assert 0 < flat_bytes == 2 * towered_bytes


def test_het_says_less_the_later_reads_may_be(run):
    """Bytes of rows, ids and gradients; most rows of a batch are used without a word."""
    sent = {}
    for staleness in (0, 100):
        output = run("het.py", str(staleness), num_ranks=2)
        assert float(output.split("test_auc ")[1].split()[0]) > 0.6
        sent[staleness] = int(output.split("bytes a step ")[1].split()[0].replace(",", ""))
        counts = dict(word.rsplit(" ", 1) for word in output.splitlines()[1].split("  "))
        hits, misses = (int(counts[name].replace(",", "")) for name in ("hits", "misses"))
        assert hits > misses if staleness else hits == 0
    assert sent[100] < 0.75 * sent[0]


@pytest.mark.slow
def test_graphsage_learns_with_copies_of_rows(run):
    """Ten batches late nothing is lost, and less than half of the bytes travel."""
    sent = {}
    for staleness in (0, 10):
        output = run("graphsage.py", str(staleness), num_ranks=2)
        assert float(output.split("test_recall@20 ")[1].split()[0]) > 0.35  # popularity: 0.1
        sent[staleness] = int(output.split("bytes ")[1].split()[0].replace(",", ""))
    assert sent[10] < 0.5 * sent[0]


@contextlib.contextmanager
def living(folder: Path, seconds: int):
    """Run live.py with `folder` for its temporary files, and check that it ends well and leaves nothing behind."""
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(RECIPES / "live.py"), "--seconds", str(seconds)],
        env={
            **os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder.with_name("torch")),
        },
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and errors == ""
        assert list(folder.iterdir()) == [] and find_processes(f"TMPDIR={folder}") == []
    finally:
        for pid in find_processes(f"TMPDIR={folder}"):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def find_processes(variable: str) -> list[int]:
    """Return the processes that were started with this variable in their environment."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable.encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def read_rows(lines):
    """Yield the numbers of each line that live.py reports: None for those that it has not."""
    for line in lines:
        words = line.split()
        if words and words[0].isdecimal():
            yield [None if word == "-" else float(word) for word in words]


@pytest.mark.slow
def test_live_serves_each_checkpoint_until_ctrl_c(tmp_path):
    with living(tmp_path / "live", seconds=90) as process:
        rows = []
        for row in read_rows(process.stdout):
            rows.append(row)
            if count_steps(rows) > 1 and row[4] is not None:
                break
        process.send_signal(signal.SIGINT)
    assert count_steps(rows) > 1 and rows[-1][4] is not None, rows
    assert all(0 <= age < 15 for _, _, age, *_ in rows if age is not None)


def count_steps(rows: list) -> int:
    """Count the steps that were served: more than one if the server followed."""
    return len({step for _, step, *_ in rows} - {None})


@pytest.mark.slow
def test_live_recommends_better_than_random_and_ends_by_itself(tmp_path):
    with living(tmp_path / "live", seconds=40) as process:
        rows = list(read_rows(process.stdout))
    *_, auc, recommended, at_random = rows[-1]
    assert len(rows) >= 6 and recommended > 1.5 * at_random and auc > 0.55
