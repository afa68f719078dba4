"""Hops of each exchange, over which a batch's ids, values and gradients are sent.

Hops are listed from the samples to the rows. Ids go forward over them, values come back in reverse order, gradients go
forward again; `Exchange` runs every table's hops, so that a new exchange is a new row of `EXCHANGES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast


@dataclass(frozen=True, slots=True)
class Hop:
    """Hop between the samples' ranks and the rows' owners."""

    request: Literal["unique_ids", "lookups"]
    """Ids sent forward: each row's id once, or every lookup of a bag."""
    reply: Literal["rows", "bags", "partials", "nothing"]
    """Values sent in reply: rows, pooled bags, or results of the model's operators on bags; "nothing": every rank has
    the rows."""
    group: Literal["world", "tower", "peers"]
    """Ranks that it is between: all, those of a tower, or those of one number in each tower."""
    transport: str = "direct"
    """Transport of bags and partials between all ranks, a key of `exchange.opening.TRANSPORTS`. Inside a tower and
    between peers there is one each (`wire/tower_transport.py`)."""


EXCHANGES: dict[str, tuple[Hop, ...]] = {
    "rows": (Hop("unique_ids", "rows", "world"),),
    "replicated": (Hop("unique_ids", "nothing", "world"),),
    "pooled": (Hop("lookups", "bags", "world"),),
    "partials": (Hop("lookups", "partials", "world"),),
    "towers": (Hop("lookups", "partials", "peers"), Hop("lookups", "bags", "tower")),
    "tower_rows": (Hop("lookups", "partials", "peers"), Hop("unique_ids", "rows", "tower")),
}
"""Hops by an exchange's name in settings."""

BY_TOWERS = cast(
    tuple[Literal["towers", "tower_rows"], ...],
    tuple(name for name, hops in EXCHANGES.items() if hops[0].group == "peers"),
)
"""Exchanges whose values are sent between peers of towers in the last hop."""
EVALUATING = tuple(name for name, hops in EXCHANGES.items() if hops[0].reply == "partials")
"""Exchanges that may evaluate consumers before values are sent."""
