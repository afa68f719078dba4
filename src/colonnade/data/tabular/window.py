"""In which order an epoch reads blocks of samples: pure functions of block lengths, window and key.

Shuffled: the blocks are put in an order drawn by the epoch's key, put together into windows of at
least `window` samples (a window closes with the block that fills it), and permuted inside each window.
So a window holds fewer than `window` samples more than the largest block, and any position of an epoch is found by
arithmetic on lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colonnade.data.counter import permutation, stream_key

READ_SAMPLES = 1 << 16
"""Samples that are read together, at least, where nothing is shuffled."""


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """W windows over P blocks."""

    blocks: NDArray[np.int64]  # (P,) numbers of the blocks in the order in which they are read
    bounds: NDArray[np.int64]  # (W + 1,): window w is blocks[bounds[w]:bounds[w + 1]]
    starts: NDArray[
        np.int64
    ]  # (W + 1,): its samples are starts[w] .. starts[w + 1] - 1 of the epoch
    key: int | None  # None: in the order of the file

    def order(self, window: int) -> NDArray[np.int64] | None:
        """Which of the window's samples comes at each place; None: as they are."""
        if self.key is None:
            return None
        size = int(self.starts[window + 1] - self.starts[window])
        return permutation(size, stream_key(self.key, window))

    def at(self, sample: int) -> int:
        """The window that holds the `sample`-th sample of the epoch."""
        return int(np.searchsorted(self.starts, sample, side="right")) - 1


def windows(lengths: NDArray[np.int64], window: int, key: int | None) -> Windows:
    """Of one epoch. `lengths` (P,): samples of each block, 1 or more. `key` None: not shuffled."""
    if key is None:
        blocks, least = np.arange(len(lengths)), READ_SAMPLES
    else:
        blocks, least = permutation(len(lengths), stream_key(key)), window
    ends = np.cumsum(lengths[blocks])
    bounds = [0]
    while bounds[-1] < len(blocks):
        begun = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        last = int(np.searchsorted(ends, begun + least, side="left"))
        bounds.append(min(last, len(blocks) - 1) + 1)
    starts = np.concatenate([[0], ends])[bounds]
    return Windows(blocks, np.array(bounds), starts.astype(np.int64), key)
