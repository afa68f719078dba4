"""Files of interactions, and of the users and items in them: columns by header types and usual names.

source                                    columns
CSV, TSV, RecBole's .inter, Parquet       by name
Arrow: .arrow, .feather, or an object     by name
with `__arrow_c_stream__`
text without a header                     user, item; user, item, time or rating; user, item, rating, time
lines of a user and its items (LightGCN)  user, item
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
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
from colonnade.data.lines import build_field_error, format_excerpt, read_all_lines
from colonnade.data.tabular.arrow_files import ArrowTableFile, open_arrow_object
from colonnade.data.tabular.arrow_types import combine_chunks, is_number_type
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.encode import convert_to_numbers
from colonnade.data.tabular.fields import Bucket, Categorical, DeclaredField, Number
from colonnade.data.tabular.files import TableFile, find_files, read_tables
from colonnade.data.tabular.formats import FORMATS, NUMBER, find_format, list_endings
from colonnade.data.tabular.infer import TIME_WORDS, infer_column_fields, split_name
from colonnade.data.tabular.join import KeyedTable, index_table
from colonnade.data.tabular.narrow import narrow_column
from colonnade.data.tabular.text_rows import guess_delimiter
from colonnade.data.tabular.times import NUMBER as TIME_NUMBER
from colonnade.data.tabular.times import (
    TIME_TEXT,
    convert_to_microseconds,
    find_time_unit,
    format_time,
)
from colonnade.errors import ConfigError, DataError

NAMES: dict[str, tuple[str, ...]] = {
    USER: ("user", "users", "uid", "member", "customer", "visitor", "reviewer", "person", "session", "query"),
    ITEM: ("item", "items", "iid", "movie", "product", "asin", "track", "song", "artist", "book", "isbn", "business",
           "article", "news", "location", "place", "venue", "poi", "recipe", "target", "sku"),
    "time": (*TIME_WORDS, "unixreviewtime"),
    "rating": ("rating", "ratings", "score", "stars", "overall"),
    "event": ("event", "eventtype", "type", "action", "behavior", "behaviour", "interaction"),
}  # fmt: skip
"""Usual names of columns, in lower case, without an ending `id` and without `_`."""
NUM_BUCKETS = 16
"""Maximal number of buckets of a number that describes users or items, between its quantiles."""
SORTED_TOGETHER = 1 << 18
"""Number of interactions, about, that are sorted at a time: as many as fit in a processor's cache."""
BLANK_BRACKETS = bytes.maketrans(b"(,)", b"   ")
LINES_SEEN = 1000
"""Number of first lines that decide whether a text file has lists of items."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Columns by role (keys of NAMES), and how text is read. Left out, or None: recognised."""

    columns: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    delimiter: str | None = None
    names: Sequence[str] | None = None
    has_item_lists: bool = False
    """True: lines of whole numbers are a user and its items, also where all have the same length."""


@dataclass(frozen=True, slots=True)
class _Table:
    """Open table: columns are read when they are needed."""

    source: str
    names: Sequence[str]
    header_types: Mapping[str, str]
    read: Any  # names -> pa.Table
    is_text: bool = False
    """True if reading one column takes as long as reading all."""


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

    return _Table(str(source), first.names, first.header_types, read, first.is_text)


def _open_file(path: Path, options: FileOptions) -> _Table:
    lengths = _find_line_lengths(path) if options.names is None else set()
    if lengths and (options.has_item_lists or _is_ragged(lengths) or lengths <= {0, 1, 2}):
        table = read_item_lists(path)
        return _Table(str(path), table.column_names, {}, table.select)
    return _open_table_file(
        open_named_file(
            path, options.delimiter, options.names, partial(_name_columns, path, options.columns)
        )
    )


def _open_table_file(file: TableFile) -> _Table:
    def read(names: Sequence[str]) -> pa.Table:
        blocks = list(read_tables(file, names))
        if not blocks:
            raise DataError(f"{file.path}: got no row, wanted at least one. Was it fully written?")
        return pa.concat_tables(blocks, promote_options="permissive")

    is_text = not isinstance(file, ArrowTableFile)
    return _Table(str(file.path), file.names, file.header_types, read, is_text)


