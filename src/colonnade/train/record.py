"""Record of a run while it trains: one JSON object per line, and the same numbers as an event file of TensorBoard.

Written by the calling thread. TensorBoard's own writer has a thread, which prints a traceback when a disk is full.

run/metrics.jsonl      {"step", "kind", "time", ...}; what each kind holds:
    train      loss; samples_per_second over all ranks; lr by param group of rows and dense network; loss_scale, where
               it is dynamic
    phases     seconds of the training thread by phase, and `total` seconds, since the previous such line
    rows       rows that became needed since the previous such line: resident, read (of files, or of what waits to be
               written to them), born; evicted meanwhile
    tiers      where there is a tier below memory: `seconds` since the previous such line, `waited` of them that the
               training thread spent waiting for rows, and by tier, from the top, `TierCounts`: what was added since
               then, and of held, live and lifetime bytes what there is now
    sent       what this rank sent to others since the previous such line: `bytes` of payload and `messages`, each by
               channel (route, fetch, push, dense, evaluate, checkpoint, control) and link (local: to ranks of its host,
               remote: to other hosts)
    missed     where reads may be late, so many batches since the previous such line, by the updates that their reads
               missed ("4"), as this rank applied them
    cache      where ranks keep copies of rows (`exchange.cached.CacheCounts`), rows of its batches since the
               previous such line: hits, misses, lease_over (of them renewed), pushed by cause, ticks of what is pushed
    copy_ages  the same rows by how old the copy was that was read, in batches since its owner was asked ("0": with the
               batch, "1", "2" to 3, "4" to 7, ..): of each other rank a read misses at most so many batches, and those
               that waited there then, `write_bound` at most
    traffic    of one batch of this rank, by table: lookups, and the different rows they name
    tables     by table: rows and bytes in memory and in files now
    evaluate   epoch, and metrics named part_metric ("validation_auc")
run/tensorboard/       the same numbers

`time` is in seconds since 1970. A number that is not finite is written as null. All but `train` and
`evaluate` are this rank's (rank 0). Where some ranks are servers, rows, tiers and tables are the first one's, in
run/metrics-rows.jsonl. Legend: T tables.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.optim import Optimizer

from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.embedding import EmbeddingCollection
from colonnade.plan.plan import Plan
from colonnade.store.disk import storage_error
from colonnade.store.tier_counts import TierCounts, tier_counts
from colonnade.train.loss_scale import LossScale
from colonnade.train.metrics_file import FILE_NAME, FIRST_LINE, ROWS_FILE_NAME, forget_after
from colonnade.train.phases import WAITING, Phases


class Board:
    """Appends to a new event file of a folder; earlier files' steps from `first_step` on no longer count."""

    def __init__(self, folder: Path, first_step: int) -> None:
        # These take a while to import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._records = RecordWriter(self.path.open("xb"))
        self._event = Event
        self._write(file_version="brain.Event:2")
        if first_step > 1:
            self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, numbers: dict[str, float]) -> None:
        """Write all of one step's numbers. Raises OSError."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(step=step, summary=Summary(value=values))

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: object) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()


OF_ROWS = ("rows", "tiers", "tables")
"""Kinds of lines that are about the rows of the rank that writes them."""
Part = Literal["all", "but rows", "rows"]
MAX_BOARD_NAMES = 64
"""TensorBoard gets lines with at most this many numbers: a thousand tables are for the report."""


class Watched(Protocol):
    """What of a trainer is recorded."""

    @property
    def collection(self) -> EmbeddingCollection: ...
    @property
    def phases(self) -> Phases: ...
    @property
    def rows(self) -> Optimizer: ...
    @property
    def dense_optimizer(self) -> Optimizer: ...
    @property
    def loss_scale(self) -> LossScale: ...


def part_of(mesh: Mesh) -> Part | None:
    """What of a run's record this rank writes; None: nothing."""
    if mesh.rank == mesh.world.owners[0]:
        return "rows" if mesh.is_server else "all"
    return "but rows" if mesh.rank == 0 else None


