"""Interactions of users with items as columns: who chose what, and when; ids of any kind; features of both.

Legend: n interactions, U users, I items, K keys of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.batch import Ids
from colonnade.data.contract import Column
from colonnade.data.tabular.arrow_types import combine_chunks
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.encode import encode_block
from colonnade.data.tabular.fields import Bag, Category, DeclaredField
from colonnade.data.tabular.join import KeyedTable
from colonnade.data.tabular.narrow import narrow_column
from colonnade.errors import DataError

USER, ITEM, HISTORY = "user", "item", "history"
LARGEST_SMALL_TABLE = 1 << 16
"""Number of entries of a table of numbers that is no matter for memory, however few interactions there are."""


@dataclass(frozen=True, slots=True, eq=False)
class Entities:
    """Users or items, in ascending order of their keys."""

    keys: NDArray
    """Ids as the files have them (K,): distinct int64, or texts as objects."""
    features: Mapping[str, Ids] = field(default_factory=dict)
    """Features that a model reads of each (K,), by column; the id first."""
    columns: tuple[Column, ...] = ()

    def select(self, is_selected_K: NDArray[np.bool_]) -> Entities:
        """Return the entities that a mask (K,) selects. They have no features yet."""
        return Entities(self.keys[is_selected_K])


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Interactions user by user, each user's in the order of their times; equal ones, and those without times, in the
    order of the files. A pair of user and item occurs once, or once of each type of feedback, at its first time.
    """

    users: Entities
    items: Entities
    user_n: NDArray[np.int32]
    """Position of each interaction's user in `users` (n,), ascending."""
    item_n: NDArray[np.int32]
    time_n: NDArray[np.int64] | NDArray[np.float64] | None = None
    """Microseconds since 1970, or the column's numbers if these are no times."""
    part_n: NDArray[np.int8] | None = None
    """Part of each interaction (splits.py) where files give it."""
    type_n: NDArray[np.int8] | None = None
    """Type of feedback of each interaction, 0 the primary one, where types are told apart."""

    @property
    def size(self) -> int:
        return len(self.user_n)

    def take(self, rows: NDArray) -> Interactions:
        """Return the interactions at indices, or those that a mask selects, in that order."""
        columns = (self.user_n, self.item_n, self.time_n, self.part_n, self.type_n)
        return Interactions(
            self.users,
            self.items,
            *(None if c is None else c[rows] for c in columns),  # type: ignore[arg-type]
        )


def index_keys(arrays: list[pa.ChunkedArray], name: str) -> tuple[NDArray, list[NDArray[np.int32]]]:
    """Number the distinct values of columns in ascending order.

    Columns of integers and of texts that are all integers have integers as keys; any others have texts, so that one
    value has one key in all files. Returns the keys (K,) and the position of each column's values, (n,) each. Raises
    DataError for a missing value and for an integer beyond 63 bits.
    """
    narrowed = [
        array
        if array.type == pa.int64()
        else pa.chunked_array([narrow_column(combine_chunks(array))])
        for array in arrays
    ]
    for array in narrowed:
        if array.null_count:
            row = int(np.argmax(array.is_null().to_numpy()))
            raise DataError(
                f"column {name!r}, value {row + 1}: got nothing, wanted the id of a {name}. Leave out the row, or "
                "name another column"
            )
    is_integer = all(pa.types.is_int64(array.type) or not len(array) for array in narrowed)
    kind = pa.int64() if is_integer else pa.string()
    return number_values([array.cast(kind) for array in narrowed])


def number_values(columns: list[pa.ChunkedArray]) -> tuple[NDArray, list[NDArray[np.int32]]]:
    """Number the distinct values of columns of one type, int64 or string, in ascending order. Returns what `index_keys`
    does."""
    kind = columns[0].type
    chunks = [chunk for column in columns for chunk in column.chunks]
    keys, positions = _index_integers(chunks) if kind == pa.int64() else _index_values(chunks, kind)
    ends = np.cumsum([0, *map(len, columns)])
    return keys, [positions[a:b] for a, b in pairwise(ends)]


