"""Fields that a model's features read: whole rows, or the parts `deep` and `wide` of a table that has them.

A table `Table(name, {"deep": D, "wide": tasks})` stores an id's vector and its first-order weights, one per task,
so each id is sent to its owner once for both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from colonnade.config.model import PairVariables
from colonnade.errors import ConfigError
from colonnade.interaction import FM, BiInteraction
from colonnade.table import Feature, Table

DEEP = "deep"
WIDE = "wide"
Pairs = TypeVar("Pairs", FM, BiInteraction)


def find_field_dims(
    tables: Sequence[Table], features: Sequence[Feature], part: str = ""
) -> dict[str, int]:
    """Return the dim of each feature's field in `part`, by field name, in the order of the features.

    Raises ConfigError for a table without that part.
    """
    dim_by_part = {
        (table.name, table_part.name): table_part.dim
        for table in tables
        for table_part in table.parts
    }
    dims = {}
    for feature in features:
        if (feature.table, part) not in dim_by_part:
            wanted = f"a part {part!r}" if part else "no parts"
            example = '{"deep": 16, "wide": 1}' if part else "16"
            raise ConfigError(
                f"feature {feature.name!r}: this model wants {wanted} in table {feature.table!r}; "
                f"declare it as Table({feature.table!r}, {example})"
            )
        name = f"{feature.name}.{part}" if part else feature.name
        dims[name] = dim_by_part[feature.table, part]
    return dims


def find_first_order_fields(
    tables: Sequence[Table], features: Sequence[Feature], tasks: int, part: str = WIDE
) -> list[str]:
    """Return the names of the fields of first-order weights. Raises ConfigError unless each has one weight per task."""
    dims = find_field_dims(tables, features, part)
    for name, dim in dims.items():
        if dim != tasks:
            raise ConfigError(
                f"field {name!r}: got {dim} first-order weights for {tasks} tasks, wanted one each"
            )
    return list(dims)


def build_pairs(
    operator: type[Pairs],
    features: Sequence[Feature],
    pair_variables: PairVariables,
    bag_features: Collection[str] | None,
) -> Pairs:
    """Return `FM` or `BiInteraction` over these features' ids or fields. bag_features: names of the features of which
    a sample may have several ids; None: all. Without any, both are the same, and pairs of fields cost less."""
    single = [
        i
        for i, feature in enumerate(features)
        if bag_features is not None and feature.name not in bag_features
    ]
    return operator("fields" if len(single) == len(features) else pair_variables, single=single)
