"""Logs of rows opened by flat arguments, of which a test names the few it is about."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from colonnade.store.contract import Resident
from colonnade.store.log.backing import LogBacking, LogLayout, open_log
from colonnade.store.log.manifest import LogTable
from colonnade.store.log.writer import LogWorkers

T = TypeVar("T")


def commit_rows(store: Resident, step: int) -> None:
    """Begin and finish a commit; give it up if it fails."""
    store.begin_commit()
    try:
        store.finish_commit(step)
    except BaseException:
        store.abandon_commit()
        raise


def open_test_log(
    directory: Path | str, *, step: int | None, read_only: bool = False, **settings: Any
) -> LogBacking:
    """`open_log` with the fields of its values as arguments; those that are None have their defaults."""
    settings["name"] = settings.pop("table_name")
    values = [_build(kind, settings) for kind in (LogTable, LogWorkers, LogLayout)]
    known: Collection[str] = {f.name for value in values for f in fields(value)}
    assert settings.keys() <= known, settings.keys() - known
    table, workers, layout = values
    return open_log(
        directory, table, step=step, read_only=read_only, workers=workers, layout=layout
    )


def _build(kind: type[T], settings: dict[str, Any]) -> T:
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{k: v for k, v in settings.items() if k in names and v is not None})
