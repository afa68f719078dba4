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


def count_bag_length_bits(
    max_bag_length: int, num_lookups: float, num_samples: float, num_owners: int
) -> int:
    """Return the bits of a bag's length in a message to one owner; 0: all lengths are equal.

    max_bag_length: lookups of the feature's longest bag. num_lookups, num_samples: of a rank's batch."""
    is_equal = abs(num_lookups - max_bag_length * num_samples) < 0.5
    if num_owners == 1:
        return 0 if is_equal else _fitting_bits(max_bag_length)
    # Find the longest part of a bag at one owner that occurs in more than half a sample of a batch on average.
    share = max_bag_length
    expected_samples = 0.0
    while share > 0:
        expected_samples += (
            math.comb(max_bag_length, share)
            * (num_owners - 1) ** (max_bag_length - share)
            / num_owners**max_bag_length
            * num_samples
        )
        if expected_samples > 0.5:
            break
        share -= 1
    return _fitting_bits(max(1, share))


def _fitting_bits(length: int) -> int:
    return next(bits for bits in LENGTH_BITS if length < 2**bits)


def expected_id_bytes(
    num_lookups: float,
    num_unique_ids: float,
    num_table_rows: int,
    num_owners: int,
    *,
    list_ratio: float = 1.0,
    raw_list_ratio: float = 1.0,
) -> float:
    """Return the bytes of one table's ids in a message to one owner.

    num_lookups: number of lookups of the owner's rows; num_unique_ids: distinct rows among them. num_table_rows: of
    the table; 0: an open table. list_ratio, raw_list_ratio: as in `TableLoad`."""
    if num_lookups <= 0:
        return 0.0
    head = list_header_bytes(num_lookups, num_table_rows)
    raw_list = (
        expected_unsorted_list_bytes(num_lookups, num_table_rows, num_owners) - head
    ) * raw_list_ratio + head
    # The number of distinct ids at an owner is random in the rows of the batch and in the owners of these rows.
    deviation = math.sqrt(
        num_unique_ids * max(0.0, 1 - num_unique_ids / (num_lookups * num_owners))
    )
    indices = sum(
        weight
        * expected_numbers_bytes(num_lookups, max(1.0, num_unique_ids + deviations * deviation))
        for deviations, weight in NORMAL_QUADRATURE
    )
    distinct = (
        expected_id_list_bytes(num_unique_ids, num_table_rows, num_owners) * list_ratio + indices
    )
    return 1 + min(raw_list, distinct)


def expected_id_list_bytes(num_ids: float, num_table_rows: int, num_owners: int) -> float:
    """Return the expected bytes of a list of `num_ids` unique rows of one owner, if every set of `num_ids` rows is
    equally likely. This holds for hashed ids, and where popular ids are spread over a table; measure ids in order of
    popularity instead. rows 0: an open table. Pure."""
    if num_ids <= 0:
        return 1.0
    least = math.floor(num_ids)
    if num_ids > least:  # a mean over batches
        part = num_ids - least
        below, above = (
            expected_id_list_bytes(n, num_table_rows, num_owners) for n in (least, least + 1)
        )
        return (1 - part) * below + part * above
    keys = -(-num_table_rows // num_owners) if num_table_rows else 2.0**64 / num_owners
    varint = 1 + sum(num_ids >= 1 << 7 * i for i in range(1, 10))
    whole, rest = divmod(least, BLOCK)
    blocks = whole * _expected_distance_block_bytes(BLOCK, num_ids, keys)
    if rest:
        blocks += _expected_distance_block_bytes(rest, num_ids, keys)
    return varint + (0 if num_table_rows else 1) + blocks


def _expected_distance_block_bytes(block_length: int, num_keys: float, upper_bound: float) -> float:
    """Return the expected bytes of a block of `block_length` distances between `num_keys` random keys below
    `upper_bound`. The largest distance determines the width of all."""
    size = chance_before = 0.0
    for width in range(65):
        # A distance is 2^width or more if that many consecutive keys are not among the `num_keys`.
        free = 1 - 2.0**width / max(1.0, upper_bound - (num_keys - 1) / 2)
        longer = free**num_keys if free > 0 and 2.0**width <= upper_bound - num_keys else 0.0
        chance = (1 - longer) ** block_length
        size += (chance - chance_before) * (1 + math.ceil(block_length * width / 8))
        if chance == 1.0:  # for all larger widths, too
            break
        chance_before = chance
    return size


def expected_numbers_bytes(num_numbers: float, upper_bound: float) -> float:
    """Return the expected bytes of `num_numbers` numbers below `upper_bound`, each equally likely, as
    `_native.pack_numbers` packs them. Pure."""
    whole, rest = divmod(num_numbers, BLOCK)
    return whole * _expected_number_block_bytes(BLOCK, upper_bound) + (
        _expected_number_block_bytes(rest, upper_bound) if rest else 0.0
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


def _expected_number_block_bytes(block_length: float, upper_bound: float) -> float:
    size = chance_before = 0.0
    for width in range(65):
        chance = min(1.0, 2.0**width / upper_bound) ** block_length
        size += (chance - chance_before) * (1 + math.ceil(block_length * width / 8))
        if chance == 1.0:  # for all larger widths, too
            break
        chance_before = chance
    return size
