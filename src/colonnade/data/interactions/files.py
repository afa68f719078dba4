"""Files of interactions, and of the users and items in them: columns by header types and usual names.

source                                    columns
CSV, TSV, RecBole's .inter, Parquet       by name
Arrow: .arrow, .feather, or an object     by name
with `__arrow_c_stream__`
text without a header                     user, item; user, item, time or rating; user, item, rating, time
lines of a user and its items (LightGCN)  user, item
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.interactions.columns import (
    HISTORY,
    ITEM,
    USER,
    Entities,
    Interactions,
    add_features,
    build_record_schema,
    index_keys,
)
from colonnade.data.interactions.splits import TEST, TRAIN, VALIDATION
from colonnade.data.lines import build_field_error, format_excerpt, read_all_lines
from colonnade.data.tabular.arrow_files import open_arrow_object
from colonnade.data.tabular.arrow_types import combine_chunks, is_number_type
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.encode import convert_to_numbers
from colonnade.data.tabular.fields import Bucket, Categorical, DeclaredField, Number
from colonnade.data.tabular.files import TableFile, find_files, read_tables
from colonnade.data.tabular.formats import FORMATS, NUMBER, find_format, list_endings
from colonnade.data.tabular.infer import TIME_WORDS, infer_column_fields
from colonnade.data.tabular.join import KeyedTable, index_table
from colonnade.data.tabular.narrow import narrow_column
from colonnade.data.tabular.times import convert_to_microseconds, find_time_unit, format_time
from colonnade.errors import ConfigError, DataError

NAMES: dict[str, tuple[str, ...]] = {
    USER: ("user", "users", "uid", "member", "customer", "visitor", "reviewer", "person", "session", "query"),
    ITEM: ("item", "items", "iid", "movie", "product", "asin", "track", "song", "artist", "book", "isbn", "business",
           "article", "news", "location", "place", "venue", "poi", "recipe", "target"),
    "time": (*TIME_WORDS, "unixreviewtime"),
    "rating": ("rating", "ratings", "score", "stars", "overall"),
    "event": ("event", "eventtype", "type", "action", "behavior", "behaviour", "interaction"),
}  # fmt: skip
"""Usual names of columns, in lower case, without an ending `id` and without `_`."""
DELIMITERS = "\t,;|"
PART_NAMES = {TRAIN: ("train",), VALIDATION: ("valid", "validation", "val", "dev"), TEST: ("test",)}
"""Names of the files of parts in a folder, before their endings."""
NUM_BUCKETS = 16
"""Maximal number of buckets of a number that describes users or items, between its quantiles."""
LINES_SEEN = 1000
"""Number of first lines that decide whether a text file has lists of items."""
PLAIN = (".txt", ".dat", ".data", "")
"""Endings of text files that may have no header, or lists of items."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Names of the columns, and how text is read. None: recognised."""

    user: str | None = None
    item: str | None = None
    time: str | None = None
    rating: str | None = None
    event: str | None = None
    delimiter: str | None = None
    names: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class _Table:
    """Open table: columns are read when they are needed."""

    source: str
    names: Sequence[str]
    header_types: Mapping[str, str]
    read: Any  # names -> pa.Table


def find_parts(path: Any, validation: Any = None, test: Any = None) -> dict[int, Any]:
    """Return the source of each part: `validation` and `test` if they are given; else the files train, valid and test
    of a folder that has them."""
    parts = {TRAIN: path}
    if isinstance(path, str | Path) and (folder := Path(path).expanduser()).is_dir():
        stems = {f.name.split(".")[0].lower(): f for f in sorted(folder.iterdir()) if f.is_file()}
        in_folder = {
            part: stems[name]
            for part, names in PART_NAMES.items()
            for name in names
            if name in stems
        }
        parts = in_folder if TRAIN in in_folder else parts
    separate = {VALIDATION: validation, TEST: test}
    return parts | {part: file for part, file in separate.items() if file is not None}


