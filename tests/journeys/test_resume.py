"""A run that is killed or interrupted goes on where its newest checkpoint is, on any number of ranks.

On the same number of ranks the model has the bits of a run that nobody disturbed; on another, it is the same to
rounding.
"""

from __future__ import annotations

import os
import signal

import pytest
from click_files import ROUNDING, write_shop
from shell import Shell

LAST_STEP = 1080


def train(run: str, ranks: int = 1) -> str:
    """Return the command that begins a run, or goes on with it."""
    return f"colonnade train clicks.yaml --run {run} --ranks {ranks}"


def predict(shell: Shell, run: str) -> str:
    """Score the test file with a run; return the name of the file of scores."""
    shell.run(f"colonnade predict {run} --path test.csv --output {run}.csv")
    return f"{run}.csv"


def kill_while_training(shell: Shell, run: str, ranks: int = 1, step: int = 100) -> None:
    """Begin a run and kill all its processes when it has a checkpoint at `step` or later."""
    process = shell.start(train(run, ranks))
    shell.wait_for_checkpoint(run, step, process)
    process.kill()
    assert shell.list_checkpoints(run)[-1] < LAST_STEP, "trained to the end before it was killed"


def go_on(shell: Shell, run: str, ranks: int = 1) -> None:
    """Give the same command again: it resumes at the newest checkpoint and trains to the end."""
    newest = shell.list_checkpoints(run)[-1]
    output = shell.run(train(run, ranks))
    assert f"resuming {run} at step {newest}" in output, output
    assert shell.read_summary(run)["step"] == LAST_STEP
    shell.run(f"colonnade verify {run}")


def check_same_model(shell: Shell, run: str, other: str) -> None:
    """Check that two runs have the same bits: those of their scores, and of all weights that they export."""
    one, two = predict(shell, run), predict(shell, other)
    assert shell.are_same_files(one, two), f"differ by up to {shell.largest_difference(one, two)}"
    for name in (run, other):
        shell.run(f"colonnade export {name} {name}-exported")
    weights = shell.read_weights(f"{run}-exported")
    assert len(weights) > 5 and weights == shell.read_weights(f"{other}-exported")


@pytest.mark.smoke
@pytest.mark.budget(60)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_run_resumes_to_the_same_bits(shell, ranks):
    write_shop(shell)
    shell.run(train("whole", ranks))
    kill_while_training(shell, "killed", ranks)
    go_on(shell, "killed", ranks)
    check_same_model(shell, "whole", "killed")


@pytest.mark.slow
@pytest.mark.budget(90)
def test_interrupted_run_resumes_on_two_ranks(shell):
    """Ctrl-C saves a checkpoint, ends the command in order and loses no step."""
    write_shop(shell)
    shell.run(train("whole", 2))
    process = shell.start(train("stopped", 2))
    newest = shell.wait_for_checkpoint("stopped", 100, process)
    process.press_ctrl_c()
    output = process.wait(status=None)
    assert "Traceback" not in output, output
    assert newest <= shell.list_checkpoints("stopped")[-1] < LAST_STEP, output
    go_on(shell, "stopped", 2)
    check_same_model(shell, "whole", "stopped")


@pytest.mark.slow
@pytest.mark.budget(90)
def test_lost_rank_ends_the_command_and_the_run_resumes(shell):
    """The system kills one of two ranks, as it does where memory is short. The other rank ends, too."""
    write_shop(shell)
    shell.run(train("whole", 2))
    process = shell.start(train("lost", 2))
    shell.wait_for_checkpoint("lost", 100, process)
    os.kill(process.list_workers()[-1], signal.SIGKILL)
    output = process.wait(status=2)
    assert "train again with --run lost" in output, output
    go_on(shell, "lost", 2)
    check_same_model(shell, "whole", "lost")


@pytest.mark.slow
@pytest.mark.budget(150)
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 3)])
def test_killed_run_resumes_on_another_number_of_ranks(shell, before, after):
    """The model is that of one rank, to rounding."""
    write_shop(shell)
    shell.run(train("whole"))
    kill_while_training(shell, "moved", before)
    go_on(shell, "moved", after)
    difference = shell.largest_difference(predict(shell, "whole"), predict(shell, "moved"))
    assert difference < ROUNDING
    assert shell.read_summary("moved")["num_ranks"] == after


@pytest.mark.slow
@pytest.mark.budget(120)
def test_finished_run_trains_more_epochs_on_other_ranks(shell):
    """Each of three calls trains one more epoch, on 1, 2 and 1 ranks."""
    write_shop(shell)
    shell.run(train("whole") + " --epochs 3")
    for epochs, ranks in ((1, 1), (2, 2), (3, 1)):
        shell.run(train("grown", ranks) + f" --epochs {epochs}")
    difference = shell.largest_difference(predict(shell, "whole"), predict(shell, "grown"))
    assert difference < ROUNDING


FIT = """
import sys
import colonnade
import torch
from colonnade import Adagrad, Concat, EmbeddingCollection, Feature, Table
from colonnade.data import open_source
from torch import nn

data = open_source("csv", "clicks.csv", test="test.csv")
columns = data.train.schema.categorical


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [Table(c.table, 4, rows=c.cardinality, optimizer=Adagrad(lr=0.05)) for c in columns]
        features = [Feature(c.name, c.table) for c in columns]
        names = [c.name for c in columns]
        self.embeddings = EmbeddingCollection(tables, features, consumers={"deep": (Concat(), names)})
        width = 4 * len(names) + len(data.train.schema.dense)
        self.top = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch):
        deep = self.embeddings(batch)["deep"]
        return self.top(torch.cat([deep, batch.dense.to(deep)], dim=1))


torch.manual_seed(0)
torch.set_num_threads(1)
result = colonnade.fit(
    Model(), data, run=sys.argv[1], epochs=2, batch_size=20, checkpoint_steps=25, quiet=True
)
if result.metrics:
    print("resumed at", result.resumed_at, "scores", sorted(result.metrics.items()))
"""


@pytest.mark.slow
@pytest.mark.budget(90)
def test_own_model_under_torchrun_resumes_to_the_same_bits(shell):
    """`colonnade.fit` in a script that torchrun starts, killed with its launcher."""
    write_shop(shell)
    shell.write("fit.py", FIT)
    command = "torchrun --standalone --nproc-per-node 2 fit.py"
    whole = shell.run(f"{command} whole")
    process = shell.start(f"{command} killed")
    newest = shell.wait_for_checkpoint("killed", 100, process)
    process.kill()
    newest = shell.list_checkpoints("killed")[-1]
    output = shell.run(f"{command} killed")
    assert f"resumed at {newest}" in output, output
    assert read_metrics(output) == read_metrics(whole)


def read_metrics(output: str) -> str:
    """Return the metrics that rank 0 of the script printed."""
    return next(line.partition("scores")[2] for line in output.splitlines() if "scores" in line)
