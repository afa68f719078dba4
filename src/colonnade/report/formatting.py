"""Formatting of numbers and settings for people: short, with units."""

from __future__ import annotations

import math
from typing import Any

from colonnade.sizes import format_bytes, format_digits

SIZE_SUFFIXES = ("dram", "bytes")


def format_count(value: float | None) -> str:
    """Format a count: 1234567 -> "1.23 M"; up to 99,999 in full; "-" if unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{format_digits(value / scale)} {unit}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"


def format_seconds(value: float | None) -> str:
    """Format a duration; "-" if unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 1e-3:
        return f"{format_digits(value * 1e6)} µs"
    if value < 1:
        return f"{format_digits(value * 1e3)} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def format_metric_name(name: str) -> str:
    """Format a metric's name: "log_loss" -> "log loss", "auc" -> "AUC"."""
    abbreviations = {"auc": "AUC", "ndcg": "NDCG"}
    return " ".join(
        "@".join(abbreviations.get(part, part) for part in word.split("@"))
        for word in name.split("_")
    )


def format_metric(name: str, value: float | None) -> str:
    """Format a metric's value; "-" if unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if name.startswith("num") else f"{value:.4f}"


def format_setting(value: Any, name: str = "") -> str:
    """Format a setting's value. name: of the setting; sizes get units."""
    if name.endswith(SIZE_SUFFIXES) and isinstance(value, int):
        return format_bytes(value)
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(format_setting, value)) or "none"
    if isinstance(value, int) and abs(value) >= 10000:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.12g}"  # 0.1 + 0.2 is 0.3
    return str(value)
