"""Ids of a segment's records in as few bytes as their range needs, back as they were; whatever else is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.errors import CorruptionError, StorageError
from colonnade.files.durable import checksum_line
from colonnade.store.log.key_list import (
    HEADER,
    MAX_BYTES,
    Keys,
    encode_key_list,
    open_key_list,
    read_key_list,
)

LIMITS = [-(2**63), -(2**63) + 1, -257, -1, 0, 1, 255, 256, 2**31, 2**63 - 1]
IDS = st.lists(st.one_of(st.sampled_from(LIMITS), st.integers(-(2**63), 2**63 - 1)), max_size=97)


def as_ids(ids) -> np.ndarray:
    return np.array(ids, np.int64)


@given(ids=IDS, cut=st.tuples(st.integers(0, 97), st.integers(0, 97)))
def test_ids_come_back(ids, cut):
    keys = Keys.pack_ids(as_ids(ids))
    assert keys.ids().tolist() == ids and keys.num_records == len(ids)
    first, last = sorted(min(n, len(ids)) for n in cut)
    assert keys.ids(first, last).tolist() == ids[first:last]


@pytest.mark.parametrize(
    ("ids", "width"),
    [
        ([], 0),
        ([7], 0),
        ([2**63 - 1] * 3, 0),
        (range(1000, 1256), 1),
        (range(1000, 1257), 2),
        ([-1, 254], 1),
        ([0, 10_131_226], 3),  # the largest table of Criteo
        ([0, 2**24], 4),
        ([0, 2**56], 8),
        ([-(2**63), 2**63 - 1], 8),
    ],
)
def test_as_few_bytes_as_the_range_needs(ids, width, tmp_path):
    ids = as_ids(list(ids))
    data = encode_key_list(9, ids, 2**64 - 1)
    assert len(data) == MAX_BYTES + width * len(ids) and Keys.pack_ids(ids).width == width
    path = tmp_path / "segment-00000009.keys"
    path.write_bytes(data)
    assert read_key_list(open_key_list(path), 9, len(ids), 2**64 - 1).ids().tolist() == ids.tolist()


def test_what_is_not_the_key_list_is_refused(tmp_path):
    path = tmp_path / "segment-00000009.keys"
    with pytest.raises(CorruptionError, match="missing"):
        open_key_list(path)
    ids = as_ids([3, 2**63 - 1, -5])
    path.write_bytes(encode_key_list(9, ids, 11))
    file = open_key_list(path)
    assert read_key_list(file, 9, 3, 11).ids().tolist() == ids.tolist()
    for number, num_records, checksum in ((8, 3, 11), (9, 2, 11), (9, 3, 12)):
        with pytest.raises(CorruptionError, match="they are of another commit"):
            read_key_list(file, number, num_records, checksum)
    whole = path.read_bytes()
    content = whole[: -len(checksum_line(b""))]
    for changed in (
        content[:40] + (9).to_bytes(4, "little") + content[44:],  # a width beyond 8
        content[:40] + (7).to_bytes(4, "little") + content[44:],  # or other than the file's length
        content[:44] + b"\1" + content[45:],
        content[: HEADER.size - 1],
        b"",
    ):
        path.write_bytes(changed + checksum_line(changed))
        with pytest.raises(CorruptionError, match="they are of another commit"):
            read_key_list(open_key_list(path), 9, 3, 11)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptionError, match="torn or altered"):
            read_key_list(open_key_list(path), 9, 3, 11)
    with pytest.raises(StorageError, match="wanted a regular file"):
        read_key_list(open_key_list(tmp_path), 9, 3, 11)
