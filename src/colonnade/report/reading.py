"""Reader of run folders. It returns plain values and drops lines and values that training does not write.

A run may be in progress, killed, or have hardly begun: missing values are empty.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colonnade.checkpoint.header import list_checkpoints
from colonnade.errors import CheckpointError
from colonnade.formats import check_format_version, make_format_stamp, parse_yaml, read_text_file
from colonnade.report.formatting import format_metric_name
from colonnade.report.intervals import BlockValues
from colonnade.train.best import HIGHER, LOWER, Best, get_direction, is_judged
from colonnade.train.metrics_file import FILE_NAME, ROWS_FILE_NAME, read_metrics_lines

MAX_ABSOLUTE = 1e18
"""Largest absolute value of any count or time that training writes."""


def is_number(value: Any) -> bool:
    """Return whether the value is a finite number of plausible size; a bool is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= MAX_ABSOLUTE and math.isfinite(value)


def keep_numbers(values: Any) -> dict[str, Any]:
    """Return the numbers among named values; {} if `values` is not a mapping."""
    if not isinstance(values, Mapping):
        return {}
    return {str(name): value for name, value in values.items() if is_number(value)}


def clean_metrics_line(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a valid line of `train/record.py` without unexpected values; None if the line is invalid."""
    kind = line.get("kind")
    step = line.get("step")
    if not isinstance(kind, str) or not isinstance(step, int) or not is_number(step) or step < 0:
        return None
    valid = {**keep_numbers(line), "kind": kind}
    if not 0 < valid.get("time", 1.0) < 1e11:
        del valid["time"]
    if kind == "train":
        valid["loss"] = valid.get("loss")
        valid["lr"] = keep_numbers(line.get("lr"))
    elif kind == "traffic":
        valid |= {name: keep_numbers(line.get(name)) for name in ("lookups", "unique")}
    elif kind == "sent":
        valid |= clean_sent(line)
    elif kind == "tables":
        valid["tables"] = clean_parts(line.get("tables"))
    elif kind == "types":
        valid["types"] = clean_parts(line)
    elif kind == "tiers":
        valid["tiers"] = clean_parts(line)
    elif kind == "test_blocks":
        valid["digest"] = str(line.get("digest"))
        valid["metrics"] = clean_lists(line.get("metrics"))
    return valid


def clean_lists(values: Any) -> dict[str, list[float]]:
    """Return the lists of numbers, by name, with NaN for anything else in them."""
    if not isinstance(values, Mapping):
        return {}
    return {
        str(name): [value if is_number(value) else math.nan for value in numbers]
        for name, numbers in values.items()
        if isinstance(numbers, list)
    }


def clean_sent(line: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return bytes and messages by channel and link. Older records have only bytes by channel."""
    if "bytes" in line:
        return {what: clean_parts(line.get(what)) for what in ("bytes", "messages")}
    by_channel = {n: v for n, v in keep_numbers(line).items() if n not in ("step", "time")}
    return {"bytes": {name: {"": size} for name, size in by_channel.items()}, "messages": {}}


def clean_parts(values: Any) -> dict[str, dict[str, Any]]:
    """Return the numbers of each table, tier or other named part, without entries that are no mappings."""
    if not isinstance(values, Mapping):
        return {}
    return {
        str(name): keep_numbers(part) for name, part in values.items() if isinstance(part, Mapping)
    }


def clean_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary's numbers, tables and tiers, without unexpected values."""
    if not summary:
        return {}
    return {
        **keep_numbers(summary),
        "stopped": summary.get("stopped") is True,
        "tables": clean_parts(summary.get("tables")),
        "tiers": clean_parts(summary.get("tiers")),
    }


def clean_named_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a plan or a machine, by name; sizes are numbers, or None for no limit."""
    valid: dict[str, Any] = {}
    for name, value in facts.items():
        if name == "tables":
            tables = value if isinstance(value, list) else []
            valid[name] = [
                t for t in tables if isinstance(t, Mapping) and isinstance(t.get("name"), str)
            ]
        elif name == "comparison":  # checked where it is described
            valid[name] = value
        elif _is_size_name(str(name)):
            if value is None or is_number(value):
                valid[str(name)] = value
        elif isinstance(value, Mapping):
            valid[str(name)] = {str(k): v for k, v in value.items() if _is_plain(v)}
        elif isinstance(value, list):
            valid[str(name)] = [item for item in value if _is_plain(item)]
        elif _is_plain(value):
            valid[str(name)] = value
    return valid


def clean_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a configuration."""
    return {str(name): dict(part) for name, part in config.items() if isinstance(part, Mapping)}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bool) or is_number(value)


