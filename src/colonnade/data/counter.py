"""Counter-based random numbers: word i of a stream is a pure function of (key, i) (splitmix64, Steele et al. 2014).

They use integer arithmetic only, so every machine and library version draws the same words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GAMMA = 0x9E3779B97F4A7C15
MASK = 0xFFFFFFFFFFFFFFFF

Words = NDArray[np.uint64]


def mix_words(words: Words) -> Words:
    """Apply mix64, the finaliser of splitmix64, a bijection of 64-bit words, to `words` in place, and return them."""
    scratch = np.empty_like(words)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
        np.right_shift(words, np.uint64(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        if factor is not None:
            np.multiply(words, np.uint64(factor), out=words)
    return words


def stream_key(*parts: int) -> int:
    """Derive one 64-bit key from a tuple of integers; the order of the parts matters."""
    key = 0
    for part in parts:
        key = int(mix_words(np.array([(key + GAMMA + part) & MASK], dtype=np.uint64))[0])
    return key


def random_words(key: int, start: int, stop: int) -> Words:
    """Return words start .. stop-1 of the stream `key`."""
    return read_words(key, np.arange(start, stop, dtype=np.uint64))


def read_words(key: int, positions: Words) -> Words:
    """Return the words of the stream `key` at `positions`, an array that is overwritten."""
    positions += np.uint64(1)
    positions *= np.uint64(GAMMA)
    positions += np.uint64(key)
    return mix_words(positions)


def random_permutation(size: int, key: int) -> NDArray[np.int64]:
    """Return a permutation of 0 .. size-1 that depends only on (size, key): indices sorted by their words."""
    return np.argsort(random_words(key, 0, size), kind="stable")