def _index_integers(chunks: list[pa.Array]) -> tuple[NDArray, NDArray[np.int32]]:
    """Number integers by a table of all numbers between the least and the largest, if these are not many more than the
    integers: ten times as fast as hashing."""
    size = sum(map(len, chunks))
    arrays = [chunk.to_numpy() for chunk in chunks if len(chunk)]
    low = min((int(array.min()) for array in arrays), default=0)
    width = max((int(array.max()) for array in arrays), default=-1) - low + 1
    if width > 2 * size + LARGEST_SMALL_TABLE:
        return _index_values(chunks, pa.int64())
    is_key = np.zeros(width, np.bool_)
    for array in arrays:
        is_key[array - low] = True
    position = np.cumsum(is_key, dtype=np.int32)
    position -= 1
    positions = [position[array - low] for array in arrays]
    return np.flatnonzero(is_key) + low, np.concatenate([np.empty(0, np.int32), *positions])


def _index_values(chunks: list[pa.Array], kind: pa.DataType) -> tuple[NDArray, NDArray[np.int32]]:
    encoded = pa.chunked_array(chunks, kind).dictionary_encode()
    dictionary = encoded.chunk(0).dictionary if encoded.num_chunks else pa.array([], kind)
    order = pc.sort_indices(dictionary).to_numpy()
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(len(order))
    positions = [position[chunk.indices.to_numpy()] for chunk in encoded.chunks]
    keys = dictionary.take(pa.array(order)).to_numpy(zero_copy_only=False)
    return keys, np.concatenate([np.empty(0, np.int32), *positions])


def build_ids(keys: NDArray, name: str, column: str) -> tuple[Category, Ids]:
    """Return the field of an entity's id in an open table, and the id of each key (K,): integers are ids themselves,
    texts are hashed, as in every file."""
    category = Category(name, column=column, dtype="text" if keys.dtype == object else "integer")
    array = pa.array(keys, pa.string() if keys.dtype == object else pa.int64())
    ids = encode_block(FileSchema((category,)), {column: array}, len(keys)).ids[0]
    assert isinstance(ids, np.ndarray)
    return category, Ids(torch.from_numpy(ids))


def add_features(
    entities: Entities,
    name: str,
    column: str,
    fields: tuple[DeclaredField, ...],
    table: KeyedTable | None,
) -> tuple[Entities, tuple[DeclaredField, ...]]:
    """Return the entities with their ids and features, and the fields of these.

    column: name of the id in files and records; table: of entities, the features of a key that it does not have are
    missing values.
    """
    category, ids = build_ids(entities.keys, name, column)
    features = {name: ids}
    columns: tuple[Column, ...] = (Column(name),)
    if fields and table is not None:
        schema = FileSchema(fields)
        aligned = table.gather(pa.array(entities.keys), schema.columns)
        chunk = encode_block(schema, aligned, len(entities.keys))
        features |= chunk.to_batch([f.name for f in schema.categorical]).ids
        columns += schema.schema.categorical
    return replace(entities, features=features, columns=columns), (category, *fields)


def build_record_schema(
    user_fields: tuple[DeclaredField, ...], item_fields: tuple[DeclaredField, ...]
) -> FileSchema:
    """Return the schema by which records of users and of items are encoded when a model is served."""
    item = item_fields[0]
    assert isinstance(item, Category)
    history = Bag(HISTORY, table=ITEM, dtype=item.dtype)
    return FileSchema((*user_fields, *item_fields, history))


def to_positions(keys: NDArray, wanted: NDArray) -> Tensor:
    """Return the position of each of `wanted` (m,) in ascending `keys` (K,); -1 for one that is not there."""
    if not len(keys) or not len(wanted):
        return torch.full((len(wanted),), -1, dtype=torch.int64)
    positions = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return torch.from_numpy(np.where(keys[positions] == wanted, positions, -1).astype(np.int64))
