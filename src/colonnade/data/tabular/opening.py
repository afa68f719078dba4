"""Opening of tabular files of any format: infer or load the schema, check types, split samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from colonnade.data.contract import Splits
from colonnade.data.tabular.arrow_files import open_arrow_object
from colonnade.data.tabular.arrow_types import id_dtype_of, is_number_type, is_time
from colonnade.data.tabular.columns import (
    check_column_types,
    check_required_columns,
    check_unique_column_names,
    resolve_dtypes,
)
from colonnade.data.tabular.declaration import FileSchema, load_file_schema
from colonnade.data.tabular.encode import SplitField
from colonnade.data.tabular.fields import NEWEST, Dtype, Key, Number, Time, reads_times
from colonnade.data.tabular.files import (
    TableFile,
    TableFiles,
    combine_table_files,
    find_days,
)
from colonnade.data.tabular.formats import FORMATS, TableFormat
from colonnade.data.tabular.infer import (
    INFER_ROWS,
    InferredSchema,
    find_integer_time_unit,
    infer_fields,
)
from colonnade.data.tabular.join import (
    KeyedTable,
    describe_reading,
    join_tables,
    read_keyed_table,
)
from colonnade.data.tabular.narrow import narrow_column
from colonnade.data.tabular.source import ReaderOptions, Selection, TableSource
from colonnade.data.tabular.times import Unit, describe_parts, find_time_unit, format_time
from colonnade.errors import ConfigError, DataError

OLDER_SHARE = 0.1
"""Share of held-out samples older than half of the training samples from which on a file is not in order of time."""


def build_opener(
    name: str, open_file: Callable[..., TableFile], description: str
) -> Callable[..., Splits]:
    """Build the function `open_NAME`, which opens files of the format `name` as splits.

    Its arguments are a path, the fields of `ReaderOptions` and the further arguments of `open_file`. `description`: its
    docstring.
    """
    path, *syntax = signature(open_file).parameters.values()
    options = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(ReaderOptions)
    ]
    parameters = Signature([path, *options, *syntax])

    def open_tables(*args: Any, **options: Any) -> Splits:
        arguments = parameters.bind(*args, **options).arguments
        own = {p.name: arguments.pop(p.name) for p in syntax if p.name in arguments}
        return open_table_files(arguments.pop("path"), name, ReaderOptions(**arguments), **own)

    open_tables.__name__ = open_tables.__qualname__ = f"open_{name}"
    open_tables.__module__ = open_file.__module__
    open_tables.__doc__ = description
    open_tables.__signature__ = parameters  # type: ignore[attr-defined]
    return open_tables


def open_table_files(path: Any, name: str, options: ReaderOptions, **syntax: Any) -> Splits:
    """Open files of the format `name`, or Arrow tables, as splits. Raises ConfigError, DataError.

    syntax: further arguments of the format's `open_file`."""
    format = FORMATS[name]
    tables = [read_keyed_table(source, key) for key, source in (options.join or {}).items()]
    days = open_days(path, format, tables, syntax)
    files = [file for day in days for file in day]
    notes = list(describe_reading(next((file for file in files if len(file.lengths)), files[0])))
    if options.schema is None:
        inferred = infer_schema_from_files(files, options.label)
        file_schema = inferred.file_schema
        notes += [str(inferred), *inferred.notes]
    else:
        file_schema = load_file_schema(options.schema)
    bound, parts = resolve_schema(files, file_schema, options)
    if options.split_column is None:
        notes += _describe_unordered_times(bound, parts)

    def open_held_out_part(part: Any) -> TableFiles | None:
        if part is None:
            return None
        part_files = [file for day in open_days(part, format, tables, syntax) for file in day]
        return bind_files_to_schema(part_files, bound.file_schema)

    validation = open_held_out_part(options.validation)
    test = open_held_out_part(options.test)
    splits = options.split_files(bound, parts, [len(day) for day in days], validation, test)
    if options.order_by is not None:
        sources = (splits.train, splits.validation, splits.test)
        first_keys = [getattr(getattr(s, "key_range", None), "low", -math.inf) for s in sources[1:]]
        sizes = [0 if source is None else source.num_samples or 0 for source in sources]
        notes.append(
            describe_parts(
                f"by {options.order_by}",
                "samples",
                sizes,
                first_keys,
                has_times=isinstance(bound.split_field, Time),
            )
        )
    splits = replace(splits, notes=tuple(notes))
    if options.group_by is None:
        return splits
    from colonnade.data.ratings import group_ratings  # imports torch, which `inspect` does not need

    train = cast("TableSource", splits.train)
    read_user = partial(_read_value, train, options.group_by)
    return group_ratings(splits, options.group_by, options.seed, read_user)


