"""Sizes of messages: of packed ids, bag lengths and headers, in bytes. Pure functions, without torch.

native/packing.h and wire/packing.py describe the formats.
"""

from __future__ import annotations

import math
import struct

BATCH_WEIGHT = struct.Struct("<d")
"""Weight of a rank's batch, which heads each message of ids."""
NUM_SAMPLES = struct.Struct("<I")
"""Number of samples of a rank's batch, in messages of lookups that carry no bag lengths."""
SIZE_BYTES = 4
"""Bytes of a message's size, sent before it."""
FLAG_BYTES = 1
"""Bytes of the flag for whether codes of `Batch.next_use` follow."""
HEAD_BYTES = SIZE_BYTES + 3
"""Header bytes of a message of bags: its size, the number of samples (2 bytes for 128 .. 16,383), a flag for codes."""
LENGTH_BITS = (1, 2, 4, 8, 16, 32)
"""Widths at which bag lengths are packed."""
BLOCK = 128
"""Number of packed numbers that share one width."""
NORMAL_QUADRATURE = (
    (0.0, 0.53333), (1.35563, 0.22208), (-1.35563, 0.22208), (2.85697, 0.01126), (-2.85697, 0.01126)
)  # fmt: skip
"""Nodes, in standard deviations, and weights of a quadrature that averages over a normal distribution."""


def expected_length_bytes(longest: int, lookups: float, samples: float, owners: int) -> float:
    """Return the bytes of a column's bag lengths in a message to each owner; the first byte tells their encoding."""
    bits = count_bag_length_bits(longest, lookups, samples, owners)
    return 2.0 if not bits else 1 + samples * bits / 8


def count_bag_length_bits(longest: int, lookups: float, samples: float, owners: int) -> int:
    """Return the bits of a bag's length in a message to one owner; 0: all lengths are equal.

    longest: lookups of the feature's longest bag. lookups, samples: of a rank's batch."""
    is_equal = abs(lookups - longest * samples) < 0.5
    if owners == 1:
        return 0 if is_equal else _fitting_bits(longest)
    # Find the longest part of a bag at one owner that occurs in more than half a sample of a batch on average.
    share = longest
    expected_samples = 0.0
    while share > 0:
        expected_samples += (
            math.comb(longest, share)
            * (owners - 1) ** (longest - share)
            / owners**longest
            * samples
        )
        if expected_samples > 0.5:
            break
        share -= 1
    return _fitting_bits(max(1, share))


def _fitting_bits(length: int) -> int:
    return next(bits for bits in LENGTH_BITS if length < 2**bits)


def expected_id_bytes(
    lookups: float,
    unique: float,
    rows: int,
    num_owners: int,
    *,
    list_ratio: float = 1.0,
    raw_list_ratio: float = 1.0,
) -> float:
    """Return the bytes of one table's ids in a message to one owner.

    lookups: number of lookups of the owner's rows; unique: distinct rows among them. rows: of the table; 0: an
    open table. list_ratio, raw_list_ratio: as in `TableLoad`."""
    if lookups <= 0:
        return 0.0
    head = list_header_bytes(lookups, rows)
    raw_list = (
        expected_unsorted_list_bytes(lookups, rows, num_owners) - head
    ) * raw_list_ratio + head
    # The number of distinct ids at an owner is random in the rows of the batch and in the owners of these rows.
    deviation = math.sqrt(unique * max(0.0, 1 - unique / (lookups * num_owners)))
    indices = sum(
        weight * expected_numbers_bytes(lookups, max(1.0, unique + deviations * deviation))
        for deviations, weight in NORMAL_QUADRATURE
    )
    distinct = expected_id_list_bytes(unique, rows, num_owners) * list_ratio + indices
    return 1 + min(raw_list, distinct)


def expected_id_list_bytes(count: float, rows: int, num_owners: int) -> float:
    """Return the expected bytes of a list of `count` unique rows of one owner, if every set of `count` rows is equally
    likely. This holds for hashed ids, and where popular ids are spread over a table; measure ids in order of popularity
    instead. rows 0: an open table. Pure."""
    if count <= 0:
        return 1.0
    least = math.floor(count)
    if count > least:  # a mean over batches
        part = count - least
        below, above = (expected_id_list_bytes(n, rows, num_owners) for n in (least, least + 1))
        return (1 - part) * below + part * above
    keys = -(-rows // num_owners) if rows else 2.0**64 / num_owners
    varint = 1 + sum(count >= 1 << 7 * i for i in range(1, 10))
    whole, rest = divmod(least, BLOCK)
    blocks = whole * _expected_distance_block_bytes(BLOCK, count, keys)
    if rest:
        blocks += _expected_distance_block_bytes(rest, count, keys)
    return varint + (0 if rows else 1) + blocks


def _expected_distance_block_bytes(length: int, count: float, keys: float) -> float:
    """Return the expected bytes of a block of `length` distances between `count` random keys of `keys`. The largest
    distance determines the width of all."""
    size = chance_before = 0.0
    for width in range(65):
        # A distance is 2^width or more if that many consecutive keys are not among the `count`.
        free = 1 - 2.0**width / max(1.0, keys - (count - 1) / 2)
        longer = free**count if free > 0 and 2.0**width <= keys - count else 0.0
        chance = (1 - longer) ** length
        size += (chance - chance_before) * (1 + math.ceil(length * width / 8))
        if chance == 1.0:  # for all larger widths, too
            break
        chance_before = chance
    return size


def expected_numbers_bytes(count: float, keys: float) -> float:
    """Return the expected bytes of `count` numbers below `keys`, each equally likely, as `_native.pack_numbers` packs
    them. Pure."""
    whole, rest = divmod(count, BLOCK)
    return whole * _expected_number_block_bytes(BLOCK, keys) + (
        _expected_number_block_bytes(rest, keys) if rest else 0.0
    )


def expected_unsorted_list_bytes(count: float, rows: int, num_owners: int) -> float:
    """Return the expected bytes of a list of `count` ids in any order, if each of an owner's rows is equally likely.
    rows 0: an open table."""
    keys = -(-rows // num_owners) if rows else 2.0**64
    return expected_numbers_bytes(count, keys) + list_header_bytes(count, rows)


def list_header_bytes(count: float, rows: int) -> float:
    """Return the bytes of the header of such a list: the count and, for an open table, the kind of the list and the
    least id."""
    return 1 + sum(count >= 1 << 7 * i for i in range(1, 10)) + (0 if rows else 11)


def _expected_number_block_bytes(length: float, keys: float) -> float:
    size = chance_before = 0.0
    for width in range(65):
        chance = min(1.0, 2.0**width / keys) ** length
        size += (chance - chance_before) * (1 + math.ceil(length * width / 8))
        if chance == 1.0:  # for all larger widths, too
            break
        chance_before = chance
    return size
