"""Who owns a row: row-wise, by a mixed hash. The native core computes the same (`_native.owner_of`)."""

from __future__ import annotations


def share(rows: int, num_ranks: int) -> int:
    """Most rows of a vocabulary table that one rank owns: ids come in runs of num_ranks, one per rank."""
    return -(-rows // num_ranks)
