"""RowIndex against a dict, crc32c against its definition, and how the module sits in its process."""

import os
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from example_counts import examples
from forked_script import run_script
from hypothesis import given, settings
from hypothesis import strategies as st
from log_bytes import crc32c
from native_batches import LIMITS, unmix64

from colonnade import _native

# Ids of many kinds: neighbours, limits, and some whose hashes share a bucket of any small index.
CLOSE = [unmix64((low << 40 | 0xFFFFFFFF) % 2**64) for low in range(40)]
IDS = st.one_of(
    st.integers(0, 50), st.sampled_from(LIMITS + CLOSE), st.integers(-(2**63), 2**63 - 1)
)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "erase"]), st.lists(IDS, max_size=40)), max_size=25
)


def longs(values):
    return torch.tensor(list(values), dtype=torch.int64)


@settings(max_examples=examples(40, 150), deadline=None)
@given(OPERATIONS, st.integers(0, 2**63 - 1))
def test_row_index_is_a_dict(operations, value):
    index, model = _native.RowIndex(), {}
    for operation, ids in operations:
        if operation == "put":
            values = [(value + i) % 2**63 for i in range(len(ids))]
            index.put(longs(ids), longs(values))
            model.update(zip(ids, values, strict=True))
        elif operation == "get":
            out = torch.empty(len(ids), dtype=torch.int64)
            index.get(longs(ids), out)
            assert out.tolist() == [model.get(i, -1) for i in ids]
        else:
            index.erase(longs(ids))
            for i in ids:
                model.pop(i, None)
        assert len(index) == len(model)
    ids, values = index.items()
    assert ids.tolist() == sorted(model)
    assert values.tolist() == [model[i] for i in sorted(model)]


def test_row_index_grows_and_shrinks():
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(np.unique(rng.integers(-(2**63), 2**63 - 1, size=300_000)))
    ids = ids[torch.randperm(len(ids))]
    index = _native.RowIndex()
    for part in ids.split(70_001):
        index.put(part, part // 2 & 2**62)
    retained = ids[::3].contiguous()
    index.erase(ids[1::3].contiguous())
    index.erase(ids[2::3].contiguous())
    assert len(index) == len(retained)
    out = torch.empty_like(ids)
    index.get(ids, out)
    assert torch.equal(out[::3], retained // 2 & 2**62)
    assert (out[1::3] == -1).all() and (out[2::3] == -1).all()
    assert torch.equal(index.items()[0], retained.sort().values)


def test_row_index_with_one_bucket_for_all():
    """Index is slow, never wrong, with more rows than a bucket's counter of passers-by can count."""
    ids = longs({unmix64((low << 40 | 0xFFFFFFFF) % 2**64) for low in range(2000)})
    index = _native.RowIndex()
    index.put(ids, ids & 2**62)
    index.erase(ids[:1000].contiguous())
    out = torch.empty_like(ids)
    index.get(ids, out)
    assert (out[:1000] == -1).all() and torch.equal(out[1000:], ids[1000:] & 2**62)


def test_row_index_refuses():
    index = _native.RowIndex()
    with pytest.raises(ValueError, match="got -1 at position 1; -1 means absent"):
        index.put(longs([1, 2]), longs([0, -1]))
    assert len(index) == 0
    with pytest.raises(ValueError, match=r"values: got int64 \(3\), wanted contiguous CPU int64"):
        index.put(longs([1, 2]), longs([0, 1, 2]))
    with pytest.raises(ValueError, match="ids: got float32"):
        index.erase(torch.zeros(2))


# crc32c


def test_crc32c_known_answers():
    """RFC 3720, appendix B.4."""
    for data, wanted in [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ]:
        assert _native.crc32c(np.frombuffer(data, np.uint8)) == wanted
        assert crc32c(data) == wanted


@pytest.mark.parametrize("size", [1, 7, 8, 63, 1000, 3071, 3072, 3073, 6200, 20_000])
def test_crc32c_equals_twin(size):
    data = np.random.default_rng(size).integers(0, 256, size=size + 3, dtype=np.uint8)
    for start in (0, 1, 3):
        part = data[start : start + size]
        assert _native.crc32c(part) == crc32c(part.tobytes())


def test_crc32c_takes_any_contiguous_array():
    rows = torch.randn(5, 3, dtype=torch.float64)
    wanted = crc32c(rows.numpy().tobytes())
    assert _native.crc32c(rows) == _native.crc32c(rows.numpy()) == wanted
    with pytest.raises(ValueError, match="contiguous"):
        _native.crc32c(rows.t())
    assert _native.crc32c(rows) != zlib.crc32(rows.numpy().tobytes())


# The process


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_runtime():
    """A second runtime's threads would fight the first's: only torch's may be loaded, and it is used."""
    code = """
import torch
from colonnade import _native
values = torch.zeros(1 << 22)
assert _native.all_finite(values.data_ptr(), len(values), "float32")
maps = [line.split()[-1] for line in open("/proc/self/maps") if len(line.split()) > 5]
print(*{m for m in maps if "gomp" in m or "iomp" in m or "libomp" in m})
"""
    assert len(run(code, OMP_NUM_THREADS="3")) == 1


def test_threads_follow_torch_unless_told(tmp_path):
    code = """
import torch
from colonnade import _native
torch.set_num_threads(3)
print(_native.num_threads())
_native.set_num_threads(2)
print(_native.num_threads())
_native.set_num_threads(0)
print(_native.num_threads())
"""
    done = run_script(tmp_path, code, environment=dict(os.environ))
    assert done.stdout.split() == ["3", "2", "3"], done.stderr


@pytest.mark.slow
def test_threads_of_a_run_bind_every_thread():
    """OpenMP would have threads that are started later take as many as OMP_NUM_THREADS says."""
    code = """
import threading
from colonnade import Mesh, _native
from colonnade.run.run import set_num_threads
set_num_threads(2, Mesh())
beside = threading.Thread(target=lambda: print(_native.num_threads()))
beside.start()
beside.join()
"""
    assert run(code, OMP_NUM_THREADS="6") == ["2"]


@pytest.mark.parametrize(
    "message, wanted", [("2", "2"), pytest.param("unset", "1", marks=pytest.mark.slow)]
)
def test_threads_of_ranks_are_shared_out_once(message, wanted):
    """OMP_NUM_THREADS is already for each rank: launchers divide before they set it."""
    code = """
import os
if os.environ["OMP_NUM_THREADS"] == "unset":
    del os.environ["OMP_NUM_THREADS"]
from colonnade import Mesh, World, _native
from colonnade.run import run
run.usable_processors = lambda: 2
mesh = Mesh(World(num_hosts=1, ranks_per_host=2))
for _ in range(2):
    run.set_num_threads(0, mesh)
    print(_native.num_threads())
"""
    assert run(code, OMP_NUM_THREADS=message) == [wanted] * 2


def test_instruction_sets():
    assert _native.isa() == _native.available_isas()[0]
    assert _native.available_isas()[-1] == "portable"
    with pytest.raises(ValueError, match=r"got .sse9., this processor has .*portable"):
        _native.set_isa("sse9")
