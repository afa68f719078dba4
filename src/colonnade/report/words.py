"""Numbers as people read them: short, with units."""

from __future__ import annotations

import math
from typing import Any

SIZES = ("dram", "bytes")


def count_words(value: float | None) -> str:
    """1234567 -> "1.23 M"; up to 99,999 in full. "-" where it is not known."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.3g} {unit}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"


def bytes_words(value: float | None) -> str:
    """Binary units."""
    if value is None:
        return "-"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return (
                f"{value / 1024**power:.3g} {unit}"
                if value < 1000 * 1024**power
                else f"{value / 1024**power:,.0f} {unit}"
            )
    return f"{value:.0f} B"


def seconds_words(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def metric_words(name: str) -> str:
    """ "log_loss" -> "log loss", "auc" -> "AUC"."""
    short = {"auc": "AUC", "ndcg": "NDCG"}
    return " ".join(
        "@".join(short.get(part, part) for part in word.split("@")) for word in name.split("_")
    )


def metric_value(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if name.startswith("num") else f"{value:.4f}"


def setting_words(value: Any, name: str = "") -> str:
    """`name` of the setting: sizes have units."""
    if name.endswith(SIZES) and isinstance(value, int):
        return bytes_words(value)
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(setting_words, value)) or "none"
    if isinstance(value, int) and abs(value) >= 10000:
        return f"{value:,}"
    return str(value)