class Record:
    """Appends to a run folder. Built by `open_record`; `close` when done."""

    def __init__(self, folder: Path, part: Part = "all") -> None:
        self.folder, self.part = folder, part
        self.path = folder / (ROWS_FILE_NAME if part == "rows" else FILE_NAME)
        self._lines: Any = None
        self._board: Board | None = None

    def open(self, done_steps: int) -> None:
        """Lines of later steps are dropped: those steps are about to happen again. Raises StorageError."""
        with self._explained():
            forget_after(self.path, done_steps)
            self._lines = self.path.open("a", encoding="utf-8")
            if not self._lines.tell():
                self._lines.write(FIRST_LINE)
            self._board = Board(self.folder / "tensorboard", first_step=done_steps + 1)

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Write one line, on disk for other processes when this returns (not through a power failure). Raises
        StorageError."""
        if self._lines is None or (
            self.part != "all" and (kind in OF_ROWS) != (self.part == "rows")
        ):
            return
        line = {"step": step, "kind": kind, "time": round(time.time(), 3), **_finite(values)}
        numbers = _flat(values, kind)
        with self._explained():
            self._lines.write(json.dumps(line, allow_nan=False) + "\n")
            self._lines.flush()
            if self._board is not None and len(numbers) <= MAX_BOARD_NAMES:
                self._board.add(step, numbers)

    def close(self) -> None:
        """Raises StorageError."""
        lines, board = self._lines, self._board
        self._lines = self._board = None
        with self._explained():
            for file in (lines, board):
                if file is not None:
                    file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, "write", self.path) from error


@dataclass(frozen=True, slots=True)
class TiersGained:
    """What the tiers did in a while."""

    seconds: float
    waited: float
    tiers: dict[str, TierCounts]
    """By name, from the top."""
    lifetime_bytes: dict[str, int]

    def plain(self) -> dict[str, Any]:
        """As a line has it."""
        by_tier = {
            name: {**counts.plain(), "lifetime_bytes": self.lifetime_bytes[name]}
            for name, counts in self.tiers.items()
        }
        return {"seconds": self.seconds, "waited": self.waited, **by_tier}

    def words(self) -> str:
        """ "dram 93.1 % | ssd 1.2k reads/s 14 MB/s | wait 2 %"; with hbm, its share of all rows first."""
        seconds = max(self.seconds, 1e-9)
        parts = []
        for number, (name, counts) in enumerate(self.tiers.items()):
            if number == 0 or name == "dram":
                rate = counts.hit_rate
                parts.append(f"{name} -" if rate is None else f"{name} {100 * rate:.1f} %")
            else:
                moved = (counts.read_bytes + counts.written_bytes) / seconds
                parts.append(
                    f"{name} {_short(counts.reads / seconds)} reads/s {_short(moved, 1e6)}B/s"
                )
        return " | ".join([*parts, f"wait {100 * min(1.0, self.waited / seconds):.0f} %"])


class Counters:
    """What a trainer's counters gained since they were last asked. Costs microseconds, but for `traffic`."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._seconds: dict[str, float] = dict(watched.phases.seconds)
        self._since = time.perf_counter()
        self._rows: dict[str, float] = {}
        self._sent: dict[str, dict[str, dict[str, int]]] = {}
        self._tiers: dict[str, TierCounts] = {}
        self._tiers_since, self._waited = self._since, 0.0
        self._missed: dict[str, float] = {}
        self._cache: dict[str, float] = {}
        self._ages: dict[str, float] = {}
        (
            self.rows(),
            self.sent(),
            self.tiers(),
            self.missed(),
            self.cache(),
            self.copy_ages(),
        )  # what was before does not count

    def phases(self) -> dict[str, float]:
        """Seconds by phase, and in all."""
        now = time.perf_counter()
        gained, self._seconds = _gained(dict(self._watched.phases.seconds), self._seconds)
        total, self._since = now - self._since, now
        return {**gained, "total": total}

    def rows(self) -> dict[str, float]:
        sources = self._watched.collection.store.sources
        now: dict[str, float] = {
            "resident": sources.resident,
            "read": sources.read + sources.copied,
            "born": sources.born,
            "evicted": sources.evicted_clean + sources.evicted_dirty,
        }
        gained, self._rows = _gained(now, self._rows)
        return gained

    def tiers(self) -> TiersGained | None:
        """None: all rows are in memory."""
        now = time.perf_counter()
        found = tier_counts(self._watched.collection.store)
        waited = self._watched.phases.seconds.get(WAITING, 0.0)
        gained = TiersGained(
            now - self._tiers_since,
            waited - self._waited,
            {
                name: counts.since(self._tiers.get(name, TierCounts()))
                for name, counts in found.items()
            },
            {name: counts.lifetime_bytes for name, counts in found.items()},
        )
        self._tiers, self._tiers_since, self._waited = found, now, waited
        return gained if len(found) > 1 else None

    def sent(self) -> dict[str, dict[str, dict[str, float]]]:
        """{"bytes" or "messages": {channel: {link: number}}}; {} where nothing was sent."""
        before, self._sent = self._sent, self._watched.collection.mesh.traffic.plain()
        gained: dict[str, dict[str, dict[str, float]]] = {
            what: {
                channel: _gained(by_link, before.get(what, {}).get(channel, {}))[0]
                for channel, by_link in by_purpose.items()
            }
            for what, by_purpose in self._sent.items()
        }
        return gained if gained["bytes"] else {}

    def missed(self) -> dict[str, float]:
        """Batches, by how many updates their reads missed; {} where none may be late."""
        collection = self._watched.collection
        if not collection.opened.reads_ahead:
            return {}
        now = {
            str(steps): float(count) for steps, count in sorted(collection.pipeline.missed.items())
        }
        gained, self._missed = _gained(now, self._missed)
        return {steps: count for steps, count in gained.items() if count}

    def cache(self) -> dict[str, float]:
        """Return the `CacheCounts` since the last line; {} without a cache."""
        cached = self._watched.collection.cached
        if cached is None:
            return {}
        gained, self._cache = _gained(dict(vars(cached.counts)), self._cache)
        return gained

    def copy_ages(self) -> dict[str, float]:
        """Rows of batches by the age of the copy that was read, each under the least age of its kind; {} where ranks
        keep no copies."""
        cached = self._watched.collection.cached
        if cached is None:
            return {}
        now = {str((1 << kind) >> 1): float(rows) for kind, rows in enumerate(cached.ages)}
        gained, self._ages = _gained(now, self._ages)
        return {age: rows for age, rows in gained.items() if rows}

    def learning_rates(self) -> dict[str, float]:
        """By param group; one number where all groups of an optimizer agree."""
        found: dict[str, float] = {}
        optimizers = {"rows": self._watched.rows, "dense": self._watched.dense_optimizer}
        for name, optimizer in optimizers.items():
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            if len(set(rates)) == 1:
                found[name] = rates[0]
                continue
            for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
                found[f"{name}.{group.get('name', number)}"] = rate
        return found

    def loss_scale(self) -> dict[str, float]:
        """{} where it does not change."""
        scale = self._watched.loss_scale
        return {"loss_scale": scale.value} if scale.is_dynamic else {}

    def traffic(self, batch: Batch) -> dict[str, dict[str, int]]:
        """By table: how many lookups the batch makes, and how many different rows they name. About a millisecond
        per 25,000 lookups."""
        declaration = self._watched.collection.declaration
        by_table: dict[str, list[np.ndarray]] = {}
        for feature in declaration.features:
            if feature.name in batch.ids:
                ids = batch.ids[feature.name].values.numpy()
                by_table.setdefault(feature.table, []).append(ids)
        return {
            "lookups": {table: sum(map(len, ids)) for table, ids in by_table.items()},
            "unique": {
                table: len(np.unique(np.concatenate(ids))) for table, ids in by_table.items()
            },
        }

    def tables(self) -> dict[str, dict[str, int]]:
        return table_sizes(self._watched.collection)


