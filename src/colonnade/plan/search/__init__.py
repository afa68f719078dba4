"""Search for the sharding and exchange of each table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from colonnade.lookup.hops import BY_TOWERS
from colonnade.plan.cost.consumers import ModelLoad
from colonnade.plan.cost.partials import check_joint
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.measure.device import RowRate
from colonnade.plan.search.candidates import OPTIONS, Choice, Forced, Memory, Option
from colonnade.plan.search.explanation import explained
from colonnade.plan.search.initial_candidates import beginnings
from colonnade.plan.search.search import Search
from colonnade.plan.search.tower_choice import freely, inside_towers
from colonnade.topology.world import World


def choose(
    loads: Sequence[TableLoad],
    world: World,
    *,
    memory: Memory | None = None,
    rates: Sequence[RowRate] = (),
    forced: Mapping[str, Forced] | None = None,
    options: Collection[Option] = OPTIONS,
    is_fetched_ahead: bool = False,
    model: ModelLoad | None = None,
    towers: int | None = None,
) -> Choice:
    """The fastest of `options` for each table, as far as `forced` (by name) leaves one. `rates`: how fast rows are
    gathered and updated and lookups planned and packed, where that was measured; `is_fetched_ahead`: staleness allows
    it; `model`: what takes the tables' fields, without which `partials` is not considered; `towers`: how many,
    default one for each host. Raises ConfigError where what is forced cannot be."""
    search = Search(
        loads, world, memory or Memory(), rates, forced or {}, options, is_fetched_ahead, model,
        towers or world.num_hosts,
    )  # fmt: skip
    begun = list(beginnings(search))
    if search.is_large:
        begun = sorted(begun, key=search.objective)[:2]
    found = [search.improved(each) for each in begun]
    best = min(found, key=search.objective)
    search.narrow(best)
    check_joint(best.joint, search.partials.model, loads, best.chosen)
    others = [each for each in found if each.joint is not None and each.joint.consumers]
    later = min((search.objective(each) for each in others), default=None)
    later = None if later is None else max(later - search.objective(best), 0.0)
    choice = explained(search, best, later)
    flat = choice
    for exchange in BY_TOWERS:
        inside = {} if model is None else inside_towers(
            loads, world, model, search.num_towers, memory=search.memory, forced=forced or {}, options=options,
            exchange=exchange,
        )  # fmt: skip
        if not inside:
            continue
        other = choose(
            loads, world, memory=memory, rates=rates, forced={**(forced or {}), **inside}, options=options,
            is_fetched_ahead=is_fetched_ahead, model=model, towers=towers,
        )  # fmt: skip
        if other.seconds.step < choice.seconds.step:
            choice = freely(other, flat, inside)
    return choice
