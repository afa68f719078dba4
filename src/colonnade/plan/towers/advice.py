"""Advice on tower modules: seconds per step they would save in a model that has none, with all pooled tables in towers.

Only advice, because modules change what the model learns: only its author should add them. Pure functions.

Legend: W floats of a tower's fields, CR compression ratio, input floats of a module over its output floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from colonnade.lookup.hops import BY_TOWERS
from colonnade.plan.cost.consumers import ConsumerLoad, ModelLoad, build_load_from_tables
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.measure.device import RowRate
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import OPTIONS, Constraint, Memory, PlanDecision
from colonnade.plan.search.tower_choice import constrain_to_towers
from colonnade.plan.towers.forecast import RATIOS, count_towers
from colonnade.topology.world import World


@dataclass(frozen=True, slots=True)
class Advice:
    """Predicted saving by modules of one compression ratio, each one linear layer over its tower's fields."""

    towers: int
    """Number of towers."""
    ratio: int
    """Compression ratio of the modules."""
    saved_seconds: float
    """Seconds saved per step without the time of the modules themselves; negative: the current plan is faster."""
    products: int
    """Number of multiplications of the modules per sample, forward."""
    parameters: int
    """Number of parameters of the modules."""


def advise_tower_modules(
    loads: Sequence[TableLoad],
    world: World,
    choice: PlanDecision,
    *,
    memory: Memory,
    rates: Sequence[RowRate] = (),
) -> tuple[Advice, ...]:
    """Predict for each ratio of `RATIOS` what tower modules would save compared with the decision `choice`.

    Tables are assigned round-robin to one tower on each host, or on several hosts if there are fewer tables than hosts.
    Sequence tables and tables with hot rows stay as chosen. Returns nothing on one host, with servers, with fewer than
    two tables or towers, or if memory has no room."""
    sides = ("[hot]", "[cold]")
    tables = [
        t
        for t, load in enumerate(loads)
        if load.is_pooled and load.columns and not load.name.endswith(sides)
    ]
    if world.num_hosts < 2 or world.has_servers or len(tables) < 2:
        return ()
    num_towers = count_towers(world, len(tables))
    if num_towers < 2:
        return ()
    advice = []
    for ratio in RATIOS:
        model, widths = _add_tower_modules(build_load_from_tables(loads), tables, num_towers, ratio)
        current = {
            table.name: Constraint(
                table.chosen.sharding.kind, table.chosen.exchange, table.chosen.sharding.ranks
            )
            for table in choice.tables
        }
        step_seconds = []
        for exchange in BY_TOWERS:
            in_towers = constrain_to_towers(
                loads, world, model, num_towers, memory=memory, forced={}, options=OPTIONS, exchange=exchange
            )  # fmt: skip
            if not in_towers:
                return ()
            other = choose(
                loads, world, memory=memory, rates=rates, forced={**current, **in_towers}, model=model,
                towers=num_towers, is_fetched_ahead=choice.seconds.is_fetched_ahead,
            )  # fmt: skip
            step_seconds.append(other.seconds.step)
        products = sum(inputs * outputs for inputs, outputs in widths)
        advice.append(
            Advice(
                num_towers,
                ratio,
                choice.seconds.step - min(step_seconds),
                products,
                products + sum(outputs for _, outputs in widths),
            )
        )
    return tuple(advice)


def _add_tower_modules(
    model: ModelLoad, tables: Sequence[int], num_towers: int, ratio: int
) -> tuple[ModelLoad, list[tuple[int, int]]]:
    """Return the model with a module for each tower's fields, and the widths (W, W / CR) of each module."""
    consumers, widths = [], []
    for tower in range(num_towers):
        tower_tables = set(tables[tower::num_towers])
        fields = [f for f, field in enumerate(model.fields) if field.table in tower_tables]
        inputs = sum(model.fields[f].dim for f in fields)
        outputs = math.ceil(inputs / ratio)
        values, gradients = (
            sum(getattr(model.fields[f], name) for f in fields) * outputs / inputs
            for name in ("value_bytes", "gradient_bytes")
        )
        widths.append((inputs, outputs))
        consumers.append(
            ConsumerLoad(
                f"tower{tower}", tuple(fields), None, inside_width=outputs, inside_value_bytes=values,
                inside_gradient_bytes=gradients, is_whole=True,
            )
        )  # fmt: skip
    return replace(model, consumers=tuple(consumers)), widths
