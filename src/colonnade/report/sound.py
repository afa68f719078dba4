"""What of a run folder's files is fit to be drawn: values of another kind than training writes are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
    """Bytes and messages, by purpose and link. Older records have bytes by purpose alone."""
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
