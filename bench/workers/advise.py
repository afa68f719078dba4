"""`python -m workers.advise predict GBIT` or, under torchrun, `train STEPS`: seconds of a step by number of hosts.

Each sample sleeps in the forward pass as long as a network would compute, so that ranks share processors without
slowing each other down: what is compared is what the links cost.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import colonnade
from colonnade import Batch, Callback, Feature, RowWiseAdagrad, Table, World
from colonnade.comm.mesh import Mesh
from colonnade.config.run import OWN, RunConfig, override_settings
from colonnade.data import open_source
from colonnade.models import DLRM
from colonnade.planning.planner import advise
from colonnade.train.objective import get_objective
from colonnade.train.setup import RunSetup

HOSTS = (1, 2, 4)
BATCH_SIZE, FIELDS, DIM = 2048, 8, 32
STEP_SLEEP, SAMPLE_SLEEP = 4e-3, 40e-6
"""Seconds of a step whatever its samples, and of each sample."""
SETTINGS = {"batch_size": BATCH_SIZE, "epochs": 1, "exchange": "rows", "evaluate_steps": 0}


class SleepingModel(DLRM):
    """DLRM that sleeps before it computes."""

    def forward(self, batch: Batch) -> Tensor:
        time.sleep(STEP_SLEEP + batch.size * SAMPLE_SLEEP)
        return super().forward(batch)


class StepTimes(Callback):
    """Time at which each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, *_: object) -> None:
        self.times.append(time.perf_counter())


def open_workload(num_steps: int):
    """Return the model and its data."""
    data = open_source(
        "synthetic", num_train=num_steps * BATCH_SIZE, num_test=100, cardinalities=[20_000] * FIELDS
    )
    names = [column.name for column in data.train.schema.categorical]
    tables = [Table(name, DIM, rows=20_000, optimizer=RowWiseAdagrad(lr=0.02)) for name in names]
    features = [Feature(name, name) for name in names]
    num_dense = len(data.train.schema.dense)
    return SleepingModel(tables, features, num_dense=num_dense, bottom=(32, DIM), top=(32,)), data


def predict(gigabits: float) -> dict[int, float]:
    """Predict the seconds of a step by number of hosts."""
    model, data = open_workload(40)
    config = override_settings(
        RunConfig(),
        {"data.name": OWN, "train.batch_size": BATCH_SIZE, "plan.exchange": "rows"},
    )
    setup = RunSetup(
        model=model, data=data, config=config, mesh=Mesh(), objective=get_objective(model)
    )
    world = World(num_hosts=HOSTS[-1], remote_bytes_per_second=gigabits * 1e9 / 8, origin="planned")
    with TemporaryDirectory() as folder:
        advice = advise(
            setup, world, run_folder=Path(folder), min_efficiency=0.8, max_hosts=HOSTS[-1]
        )
    return {point.num_ranks: point.step_seconds for point in advice.curve}


def train(num_steps: int) -> float | None:
    """Train; return the median seconds of a step of the later half on rank 0, None on others."""
    model, data = open_workload(num_steps)
    steps = StepTimes()
    mesh = colonnade.open_mesh()
    colonnade.fit(model, data.train, mesh=mesh, callbacks=[steps], quiet=True, **SETTINGS)
    colonnade.close_mesh(mesh)
    later = steps.times[len(steps.times) // 2 :]
    return median(after - before for before, after in pairwise(later)) if later else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "predict":
        print(json.dumps(predict(float(sys.argv[2]))))
    else:
        print(json.dumps({"seconds": train(int(sys.argv[2]))}))
