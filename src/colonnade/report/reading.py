"""Reading of run folders as plain values; what training does not write is left out.

Works for a run that is under way, was killed, or has hardly begun: whatever is missing is empty.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colonnade.checkpoint.header import list_checkpoints
from colonnade.errors import CheckpointError
from colonnade.formats import check_stamp, parse_yaml, read_text, stamp
from colonnade.report.words import metric_words
from colonnade.train.best import is_judged, is_less_better
from colonnade.train.metrics_file import FILE_NAME, ROWS_FILE_NAME, read_lines

LARGEST = 1e18
"""Beyond it nothing that training counts can lie, nor a time."""


def is_number(value: Any) -> bool:
    """Finite, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST and math.isfinite(value)


def numbers(values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        return {}
    return {str(name): value for name, value in values.items() if is_number(value)}


def sound_line(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """A line of `train/record.py`; None where it is of no use."""
    kind, step = line.get("kind"), line.get("step")
    if not isinstance(kind, str) or not isinstance(step, int) or not is_number(step) or step < 0:
        return None
    found = {**numbers(line), "kind": kind}
    if not 0 < found.get("time", 1.0) < 1e11:
        del found["time"]
    if kind == "train":
        found["loss"] = found.get("loss")
        found["lr"] = numbers(line.get("lr"))
    elif kind == "traffic":
        found |= {name: numbers(line.get(name)) for name in ("lookups", "unique")}
    elif kind == "sent":
        found |= sent(line)
    elif kind == "tables":
        found["tables"] = sizes(line.get("tables"))
    elif kind == "tiers":
        found["tiers"] = tiers(line)
    return found


def tiers(values: Any) -> dict[str, dict[str, Any]]:
    """By tier: what it counts."""
    if not isinstance(values, Mapping):
        return {}
    return {str(name): numbers(part) for name, part in values.items() if isinstance(part, Mapping)}


def sent(line: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Bytes and messages, by channel and link. Older records have bytes by channel alone."""
    if "bytes" in line:
        return {what: sizes(line.get(what)) for what in ("bytes", "messages")}
    by_purpose = {n: v for n, v in numbers(line).items() if n not in ("step", "time")}
    return {"bytes": {name: {"": size} for name, size in by_purpose.items()}, "messages": {}}


def sizes(tables: Any) -> dict[str, dict[str, Any]]:
    """By table, or whatever names them: numbers by name."""
    if not isinstance(tables, Mapping):
        return {}
    return {str(name): numbers(size) for name, size in tables.items()}


def sound_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    if not summary:
        return {}
    stopped = summary.get("stopped") is True
    return {
        **numbers(summary),
        "stopped": stopped,
        "tables": sizes(summary.get("tables")),
        "tiers": tiers(summary.get("tiers")),
    }


def sound_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A plan or a machine: names with plain values; sizes are numbers, or None for no limit."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if name == "tables":
            listed = value if isinstance(value, list) else []
            found[name] = [
                t for t in listed if isinstance(t, Mapping) and isinstance(t.get("name"), str)
            ]
        elif _is_size(str(name)):
            if value is None or is_number(value):
                found[str(name)] = value
        elif isinstance(value, Mapping):
            found[str(name)] = {str(k): v for k, v in value.items() if _is_plain(v)}
        elif isinstance(value, list):
            found[str(name)] = [each for each in value if _is_plain(each)]
        elif _is_plain(value):
            found[str(name)] = value
    return found


def sound_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Its sections."""
    return {str(name): dict(part) for name, part in config.items() if isinstance(part, Mapping)}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bool) or is_number(value)


def _is_size(name: str) -> bool:
    return name.endswith("_bytes") or name == "num_ranks"


QUIET_SECONDS = 120.0
"""A run without a summary that wrote nothing for so long has probably ended."""


@dataclass(frozen=True)
class RunRecord:
    """One run. `lines` as in `train/record.py`, oldest first."""

    folder: Path
    config: dict[str, Any]
    plan: dict[str, Any]
    machine: dict[str, Any]
    summary: dict[str, Any]
    """Empty unless the newest training call of this folder came to its end."""
    lines: tuple[dict[str, Any], ...]
    checkpoints: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def status(self) -> str:
        """ "finished", "stopped", "under way", "ended early" or "not begun"."""
        if self.summary:
            return "stopped" if self.summary.get("stopped") else "finished"
        if not self.lines:
            return "not begun"
        quiet = time.time() - float(self.lines[-1].get("time") or 0)
        return "under way" if quiet < QUIET_SECONDS else "ended early"

    @property
    def step(self) -> int:
        """The last one that is known of."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def seconds(self) -> float:
        """From the first to the last line, evaluation and pauses between calls included."""
        times = [line["time"] for line in self.lines if line.get("time")]
        return float(self.summary.get("seconds") or 0) or (times[-1] - times[0] if times else 0.0)


def read_run(folder: Path) -> RunRecord:
    """Raises CheckpointError where the folder is no run folder, or a file of it cannot be read."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder; give a run folder that `colonnade train` wrote"
        )
    if not (folder / "config.yaml").is_file() and not (folder / FILE_NAME).is_file():
        raise CheckpointError(
            f"{folder} is no run folder: it has neither config.yaml nor {FILE_NAME}. "
            "Give a folder that `colonnade train` wrote"
        )
    read = [sound_line(line) for line in read_lines(folder / FILE_NAME)]
    lines = [line for line in read if line is not None]
    if of_rows := read_lines(folder / ROWS_FILE_NAME):  # another rank's
        lines += [line for line in map(sound_line, of_rows) if line is not None]
        lines.sort(key=lambda line: line.get("time") or 0.0)
    summary = sound_summary(_load(folder / "summary.json", "colonnade summary"))
    if summary and lines:
        written = (folder / "summary.json").stat().st_mtime
        if float(lines[-1].get("time") or 0) > written + 1:  # of an earlier call
            summary = {}
    return RunRecord(
        folder,
        sound_config(_load(folder / "config.yaml", "colonnade config")),
        sound_facts(_load(folder / "plan.json", "colonnade plan")),
        sound_facts(_load(folder / "machine.json", "colonnade machine")),
        summary,
        tuple(lines),
        tuple(list_checkpoints(folder)),
    )


def metrics_of(run: RunRecord) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """{metric: {part: [(step, value)]}} over the run's evaluations; parts are validation, test, ..."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in run.of_kind("evaluate"):
        for name, value in line.items():
            part, _, metric = name.partition("_")
            if metric and is_number(value):
                found[metric][part].append((line["step"], value))
    return {metric: dict(parts) for metric, parts in found.items()}


def is_constant(metric: str) -> bool:
    """Whether it tells of the data, not of the model."""
    return metric.startswith(("num_", "positive_rate"))


def best_of(metric: str, points: list[tuple[int, float]]) -> tuple[int, float]:
    """The (step, value) that is best; the first of equals."""
    sign = -1 if is_less_better(metric) else 1
    return max(points, key=lambda point: sign * point[1])


@dataclass(frozen=True)
class Choice:
    """The evaluation that a run is judged by, and why: never one that the test part chose."""

    step: int
    words: str
    monitor: str | None
    """Metric of the validation part that chose; None: there is no such part, so it is the last."""


def choice_of(run: RunRecord) -> Choice | None:
    """None: nothing was evaluated."""
    lines, metrics = run.of_kind("evaluate"), metrics_of(run)
    judged = [m for m, parts in metrics.items() if "validation" in parts and is_judged(m)]
    train = run.config.get("train")
    monitor = train.get("monitor") if isinstance(train, Mapping) else None
    if monitor not in judged:  # older runs did not record it
        monitor = judged[0] if judged else None
    if monitor is not None:
        step = best_of(monitor, metrics[monitor]["validation"])[0]
        return Choice(step, f"step {step:,}, best of validation {metric_words(monitor)}", monitor)
    if not lines:
        return None
    step = lines[-1]["step"]
    return Choice(step, f"last step, {step:,}; no validation part", None)


def chosen_value(choice: Choice, points: list[tuple[int, float]]) -> tuple[int, float]:
    """The (step, value) of a metric at the chosen step; where it has none then, the last one before, else the first."""
    earlier = [point for point in points if point[0] <= choice.step]
    return earlier[-1] if earlier else points[0]


def sums_of(run: RunRecord, kind: str) -> dict[str, float]:
    """What a kind of line adds up to over the run, by name."""
    total: dict[str, float] = defaultdict(float)
    for line in run.of_kind(kind):
        for name, value in line.items():
            if name not in ("step", "time") and is_number(value):
                total[name] += value
    return dict(total)


@dataclass(frozen=True)
class TableFigures:
    """One table of the run, on rank 0. None: not known."""

    name: str
    rows_declared: int | None
    rows_in_memory: int | None
    rows_in_files: int | None
    bytes_in_memory: int
    bytes_in_files: int
    lookups: float | None  # of the median batch
    unique: float | None  # different rows of the median batch

    @property
    def rows_known(self) -> int:
        return max(self.rows_in_memory or 0, self.rows_in_files or 0)


def tables_of(run: RunRecord) -> list[TableFigures]:
    """The run's tables, most bytes first."""
    sizes: Mapping[str, Any] = run.summary.get("tables") or {}
    if not sizes:
        lines = run.of_kind("tables")
        sizes = lines[-1].get("tables", {}) if lines else {}
    traffic = run.of_kind("traffic")
    planned = {table.get("name"): table for table in run.plan.get("tables", [])}
    names = dict.fromkeys([*planned, *sizes, *(n for line in traffic for n in line["lookups"])])
    found = []
    for name in names:
        size = sizes.get(name, {})
        found.append(
            TableFigures(
                str(name),
                planned.get(name, {}).get("rows"),
                size.get("rows_in_memory"),
                size.get("rows_in_files"),
                size.get("bytes_in_memory", 0),
                size.get("bytes_in_files", 0),
                _median([line["lookups"].get(name) for line in traffic]),
                _median([line["unique"].get(name) for line in traffic]),
            )
        )
    return sorted(
        found, key=lambda t: (-t.bytes_in_memory - t.bytes_in_files, -(t.unique or 0), t.name)
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"epochs": 3}} -> {"train.epochs": 3}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def _median(values: list[Any]) -> float | None:
    """Return the median of the numbers, which the smaller last batch of an epoch does not move."""
    known = [value for value in values if is_number(value)]
    return statistics.median(known) if known else None


def _load(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON or YAML file of the folder, of format `name`; {} where it is absent. A run that was killed may
    have left half of one."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; restore it from a copy") from None
    try:
        loaded = json.loads(text) if path.suffix == ".json" else parse_yaml(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: got broken {path.suffix[1:].upper()} ({error}); restore it from a copy, or remove it"
        ) from None
    if not isinstance(loaded, dict):
        return {}
    check_stamp(path, loaded, name, is_needed=False)
    return {key: value for key, value in loaded.items() if key not in stamp(name)}
