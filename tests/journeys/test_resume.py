"""A run that is killed or interrupted goes on where its newest checkpoint is, on any number of ranks.

On the same number of ranks the model has the bits of a run that nobody disturbed; on another, it is the same to
rounding.
"""

from __future__ import annotations

import os
import signal

import pytest
from click_files import LAST_STEP, write_shop
from shell import Process


def train(run: str, ranks: int = 1) -> str:
    """Return the command that begins a run, or goes on with it."""
    return f"colonnade train clicks.yaml --run {run} --ranks {ranks}"


@pytest.mark.smoke
@pytest.mark.budget(80)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_run_resumes_to_the_same_bits(shell, ranks):
    """The bits are compared in the scores of a file, and in all weights that are exported."""
    write_shop(shell)
    shell.run(train("whole", ranks))
    shell.stop_training(train("killed", ranks), "killed")
    shell.resume(train("killed", ranks), "killed")
    assert shell.read_summary("killed")["step"] == LAST_STEP
    shell.check_same_metrics("whole", "killed")
    for run in ("whole", "killed"):
        shell.run(f"colonnade export {run} {run}-exported")
    weights = shell.read_weights("whole-exported")
    assert len(weights) > 5 and weights == shell.read_weights("killed-exported")
    shell.check_same_scores("whole-exported", "killed-exported")


@pytest.mark.slow
@pytest.mark.budget(100)
def test_run_of_two_ranks_survives_all_that_may_stop_it(shell):
    """A rank is killed, as by a system without memory; then Ctrl-C; then SIGTERM; the bits are the same."""
    write_shop(shell)
    shell.run(train("whole", 2))

    process = shell.start_training(train("run", 2), "run")
    os.kill(process.list_workers()[-1], signal.SIGKILL)
    output = process.wait(status=2)  # the other rank ends, too
    assert "train again with --run run" in output, output

    shell.stop_training(train("run", 2), "run", Process.press_ctrl_c)
    newest = shell.stop_training(train("run", 2), "run", Process.terminate)
    assert newest < LAST_STEP
    shell.resume(train("run", 2), "run")
    shell.run("colonnade verify run")
    shell.check_same_metrics("whole", "run")


@pytest.mark.slow
@pytest.mark.budget(100)
def test_killed_run_moves_between_one_two_and_three_ranks(shell):
    """The model is that of one rank, to rounding."""
    write_shop(shell)
    shell.run(train("whole"))
    for ranks in (1, 2, 3):
        newest = shell.stop_training(train("run", ranks), "run")
    assert newest < LAST_STEP
    shell.resume(train("run", 2), "run")
    assert shell.read_summary("run")["num_ranks"] == 2
    shell.check_equal_losses("whole", "run")


@pytest.mark.slow
@pytest.mark.budget(100)
def test_finished_run_trains_more_epochs_on_other_ranks(shell):
    """Each of three calls trains one more epoch, on 1, 2 and 2 ranks."""
    write_shop(shell, 4_000)
    shell.run(train("whole") + " --epochs 3")
    for epochs, ranks in ((1, 1), (2, 2), (3, 2)):
        shell.run(train("grown", ranks) + f" --epochs {epochs}")
    shell.check_equal_losses("whole", "grown")


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
    print("resumed at", result.resumed_at)
"""


@pytest.mark.slow
@pytest.mark.budget(100)
def test_own_model_under_torchrun_resumes_to_the_same_bits(shell):
    """`colonnade.fit` in a script that torchrun starts: killed with its launcher, then interrupted by Ctrl-C."""
    write_shop(shell)
    shell.write("fit.py", FIT)
    command = "torchrun --standalone --nproc-per-node 2 fit.py"
    shell.run(f"{command} whole")
    shell.stop_training(f"{command} run", "run")
    process = shell.start_training(f"{command} run", "run")
    process.press_ctrl_c()
    process.wait(status=None)
    newest = shell.list_checkpoints("run")[-1]
    assert newest < LAST_STEP
    assert f"resumed at {newest}" in shell.run(f"{command} run")
    shell.check_same_metrics("whole", "run")
