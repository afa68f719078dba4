"""`python -m workers.advise_servers predict SETTING` or, as each rank, `train SETTING SERVERS STEPS`.

The ranks are two trainers and then the servers, each on a host of its own. They call themselves ranks of one host,
because every host of a run has as many servers; so shared memory, which real hosts do not have, is refused.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import colonnade
from colonnade import Batch, Feature, RowWiseAdagrad, Table, World
from colonnade.comm import process_groups
from colonnade.comm.mesh import Mesh
from colonnade.config.run import OWN, RunConfig, override_settings
from colonnade.data import open_source
from colonnade.models import DLRM
from colonnade.planning.planner import advise
from colonnade.train.objective import get_objective
from colonnade.train.setup import RunSetup
from workers.advise import StepTimes

TRAINERS = 2
ROWS = 100_000
STALENESS_STEPS = 2
"""Steps that reads are late, so that servers work while trainers compute."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Workload of two trainers, and the links of the servers."""

    fields: int
    dim: int
    batch_size: int
    gigabits: float
    """Gbit/s of a server's uplink."""
    sleep: float
    """Seconds that a trainer sleeps in a step instead of computing."""


class SleepingModel(DLRM):
    """DLRM that sleeps as long before each batch."""

    sleep = 0.0

    def forward(self, batch: Batch) -> Tensor:
        time.sleep(self.sleep)
        return super().forward(batch)


def open_workload(setting: Setting, num_steps: int) -> tuple[SleepingModel, Any]:
    """Return the model and its data, whose ids are uniform."""
    data = open_source(
        "synthetic", num_train=num_steps * setting.batch_size, num_test=100, exponent=0,
        cardinalities=[ROWS] * setting.fields, max_cardinality=None,
    )  # fmt: skip
    names = [column.name for column in data.train.schema.categorical]
    tables = [
        Table(name, setting.dim, rows=ROWS, optimizer=RowWiseAdagrad(lr=0.02)) for name in names
    ]
    model = SleepingModel(
        tables,
        [Feature(name, name) for name in names],
        num_dense=len(data.train.schema.dense),
        bottom=(16, setting.dim),
        top=(16,),
    )
    model.sleep = setting.sleep
    return model, data


def predict(setting: Setting) -> dict[str, float]:
    """Return the advised number of servers, and the real numbers that link and processor need."""
    model, data = open_workload(setting, 40)
    settings = {"data.name": OWN, "train.batch_size": setting.batch_size}
    settings |= {"plan.exchange": "rows", "plan.staleness_steps": STALENESS_STEPS}
    config = override_settings(RunConfig(), settings)
    setup = RunSetup(
        model=model, data=data, config=config, mesh=Mesh(), objective=get_objective(model)
    )
    bytes_per_second = setting.gigabits * 1e9 / 8
    world = World(num_hosts=TRAINERS, remote_bytes_per_second=bytes_per_second, origin="planned")
    with TemporaryDirectory() as folder:
        advice = advise(
            setup, world, run_folder=Path(folder), min_efficiency=0.8, max_hosts=TRAINERS
        )
    demand = advice.servers
    return {"servers": advice.num_servers, "link": demand.link, "processor": demand.processor}


def train(setting: Setting, num_servers: int, num_steps: int) -> float | None:
    """Train; return the median seconds of a step of the later half on rank 0, None on others."""
    process_groups.can_read_buffer = lambda *_: False  # type: ignore[assignment]
    model, data = open_workload(setting, num_steps)
    times = StepTimes()
    mesh = colonnade.open_mesh()
    colonnade.fit(
        model, data.train, mesh=mesh, callbacks=[times], quiet=True, epochs=1, evaluate_steps=0,
        batch_size=setting.batch_size, exchange="rows", staleness_steps=STALENESS_STEPS,
        servers=num_servers,
    )  # fmt: skip
    colonnade.close_mesh(mesh)
    later = times.times[len(times.times) // 2 :]
    return median(after - before for before, after in pairwise(later)) if later else None


def dump_setting(setting: Setting) -> str:
    """Return a setting as an argument of this script."""
    return json.dumps(asdict(setting))


if __name__ == "__main__":
    torch.set_num_threads(1)
    work, setting = sys.argv[1], Setting(**json.loads(sys.argv[2]))
    if work == "predict":
        print(json.dumps(predict(setting)))
    else:
        print(json.dumps({"seconds": train(setting, *map(int, sys.argv[3:]))}))