def open_table(source: Any, options: FileOptions) -> _Table:
    """Open files or an Arrow object. Raises DataError, ConfigError."""
    if isinstance(source, str | Path):
        files = find_files(source, (*list_endings(), ".txt", ".dat"))
        tables = [_open_file(file, options) for file in files]
    else:
        tables = [_open_table_file(file) for file in open_arrow_object(source)]
    first = tables[0]
    if len(tables) == 1:
        return first

    def read(names: Sequence[str]) -> pa.Table:
        parts = [table.read(names) for table in tables]
        try:
            return pa.concat_tables(parts, promote_options="permissive")
        except pa.ArrowException:  # integers in one file, texts in another
            texts = pa.schema([(name, pa.string()) for name in names])
            return pa.concat_tables([part.cast(texts) for part in parts])

    return _Table(str(source), first.names, first.header_types, read)


def _open_file(path: Path, options: FileOptions) -> _Table:
    ending = path.suffix.lower()
    if ending in PLAIN and options.names is None and _has_item_lists(path):
        table = read_item_lists(path)
        return _Table(str(path), table.column_names, {}, table.select)
    format = find_format(ending) or FORMATS["csv"]
    syntax: dict[str, Any] = {}
    if format.name == "csv":
        syntax = {"delimiter": options.delimiter, "names": options.names}
        if options.delimiter is None and ending in PLAIN:
            syntax["delimiter"] = _guess_delimiter(path)
    file = format.open_file(path, **syntax)
    if format.name == "csv" and options.names is None and not _has_header(file.names, options):
        head = [narrow_column(pa.array([name])) for name in file.names]
        file = format.open_file(path, **{**syntax, "names": _name_columns(head, path)})
    return _open_table_file(file)


def _open_table_file(file: TableFile) -> _Table:
    def read(names: Sequence[str]) -> pa.Table:
        blocks = list(read_tables(file, names))
        if not blocks:
            raise DataError(f"{file.path}: got no row, wanted at least one. Was it fully written?")
        return pa.concat_tables(blocks, promote_options="permissive")

    return _Table(str(file.path), file.names, file.header_types, read)


def _has_header(names: Sequence[str], options: FileOptions) -> bool:
    """Return whether the first line names columns: a known one, or none that is a number."""
    usual = {name for group in NAMES.values() for name in group}
    is_known = any(_plain_name(name) in usual for name in names)
    is_given = any(getattr(options, role) in names for role in NAMES)
    return is_known or is_given or not any(map(NUMBER.fullmatch, names))


def _name_columns(values: Sequence[pa.Array], path: Path) -> list[str]:
    """Name the columns of a file without a header, from the values of its first line."""
    if len(values) == 3:
        third = "time" if (find_time_unit(values[2]) or ("", 0))[1] else "rating"
        return [USER, ITEM, third]
    if len(values) not in (2, 4):
        raise ConfigError(
            f"{path}: got {len(values)} columns without a header, wanted 2 to 4 (user, item, rating, time); name them "
            "with data.options.names"
        )
    return [USER, ITEM, "rating", "time"][: len(values)]


def _guess_delimiter(path: Path) -> str:
    first = next(iter(read_all_lines(path)[:1])).decode("utf-8", "replace")
    return max(DELIMITERS, key=first.count) if any(d in first for d in DELIMITERS) else " "


def _has_item_lists(path: Path) -> bool:
    """Return whether the lines of a text file are a user and any number of items, with blanks between them."""
    lengths = set()
    with path.open("rb") as file:
        for line in islice(file, LINES_SEEN):
            fields = line.split()
            if not all(field.isdigit() for field in fields):
                return False
            lengths.add(len(fields))
    return len(lengths - {0}) > 1 or lengths <= {1, 2}


def read_item_lists(path: Path) -> pa.Table:
    """Read lines of a user, then its items, with blanks between them; empty lines are skipped. Raises DataError."""
    users: list[int] = []
    items: list[bytes] = []
    counts: list[int] = []
    for number, line in enumerate(read_all_lines(path), 1):
        fields = line.split()
        if not all(field.isdigit() and len(field) < 19 for field in fields):
            wrong = next(field for field in fields if not field.isdigit() or len(field) > 18)
            raise build_field_error(
                path,
                number,
                None,
                got=format_excerpt(wrong),
                wanted="whole numbers with blanks between them: a user, then its items",
                fix="Repair the line",
            )
        if fields:
            users.append(int(fields[0]))
            counts.append(len(fields) - 1)
            items += fields[1:]
    if not items:
        raise DataError(f"{path}: got no item on any line, wanted a user and its items on each")
    return pa.table({USER: np.repeat(users, counts), ITEM: np.array(items).astype(np.int64)})


