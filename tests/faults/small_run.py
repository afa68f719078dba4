"""A small real run in a process of its own, that can be killed; and what it left, as one digest.

python small_run.py FOLDER SETTINGS_JSON [KILL_AT]     KILL_AT: SIGKILL before that change of the disk
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from colonnade import close_mesh, open_mesh
from colonnade.config import build_config, override
from colonnade.data import open_source
from colonnade.models.build import build_model
from colonnade.store.disk import Change, Disk
from colonnade.train.commits import committed_steps, load_state, open_stores, read_header
from colonnade.train.run import load_run_config, open_run

CONFIG = {
    "data": {
        "name": "synthetic",
        "options": {"num_train": 1500, "num_test": 200, "cardinalities": [50, 900, 7, 3000]},
    },
    "model": {"dim": 4, "bottom": [8], "top": [8]},
    "train": {"batch_size": 100, "epochs": 2, "commit_steps": 4, "threads": 1},
}


class KillingDisk(Disk):
    """Dies, as if the power of this process were cut, before change number `kill_at`."""

    def __init__(self, kill_at: int) -> None:
        self.left = kill_at

    def perform(self, change: Change, action):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return action()


def digest(folder: Path, step: int | None = None) -> str:
    """Of everything a commit (the newest) holds: rows with optimizer state and clock, dense state, position."""
    data = open_source("synthetic", **CONFIG["data"]["options"])
    tables = build_model(data.train.schema, load_run_config(folder)).embeddings.tables
    step = committed_steps(folder)[-1] if step is None else step
    num_ranks = read_header(folder, step)["num_ranks"]
    found = hashlib.sha256(str(step).encode())
    rows: dict[str, list] = {}
    for rank in range(num_ranks):
        stores = open_stores(folder, tables, rank, num_ranks, Disk(), step, read_only=True)
        for table, store in zip(tables, stores, strict=True):
            for batch in store.scan():
                rows.setdefault(table.name, []).extend(
                    zip(batch.ids.tolist(), map(bytes, batch.records.numpy()), strict=True)
                )
            store.close()
    for name in sorted(rows):
        for row_id, record in sorted(rows[name]):
            found.update(f"{name}/{row_id}/".encode() + record)
    state = load_state(folder / "commits" / f"{step:012d}" / "dense")
    for name, value in sorted(state["model"].items()):
        found.update(name.encode() + value.numpy().tobytes())
    for what in ("position", "best", "days"):
        found.update(str(state[what]).encode())
    return found.hexdigest()


def main(folder: str, settings: str, kill_at: str = "0") -> None:
    mesh = open_mesh()
    config = override(build_config(CONFIG), json.loads(settings))
    data = open_source("synthetic", **config.data.options)
    if config.train.patience:
        data = replace(data, validation=data.test)
    disk = KillingDisk(int(kill_at)) if int(kill_at) else None
    run = open_run(config, mesh, Path(folder), disk=disk, data=data)
    print(f"started at {run.resumed_at}", flush=True)
    run.train()
    run.close()
    close_mesh(mesh)


if __name__ == "__main__":
    main(*sys.argv[1:])
