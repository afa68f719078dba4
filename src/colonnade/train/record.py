"""Metrics of a run while it trains: JSON lines, and the same numbers as a TensorBoard event file.

The calling thread writes them, and passes the numbers to callbacks, of which TensorBoard is one. TensorBoard's own
writer has a thread, which prints a traceback when a disk is full.

run/metrics.jsonl      {"step", "kind", "time", ...}; by kind:
    train      loss; samples_per_second over all ranks; lr by param group of rows and dense network; loss_scale, where
               it is dynamic; with codistillation `teacher`, the peer's step that taught this one (0: none), and of this
               rank's samples label_loss, peer_loss and peer_difference, the mean of |probability - the peer's|
    phases     seconds of the training thread by phase, and `total` seconds, since the previous such line
    rows       rows that batches needed since the previous such line: resident, read (from files or write buffers),
               born (initialised); and rows evicted
    tiers      only with a tier below memory: `seconds` since the previous such line; `waited`, the part of them that
               the training thread waited for rows; `TierCounts` by tier, from the top: increments since then, but
               current values of held, live and lifetime bytes
    sent       payload `bytes` and `messages` that this rank sent since the previous such line, by channel (route,
               fetch, push, dense, evaluate, checkpoint, control) and link (local: ranks of its host, remote: others)
    noise      only on several ranks or with micro-batches: number of `steps` since the previous such line; sums over
               them of estimates of the variance of a sample's dense gradient, and of the square of the gradient's norm
               without noise. The gradient noise scale is the one sum over the other (plan/advice.py)
    missed     only with bounded staleness: number of batches since the previous such line, by the number of updates
               that their reads missed ("4"), as this rank applied them
    cache      only with a row cache: `cache.directory.CacheCounts` of rows of batches since the previous such line:
               hits, misses, lease_over (renewed among them), pushed by cause, ticks (version lag) of pushed rows
    copy_ages  the same rows by the age of the cached row that was read, in batches since it was fetched ("0": with the
               batch, "1", "2" to 3, "4" to 7, ..). A read misses at most that many batches of each other rank, plus
               the batches that were pending there at the fetch, `write_bound` at most
    traffic    one batch of this rank, by table: number of lookups and of unique rows
    tables     by table: current rows and bytes in memory and in files
    evaluate   epoch, and metrics named part_metric ("validation_auc"); those of the test part may be recorded after
               training, by the step whose weights were tested
    test_blocks  `digest` of the samples of the test part, and `metrics`: values by block (`models.ranking.NUM_BLOCKS`
               fixed blocks of samples), to pair runs that tested the same samples
    types      by type of feedback, where a model tells types apart: the figures of `models.mrmn.measure_type`, by the
               weights that were tested
run/tensorboard/       the same numbers

`time` is in seconds since 1970. A number that is not finite is written as null. All kinds but `train` and `evaluate`
are of this rank alone (rank 0). With servers, rows, tiers and tables are of the first server, in
run/metrics-rows.jsonl. Legend: T tables.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from colonnade.batch import Batch
from colonnade.checkpoint.contract import TrainerState
from colonnade.comm.mesh import Mesh
from colonnade.embedding import EmbeddingCollection
from colonnade.files.disk import storage_error
from colonnade.plan.plan import Plan
from colonnade.store.contract import TierCounts
from colonnade.train.callbacks import Callback, Callbacks, RunEvent
from colonnade.train.metrics_file import (
    FILE_NAME,
    FIRST_LINE,
    ROWS_FILE_NAME,
    drop_metrics_after_step,
)
from colonnade.train.phases import WAITING


class TensorBoard(Callback):
    """Callback that writes a new event file in a folder. It invalidates later steps in earlier files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_start(self, event: RunEvent) -> None:
        """Open the event file."""
        # These take a while to import.
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((self.folder / name).open("xb"))
        self._write(file_version="brain.Event:2")
        if event.step:
            self._write(step=event.step + 1, session_log=SessionLog(status=SessionLog.START))

    def on_log(self, event: RunEvent) -> None:
        """Write all of one step's numbers."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = event.metrics.items()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers]
        self._write(step=event.step, summary=Summary(value=values))

    def on_end(self, event: RunEvent) -> None:
        """Close the event file."""
        self._records.close()

    def _write(self, **fields: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()


ROW_KINDS = ("rows", "tiers", "tables")
"""Kinds of lines about the rows of the writing rank."""
Part = Literal["all", "but rows", "rows"]
MAX_BOARD_NAMES = 64
"""Maximum count of numbers in a line for callbacks; longer lines are in the report alone."""


def select_record_part(mesh: Mesh) -> Part | None:
    """Return the part of a run's record that this rank writes; None if it writes nothing."""
    if mesh.rank == mesh.world.owners[0]:
        return "rows" if mesh.is_server else "all"
    return "but rows" if mesh.rank == 0 else None


