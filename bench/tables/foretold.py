"""Predictions for worlds that this machine cannot run: bytes over a host's uplink and the time that links
take, of each exchange under its best shardings. Predictions: nothing of this was measured.

Legend: N ranks, b samples of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from harness import open_grid
from rich.console import Console

from colonnade import EmbeddingCollection, World
from colonnade.hops.load import ColumnLoad, TableLoad
from colonnade.plan.cost.consumers import build_model_load
from colonnade.plan.measure.popularity import Popularity
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import Constraint, Problem
from colonnade.store.budget import slot_bytes

RANKS = (16, 64, 256)
RANKS_PER_HOST = 8
UPLINK = 1.25e9
"""Bytes per second: 10 Gbit/s."""
EXCHANGES = ("rows", "pooled", "partials")


@dataclass(frozen=True)
class Foretold:
    case: str
    num_ranks: int
    exchange: str
    megabytes: float
    """Bytes that a host sends over its uplink in a step."""
    milliseconds: float
    """Seconds that a step waits for links."""


def zipf(rows: int, skew: float) -> Popularity:
    """The law that the bench draws ids by."""
    chance = np.arange(1, rows + 1) ** -skew
    return Popularity(np.ones(rows), chance / chance.sum())


def load_of(
    table, popularity: Popularity, world: World, batch_size: int, lookups: int
) -> TableLoad:
    item = float(batch_size * lookups)
    parts = 4 * table.width
    return TableLoad(
        name=table.name, width=table.width, value_bytes=parts, gradient_bytes=parts, bag_bytes=parts, row_bytes=parts,
        rows=float(table.rows), slot_bytes=slot_bytes(table), samples=float(batch_size),
        unique_rank=popularity.unique(item),
        unique_host=popularity.unique(item * world.ranks_per_host),
        unique_world=popularity.unique(item * world.num_ranks), lookups=item,
        columns=(ColumnLoad(item, lookups),), is_pooled=True, vocabulary=table.rows,
    )  # fmt: skip


def foretell(
    case: str, declared: tuple, *, batch_size: int, lookups: int, skew: float
) -> list[Foretold]:
    """declared: tables of equally many rows, features, consumers."""
    tables, features, consumers = declared
    declaration = EmbeddingCollection(tables, features, consumers=consumers).declaration
    law, results = zipf(tables[0].rows, skew), []
    for num_ranks in RANKS:
        world = World(
            num_hosts=num_ranks // RANKS_PER_HOST,
            ranks_per_host=RANKS_PER_HOST,
            remote_bytes_per_second=UPLINK,
        )
        loads = [load_of(table, law, world, batch_size, lookups) for table in tables]
        bags = [feature.name for feature in features] if lookups > 1 else ()
        model = build_model_load(declaration, loads, world=world, bags=bags)
        for exchange in EXCHANGES:
            forced = {table.name: Constraint(exchange=exchange) for table in tables}  # type: ignore[arg-type]
            choice = choose(Problem(loads, world, forced=forced, model=model))
            over = sum(size for (_, link), size in choice.sent.items() if link == "remote")
            results.append(
                Foretold(
                    case,
                    num_ranks,
                    exchange,
                    over * RANKS_PER_HOST / 1e6,
                    1e3 * choice.seconds.step,
                )
            )
    return results


def print_foretold(console: Console, predictions: Sequence[Mapping]) -> None:
    title = (
        f"Predictions, not measured: hosts of {RANKS_PER_HOST} ranks, {UPLINK * 8 / 1e9:g} Gbit/s; MB a host's "
        "uplink and ms that links take, a step"
    )
    units = [f"{exchange} {unit}" for unit in ("MB", "ms") for exchange in EXCHANGES]
    grid = open_grid(["case", "ranks", *units], title=title)
    lines: dict[tuple[str, int], dict[str, Mapping]] = {}
    for prediction in predictions:
        lines.setdefault((prediction["case"], prediction["num_ranks"]), {})[
            prediction["exchange"]
        ] = prediction
    for (case, ranks), by_exchange in lines.items():
        cells = [f"{by_exchange[e]['megabytes']:,.1f}" for e in EXCHANGES]
        cells += [f"{by_exchange[e]['milliseconds']:,.1f}" for e in EXCHANGES]
        grid.add_row(case, str(ranks), *cells)
    console.print(grid)