def open_named_file(
    path: Path,
    delimiter: str | None,
    names: Sequence[str] | None,
    name_columns: Callable[[Sequence[str]], Sequence[str] | None],
    unquoted: str = "",
) -> TableFile:
    """Open a file of any format, by its ending; others are delimited text. Raises DataError, ConfigError.

    delimiter, names   of text; None: recognised
    name_columns       names the columns of text without a header from the cells of its first line; returns None if
                       these are a header
    unquoted           delimiters of text in which a quote is a character as others
    """
    format = find_format(path.suffix) or FORMATS["csv"]
    if format.name != "csv":
        return format.open_file(path)
    delimiter = delimiter or guess_delimiter(path, names)
    open_text = partial(
        format.open_file, path, delimiter=delimiter, quote=None if delimiter in unquoted else '"'
    )
    file = open_text(names=names)
    own_names = name_columns(file.names) if names is None else None
    return file if own_names is None else open_text(names=own_names)


def _name_columns(
    path: Path, requested: Mapping[str, str | None], cells: Sequence[str]
) -> list[str] | None:
    """Name the columns of a file from the cells of its first line; None if that names columns itself: a requested or
    usual one, or none that is a number."""
    is_header = match_columns(cells, NAMES, {}) or set(requested.values()) & set(cells)
    if is_header or not any(map(NUMBER.fullmatch, cells)):
        return None
    if len(cells) not in (2, 3, 4):
        raise ConfigError(
            f"{path}: got {len(cells)} columns without a header, wanted 2 to 4 (user, item, rating, time); name them "
            "with data.options.names"
        )
    has_times = len(cells) == 3 and find_time_unit(narrow_column(pa.array(cells[2:])))
    is_time = has_times and has_times[1]
    return [USER, ITEM, *(["time"] if is_time else ["rating", "time"])][: len(cells)]


def _find_line_lengths(path: Path) -> set[int]:
    """Return how many numbers the first lines of a text file have, with blanks between them; none for other files."""
    lengths: set[int] = set()
    if find_format(path.suffix) is None:
        with path.open("rb") as file:
            for line in islice(file, LINES_SEEN):
                fields = line.split()
                if not all(field.isdigit() for field in fields):
                    return set()
                lengths.add(len(fields))
    return lengths


def _is_ragged(lengths: set[int]) -> bool:
    """Return whether lines of these lengths are lists, because rows of a table have one length."""
    return len(lengths - {0}) > 1


def read_item_lists(path: Path) -> pa.Table:
    """Read lines of a user, then its items, with blanks between them; empty lines are skipped. Raises DataError.

    The first two may be written `(user,item)`, as in files of negatives (NCF, He et al. 2017)."""
    users: list[int] = []
    items: list[bytes] = []
    counts: list[int] = []
    for number, line in enumerate(read_all_lines(path), 1):
        fields = (line.translate(BLANK_BRACKETS) if line.startswith(b"(") else line).split()
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
    """Return the column of each role that the table has. Raises ConfigError for missing ones."""
    listed = f"the columns are {', '.join(list(table.names)[:20])}"
    roles = match_columns(table.names, {role: NAMES[role] for role in wanted}, options.columns)
    for role, name in roles.items():
        if name not in table.names:
            raise ConfigError(
                f"{table.source}: got no column {name!r}, which data.options.{role} names; {listed}"
            )
    for role in {USER, ITEM} & (set(wanted) - set(roles)):
        raise ConfigError(
            f"{table.source}: got no column named like a {role}, wanted to know which one it is. Say so with "
            f"data.options.{role}; {listed}"
        )
    return roles


def match_columns(
    names: Sequence[str],
    usual_names: Mapping[str, Sequence[str]],
    requested: Mapping[str, str | None],
) -> dict[str, str]:
    """Return the column of each role in `usual_names` that has one: the requested one, else the first of `names` with a
    usual name, or for times with such a last word (`watched_at`)."""
    columns: dict[str, str] = {}
    for role, usual in usual_names.items():
        rest = [name for name in names if name not in columns.values()]
        matches = [name for name in rest if _plain_name(name) in usual]
        if role == "time":
            matches += [name for name in rest if split_name(name)[-1] in usual]
        column = requested.get(role) or next(iter(matches), None)
        columns |= {} if column is None else {role: column}
    return columns


def _plain_name(name: str) -> str:
    """Return a name in lower case without blanks, and without an ending `id`: userId, user_id and User are alike."""
    plain = name.lower().replace("_", "").replace(" ", "").replace("-", "")
    return plain if plain in ("uid", "iid") else plain.removesuffix("id").removesuffix("idx")