class Record:
    """Writer of a run's metrics, to its folder and to callbacks. Call `open_files` first and `close` at the end."""

    def __init__(
        self, folder: Path | None, part: Part = "all", callbacks: Sequence[object] = ()
    ) -> None:
        """folder: None if only callbacks receive the metrics."""
        self.folder = folder
        self.path = (folder or Path()) / (ROWS_FILE_NAME if part == "rows" else FILE_NAME)
        self.part = part
        boards = [] if folder is None else [TensorBoard(folder / "tensorboard")]
        self.callbacks = Callbacks([*boards, *callbacks], folder)
        self._lines: Any = None

    @property
    def has_readers(self) -> bool:
        """True if anything receives the metrics."""
        return bool(self.callbacks.callbacks)

    def open_files(self, done_steps: int) -> None:
        """Open the file and drop lines of later steps, which the run repeats; start the callbacks.

        Raises StorageError, CallbackError."""
        if self.folder is not None:
            with self._as_storage_error():
                drop_metrics_after_step(self.path, done_steps)
                self._lines = self.path.open("a", encoding="utf-8")
                if not self._lines.tell():
                    self._lines.write(FIRST_LINE)
        self.callbacks.call("on_start", done_steps, {})

    def write_line(self, step: int, line_kind: str, line_values: Mapping[str, Any]) -> None:
        """Write one line and flush it, without fsync. Raises StorageError, CallbackError."""
        if self.part != "all" and (line_kind in ROW_KINDS) != (self.part == "rows"):
            return
        line = {
            "step": step,
            "kind": line_kind,
            "time": round(time.time(), 3),
            **_replace_non_finite(line_values),
        }
        if self._lines is not None:
            with self._as_storage_error():
                self._lines.write(json.dumps(line, allow_nan=False) + "\n")
                self._lines.flush()
        numbers = _flatten_numbers(line_values, line_kind)
        if 0 < len(numbers) <= MAX_BOARD_NAMES:
            self.callbacks.call("on_log", step, numbers)

    def close(self, step: int, metrics: Mapping[str, float]) -> None:
        """End the callbacks with the metrics of the result, and close the file. Raises StorageError, CallbackError."""
        self.callbacks.call("on_end", step, metrics)
        if self._lines is not None:
            with self._as_storage_error():
                self._lines.close()

    @contextmanager
    def _as_storage_error(self) -> Iterator[None]:
        """Convert OSError to StorageError that names the file."""
        try:
            yield
        except OSError as error:
            raise storage_error(error, "write", self.path) from error


