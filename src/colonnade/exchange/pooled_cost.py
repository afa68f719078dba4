"""What `pooled` asks its owners with, in bytes, foretold: pure functions of numbers."""

from __future__ import annotations

import math

from colonnade.exchange.bags import BITS
from colonnade.exchange.packing import (
    expected_list_bytes,
    expected_listed_bytes,
    expected_numbers_bytes,
    listed_head_bytes,
)
from colonnade.exchange.routing import SIZE_BYTES

HEAD_BYTES = SIZE_BYTES + 3
"""Of a message: its size, how many samples (2 bytes for 128 .. 16,383) and whether codes follow."""
SPREAD = ((0.0, 0.53333), (1.35563, 0.22208), (-1.35563, 0.22208), (2.85697, 0.01126), (-2.85697, 0.01126))  # fmt: skip
"""Where to look, in standard deviations, and the weight of what is found there: the mean over a normal distribution."""


def lengths_bytes(longest: int, lookups: float, samples: float, owners: int) -> float:
    """Of one column, to each of its owners: a byte says how lengths lie."""
    bits = length_bits(longest, lookups, samples, owners)
    return 2.0 if not bits else 1 + samples * bits / 8


def length_bits(longest: int, lookups: float, samples: float, owners: int) -> int:
    """Of the length of a bag, at one of its owners; 0: all are equal. Of a feature: lookups of the longest bag, and
    of a rank's batch of so many samples."""
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
    return next(bits for bits in BITS if length < 2**bits)


def ids_bytes(
    lookups: float,
    unique: float,
    rows: int,
    num_owners: int,
    *,
    list_ratio: float = 1.0,
    listed_ratio: float = 1.0,
) -> float:
    """Of one table, to one owner that has the rows of so many lookups, `unique` of them different. rows 0: an open
    table. Ratios: of measured ids to evenly spread ones, of a list of different ids and of ids as they come."""
    if lookups <= 0:
        return 0.0
    head = listed_head_bytes(lookups, rows)
    listed = (expected_listed_bytes(lookups, rows, num_owners) - head) * listed_ratio + head
    # Different ids at an owner vary by which rows come, and by which of them are its own.
    deviation = math.sqrt(unique * max(0.0, 1 - unique / (lookups * num_owners)))
    which = sum(
        weight * expected_numbers_bytes(lookups, max(1.0, unique + deviations * deviation))
        for deviations, weight in SPREAD
    )
    distinct = expected_list_bytes(unique, rows, num_owners) * list_ratio + which
    return 1 + min(listed, distinct)