def read_times(
    columns: Sequence[pa.ChunkedArray], source: str
) -> NDArray[np.int64] | NDArray[np.float64]:
    """Return the times of all columns (n,) in microseconds since 1970, or the numbers themselves if they are none.
    Raises DataError."""
    times = []
    for column in columns:
        # Integers are read chunk by chunk, because reading takes several times their memory.
        is_integer = column.type == pa.int64()
        arrays = column.chunks if is_integer else [narrow_column(combine_chunks(column))]
        if any(array.null_count for array in arrays):
            row = int(np.argmax(column.is_null().to_numpy()))
            raise DataError(
                f"{source}, row {row + 1}: got no time, wanted one. Leave out the row, or name another column "
                "(data.options.time)"
            )
        times += [array for array in arrays if len(array)]
    result = np.empty(sum(map(len, times)), np.int64)
    ends = np.cumsum([0, *map(len, times)])
    unit, share = (find_time_unit(times[0]) if times else None) or ("s", 0.0)
    if share > 0.5 or any(pa.types.is_timestamp(array.type) for array in times):
        try:
            for array, begin, end in zip(times, ends, ends[1:], strict=False):
                result[begin:end] = convert_to_microseconds(array, unit)[0]
            return result
        except pa.ArrowException:
            pass
    for array in times:
        if not is_number_type(array.type):
            raise DataError(
                f"{source}: got {_find_odd_time(array)[:40]!r} as a time, wanted timestamps, ISO texts or numbers in "
                "all rows; repair it, or name another column (data.options.time)"
            )
    numbers = [array.cast(pa.float64()).to_numpy(zero_copy_only=False) for array in times]
    return np.concatenate([np.empty(0), *numbers])


def _find_odd_time(array: pa.Array) -> str:
    """Return the first value that looks neither like a number nor like a time, else the first one."""
    texts = array.cast(pa.string())
    odd = texts.filter(pc.invert(pc.match_substring_regex(texts, f"{TIME_NUMBER}|{TIME_TEXT}")))
    return str((odd if len(odd) else texts)[0])


def select_rows(
    table: _Table, roles: Mapping[str, str], at_least: float | None, events: Sequence[str] | None
) -> pa.ChunkedArray | None:
    """Return a mask of the rows with a rating of at least `at_least` and an event of `events`; None: all."""
    masks = []
    if at_least is not None:
        ratings = combine_chunks(table.read([roles["rating"]]).column(0))
        masks.append(pa.array(convert_to_numbers(Number("rating"), ratings) >= at_least))
    if events is not None:
        texts = table.read([roles["event"]]).column(0).cast(pa.string())
        masks.append(pc.is_in(texts, pa.array([*map(str, events)])))
    return reduce(pc.and_, masks) if masks else None


