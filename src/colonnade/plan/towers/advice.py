"""What tower modules would save a model that has none: the plan's seconds once more, with all pooled tables in towers.

Advice: modules change what is learned, so nobody but the model's author puts them in. Pure.

Legend: W floats of a tower's fields, CR what enters a module over what leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from colonnade.lookup.hops import BY_TOWERS
from colonnade.plan.cost.consumers import ConsumerLoad, ModelLoad, bare
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.measure.device import RowRate
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import OPTIONS, Choice, Forced, Memory
from colonnade.plan.search.tower_choice import inside_towers
from colonnade.plan.towers.forecast import RATIOS, towers_of
from colonnade.topology.world import World


@dataclass(frozen=True, slots=True)
class Advice:
    """Of modules of one compression ratio, each one linear layer of its tower's fields."""

    towers: int
    ratio: int
    saved_seconds: float
    """Of a step of the exchange, without what the modules compute; less than 0: the plan as it is is faster."""
    products: int
    """Of a sample, forward."""
    parameters: int


def advised(
    loads: Sequence[TableLoad],
    world: World,
    choice: Choice,
    *,
    memory: Memory,
    rates: Sequence[RowRate] = (),
) -> tuple[Advice, ...]:
    """By ratio of `RATIOS`, against `choice`, of these loads in this world. Tables are dealt in turn to one tower on
    each host, or on several where there are fewer; those of sequences and with hot rows stay as they are chosen. Empty
    on one host, with servers, where fewer than two tables or towers are there, or memory has no room."""
    sides = ("[hot]", "[cold]")
    mine = [
        t
        for t, load in enumerate(loads)
        if load.is_pooled and load.columns and not load.name.endswith(sides)
    ]
    if world.num_hosts < 2 or world.has_servers or len(mine) < 2:
        return ()
    num_towers = towers_of(world, len(mine))
    if num_towers < 2:
        return ()
    found = []
    for ratio in RATIOS:
        model, widths = _with_modules(bare(loads), mine, num_towers, ratio)
        as_is = {
            each.name: Forced(
                each.chosen.sharding.kind, each.chosen.exchange, each.chosen.sharding.ranks
            )
            for each in choice.tables
        }
        taken = []
        for exchange in BY_TOWERS:
            inside = inside_towers(
                loads, world, model, num_towers, memory=memory, forced={}, options=OPTIONS, exchange=exchange
            )  # fmt: skip
            if not inside:
                return ()
            other = choose(
                loads, world, memory=memory, rates=rates, forced={**as_is, **inside}, model=model, towers=num_towers,
                is_fetched_ahead=choice.seconds.is_fetched_ahead,
            )  # fmt: skip
            taken.append(other.seconds.step)
        products = sum(enter * leave for enter, leave in widths)
        found.append(
            Advice(
                num_towers,
                ratio,
                choice.seconds.step - min(taken),
                products,
                products + sum(leave for _, leave in widths),
            )
        )
    return tuple(found)


def _with_modules(
    model: ModelLoad, tables: Sequence[int], num_towers: int, ratio: int
) -> tuple[ModelLoad, list[tuple[int, int]]]:
    """The model with a module for the fields of every tower's tables, and by module (W, W / CR)."""
    consumers, widths = [], []
    for number in range(num_towers):
        some = set(tables[number::num_towers])
        fields = [f for f, field in enumerate(model.fields) if field.table in some]
        enter = sum(model.fields[f].dim for f in fields)
        leave = math.ceil(enter / ratio)
        values, gradients = (
            sum(getattr(model.fields[f], name) for f in fields) * leave / enter
            for name in ("value_bytes", "gradient_bytes")
        )
        widths.append((enter, leave))
        consumers.append(
            ConsumerLoad(
                f"tower{number}", tuple(fields), None, inside_width=leave, inside_value_bytes=values,
                inside_gradient_bytes=gradients, is_whole=True,
            )
        )  # fmt: skip
    return replace(model, consumers=tuple(consumers)), widths
