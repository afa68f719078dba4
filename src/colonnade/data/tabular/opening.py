"""From the files of any tabular kind to their parts: schema inferred or declared, types checked, samples split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colonnade.data.contract import Splits
from colonnade.data.tabular.columns import refuse_repeated, settle
from colonnade.data.tabular.declaration import Declaration, load_declaration
from colonnade.data.tabular.fields import NEWEST, Dtype, Number
from colonnade.data.tabular.files import (
    Files,
    TableFile,
    bind_files,
    find_days,
    find_files,
)
from colonnade.data.tabular.infer import INFER_ROWS, Inferred, infer
from colonnade.data.tabular.source import Splitting
from colonnade.data.tabular.times import format_time
from colonnade.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of file. `open_file` indexes a file; raises DataError."""

    endings: tuple[str, ...]  # of the files that are read of a folder
    open_file: Callable[[Path], TableFile]


def open_tables(
    path: str | Path | Sequence[str | Path],
    format: Format,
    *,
    schema: Any,
    label: str | None,
    validation: str | Path | None,
    test: str | Path | None,
    splitting: Splitting,
) -> Splits:
    """Open the files at `path`, which `open_parquet` describes. Raises ConfigError, DataError."""
    days = find_days(path, format.endings)
    files = [format.open_file(file) for day in days for file in day]
    if schema is None:
        declaration = infer_tables(files, label).declaration
    elif label is not None:
        raise ConfigError(
            f"got both schema and label={label!r}; the schema says which field is the label"
        )
    else:
        declaration = load_declaration(schema)
    bound = settle_files(files, declaration, splitting)
    held_out = [
        None
        if each is None
        else bind_tables(
            [format.open_file(file) for file in find_files(each, format.endings)], bound.declaration
        )
        for each in (validation, test)
    ]
    return splitting.split(bound, days, *held_out)


def infer_tables(files: Sequence[TableFile], label: str | None) -> Inferred:
    """Return the schema that the first file with rows declares (Parquet's footer may), else infer one."""
    first = next((file for file in files if len(file.lengths)), None)
    if first is None:
        raise DataError(f"{files[0].path}: got no row, wanted at least one to infer a schema from")
    refuse_repeated(first.path, first.names)
    declared = first.declared() if label is None else None
    if declared is not None:
        return Inferred(declared, {})
    return infer(first.path, first.head(INFER_ROWS), label, first.header_types)


def settle_files(
    files: Sequence[TableFile], declaration: Declaration, splitting: Splitting
) -> Files:
    """Return the files under `declaration` with every dtype and time recorded, so that it reads the same tomorrow."""
    bound = bind_tables(files, declaration, splitting.split_by)
    return replace(bound, declaration=_settle_newest(bound, splitting))


def bind_tables(
    files: Sequence[TableFile], declaration: Declaration, split_by: str | None = None
) -> Files:
    """Raise DataError for the first file whose columns are not what the declaration reads."""
    dtypes: dict[str, Dtype | None] = {}
    for file in files:
        for column in declaration.columns:
            dtypes[column] = dtypes.get(column) or file.dtype_of(column)
    declaration = settle(declaration, dtypes)
    bound = [file.bind(declaration, split_by) for file in files]
    if not any(len(file.lengths) for file in files):
        raise DataError(f"{files[0].path}: got no row, wanted at least one. Was it fully written?")
    return bind_files(declaration, bound, split_by)


def _settle_newest(files: Files, splitting: Splitting) -> Declaration:
    """Put the newest time of the training samples wherever the declaration says `newest`."""
    fields = list(files.declaration.fields)
    for i, field in enumerate(fields):
        if isinstance(field, Number) and field.days_before == NEWEST:
            newest = _newest(files, field, splitting.num_train(int(files.lengths.sum())))
            fields[i] = replace(field, days_before=format_time(newest))
    return replace(files.declaration, fields=tuple(fields))


def _newest(files: Files, field: Number, num_samples: int) -> int:
    """Return the newest time among the first samples, in microseconds since 1970."""
    newest: list[int] = []
    for block, length in enumerate(files.lengths.tolist()):
        if num_samples <= 0:
            break
        times, missing = files.read_times(block, field)
        known = times[:num_samples][~missing[:num_samples]]
        newest += [int(known.max())] if len(known) else []
        num_samples -= length
    if not newest:
        raise ConfigError(
            f"{files.files[0].path}, column {field.column}: got no time in any training sample, wanted one to count "
            f"the days of {field.name!r} from. Give days_before a time, or leave the field out"
        )
    return max(newest)
