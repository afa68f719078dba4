"""Why a consumer's partial travels, or its fields' values: words and floats for a person to read. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colonnade.exchange.tower_cut import BY_TOWERS
from colonnade.plan.chosen import ConsumerChoice
from colonnade.plan.partials import Floats, Partials, is_cut


def consumer_choices(
    partials: Partials,
    owners: Floats,
    exchanges: Sequence[str],
    names: Sequence[str],
    later: float | None = None,
    *,
    inside: Mapping[int, int] | None = None,
) -> tuple[ConsumerChoice, ...]:
    """By consumer. owners (T, N): the part of a table's columns that a rank has rows of, whatever its exchange; by
    table: `exchanges`, `names`; later: by how many seconds a step is longer where partials travel, if it is known;
    inside: consumers that are evaluated inside a tower, and which."""
    model = partials.model
    under = [exchange == "substitute" for exchange in exchanges]
    mine = owners * [[float(each)] for each in under]
    are_cut = is_cut(owners)
    some = partials.cut(mine)
    counts = (owners > 0).sum(1)
    floats = partials.dims * partials.rows * owners.sum(1)[partials.tables]
    found = []
    for c, consumer in enumerate(model.consumers):
        values = float(floats[partials.takes[c]].sum())
        if c in (inside or {}):
            why = f"evaluated inside tower {(inside or {})[c]}, which fewer floats leave"
            width = float(consumer.inside_width or 0)
            found.append(ConsumerChoice(consumer.name, True, width, values, why))
            continue
        partial = None if consumer.width is None else partials.partial_floats(c, owners)
        tables = partials.tables_of(consumer)
        others = [names[t] for t in tables if not under[t]]
        cut = [names[t] for t in tables if are_cut[t]]
        if c in some:
            why = (
                "rows of its sequence stay where they lie" if consumer.sequences else "fewer floats"
            )
            if consumer.beside:
                why += f"; of table {consumer.beside}, which has hot rows, values travel"
        elif len({exchanges[t] for t in tables}) == 1 and exchanges[tables[0]] in BY_TOWERS:
            why = "its fields do not all lie in one tower, or what it gives there is not less than values"
        elif partial is None:
            why = consumer.barred or "its operator has no partial that adds up"
        elif cut:
            why = f"rows of table {cut[0]} are cut by columns"
        elif others:
            first = next(t for t in tables if not under[t])
            why = f"table {names[first]} is under {exchanges[first]}"
            if len(others) == len(tables):
                of = {exchanges[t] for t in tables}
                why = f"its tables are under {', '.join(sorted(of))}"
            if not some and later is not None:
                why += f"; with partials a step takes {1e3 * later:.3g} ms more"
            elif partial >= values:
                why += f"; a partial is {_floats(partial)} floats, values {_floats(values)}"
        else:
            why = _costs_more(partials, c, some, floats, partial)
        split = [
            model.fields[f].name
            for f in consumer.fields
            if consumer.needs_bags
            and model.fields[f].has_bags
            and counts[model.fields[f].table] > 1
        ]
        if split and partial is not None and c not in some and others:
            why += f"; bags of {split[0]} are split"
        said = ConsumerChoice(consumer.name, c in some, partial, values, why, consumer.is_apart)
        found.append(said)
    return tuple(found)


def _costs_more(
    partials: Partials, c: int, some: Sequence[int], floats: Floats, partial: float
) -> str:
    takes, model = partials.takes, partials.model
    values = float(floats[takes[c]].sum())
    if partial >= values:
        return f"costs more: {_floats(partial)} floats, not {_floats(values)}"
    others = [
        k for k in range(len(model.consumers))
        if k != c and k not in some and (takes[k] & takes[c]).any()
    ]  # fmt: skip
    if not others:
        return f"saves nothing: {_floats(partial)} floats, not {_floats(values)}"
    rest = takes[c] & ~takes[others].any(0)
    first = ", ".join(model.consumers[k].name for k in others)
    if not rest.any():
        return f"values travel anyway for {first}"
    left = float(floats[rest].sum())
    return (
        f"values travel anyway for {first}, all but {_floats(left)} floats; a partial is "
        f"{_floats(partial)}"
    )


def _floats(count: float | None) -> str:
    return f"{count or 0:,.0f}"
