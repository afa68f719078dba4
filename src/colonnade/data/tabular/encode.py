"""From the Arrow columns of a file to what a declaration makes of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from colonnade.data.tabular.arrow import typed
from colonnade.data.tabular.chunk import Bags, Chunk, Longs
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.encode_ids import (
    encode_ids,
    encode_key,
    encode_name,
    encode_part,
    encode_several,
)
from colonnade.data.tabular.encode_numbers import (
    encode_bucket,
    encode_label,
    encode_number,
    encode_time,
    encode_weight,
    number_fault,
)
from colonnade.data.tabular.fields import Bag, Bucket, Category, Cross, Group, Key, Time, Weight
from colonnade.data.tabular.hashing import cross_ids, rows_of


def encode(
    declaration: Declaration,
    columns: Mapping[str, pa.Array],
    num_samples: int,
    *,
    split_by: str | None = None,
) -> Chunk:
    """Of one block. `columns`: arrays of length S, by column of the file. Raises Fault at the first value at fault."""
    columns = {name: typed(array) for name, array in columns.items()}
    numbers = declaration.numbers
    dense = np.empty((num_samples, len(numbers)), dtype=np.float32)
    for j, field in enumerate(numbers):
        encode_number(field, columns[field.column], dense[:, j])
    if not np.isfinite(dense).all():
        row, j = np.argwhere(~np.isfinite(dense))[0]
        raise number_fault(numbers[j], columns[numbers[j].column], int(row))

    ids: dict[str, Longs | Bags] = {}
    for each in declaration.categorical:
        if isinstance(each, Cross):
            continue
        array = columns[each.column]
        if isinstance(each, Bucket):
            ids[each.name] = encode_bucket(each, array)
        elif isinstance(each, Time):
            ids[each.name] = encode_time(each, array)
        elif isinstance(each, Category):
            ids[each.name] = encode_ids(each, array)
        else:
            weights = columns[each.weights] if isinstance(each, Bag) and each.weights else None
            ids[each.name] = encode_several(each, array, weights)
    for each in declaration.categorical:
        if isinstance(each, Cross):
            crossed = cross_ids([ids[part] for part in each.of])  # type: ignore[misc]
            ids[each.name] = crossed if each.rows is None else rows_of(crossed, each.rows)

    label = None
    if declaration.labels:
        label = np.empty((num_samples, len(declaration.labels)), dtype=np.float32)
        for j, task in enumerate(declaration.labels):
            label[:, j] = encode_label(task, columns[task.column])
    weight, group, key = (declaration.one(kind) for kind in (Weight, Group, Key))
    return Chunk(
        dense,
        tuple(ids[each.name] for each in declaration.categorical),
        label,
        None if weight is None else encode_weight(weight, columns[weight.column]),
        None if group is None else encode_name(group, columns[group.column]),
        None if key is None else encode_key(key, columns[key.column]),
        None if split_by is None else encode_part(split_by, columns[split_by]),
    )