def _is_size_name(name: str) -> bool:
    return name.endswith("_bytes") or name == "num_ranks"


QUIET_SECONDS = 120.0
"""Seconds without a new line after which a run without a summary has probably ended."""


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run folder. `lines` are those of `train/record.py`, oldest first."""

    folder: Path
    config: dict[str, Any]
    plan: dict[str, Any]
    machine: dict[str, Any]
    summary: dict[str, Any]
    """Summary of the newest training call; empty unless that call reached its end."""
    lines: tuple[dict[str, Any], ...]
    checkpoints: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.folder.resolve().name

    def lines_of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind, oldest first."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def status(self) -> str:
        """Status of the run: "finished", "stopped", "under way", "ended early" or "not begun"."""
        if self.summary:
            return "stopped" if self.summary.get("stopped") else "finished"
        if not self.lines:
            return "not begun"
        silence = time.time() - float(self.lines[-1].get("time") or 0)
        return "under way" if silence < QUIET_SECONDS else "ended early"

    @property
    def step(self) -> int:
        """Last recorded step."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last line, including evaluation and pauses between calls."""
        times = [line["time"] for line in self.lines if line.get("time")]
        return float(self.summary.get("seconds") or 0) or (times[-1] - times[0] if times else 0.0)


def read_run_folder(folder: Path) -> RunRecord:
    """Read a run folder. Raises CheckpointError if it is not a run folder, or if one of its files cannot be read."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder; give a run folder that `colonnade train` wrote"
        )
    if not (folder / "config.yaml").is_file() and not (folder / FILE_NAME).is_file():
        raise CheckpointError(
            f"{folder} is no run folder: it has neither config.yaml nor {FILE_NAME}. "
            "Give a folder that `colonnade train` wrote"
        )
    parsed_lines = [clean_metrics_line(line) for line in read_metrics_lines(folder / FILE_NAME)]
    lines = [line for line in parsed_lines if line is not None]
    if row_lines := read_metrics_lines(folder / ROWS_FILE_NAME):  # written by another rank
        lines += [line for line in map(clean_metrics_line, row_lines) if line is not None]
        lines.sort(key=lambda line: line.get("time") or 0.0)
    summary = clean_summary(_load_run_file(folder / "summary.json", "colonnade summary"))
    if summary and lines:
        written = (folder / "summary.json").stat().st_mtime
        if float(lines[-1].get("time") or 0) > written + 1:  # the summary is of an earlier call
            summary = {}
    return RunRecord(
        folder,
        clean_config(_load_run_file(folder / "config.yaml", "colonnade config")),
        clean_named_facts(_load_run_file(folder / "plan.json", "colonnade plan")),
        clean_named_facts(_load_run_file(folder / "machine.json", "colonnade machine")),
        summary,
        tuple(lines),
        tuple(list_checkpoints(folder)),
    )


def collect_metrics(run: RunRecord) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return {metric: {part: [(step, value)]}} of the run's evaluations; parts are validation, test, ..."""
    metrics: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in run.lines_of_kind("evaluate"):
        for name, value in line.items():
            part, _, metric = name.partition("_")
            if metric and is_number(value):
                metrics[metric][part].append((line["step"], value))
    return {metric: dict(parts) for metric, parts in metrics.items()}


def is_constant(metric: str) -> bool:
    """Return whether the metric describes the data, not the model."""
    return metric.startswith(("num_", "positive_rate"))


def find_direction(metric: str, runs: Sequence[RunRecord]) -> int:
    """Return which values of a metric are better, as `get_direction`: those that a run monitors it for, else the known
    ones; NEITHER for other metrics of the user."""
    settings = [run.config.get("train", {}) for run in runs]
    modes = {s.get("monitor_mode") for s in settings if s.get("monitor") == metric} - {None}
    if len(modes) == 1:
        return LOWER if "min" in modes else HIGHER
    return get_direction(metric, is_guessed=False)


@dataclass(frozen=True)
class SelectedEvaluation:
    """Evaluation whose metrics stand for a run. It is never selected by the test part."""

    step: int
    description: str
    monitor: str | None
    """Metric of the validation part that selected it; None: there is no validation part, so it is the last one."""