def _read_value(source: TableSource, field_name: str, sample: int) -> Any:
    """Return the value in a field's first column of a sample, counted in the order of an unshuffled source."""
    column = next(f.columns[0] for f in source.file_schema.categorical if f.name == field_name)
    values = Selection(source.pieces, source.key_range).read_selected(
        source.files,
        lambda block: source.files.read_column(block, column, lambda a: np.array(a.to_pylist())),
    )
    return np.concatenate(list(values))[sample]


def open_days(
    source: Any, format: TableFormat, tables: Sequence[KeyedTable], syntax: Mapping[str, Any]
) -> list[list[TableFile]]:
    """Open the files of a data set, or an Arrow table or data set, by day, with the columns of `tables` joined.

    syntax: further arguments of the format's `open_file`. Raises DataError, ConfigError.
    """
    days: list[list[Any]]
    if isinstance(source, str | Path | Sequence):
        days = [
            [format.open_file(file, **syntax) for file in day]
            for day in find_days(source, format.endings)
        ]
    else:
        days = [[file] for file in open_arrow_object(source)]
    return [[join_tables(file, tables) for file in day] for day in days]


def infer_schema_from_files(files: Sequence[TableFile], label: str | None) -> InferredSchema:
    """Infer a schema from the first file with rows."""
    first = next((file for file in files if len(file.lengths)), None)
    if first is None:
        raise DataError(f"{files[0].path}: got no row, wanted at least one to infer a schema from")
    check_unique_column_names(first.path, first.names)
    return infer_fields(first.path, first.read_head(INFER_ROWS), label, first.header_types)


def resolve_schema(
    files: Sequence[TableFile], file_schema: FileSchema, options: ReaderOptions
) -> tuple[TableFiles, tuple[Selection, Selection, Selection]]:
    """Bind files to the schema with every dtype, unit and time set, so that it reads changed files the same, and select
    the samples for training, validation and testing."""
    bound = bind_files_to_schema(files, file_schema, options.split_column)
    bound = replace(bound, file_schema=_resolve_time_units(bound))
    if options.split_column is not None:
        bound = replace(bound, split_field=_resolve_split_field(bound, options))
    parts = options.select_parts(bound)
    bound = replace(bound, file_schema=_resolve_newest_times(bound, parts[0]))
    bound = replace(bound, file_schema=_resolve_scales(bound, parts[0]))
    return bound, parts


def bind_files_to_schema(
    files: Sequence[TableFile], file_schema: FileSchema, split_column: str | None = None
) -> TableFiles:
    """Bind files to a schema, with every dtype set. Raises DataError for the first file with unsuitable columns."""
    dtypes: dict[str, Dtype | None] = {}
    for file in files:
        for column in file_schema.columns:
            arrow_type = file.column_types.get(column, pa.null())
            dtypes[column] = dtypes.get(column) or id_dtype_of(arrow_type)
    file_schema = resolve_dtypes(file_schema, dtypes)
    bound = [file.bind_schema(file_schema) for file in files]
    for file in bound:
        check_required_columns(file.path, file.names, file_schema, split_column)
        check_column_types(file.path, file.column_types, file_schema)
    if not any(len(file.lengths) for file in files):
        raise DataError(f"{files[0].path}: got no row, wanted at least one. Was it fully written?")
    return combine_table_files(file_schema, bound)


def _resolve_time_units(files: TableFiles) -> FileSchema:
    """Set the unit of every column of times: what its fields declare, else what suits most of the first numbers."""
    units: dict[str, Unit] = {}
    times = [field for field in files.file_schema.fields if reads_times(field)]
    for field in sorted(times, key=lambda field: field.unit is None):
        if field.column not in units and field.unit is None:
            blocks = range(len(files.lengths))
            first = (files.read_column(block, field.column, find_time_unit) for block in blocks)
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


def _resolve_split_field(files: TableFiles, options: ReaderOptions) -> SplitField:
    """Return the field that reads the column of the split. Raises ConfigError for `split_by` with a column of times."""
    column = options.split_column
    assert column is not None
    blocks = range(len(files.lengths))
    arrays = (files.read_column(b, column, lambda a: narrow_column(a[:INFER_ROWS])) for b in blocks)
    first = next((a for a in arrays if not pa.types.is_null(a.type)), pa.nulls(0))
    time_field = next(
        (f for f in files.file_schema.fields if reads_times(f) and f.column == column), None
    )
    unit = find_integer_time_unit(column, first) if time_field is None else time_field.unit
    if options.split_by is not None:
        if unit or is_time(first.type):
            raise ConfigError(
                f"got split_by={column!r}, a column of times, wanted one whose equal values stay together, such as a "
                f"user. To hold out the newest samples use data.options.order_by={column} (in Python order_by=)"
            )
        return Key("part", column=column)
    cutoffs = (options.validation_after, options.test_after)
    mixed = [cutoff for cutoff in cutoffs if isinstance(cutoff, int | float)]
    is_number = is_number_type(first.type)
    if is_number and (mixed or unit is None) and not any(isinstance(c, str) for c in cutoffs):
        return Number("order", column=column)
    best, share = find_time_unit(first) or ("s", 0.0)
    unit = unit or (best if share > 0.5 else None)
    if mixed or (is_number and unit is None):
        raise ConfigError(
            f"got {mixed[0] if mixed else next(filter(None, cutoffs))!r} as a cutoff of order_by={column!r}, wanted "
            f"{'an ISO time, because it holds times' if mixed else 'a number, because it holds no times'}"
        )
    return Time("order", column=column, part="hour", unit=unit)


