"""Hashing of values to 64-bit ids, the same in every process, on every machine and from every file format.

Version 1. The UTF-8 bytes of a text are split into little-endian 64-bit words, the last one padded with zeros:

    h = mix64(length * GAMMA);  for each word:  h = mix64((h + GAMMA) ^ word)

`HASH_VERSION` is part of every file schema, so that the ids on which a run trained never change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from colonnade.data.counter import GAMMA, MASK, Words, mix_words

HASH_VERSION = 1
MISSING_ID = -(1 << 63)
"""Id of a missing value where ids are open or hashed."""

MAX_TEXT_BYTES = 1 << 16
"""Maximal bytes of a text that is an id."""

SLICE = 1 << 14
"""Number of texts hashed at a time, so that the arrays stay in cache."""

FULL = np.uint64(MASK)
STEP = np.uint64(GAMMA)


def hash_text(text: bytes) -> int:
    """Hash one text to a signed 64-bit id: the definition of the hash that `hash_texts` computes fast."""
    h = _mix(len(text) * GAMMA & MASK)
    for at in range(0, len(text), 8):
        h = _mix((h + GAMMA & MASK) ^ int.from_bytes(text[at : at + 8], "little"))
    return h - (1 << 64) if h >> 63 else h


def _mix(x: int) -> int:
    """Compute `counter.mix_words` of a plain integer."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def hash_texts(texts: pa.Array) -> NDArray[np.int64]:
    """Hash S strings or binaries to ids (S,); a null gets the id of the empty text."""
    offsets, data = view_text_buffers(texts)
    # View an unaligned word at every byte; eight bytes of padding let the last text have one too.
    padded = np.zeros(len(data) + 8, dtype=np.uint8)
    padded[: len(data)] = data
    word_at = np.ndarray((len(data) + 1,), dtype="<u8", buffer=padded.data, strides=(1,))
    hashes = np.empty(len(texts), dtype=np.uint64)
    for begin in range(0, len(texts), SLICE):
        end = min(begin + SLICE, len(texts))
        hashes[begin:end] = _hash_text_slice(offsets[begin : end + 1], word_at)
    return hashes.view(np.int64)


def view_text_buffers(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return (offsets, bytes) of strings or binaries: text i is bytes[offsets[i]:offsets[i + 1]], offsets[0] is 0."""
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


def _hash_text_slice(text_offsets: NDArray[np.int64], words_at_bytes: NDArray) -> Words:
    remaining = np.diff(text_offsets)  # bytes not yet hashed, of the texts in `active`
    position = text_offsets[:-1]
    hashes = mix_words(remaining.astype(np.uint64) * STEP)
    active = np.flatnonzero(remaining)
    if len(active) < len(remaining):
        remaining = remaining[active]
        position = position[active]
    while len(active):
        word = words_at_bytes[position]
        if remaining.min() < 8:
            unused = (np.maximum(8 - remaining, 0) << 3).astype(np.uint64)
            word &= FULL >> unused
        is_all_active = len(active) == len(hashes)
        if is_all_active:
            word ^= hashes + STEP
            hashes = mix_words(word)
        else:
            word ^= hashes[active] + STEP
            hashes[active] = mix_words(word)
        has_more = remaining > 8
        if not has_more.all():
            active = active[has_more]
            remaining = remaining[has_more]
            position = position[has_more]
        remaining = remaining - 8
        position = position + 8
    return hashes


def hash_to_rows(ids: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Hash 64-bit ids to rows 0 .. rows-1: mix64(id) mod rows."""
    words = mix_words(ids.astype(np.uint64))
    words %= np.uint64(rows)
    return words.view(np.int64)


def add_namespace_to_ids(ids: NDArray[np.int64], field_name: str) -> NDArray[np.int64]:
    """Map a field's ids (S,) to mix64(id ^ hash_text(field_name)), so that fields with one table share no ids.

    Distinct ids of a field stay distinct. Ids of two fields collide with a probability of 2^-64 per pair, for any
    number of fields.
    """
    key = np.uint64(hash_text(field_name.encode()) & MASK)
    return mix_words(ids.view(np.uint64) ^ key).view(np.int64)


def combine_ids(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Combine the ids of several fields into one id per sample (S,), by `counter.stream_key`; the order matters."""
    key = np.zeros(len(parts[0]), dtype=np.uint64)
    for part in parts:
        key = mix_words(key + STEP + part.view(np.uint64))
    return key.view(np.int64)