def check_events(
    tables: Sequence[tuple[_Table, Mapping[str, str], Any]], events: Sequence[str]
) -> None:
    """Raise ConfigError for an event that no part has. tables: as `_open_part` returns them."""
    columns = [
        (table.read([roles["event"]]).column(0), roles["event"]) for table, roles, _ in tables
    ]
    known = {
        text for column, _ in columns for text in pc.unique(column.cast(pa.string())).to_pylist()
    }
    if unknown := {*map(str, events)} - known:
        raise ConfigError(
            f"got the event {min(unknown)!r}, wanted values of the column {columns[0][1]!r}: "
            + ", ".join(sorted(map(str, known))[:20])
        )


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
    types: Sequence[Sequence[str]] = (),
    core: int = 0,
    has_times: bool = True,
    schema: FileSchema | None = None,
) -> tuple[Interactions, FileSchema, str]:
    """Read interactions from the source of each part.

    users, items   files of users and of items, with one row for each
    at_least       lowest rating that counts; None: any
    events         values of the event column that count; None: any
    types          events of each type of feedback, the primary type first: these events count, and a pair of user and
                   item may occur once of each type; (): types are not told apart
    core           users and items with fewer interactions are left out, again until none is left
    has_times      False: a column of times is not read, and the order is that of the files
    schema         what models read of users and items; None: inferred from `users` and `items`

    Returns the interactions, the schema, and a line that says what was recognised and left out. Raises DataError,
    ConfigError.
    """
    files_of_parts = (Path(s) for s in parts.values() if isinstance(s, str | Path))
    # A part whose users have equally many items looks like a table; another part shows that it is none.
    if any(_is_ragged(_find_line_lengths(file)) for file in files_of_parts if file.is_file()):
        options = replace(options, has_item_lists=True)
    type_of_event = {event: number for number, group in enumerate(types) for event in group}
    events = list(type_of_event) or events
    tables = [_open_part(source, options, at_least, events, has_times) for source in parts.values()]
    if events is not None:
        check_events(tables, events)
    roles = tables[-1][1]

    def read_role(role: str) -> list[pa.ChunkedArray]:
        # The raw values of all columns together would take more memory than what is made of them.
        columns = [table.read([roles[role]]).column(0) for table, roles, _ in tables]
        masks = [mask for _, _, mask in tables]
        return [c if m is None else c.filter(m) for c, m in zip(columns, masks, strict=True)]

    columns: dict[str, Any] = {"time": None, "part": None, "type": None}
    if all("time" in columns_of_table for _, columns_of_table, _ in tables):
        columns["time"] = read_times(read_role("time"), tables[0][0].source)
    if types:
        columns["type"] = _number_types(read_role("event"), type_of_event)
    files = {
        role: _read_entity_file(source, role, options)
        for role, source in ((USER, users), (ITEM, items))
    }
    keys: dict[str, NDArray[Any]] = {}
    for role, file in files.items():
        arrays = read_role(role)
        sizes = [len(array) for array in arrays]
        if not sum(sizes):
            raise DataError(f"{tables[0][0].source}: got no interaction, wanted one at least")
        arrays += [] if file is None else [pa.chunked_array([file.keys])]
        keys[role], positions = index_keys(arrays, role)
        del arrays
        if file is not None:
            positions.pop()
        columns[role] = positions[0] if len(positions) == 1 else np.concatenate(positions)
    if len(parts) > 1:
        columns["part"] = np.repeat(np.array(list(parts), np.int8), sizes)
    size = len(columns[USER])
    pa.default_memory_pool().release_unused()  # of the raw values
    sort_columns(columns, len(keys[ITEM]))
    entities = Entities(keys[USER]), Entities(keys[ITEM])
    data = Interactions(*entities, *(columns[n] for n in (USER, ITEM, "time", "part", "type")))
    data = keep_core(data, core)
    note = _describe(size, data, roles, tables[-1][0].names) + _describe_absent(data, files)
    return *_add_entities(data, files, roles, schema), note


def _number_types(
    columns: Sequence[pa.ChunkedArray], type_of_event: Mapping[str, int]
) -> NDArray[np.int8]:
    """Return the type of the events of all columns (n,), each of which has one."""
    names = pa.array(list(type_of_event))
    numbers = np.array(list(type_of_event.values()), np.int8)
    texts = [column.cast(pa.string()) for column in columns]
    return np.concatenate([numbers[pc.index_in(t, value_set=names).to_numpy()] for t in texts])


def _open_part(
    source: Any,
    options: FileOptions,
    at_least: float | None,
    events: Sequence[str] | None,
    has_times: bool,
) -> tuple[_Table, dict[str, str], pa.ChunkedArray | None]:
    """Open a part: the table, the column of each role in it, and a mask of the rows that count; None: all."""
    table = open_table(source, options)
    wanted = [USER, ITEM, *(["time"] if has_times else [])]
    wanted += ["rating"] if at_least is not None or options.columns.get("rating") else []
    wanted += ["event"] if events is not None or options.columns.get("event") else []
    roles = find_roles(table, options, wanted)
    for role, setting in (("rating", at_least), ("event", events)):
        if setting is not None and role not in roles:
            raise ConfigError(
                f"{table.source}: got no column named like {role}s, which data.options."
                f"{'at_least needs' if role == 'rating' else 'events or types need'}; say which it is with "
                f"data.options.{role}"
            )
    if table.is_text:
        table = replace(table, read=table.read(list(roles.values())).select)
    return table, roles, select_rows(table, roles, at_least, events)


def sort_columns(columns: dict[str, Any], num_items: int) -> None:
    """Sort interactions by user and time, and keep the first of each pair of user and item, that of the training part
    if there is one; of each type, with types, that which is held out. columns: (n,) by role, replaced in place. Equal
    times stay in order."""
    names = (USER, ITEM, "time", "part", "type")
    users, items, times, parts, types = (columns[name] for name in names)
    # Words of a user and a row sort faster than rows by users, in half the memory.
    words = users.astype(np.uint64)
    words <<= np.uint64(32)
    np.add(words, np.arange(len(users), dtype=np.uint32), out=words)
    words.sort()
    rows = np.empty(len(users), np.uint32)
    np.bitwise_and(words, np.uint64(0xFFFFFFFF), out=rows, casting="unsafe")
    del words
    ends = np.cumsum(np.bincount(users))
    bounds = np.unique(
        ends[np.searchsorted(ends, np.arange(SORTED_TOGETHER, len(users), SORTED_TOGETHER))]
    )
    is_first = np.empty(len(rows), np.bool_)
    for block, marks in zip(np.split(rows, bounds), np.split(is_first, bounds), strict=True):
        user = users[block]
        if times is not None:
            block[:] = block[np.lexsort((times[block], user))]
        pairs = user * np.int64(num_items) + items[block]
        preferred = None if parts is None else parts[block]
        if types is not None:
            pairs = pairs << np.int64(7) | types[block]
            preferred = None if parts is None else -parts[block]
        order = np.lexsort((pairs,) if preferred is None else (preferred, pairs))
        pairs = pairs[order]
        marks[order] = np.append(True, pairs[1:] != pairs[:-1])
    rows = rows[is_first]
    del block, users, items, times, parts, types
    for role, column in columns.items():
        columns[role] = None if column is None else column[rows]