def _describe_unordered_times(files: TableFiles, parts: Sequence[Selection]) -> Iterator[str]:
    """Yield a warning if the samples held out at the end of the files are not the newest, by the first and last block
    with one."""
    train, *held_out = parts
    held_out = [part for part in held_out if len(part.pieces)]
    if not held_out or not len(train.pieces):
        return
    ends = Selection(train.pieces[:1]), Selection(held_out[-1].pieces[-1:])
    columns = {field.column: field for field in files.file_schema.fields if reads_times(field)}
    for column, field in columns.items():
        first, last = (
            np.concatenate(list(part.read_selected(files, partial(_read_times, files, field))))
            for part in ends
        )
        # Rows of a log may be a little out of order, so the middle of what trains is the measure.
        older = np.mean(last < np.nanmedian(first)) if np.isfinite(first).any() else 0.0
        if older > OLDER_SHARE:
            yield (
                f"warning: {files.files[0].path}: the last rows, which are held out, are not the newest by {column!r}; "
                f'to train on the past and test on what follows, add --set "data.options.order_by={column}" (in Python '
                "order_by=), or split_by to hold out whole users"
            )


def _read_times(files: TableFiles, field: Number | Time, block: int) -> NDArray[np.float64]:
    """Return the times of a block in microseconds since 1970 (S,), NaN where missing."""
    times, missing = files.read_time_column(block, field)
    return np.where(missing, np.nan, times)


def _resolve_newest_times(files: TableFiles, train: Selection) -> FileSchema:
    """Replace `newest` in the schema by the newest time of the training samples."""
    fields = list(files.file_schema.fields)
    for i, field in enumerate(fields):
        if isinstance(field, Number) and field.days_before == NEWEST:
            newest = _find_newest_time(files, field, train)
            fields[i] = replace(field, days_before=format_time(newest))
    return replace(files.file_schema, fields=tuple(fields))


def _resolve_scales(files: TableFiles, train: Selection) -> FileSchema:
    """Set mean and std of numbers that declare neither to those of the first training samples."""
    numbers = [field for field in files.file_schema.numbers if field.is_standardised]
    if not numbers:
        return files.file_schema
    blocks: list[NDArray[np.float64]] = []
    for block in train.read_selected(files, lambda b: files.read_numbers(b, numbers)):
        blocks.append(block[: INFER_ROWS - sum(map(len, blocks))])
        if sum(map(len, blocks)) == INFER_ROWS:
            break
    scaled = {}
    columns = np.concatenate(blocks).T if blocks else np.empty((len(numbers), 0))
    for field, column in zip(numbers, columns, strict=True):
        mean, std = _round_scale(column[np.isfinite(column)])
        scaled[field.name] = replace(field, mean=mean, std=std)
    fields = (scaled.get(field.name, field) for field in files.file_schema.fields)
    return replace(files.file_schema, fields=tuple(fields))


def _round_scale(x: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and standard deviation of numbers, short to read: precise to a thousandth of the deviation."""
    if not len(x):
        return 0.0, 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = float(x.mean()), float(x.std())
    if not (math.isfinite(mean) and math.isfinite(std)):
        return 0.0, 1.0
    std = float(f"{std:.4g}")
    return (round(mean, 3 - math.floor(math.log10(std))), std) if std > 0 else (mean, 1.0)


def _find_newest_time(files: TableFiles, time_field: Number, train: Selection) -> int:
    """Return the newest time among the training samples, in microseconds since 1970."""
    times = train.read_selected(files, partial(_read_times, files, time_field))
    newest = max((float(np.nanmax(x)) for x in times if np.isfinite(x).any()), default=None)
    if newest is None:
        raise ConfigError(
            f"{files.files[0].path}, column {time_field.column}: got no time in any training sample, wanted "
            "one to count "
            f"the days of {time_field.name!r} from. Give days_before a time, or leave the field out"
        )
    return int(newest)
