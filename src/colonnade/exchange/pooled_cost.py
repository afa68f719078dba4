"""What `pooled` sends, predicted from a load: a pure function of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from colonnade.exchange.bags import BITS, NUM_WORDS
from colonnade.exchange.codec import CODECS, EXACT, Codecs
from colonnade.exchange.contract import Cost, Load
from colonnade.exchange.fields import Fields
from colonnade.exchange.routing import SIZE_BYTES, WEIGHT
from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World


def cost_of(
    fields: Fields,
    shardings: Sequence[Sharding],
    load: Load,
    world: World,
    codecs: Codecs = EXACT,
) -> Cost:
    """Payload per rank and step, in the mean over ranks. load: `samples`, and by feature `lookups`, `lookups_remote`,
    `longest_bags`; next uses are not counted."""
    num_ranks, others = world.num_ranks, world.num_ranks - 1
    declaration = fields.declaration
    itemsize = declaration.compute_dtype.itemsize
    shares = [fields.share(rank, shardings).order for rank in range(num_ranks)]
    dims = [[declaration.fields[i].dim for i in order] for order in shares]

    def blocks(name: str) -> float:
        # A rank is one of an owner's others but where it is the owner itself: of N owners' blocks it sends N - 1.
        codec, dtype = CODECS[name], declaration.compute_dtype
        return load.samples * sum(codec.row_bytes(d, dtype) for d in dims) * others / num_ranks

    columns = route = 0.0
    for f in fields.features:
        feature = declaration.features[f]
        owners = len(shardings[declaration.table_of(feature)].ranks)
        away = owners * others / num_ranks  # owners that are other ranks
        columns += away
        weight = itemsize if feature.name in load.weighted else 0
        route += load.lookups_remote[feature.name] * (8 + weight)
        longest, lookups = load.longest_bags[feature.name], load.lookups[feature.name]
        bits = length_bits(longest, lookups, load.samples, owners)
        route += away * load.samples * bits / 8
    header = others * (SIZE_BYTES + WEIGHT.size + 8 * NUM_WORDS) + 8 * columns
    padding = 4 * others  # bodies end at a multiple of 8 bytes
    fetch, push = blocks(codecs.values), blocks(codecs.gradients)
    sent = {"route": route + header + padding, "fetch": fetch, "push": push}
    return Cost.of(sent, 4 * others, world)


def length_bits(longest: int, lookups: float, samples: float, owners: int) -> int:
    """Of the length of a bag, at one of its owners. Of a feature: lookups of the longest bag, and of a rank's batch of
    so many samples."""
    is_equal = abs(lookups - longest * samples) < 0.5
    if owners == 1:
        return 0 if is_equal else _holding(longest)
    # The longest share that more than half a sample of a batch is expected to have.
    share, likely = longest, 0.0
    while share > 0:
        likely += (
            math.comb(longest, share)
            * (owners - 1) ** (longest - share)
            / owners**longest
            * samples
        )
        if likely > 0.5:
            break
        share -= 1
    return _holding(max(1, share))


def _holding(length: int) -> int:
    return next(bits for bits in BITS[1:] if length < 2**bits)
