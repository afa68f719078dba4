"""A small real run in a process of its own, that can be killed; and what it left, as one digest.

python small_run.py FOLDER SETTINGS_JSON [KILL_AT]     KILL_AT: SIGKILL before that change of the disk
FAULT="rank 1 SIGKILL push 9" does so before that rank's 9th call of that channel, once (FOLDER/fault); channels
"start" and "end" are before the world is joined and after training. "reader 1 ..." does so to that rank's reader.
"rank 1 0.3x8 push 9" instead makes that call and the seven after it 0.3 seconds late: slow, and not stopped.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from ranks import console_of

from colonnade import close_mesh, open_mesh
from colonnade.checkpoint.checkpoints import load_state
from colonnade.checkpoint.header import list_checkpoints, read_header
from colonnade.checkpoint.stores import open_recorded_stores
from colonnade.comm.peer_status import PeerMonitor
from colonnade.config.run import RunConfig, build_config, override_settings
from colonnade.data import Splits, open_source, processes
from colonnade.files.disk import Change, Disk
from colonnade.models.build import build_model
from colonnade.run.run import load_run_config, open_run

CONFIG = {
    "data": {
        "name": "synthetic",
        "options": {"num_train": 1500, "num_test": 200, "cardinalities": [50, 900, 7, 3000]},
    },
    "model": {"dim": 4, "bottom": [8], "top": [8]},
    "train": {"batch_size": 100, "epochs": 2, "checkpoint_steps": 4, "threads": 1},
}


def opened(config: RunConfig) -> Splits:
    """The data; of open tables where rows are to be evicted."""
    data = open_source("synthetic", **config.data.options)
    if config.embedding.eviction.max_rows or config.embedding.eviction.age_steps:
        whole = data.train.schema
        columns = tuple(replace(column, cardinality=None) for column in whole.categorical)
        schema = replace(whole, categorical=columns)
        for source in (data.train, data.test):
            kind = type("Open", (type(source),), {"schema": schema, "__slots__": ()})
            object.__setattr__(source, "__class__", kind)
    return data


class KillingDisk(Disk):
    """Dies, as if the power of this process were cut, before change number `kill_at`."""

    def __init__(self, kill_at: int) -> None:
        self.remaining = kill_at

    def perform(self, change: Change, action):
        self.remaining -= 1
        if self.remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return action()


def digest(folder: Path, step: int | None = None) -> str:
    """Return the content of the newest checkpoint: rows with optimizer state and clock, dense state, position."""
    config = load_run_config(folder)
    tables = build_model(opened(config).train.schema, config).embeddings.tables
    step = list_checkpoints(folder)[-1] if step is None else step
    header = read_header(folder, step)
    run = header["run"]
    result = hashlib.sha256(str(step).encode())
    rows: dict[str, list] = {}
    for number, table in enumerate(tables):
        for store in open_recorded_stores(folder, header, number):
            for batch in store.scan():
                rows.setdefault(table.name, []).extend(
                    zip(batch.ids.tolist(), map(bytes, batch.records.numpy()), strict=True)
                )
            store.close()
    for name in sorted(rows):
        for row_id, record in sorted(rows[name]):
            result.update(f"{name}/{row_id}/".encode() + record)
    for path in sorted((folder / "checkpoints" / f"{step:012d}").glob("retention-*")):
        for name, parts in load_state(path, run).items():
            remembered = {what: torch.cat(of) for what, of in parts.items() if of}
            if "ids" in remembered:  # rows are in no order
                order = remembered["ids"].argsort()
                columns = ("ids", "steps", "values")
                remembered |= {what: remembered[what][order] for what in columns}
            for what, values in sorted(remembered.items()):
                result.update(f"{path.name}/{name}/{what}/".encode() + values.numpy().tobytes())
    state = load_state(folder / "checkpoints" / f"{step:012d}" / "dense", run)
    for name, value in sorted(state["model"].items()):
        result.update(name.encode() + value.numpy().tobytes())
    for what in ("position", "best", "days"):
        result.update(str(state[what]).encode())
    return result.hexdigest()


def fail(folder: Path, channel: str, number: int = 0) -> None:
    """Fail as FAULT says; signals once."""
    who, rank, what, *where, first = (os.environ.get("FAULT") or "- - - -").split()
    if (rank, " ".join(where)) != (os.environ["RANK"], channel):
        return
    seconds, _, calls = what.partition("x")
    if not 0 <= number - int(first) < int(calls or 1):
        return
    done = folder.parent / f"{folder.name}.fault"
    if done.exists() and not calls:
        return
    done.write_text(str(os.getpid()))
    hit = os.getpid() if who == "rank" else multiprocessing.active_children()[0].pid
    if not calls:
        os.kill(hit, getattr(signal, what))
    elif who == "rank":
        time.sleep(float(seconds))
    else:
        os.kill(hit, signal.SIGSTOP)
        threading.Timer(float(seconds), os.kill, (hit, signal.SIGCONT)).start()


def main(folder: str, settings: str, kill_at: str = "0") -> None:
    fail(Path(folder), "start")
    enter = PeerMonitor.begin_call

    def enter_or_fail(peer_monitor: PeerMonitor, channel: str) -> None:
        fail(Path(folder), channel, peer_monitor._calls.get(channel, 0))
        enter(peer_monitor, channel)

    PeerMonitor.begin_call = enter_or_fail  # type: ignore[method-assign]
    mesh = open_mesh(timeout=timedelta(seconds=float(os.environ.get("LIMIT", "60"))))
    config = override_settings(build_config(CONFIG), json.loads(settings))
    # Readers open the data themselves; a step or two ahead, so one that is lost is missed.
    data = None if config.data.readers else opened(config)
    processes.RUN_SAMPLES = 1
    if data and config.train.patience:
        data = replace(data, validation=data.test)
    disk = KillingDisk(int(kill_at)) if int(kill_at) else None
    run = open_run(config, mesh, Path(folder), disk=disk, data=data, console=console_of(mesh))
    print(f"started at {run.resumed_at}", flush=True)
    run.train()
    fail(Path(folder), "end")
    run.close()
    close_mesh(mesh)


if __name__ == "__main__":
    main(*sys.argv[1:])