def table_sizes(collection: EmbeddingCollection) -> dict[str, dict[str, int]]:
    """By table: rows and bytes in this rank's memory, and live rows and their bytes in its files.

    A row's bytes are its weights, optimizer state and clock; neither index nor rows that files still hold
    but nobody reads.
    """
    store = collection.store
    found: dict[str, dict[str, int]] = {}
    for t, table in enumerate(store.tables):
        in_memory = int(store.num_rows(t))
        in_files = len(store.backings[t]) if store.backings else 0
        said = {
            "rows_in_memory": in_memory,
            "bytes_in_memory": in_memory * table.record_bytes,
            "rows_in_files": in_files,
            "bytes_in_files": in_files * table.record_bytes,
        }
        before = found.get(table.origin[0], dict.fromkeys(said, 0))  # of another slice
        found[table.origin[0]] = {name: before[name] + said[name] for name in said}
    return found


def _short(value: float, least: float = 1.0) -> str:
    """1234 -> "1.2k"; `least`: the smallest unit to use."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, "k"), (1.0, "")):
        if value >= size or size <= least:
            return (
                f"{value / size:.0f}{unit}"
                if value >= 10 * size or size == 1
                else f"{value / size:.1f}{unit}"
            )
    return "0"


def _gained(
    now: dict[str, Any], before: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    return {name: value - before.get(name, 0) for name, value in now.items()}, now


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in values.items():
        path = f"{prefix}/{name}"
        if isinstance(value, Mapping):
            flat |= _flat(value, path)
        elif isinstance(value, int | float):
            flat[path] = value
    return flat


PREDICTED_CHANNELS = ("route", "fetch", "push")
"""Of what a plan foretells: ids, rows and their gradients."""


def mean_sent(mesh: Mesh, steps: int) -> dict[str, float]:
    """Collective: bytes that a rank sent per step, the mean over ranks, by channel."""
    if mesh.num_ranks == 1 or not steps:
        return {}
    counted = [
        float(mesh.traffic.bytes_of(channel)) for channel in PREDICTED_CHANNELS
    ]  # before this sends
    told = mesh.all_gather("control", torch.tensor(counted, dtype=torch.float64))
    means = torch.stack(list(told)).mean(0) / steps
    return dict(zip(PREDICTED_CHANNELS, means.tolist(), strict=True))


def rows_of_first_owner(mesh: Mesh, collection: EmbeddingCollection) -> dict[str, Any]:
    """Collective where there are servers: as a run's summary has it, where rows came from, by tier and table. Rank 0's
    own where it has rows."""
    store = collection.store
    found = {
        "row_sources": asdict(store.sources),
        "tiers": {name: counts.plain() for name, counts in tier_counts(store).items()},
        "resident_bytes": store.resident_bytes(),
        "tables": table_sizes(collection),
    }
    if not mesh.world.has_servers:
        return found
    heard = mesh.all_gather_bytes("control", json.dumps(found).encode())
    return json.loads(heard[mesh.world.owners[0]])


def checked(
    plan: Plan, rate: float, batch_size: int, sent: Mapping[str, float]
) -> dict[str, float]:
    """As a run's summary has it; nothing where the plan foretold nothing. `rate`: samples per second of all ranks;
    errors are relative to what was measured."""
    foretold = plan.prediction
    if foretold is None or not rate:
        return {}
    found = {
        "predicted_samples_per_second": foretold["samples_per_second"],
        "prediction_error": foretold["samples_per_second"] / rate - 1,
    }
    if foretold.get("step_seconds"):
        found["predicted_step_seconds"] = foretold["step_seconds"]
        found["step_seconds"] = batch_size / rate
    counted = sum(sent.values())
    if counted:
        said = sum(sum(links.values()) for links in foretold["sent"].values())
        found |= {
            "predicted_sent_bytes": said,
            "counted_sent_bytes": counted,
            "sent_error": said / counted - 1,
        }
    return found