def keep_core(interactions: Interactions, core: int) -> Interactions:
    """Leave out users and items with fewer than `core` interactions until none is left. Raises ConfigError if no
    interaction is left."""
    while core > 1:
        counts = [
            np.bincount(positions)[positions]
            for positions in (interactions.user_n, interactions.item_n)
        ]
        is_kept = (counts[0] >= core) & (counts[1] >= core)
        if is_kept.all():
            break
        interactions = interactions.take(is_kept)
        if not interactions.size:
            raise ConfigError(
                f"core={core}: no user and item have that many interactions; give a smaller one"
            )
    return interactions


def _read_entity_file(source: Any, role: str, options: FileOptions) -> KeyedTable | None:
    """Read a file of users or of items. Its key has the name of the role's column; else it is a first column `id`."""
    if source is None:
        return None
    table = open_table(source, FileOptions(options.columns, options.delimiter))
    first, requested = table.names[0], options.columns.get(role)
    columns = {role: requested} if requested in table.names else {}
    if _plain_name(first) == "":
        columns = {role: first}
    key = find_roles(table, FileOptions(columns), [role])[role]
    return index_table(table.source, key, table.read(table.names), table.header_types, {})


def _add_entities(
    interactions: Interactions,
    files: Mapping[str, KeyedTable | None],
    columns: Mapping[str, str],
    schema: FileSchema | None,
) -> tuple[Interactions, FileSchema]:
    """Leave out users and items that neither interact nor have a row, and add what models read of the others.

    columns: names of the ids by role, as records will have them; a recorded `schema` has its own."""
    if schema is not None:
        columns = {f.name: f.columns[0] for f in schema.fields if f.name in (USER, ITEM)}
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
        entities[role], fields[role] = add_features(
            whole.select(is_kept), role, columns[role], own, file
        )
        numbers[role] = used
        if not is_kept.all():
            numbers[role] = (np.cumsum(is_kept, dtype=np.int32) - np.int32(1))[used]
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


def _describe(size: int, data: Interactions, roles: Mapping[str, str], names: Sequence[str]) -> str:
    """Describe what was recognised in files and left out, in one line."""
    columns = ", ".join(f"{role}={name}" for role, name in roles.items())
    others = [name for name in names if name not in roles.values()]
    not_read = f"; not read: {', '.join(others)}" if others else ""
    cells = max(len(data.users.keys) * len(data.items.keys), 1)
    times = ""
    if data.time_n is not None and data.time_n.dtype == np.int64 and data.size:
        first, last = (format_time(int(at))[:10] for at in (data.time_n.min(), data.time_n.max()))
        times = f", from {first} to {last}"
    left_out = f", {size - data.size:,} repeated or left out" if size > data.size else ""
    return (
        f"{data.size:,} interactions of {len(data.users.keys):,} users with {len(data.items.keys):,} items "
        f"({data.size / cells:.2%} of all pairs){times}{left_out}; columns: {columns}{not_read}"
    )


def _describe_absent(data: Interactions, files: Mapping[str, KeyedTable | None]) -> str:
    """Describe how many of the users and items that interact have no row in the files about them."""
    absent = ""
    entities = (data.users, data.user_n), (data.items, data.item_n)
    for (role, file), (entity, positions) in zip(files.items(), entities, strict=True):
        if file is not None:
            keys = entity.keys[np.bincount(positions, minlength=len(entity.keys)) > 0]
            num_absent = int((file.find_rows(pa.array(keys)) < 0).sum())
            if num_absent:
                absent += f"; {num_absent:,} of {len(keys):,} {role}s have no row in {file.source}"
    return absent
