"""From values to 64-bit ids, the same in every process, on every machine and from every kind of file.

Version 1. A text is its UTF-8 bytes, cut into little-endian 64-bit words, the last one filled with zeros:

    h = mix64(length * GAMMA);  for each word:  h = mix64((h + GAMMA) ^ word)

`HASH_VERSION` is part of every declaration: ids that a run trained on stay what they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from colonnade.data.counter import GAMMA, MASK, Words, mix64

HASH_VERSION = 1
MISSING_ID = -(1 << 63)
"""The id of a missing value where ids are open or hashed."""

MAX_TEXT_BYTES = 1 << 16
"""Longest text that is an id."""

SLICE = 1 << 14
"""Texts hashed at a time: what is touched stays in cache."""

FULL = np.uint64(MASK)
STEP = np.uint64(GAMMA)


def hash_text(text: bytes) -> int:
    """The definition, and the slow twin of `hash_texts`. As a signed 64-bit number."""
    h = _mix(len(text) * GAMMA & MASK)
    for at in range(0, len(text), 8):
        h = _mix((h + GAMMA & MASK) ^ int.from_bytes(text[at : at + 8], "little"))
    return h - (1 << 64) if h >> 63 else h


def _mix(x: int) -> int:
    """mix64 of counter.py in plain integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def hash_texts(texts: pa.Array) -> NDArray[np.int64]:
    """(S,) ids of S strings or binaries; of a null, the id of the empty text."""
    offsets, data = text_buffers(texts)
    # An unaligned word at every byte; eight more bytes so that the last text has one too.
    padded = np.zeros(len(data) + 8, dtype=np.uint8)
    padded[: len(data)] = data
    word_at = np.ndarray((len(data) + 1,), dtype="<u8", buffer=padded.data, strides=(1,))
    hashes = np.empty(len(texts), dtype=np.uint64)
    for begin in range(0, len(texts), SLICE):
        end = min(begin + SLICE, len(texts))
        hashes[begin:end] = _hash_slice(offsets[begin : end + 1], word_at)
    return hashes.view(np.int64)


def text_buffers(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """`(offsets, bytes)` of strings or binaries: text i is bytes[offsets[i]:offsets[i + 1]], offsets[0] is 0."""
    if texts.type in (pa.string_view(), pa.binary_view()):
        texts = texts.cast(pa.large_binary())
    kind = np.int32 if texts.type in (pa.string(), pa.binary()) else np.int64
    _, offsets_buffer, data_buffer = texts.buffers()
    if len(texts) == 0 or offsets_buffer is None:
        return np.zeros(len(texts) + 1, np.int64), np.empty(0, np.uint8)
    offsets = np.frombuffer(offsets_buffer, dtype=kind)[texts.offset :][: len(texts) + 1]
    offsets = offsets.astype(np.int64)
    data = np.empty(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)
    return offsets - offsets[0], data[offsets[0] : offsets[-1]]


def _hash_slice(offsets: NDArray[np.int64], word_at: NDArray) -> Words:
    left = np.diff(offsets)  # bytes not yet hashed, of the texts in `active`
    place = offsets[:-1]
    hashes = mix64(left.astype(np.uint64) * STEP)
    active = np.flatnonzero(left)
    if len(active) < len(left):
        left, place = left[active], place[active]
    while len(active):
        word = word_at[place]
        if left.min() < 8:
            unused = (np.maximum(8 - left, 0) << 3).astype(np.uint64)
            word &= FULL >> unused
        whole = len(active) == len(hashes)
        if whole:
            word ^= hashes + STEP
            hashes = mix64(word)
        else:
            word ^= hashes[active] + STEP
            hashes[active] = mix64(word)
        more = left > 8
        if not more.all():
            active, left, place = active[more], left[more], place[more]
        left = left - 8
        place = place + 8
    return hashes


def rows_of(ids: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Any 64-bit ids hashed into 0 .. rows-1: mix64(id) mod rows."""
    words = mix64(ids.astype(np.uint64))
    words %= np.uint64(rows)
    return words.view(np.int64)


def add_namespace(ids: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """(S,) of a field's ids, others: mix64(id ^ hash_text(name)). Different ids of a field stay different; those of
    two fields meet by chance alone, one pair in 2^64, however many fields there are."""
    key = np.uint64(hash_text(name.encode()) & MASK)
    return mix64(ids.view(np.uint64) ^ key).view(np.int64)


def cross_ids(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """(S,) one id for each combination of ids, the order of the parts mattering: counter.stream_key of them."""
    key = np.zeros(len(parts[0]), dtype=np.uint64)
    for part in parts:
        key = mix64(key + STEP + part.view(np.uint64))
    return key.view(np.int64)