@dataclass(frozen=True, slots=True)
class TierActivity:
    """Activity of the storage tiers in an interval."""

    seconds: float
    waited: float
    tiers: dict[str, TierCounts]
    """Counts by tier name, from the top tier."""
    lifetime_bytes: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the values of a metrics line."""
        by_tier = {
            name: {**counts.to_dict(), "lifetime_bytes": self.lifetime_bytes[name]}
            for name, counts in self.tiers.items()
        }
        return {"seconds": self.seconds, "waited": self.waited, **by_tier}

    def format_activity(self) -> str:
        """Format as "dram 93.1 % | ssd 1.2k reads/s 14 MB/s | wait 2 %"; with hbm its hit rate comes first."""
        seconds = max(self.seconds, 1e-9)
        parts = []
        for number, (name, counts) in enumerate(self.tiers.items()):
            if number == 0 or name == "dram":
                rate = counts.hit_rate
                parts.append(f"{name} -" if rate is None else f"{name} {100 * rate:.1f} %")
            else:
                moved = (counts.read_bytes + counts.written_bytes) / seconds
                parts.append(
                    f"{name} {_format_short_number(counts.reads / seconds)} reads/s "
                    f"{_format_short_number(moved, 1e6)}B/s"
                )
        return " | ".join([*parts, f"wait {100 * min(1.0, self.waited / seconds):.0f} %"])


class Counters:
    """Increments of a trainer's counters since the previous call. A call costs microseconds, except `traffic`."""

    def __init__(self, trainer: TrainerState) -> None:
        self._trainer = trainer
        self._counts: dict[str, Mapping[str, Any]] = {}
        """Counts at the previous call, by kind of line."""
        self._tiers: dict[str, TierCounts] = {}
        self._tiers_since = time.perf_counter()
        self._waited = 0.0
        # Counting starts now: drop the counts so far.
        self.collect_increments()
        self.collect_tiers()

    def collect_increments(self) -> dict[str, Mapping[str, Any]]:
        """Return the values of every kind of line that has increments, except `tiers`."""
        counts = self._count_all()
        gained = _subtract(counts, self._counts)
        self._counts = counts
        for kind in ("missed", "copy_ages"):
            gained[kind] = {number: count for number, count in gained[kind].items() if count}
        return {kind: values for kind, values in gained.items() if values}

    def _count_all(self) -> dict[str, Mapping[str, Any]]:
        """Return the counts so far by kind of line; {} for a kind that this run does not have."""
        collection = self._trainer.collection
        sources = collection.store.sources
        cached = collection.cached
        noise = self._trainer.dense.noise
        sent = collection.mesh.traffic.to_dict()
        missed = collection.pipeline.missed if collection.opened.reads_ahead else {}
        ages = () if cached is None else cached.ages
        return {
            "phases": {**self._trainer.phases.seconds, "total": time.perf_counter()},
            "rows": {
                "resident": sources.resident,
                "mapped": sources.mapped,
                "read": sources.read + sources.copied,
                "born": sources.born,
                "evicted": sources.evicted_clean + sources.evicted_dirty,
            },
            "sent": sent if sent["bytes"] else {},
            "noise": {
                "steps": noise.steps,
                "variance": self._trainer.config.train.samples_per_step * noise.variance,
                "square": noise.square,
            }
            if noise.steps
            else {},
            "missed": {str(steps): float(count) for steps, count in sorted(missed.items())},
            "cache": {} if cached is None else dict(vars(cached.counts)),
            # By the smallest age of a bin.
            "copy_ages": {str((1 << kind) >> 1): float(rows) for kind, rows in enumerate(ages)},
        }

    def collect_tiers(self) -> TierActivity | None:
        """Return the activity of tiers; None if all rows are in memory."""
        now = time.perf_counter()
        tiers = self._trainer.collection.store.count_tiers()
        waited = self._trainer.phases.seconds.get(WAITING, 0.0)
        gained = TierActivity(
            now - self._tiers_since,
            waited - self._waited,
            {
                name: counts.subtract_earlier(self._tiers.get(name, TierCounts()))
                for name, counts in tiers.items()
            },
            {name: counts.lifetime_bytes for name, counts in tiers.items()},
        )
        self._tiers = tiers
        self._tiers_since = now
        self._waited = waited
        return gained if len(tiers) > 1 else None

    def collect_learning_rates(self) -> dict[str, float]:
        """Return learning rates by param group; one number if all groups of an optimizer are equal."""
        rates_by_group: dict[str, float] = {}
        optimizers = {"rows": self._trainer.rows, "dense": self._trainer.dense_optimizer}
        for name, optimizer in optimizers.items():
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            if len(set(rates)) == 1:
                rates_by_group[name] = rates[0]
                continue
            for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
                rates_by_group[f"{name}.{group.get('name', number)}"] = rate
        return rates_by_group

    def collect_loss_scale(self) -> dict[str, float]:
        """Return the loss scale; {} if it is constant."""
        scale = self._trainer.loss_scale
        return {"loss_scale": scale.value} if scale.is_dynamic else {}

    def collect_traffic(self, batch: Batch) -> dict[str, dict[str, int]]:
        """Count a batch's lookups and unique rows by table. About a millisecond per 25,000 lookups."""
        declaration = self._trainer.collection.declaration
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

    def collect_tables(self) -> dict[str, dict[str, int]]:
        """Return the current sizes of tables: `collect_table_sizes`."""
        return collect_table_sizes(self._trainer.collection)