def find_roles(table: _Table, options: FileOptions, wanted: Sequence[str]) -> dict[str, str]:
    """Return the column of each role that the table has: the one of the options, else the first with a usual name."""
    roles = {}
    for role in wanted:
        requested = getattr(options, role)
        if requested is not None:
            if requested not in table.names:
                raise ConfigError(
                    f"{table.source}: got no column {requested!r}, which data.options.{role} names; the columns are "
                    f"{', '.join(list(table.names)[:20])}"
                )
            roles[role] = requested
            continue
        for name in table.names:
            if _plain_name(name) in NAMES[role] and name not in roles.values():
                roles[role] = name
                break
    for role in (USER, ITEM):
        if role in wanted and role not in roles:
            raise ConfigError(
                f"{table.source}: got no column named like a {role}, wanted to know which one it is. Say so with "
                f"data.options.{role}; the columns are {', '.join(list(table.names)[:20])}"
            )
    return roles


def _plain_name(name: str) -> str:
    """Return a name in lower case without blanks, and without an ending `id`: userId, user_id and User are alike."""
    plain = name.lower().replace("_", "").replace(" ", "").replace("-", "")
    return plain if plain in ("uid", "iid") else plain.removesuffix("id").removesuffix("idx")


def read_times(array: pa.Array, source: str) -> NDArray[np.int64] | NDArray[np.float64]:
    """Return times (n,) in microseconds since 1970, or the numbers themselves if they are none. Raises DataError."""
    array = narrow_column(array)
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(
            f"{source}, row {row + 1}: got no time, wanted one. Leave out the row, or name another column "
            "(data.options.time)"
        )
    unit, share = find_time_unit(array) or ("s", 0.0)
    if pa.types.is_timestamp(array.type) or share > 0.5:
        try:
            return convert_to_microseconds(array, unit)[0]
        except pa.ArrowException:
            pass
    if not is_number_type(array.type):
        raise DataError(
            f"{source}: got {str(array[0])[:40]!r} as a time, wanted timestamps, ISO texts or numbers; name another "
            "column (data.options.time)"
        )
    return array.cast(pa.float64()).to_numpy(zero_copy_only=False)


def select_rows(
    table: pa.Table, roles: Mapping[str, str], at_least: float | None, events: Sequence[str] | None
) -> pa.Table:
    """Return the rows with a rating of at least `at_least` and an event of `events`. Raises ConfigError."""
    if at_least is not None:
        numbers = convert_to_numbers(
            Number("rating"), combine_chunks(table.column(roles["rating"]))
        )
        table = table.filter(pa.array(numbers >= at_least))
    if events is not None:
        texts = table.column(roles["event"]).cast(pa.string())
        if unknown := set(events) - set(pc.unique(texts).to_pylist()):
            raise ConfigError(
                f"events: got {sorted(unknown)[0]!r}, wanted values of the column {roles['event']!r}: "
                + ", ".join(sorted(map(str, pc.unique(texts).to_pylist()))[:20])
            )
        table = table.filter(pc.is_in(texts, pa.array(list(events))))
    return table


def infer_features(
    source: str,
    columns: Mapping[str, pa.Array],
    header_types: Mapping[str, str],
    role: str,
    taken: Sequence[str],
) -> tuple[DeclaredField, ...]:
    """Infer the fields of users or items. A number becomes buckets between its quantiles; a field with a name in
    `taken` gets `role` before it."""
    fields: list[DeclaredField] = []
    for name, array in columns.items():
        array = narrow_column(array)
        inferred = infer_column_fields(Path(source), name, array, header_types.get(name))
        for field in [] if isinstance(inferred, str) else inferred:
            if isinstance(field, Number):
                bounds = _find_bucket_bounds(field, array)
                if not bounds:
                    continue
                field = Bucket(field.name, column=name, boundaries=bounds)
            if field.name in taken:
                own = {"table": f"{role}_{field.name}"} if hasattr(field, "table") else {}
                field = replace(field, name=f"{role}_{field.name}", **own)
            if isinstance(field, Categorical):
                fields.append(field)
    return tuple(fields)


