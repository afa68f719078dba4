"""Metrics files of a run: read their lines, and truncate them to a checkpoint. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colonnade.formats import check_format_version, make_format_stamp, read_text_file

FILE_NAME = "metrics.jsonl"
FORMAT = "colonnade metrics"
FIRST_LINE = json.dumps(make_format_stamp(FORMAT)) + "\n"
ROWS_FILE_NAME = "metrics-rows.jsonl"
"""Written by the first server of a run that has servers, about its rows."""


def read_metrics_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, oldest first, without truncated lines; [] if there is no file.

    Raises CheckpointError where the first line states another version.
    """
    if not path.is_file():
        return []
    lines = []
    for text in read_text_file(path, "replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and "format" in line:
            check_format_version(path, line, FORMAT)
        elif isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line:
            lines.append(line)
    return lines


def drop_metrics_after_step(path: Path, step: int) -> None:
    """Drop the lines after a step: those steps were not saved, so the run repeats them."""
    if not path.exists():
        return
    lines = read_metrics_lines(path)
    saved = [line for line in lines if line["step"] <= step]
    text = read_text_file(path, "replace")
    is_complete = text.endswith("\n") or not text
    if len(saved) < len(lines) or not is_complete:
        text = "".join(json.dumps(line) + "\n" for line in saved)
        path.write_text(FIRST_LINE + text, encoding="utf-8")