def collect_table_sizes(collection: EmbeddingCollection) -> dict[str, dict[str, int]]:
    """Return rows and bytes of each table in this rank's memory, and live rows and bytes in its files.

    A row's bytes are its weights, optimizer state and clock. The index and dead rows in files do not count.
    """
    store = collection.store
    sizes: dict[str, dict[str, int]] = {}
    for t, table in enumerate(store.tables):
        in_memory = int(store.num_rows(t))
        in_files = len(store.backings[t]) if store.backings else 0
        table_size = {
            "rows_in_memory": in_memory,
            "bytes_in_memory": in_memory * table.record_bytes,
            "rows_in_files": in_files,
            "bytes_in_files": in_files * table.record_bytes,
        }
        # A table may have several slices.
        sizes_of_slices = sizes.get(table.origin[0], dict.fromkeys(table_size, 0))
        sizes[table.origin[0]] = {
            name: sizes_of_slices[name] + table_size[name] for name in table_size
        }
    return sizes


def _format_short_number(value: float, smallest_unit: float = 1.0) -> str:
    """Format a number: 1234 -> "1.2k". smallest_unit: smallest unit to use."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, "k"), (1.0, "")):
        if value >= size or size <= smallest_unit:
            return (
                f"{value / size:.0f}{unit}"
                if value >= 10 * size or size == 1
                else f"{value / size:.1f}{unit}"
            )
    return "0"


def _subtract(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the increments `now - before` of nested counts."""
    return {
        name: _subtract(value, before.get(name, {}))
        if isinstance(value, Mapping)
        else value - before.get(name, 0)
        for name, value in now.items()
    }


def _replace_non_finite(value: Any) -> Any:
    """Replace NaN and inf by None, also in nested mappings and lists."""
    if isinstance(value, Mapping):
        return {name: _replace_non_finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flatten_numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Flatten nested numbers to names with slashes, for TensorBoard."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        path = f"{prefix}/{name}"
        if isinstance(value, Mapping):
            flat |= _flatten_numbers(value, path)
        elif isinstance(value, int | float):
            flat[path] = value
    return flat


PREDICTED_CHANNELS = ("route", "fetch", "push")
"""Channels that a plan predicts: ids, rows and their gradients."""


def average_sent_bytes(mesh: Mesh, num_steps: int) -> dict[str, float]:
    """Return bytes that a rank sent per step by channel, averaged over ranks. Collective."""
    if mesh.num_ranks == 1 or not num_steps:
        return {}
    # Counted before the all-gather below.
    counted = [float(mesh.traffic.bytes_of(channel)) for channel in PREDICTED_CHANNELS]
    received = mesh.all_gather("control", torch.tensor(counted, dtype=torch.float64))
    means = torch.stack(list(received)).mean(0) / num_steps
    return dict(zip(PREDICTED_CHANNELS, means.tolist(), strict=True))


def gather_row_summary(mesh: Mesh, collection: EmbeddingCollection) -> dict[str, Any]:
    """Return row sources, tiers and table sizes of the first rank that owns rows, for a run's summary.

    Collective with servers.
    """
    store = collection.store
    summary = {
        "row_sources": asdict(store.sources),
        "tiers": {name: counts.to_dict() for name, counts in store.count_tiers().items()},
        "resident_bytes": store.resident_bytes(),
        "tables": collect_table_sizes(collection),
    }
    if not mesh.world.has_servers:
        return summary
    received = mesh.all_gather_bytes("control", json.dumps(summary).encode())
    return json.loads(received[mesh.world.owners[0]])


def compare_with_prediction(
    plan: Plan, samples_per_second: float, batch_size: int, sent_bytes: Mapping[str, float]
) -> dict[str, float]:
    """Compare the plan's prediction with the measured rate and bytes, for a run's summary; {} without a prediction.

    samples_per_second: samples per second of all ranks. Errors are relative to the measured values.
    """
    prediction = plan.prediction
    if prediction is None or not samples_per_second:
        return {}
    comparison = {
        "predicted_samples_per_second": prediction["samples_per_second"],
        "prediction_error": prediction["samples_per_second"] / samples_per_second - 1,
    }
    if prediction.get("step_seconds"):
        comparison["predicted_step_seconds"] = prediction["step_seconds"]
        comparison["step_seconds"] = batch_size / samples_per_second
    counted_bytes = sum(sent_bytes.values())
    if counted_bytes:
        predicted_bytes = sum(sum(links.values()) for links in prediction["sent"].values())
        comparison |= {
            "predicted_sent_bytes": predicted_bytes,
            "counted_sent_bytes": counted_bytes,
            "sent_error": predicted_bytes / counted_bytes - 1,
        }
    return comparison
