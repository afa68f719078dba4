"""Opening of tabular files of any format: infer or load the schema, check types, split samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from colonnade.data.contract import Splits
from colonnade.data.tabular.columns import check_unique_column_names, resolve_dtypes
from colonnade.data.tabular.declaration import FileSchema, load_file_schema
from colonnade.data.tabular.fields import NEWEST, Dtype, Number, reads_times
from colonnade.data.tabular.files import (
    TableFile,
    TableFiles,
    combine_table_files,
    find_days,
    find_files,
)
from colonnade.data.tabular.formats import FORMATS
from colonnade.data.tabular.infer import INFER_ROWS, InferredSchema, infer_fields
from colonnade.data.tabular.source import ReaderOptions
from colonnade.data.tabular.times import Unit, format_time
from colonnade.errors import ConfigError, DataError


def open_table_files(
    path: str | Path | Sequence[str | Path], name: str, options: ReaderOptions, **syntax: Any
) -> Splits:
    """Open files of the format `name` as splits. Raises ConfigError, DataError.

    syntax: further arguments of the format's `open_file`."""
    format = FORMATS[name]
    days = find_days(path, format.endings)
    files = [format.open_file(file, **syntax) for day in days for file in day]
    if options.schema is None:
        file_schema = infer_schema_from_files(files, options.label).file_schema
    else:
        file_schema = load_file_schema(options.schema)
    bound = resolve_schema(files, file_schema, options)

    def open_held_out_part(part: str | Path | None) -> TableFiles | None:
        if part is None:
            return None
        part_files = [format.open_file(file, **syntax) for file in find_files(part, format.endings)]
        return bind_files_to_schema(part_files, bound.file_schema)

    validation = open_held_out_part(options.validation)
    return options.split_files(bound, days, validation, open_held_out_part(options.test))


def infer_schema_from_files(files: Sequence[TableFile], label: str | None) -> InferredSchema:
    """Return the schema embedded in the first file with rows (Parquet's footer may have one), else infer one."""
    first = next((file for file in files if len(file.lengths)), None)
    if first is None:
        raise DataError(f"{files[0].path}: got no row, wanted at least one to infer a schema from")
    check_unique_column_names(first.path, first.names)
    embedded = first.embedded_schema() if label is None else None
    if embedded is not None:
        return InferredSchema(embedded, {})
    return infer_fields(first.path, first.read_head(INFER_ROWS), label, first.header_types)


def resolve_schema(
    files: Sequence[TableFile], file_schema: FileSchema, options: ReaderOptions
) -> TableFiles:
    """Bind files to the schema with every dtype, unit and time set, so that it reads changed files the same."""
    bound = bind_files_to_schema(files, file_schema, options.split_by)
    if file_schema.encoding_version > 1:
        bound = replace(bound, file_schema=_resolve_time_units(bound))
    return replace(bound, file_schema=_resolve_newest_times(bound, options))


def bind_files_to_schema(
    files: Sequence[TableFile], file_schema: FileSchema, split_column: str | None = None
) -> TableFiles:
    """Bind files to a schema, with every dtype set. Raises DataError for the first file with unsuitable columns."""
    dtypes: dict[str, Dtype | None] = {}
    for file in files:
        for column in file_schema.columns:
            dtypes[column] = dtypes.get(column) or file.dtype_of(column)
    file_schema = resolve_dtypes(file_schema, dtypes)
    bound = [file.bind_schema(file_schema, split_column) for file in files]
    if not any(len(file.lengths) for file in files):
        raise DataError(f"{files[0].path}: got no row, wanted at least one. Was it fully written?")
    return combine_table_files(file_schema, bound, split_column)


def _resolve_time_units(files: TableFiles) -> FileSchema:
    """Set the unit of every column of times: what its fields declare, else what suits most of the first numbers."""
    units: dict[str, Unit] = {}
    times = [field for field in files.file_schema.fields if reads_times(field)]
    for field in sorted(times, key=lambda field: field.unit is None):
        if field.column not in units and field.unit is None:
            blocks = range(len(files.lengths))
            first = (files.find_time_unit(block, field.column) for block in blocks)
            unit, share = next(filter(None, first), None) or ("s", 0.0)
            units[field.column] = unit if share > 0.5 else "s"
        if units.setdefault(field.column, field.unit or "s") != (field.unit or units[field.column]):
            raise ConfigError(
                f"field {field.name!r}: got unit={field.unit}, wanted {units[field.column]} as another field of the "
                f"column {field.column!r} declares it"
            )
    fields = (
        replace(f, unit=units[f.column]) if reads_times(f) else f for f in files.file_schema.fields
    )
    return replace(files.file_schema, fields=tuple(fields))


def _resolve_newest_times(files: TableFiles, options: ReaderOptions) -> FileSchema:
    """Replace `newest` in the schema by the newest time of the training samples."""
    fields = list(files.file_schema.fields)
    for i, field in enumerate(fields):
        if isinstance(field, Number) and field.days_before == NEWEST:
            num_train = options.count_train_samples(int(files.lengths.sum()))
            newest = _find_newest_time(files, field, num_train)
            fields[i] = replace(field, days_before=format_time(newest))
    return replace(files.file_schema, fields=tuple(fields))


def _find_newest_time(files: TableFiles, time_field: Number, num_samples: int) -> int:
    """Return the newest time among the first samples, in microseconds since 1970."""
    newest: list[int] = []
    for block, length in enumerate(files.lengths.tolist()):
        if num_samples <= 0:
            break
        times, missing = files.read_time_column(block, time_field)
        present_times = times[:num_samples][~missing[:num_samples]]
        newest += [int(present_times.max())] if len(present_times) else []
        num_samples -= length
    if not newest:
        raise ConfigError(
            f"{files.files[0].path}, column {time_field.column}: got no time in any training sample, wanted "
            "one to count "
            f"the days of {time_field.name!r} from. Give days_before a time, or leave the field out"
        )
    return max(newest)