def select_evaluation(run: RunRecord) -> SelectedEvaluation | None:
    """Select the evaluation that stands for the run: the one that training chose. None without evaluations."""
    lines = run.lines_of_kind("evaluate")
    metrics = collect_metrics(run)
    judged = [m for m, parts in metrics.items() if "validation" in parts and is_judged(m)]
    train = run.config.get("train", {})
    monitor = train.get("monitor")
    if monitor not in judged:  # older runs did not record it
        monitor = judged[0] if judged else None
    if monitor is not None:
        points = metrics[monitor]["validation"]
        step = int(run.summary.get("best_step", -1))
        if step not in dict(points):  # training is not over
            min_delta = train.get("min_delta")
            delta = min_delta if is_number(min_delta) else 0.0
            best = Best(f"validation_{monitor}", delta, train.get("monitor_mode"))
            for evaluated_step, score in points:
                best.record_evaluation({best.monitor: score}, evaluated_step)
            step = best.step or step
        description = f"step {step:,}, best of validation {format_metric_name(monitor)}"
        return SelectedEvaluation(step, description, monitor)
    if not lines:
        return None
    step = lines[-1]["step"]
    return SelectedEvaluation(step, f"last step, {step:,}; no validation part", None)


def value_at_selection(
    selection: SelectedEvaluation, points: list[tuple[int, float]]
) -> tuple[int, float]:
    """Return the (step, value) of a metric at the selected step; else the last one before, else the first."""
    earlier = [point for point in points if point[0] <= selection.step]
    return earlier[-1] if earlier else points[0]


def find_block_values(
    run: RunRecord, part: str, metric: str, selection: SelectedEvaluation | None
) -> BlockValues | None:
    """Find a metric by block, at the selected step; None if the run did not record it, as of other parts than test."""
    lines = [
        line
        for line in run.lines_of_kind("test_blocks")
        if selection and line["step"] == selection.step
    ]
    if not lines or part != "test" or metric not in lines[-1]["metrics"]:
        return None
    return lines[-1]["digest"], lines[-1]["metrics"][metric]


def sum_metrics_lines(run: RunRecord, line_kind: str) -> dict[str, float]:
    """Return the sums of the values of one kind of line over the run, by name."""
    total: dict[str, float] = defaultdict(float)
    for line in run.lines_of_kind(line_kind):
        for name, value in line.items():
            if name not in ("step", "time") and is_number(value):
                total[name] += value
    return dict(total)


@dataclass(frozen=True)
class TableFigures:
    """Sizes and traffic of one table, on rank 0. None: unknown."""

    name: str
    rows_in_memory: int | None
    rows_in_files: int | None
    bytes_in_memory: int
    bytes_in_files: int
    lookups: float | None  # of the median batch
    unique: float | None  # distinct rows of the median batch

    @property
    def rows_known(self) -> int:
        """Number of the table's rows in memory or in files, whichever is larger."""
        return max(self.rows_in_memory or 0, self.rows_in_files or 0)


def collect_table_figures(run: RunRecord) -> list[TableFigures]:
    """Return the run's tables, most bytes first."""
    size_by_table: Mapping[str, Any] = run.summary.get("tables") or {}
    if not size_by_table:
        lines = run.lines_of_kind("tables")
        size_by_table = lines[-1].get("tables", {}) if lines else {}
    traffic = run.lines_of_kind("traffic")
    planned = [table.get("name") for table in run.plan.get("tables", [])]
    names = dict.fromkeys(
        [*planned, *size_by_table, *(n for line in traffic for n in line["lookups"])]
    )
    tables = []
    for name in names:
        size = size_by_table.get(name, {})
        tables.append(
            TableFigures(
                str(name),
                size.get("rows_in_memory"),
                size.get("rows_in_files"),
                size.get("bytes_in_memory", 0),
                size.get("bytes_in_files", 0),
                _median([line["lookups"].get(name) for line in traffic]),
                _median([line["unique"].get(name) for line in traffic]),
            )
        )
    return sorted(
        tables, key=lambda t: (-t.bytes_in_memory - t.bytes_in_files, -(t.unique or 0), t.name)
    )


def _median(values: list[Any]) -> float | None:
    """Return the median of the numbers; unlike a mean, it ignores the smaller last batch of an epoch."""
    numbers = [value for value in values if is_number(value)]
    return statistics.median(numbers) if numbers else None


def _load_run_file(path: Path, format_name: str) -> dict[str, Any]:
    """Read a JSON or YAML file of the folder, of format `format_name`; {} if it is absent. A killed run may have left
    a part of one."""
    try:
        text = read_text_file(path)
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
    check_format_version(path, loaded, format_name, is_needed=False)
    return {
        key: value for key, value in loaded.items() if key not in make_format_stamp(format_name)
    }