def _find_bucket_bounds(field: Number, array: pa.Array) -> tuple[float, ...]:
    """Return the distinct quantiles of a number; none of a time's age, and none if all values are equal."""
    if field.days_before is not None:
        return ()
    numbers = convert_to_numbers(field, array)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return ()
    shares = np.linspace(0, 1, NUM_BUCKETS + 1)[1:-1]
    bounds = np.unique(np.quantile(numbers, shares))
    return tuple(float(bound) for bound in bounds if bound > numbers.min())


def read_interactions(
    parts: Mapping[int, Any],
    options: FileOptions = FileOptions(),
    *,
    users: Any = None,
    items: Any = None,
    at_least: float | None = None,
    events: Sequence[str] | None = None,
    core: int = 0,
    has_times: bool = True,
    schema: FileSchema | None = None,
) -> tuple[Interactions, FileSchema, str]:
    """Read interactions from the source of each part.

    users, items   files of users and of items, with one row for each
    at_least       lowest rating that counts; None: any
    events         values of the event column that count; None: any
    core           users and items with fewer interactions are left out, again until none is left
    has_times      False: a column of times is not read, and the order is that of the files
    schema         what models read of users and items; None: inferred from `users` and `items`

    Returns the interactions, the schema, and a line that says what was recognised and left out. Raises DataError,
    ConfigError.
    """
    tables, roles = [], {}
    for source in parts.values():
        table = open_table(source, options)
        wanted = [USER, ITEM, *(["time"] if has_times else [])]
        wanted += ["rating"] if at_least is not None or options.rating else []
        wanted += ["event"] if events is not None or options.event else []
        roles = find_roles(table, options, wanted)
        for role, setting in (("rating", at_least), ("event", events)):
            if setting is not None and role not in roles:
                raise ConfigError(
                    f"{table.source}: got no column named like {role}s, which data.options."
                    f"{'at_least' if role == 'rating' else 'events'} needs; say which it is with data.options.{role}"
                )
        tables.append(
            (
                table.source,
                select_rows(table.read(list(roles.values())), roles, at_least, events),
                roles,
            )
        )
    part_n = np.repeat(np.array(list(parts), np.int8), [len(table) for _, table, _ in tables])
    if not len(part_n):
        raise DataError(f"{tables[0][0]}: got no interaction, wanted one at least")
    times = None
    if all("time" in columns for _, _, columns in tables):
        times = np.concatenate(
            [
                read_times(combine_chunks(table.column(columns["time"])), source)
                for source, table, columns in tables
            ]
        )
    files = {
        role: _read_entity_file(source, role, options)
        for role, source in ((USER, users), (ITEM, items))
    }
    keys, positions = {}, {}
    for role, file in files.items():
        columns_of_role = [table.column(columns[role]) for _, table, columns in tables]
        others = [] if file is None else [pa.chunked_array([file.keys])]
        keys[role], by_table = index_keys([*columns_of_role, *others], role)
        positions[role] = np.concatenate(by_table[: len(tables)])
    data = Interactions(
        Entities(keys[USER]), Entities(keys[ITEM]), positions[USER], positions[ITEM], times,
        part_n if len(parts) > 1 else None,
    )  # fmt: skip
    size = data.size
    data = keep_core(drop_repeats(data), core)
    return *_add_entities(data, files, schema), _describe(size, data, roles)


def drop_repeats(interactions: Interactions) -> Interactions:
    """Order interactions by time, and keep the first of each pair of user and item, that of the training part if there
    is one."""
    times = interactions.time_n
    if times is not None:
        interactions = interactions.take(np.argsort(times, kind="stable"))
    pairs = interactions.user_n * len(interactions.items.keys) + interactions.item_n
    order = np.arange(len(pairs))
    if interactions.part_n is not None:
        order = np.argsort(interactions.part_n, kind="stable")
    first = np.unique(pairs[order], return_index=True)[1]
    return interactions.take(np.sort(order[first]))


