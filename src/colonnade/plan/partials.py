"""What `substitute` makes of a plan: whose partials travel, how many bytes that is, what it asks of the data. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from colonnade.errors import ConfigError
from colonnade.exchange.layout import Declaration
from colonnade.exchange.several import part_of
from colonnade.exchange.slices import slices_of
from colonnade.exchange.substitution import substituted
from colonnade.topology.sharding import Sharding


def evaluated_at_owners(
    declaration: Declaration, shardings: Sequence[Sharding], exchanges: Sequence[str]
) -> tuple[str, ...]:
    """Names of the consumers whose partials travel; by table: `shardings`, `exchanges`."""
    slices = slices_of(declaration, shardings)
    names = [exchanges[each.number] for each in slices.laid]
    tables = {
        each.table.name
        for each, name in zip(slices.laid, names, strict=True)
        if name == "substitute"
    }
    mine = part_of(slices.declaration, tables, "substitute")
    return substituted(mine, [each.sharding for each in slices.laid])


def check_bags(
    declaration: Declaration,
    shardings: Sequence[Sharding],
    exchanges: Sequence[str],
    bags: Collection[str],
) -> None:
    """`bags`: features whose samples have any number of ids. Raises ConfigError where rows of such a bag may lie on
    several ranks, and an operator that is evaluated there needs the whole bag."""
    fields = {field.name: field for field in declaration.fields}
    for name in evaluated_at_owners(declaration, shardings, exchanges):
        consumer = declaration.consumers[name]
        if consumer.interaction.needs() != "fields":
            continue
        for each in consumer.features:
            feature = declaration.features[fields[each].feature]
            sharding = shardings[declaration.table_of(feature)]
            if feature.name in bags and sharding.num_owners > 1:
                raise ConfigError(
                    f"table {feature.table!r}: got exchange=substitute with sharding={sharding.kind}, but feature "
                    f"{feature.name!r} has bags of ids, and consumer {name!r}, which is evaluated where rows lie, "
                    f"needs a sample's whole bag on one rank; set plan.tables.{feature.table}.sharding=table_wise "
                    "(plan.sharding=auto finds a rank for it), or "
                    f"plan.tables.{feature.table}.exchange=pooled"
                )