def keep_core(interactions: Interactions, core: int) -> Interactions:
    """Leave out users and items with fewer than `core` interactions until none is left. Raises ConfigError if no
    interaction is left."""
    while True:
        counts = [
            np.bincount(positions)[positions]
            for positions in (interactions.user_n, interactions.item_n)
        ]
        is_kept = (counts[0] >= core) & (counts[1] >= core)
        if is_kept.all():
            return interactions
        interactions = interactions.take(is_kept)
        if not interactions.size:
            raise ConfigError(
                f"core={core}: no user and item have that many interactions; give a smaller one"
            )


def _read_entity_file(source: Any, role: str, options: FileOptions) -> KeyedTable | None:
    """Read a file of users or of items. Its key has the name of the role's column; else it is a first column `id`."""
    if source is None:
        return None
    options = FileOptions(**{"delimiter": options.delimiter, role: getattr(options, role)})
    table = open_table(source, options)
    if getattr(options, role) not in table.names:
        options = replace(options, **{role: None})
    if _plain_name(table.names[0]) == "":
        options = replace(options, **{role: table.names[0]})
    key = find_roles(table, options, [role])[role]
    return index_table(table.source, key, table.read(table.names), table.header_types, {})


def _add_entities(
    interactions: Interactions,
    files: Mapping[str, KeyedTable | None],
    schema: FileSchema | None,
) -> tuple[Interactions, FileSchema]:
    """Leave out users and items that neither interact nor have a row, and add what models read of the others."""
    entities, fields, numbers = {}, {}, {}
    taken = [USER, ITEM, HISTORY]
    for role, used in ((USER, interactions.user_n), (ITEM, interactions.item_n)):
        file = files[role]
        whole = interactions.users if role == USER else interactions.items
        is_kept = np.zeros(len(whole.keys), np.bool_)
        is_kept[used] = True
        keys = pa.array(whole.keys)
        own: tuple[DeclaredField, ...] = ()
        if file is not None:
            is_kept |= file.find_rows(keys) >= 0
            own = infer_features(file.source, file.columns, file.header_types, role, taken)
            if schema is not None:
                own = tuple(
                    f for f in _split_fields(schema.fields)[role] if isinstance(f, Categorical)
                )
        taken += [field.name for field in own]
        entities[role], fields[role] = add_features(whole.select(is_kept), role, own, file)
        numbers[role] = (np.cumsum(is_kept) - 1)[used]
    result = replace(
        interactions,
        users=entities[USER],
        items=entities[ITEM],
        user_n=numbers[USER],
        item_n=numbers[ITEM],
    )
    return result, build_record_schema(fields[USER], fields[ITEM])


def _split_fields(fields: Sequence[DeclaredField]) -> dict[str, Sequence[DeclaredField]]:
    """Return the features of users and of items in a recorded schema: user, features, item, features, history."""
    names = [field.name for field in fields]
    middle = names.index(ITEM)
    return {USER: fields[1:middle], ITEM: fields[middle + 1 : names.index(HISTORY)]}


def _describe(size: int, data: Interactions, roles: Mapping[str, str]) -> str:
    """Describe what was recognised in files and left out, in one line."""
    columns = ", ".join(f"{role}={name}" for role, name in roles.items())
    cells = max(len(data.users.keys) * len(data.items.keys), 1)
    times = ""
    if data.time_n is not None and data.time_n.dtype == np.int64 and data.size:
        first, last = (format_time(int(at))[:10] for at in data.time_n[[0, -1]])
        times = f", from {first} to {last}"
    left_out = f", {size - data.size:,} repeated or left out" if size > data.size else ""
    return (
        f"{data.size:,} interactions of {len(data.users.keys):,} users with {len(data.items.keys):,} items "
        f"({data.size / cells:.2%} of all pairs){times}{left_out}; columns: {columns}"
    )
