"""Tensors in and out of the core: as torch's own functions hand them over, and held for as long as somebody looks."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest
import torch

from colonnade import _native

needs_exchange = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch has no such functions yet"
)
VALUES, INDEX = torch.arange(10, 20, dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)


def a_plan(ids: torch.Tensor) -> _native.Plan:
    lookups = _native.Lookups(
        ids, torch.tensor([0, len(ids)]), torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.uint8), len(ids), None, None,
    )  # fmt: skip
    return _native.make_plan(lookups, torch.tensor([0]), torch.tensor([1]))


@needs_exchange
def test_no_python_is_run_for_a_tensor():
    """Three microseconds of each, where it is."""
    out, plan = torch.empty(2, dtype=torch.int32), a_plan(torch.tensor([5, 2, 5]))
    matrix, dots = torch.ones(3, 1, 4), torch.empty(3, 1)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
    try:
        _native.take(VALUES, INDEX, out)
        inverse = plan.inverse
        _native.fm([matrix, matrix], dots)
    finally:
        sys.setprofile(None)
    assert not calls
    assert out.tolist() == [13, 11]
    assert inverse.dtype == torch.int32 and inverse[0] == inverse[2] != inverse[1]
    assert dots.flatten().tolist() == [4, 4, 4]


def test_tensors_of_other_kinds_go_by_python_or_are_refused():
    rows, out = torch.ones(2, 1, 4), torch.empty(2, 1)
    _native.fm([rows, torch.nn.Parameter(rows)], out)
    assert out.flatten().tolist() == [4, 4]
    for wrong in (rows.to("meta"), rows.to_sparse(), rows.to(torch.complex64), [1.0]):
        with pytest.raises((TypeError, ValueError)):
            _native.fm([rows, wrong], out)


def test_a_tensor_whose_storage_was_freed_is_refused():
    """FSDP leaves parameters like this between uses: the shape is there, the memory is not."""
    rows, out = torch.ones(2, 1, 4), torch.empty(2, 1)
    index, freed = INDEX.clone(), torch.ones(2, 1, 4)
    for item in (index, freed):
        item.untyped_storage().resize_(0)
    calls = (
        lambda: _native.take(VALUES, index, torch.empty(2, dtype=torch.int32)),
        lambda: _native.take(VALUES, INDEX, index),
        lambda: _native.fm([rows, freed], out),
        lambda: _native.fm_gradient([rows, rows], out, [None, freed]),
        lambda: _native.crc32c(freed),
    )
    for call in calls:
        with pytest.raises(
            ValueError, match=r"got (int32|float32) \(2.* without memory, wanted one whose storage"
        ):
            call()


def test_views_and_arrays_of_others_are_what_they_say():
    out = torch.zeros(4, dtype=torch.int32)
    _native.take(VALUES[2:5], INDEX[1:], out[2:3])
    assert out.tolist() == [0, 0, 13, 0]
    _native.take(VALUES.numpy(), INDEX.numpy(), out[:2])
    assert out.tolist() == [13, 11, 13, 0]
    readonly = VALUES.numpy().copy()
    readonly.flags.writeable = False
    _native.take(readonly, INDEX, out[2:])
    assert out.tolist() == [13, 11, 13, 11]
    with pytest.raises(ValueError, match="wanted contiguous CPU int32"):
        _native.take(VALUES[::2], INDEX, out[:2])
    empty = torch.empty(0, dtype=torch.int32)
    _native.take(VALUES, empty, empty.clone())


def test_what_is_looked_into_stays_for_as_long_as_somebody_looks():
    ids = torch.tensor([7, 3, 7])
    lookups = _native.Lookups(
        ids, torch.tensor([0, 3]), torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.uint8), 3, None, None,
    )  # fmt: skip
    before = sys.getrefcount(ids)
    del lookups
    assert sys.getrefcount(ids) == before - 1
    unique = a_plan(ids).unique_ids  # the plan itself has gone
    gc.collect()
    again = [a_plan(torch.arange(50 + n)) for n in range(20)]  # which would take its memory
    assert sorted(unique.tolist()) == [3, 7] and len(again) == 20
    view = _native.empty_bytes(1 << 16)[8:]
    address = view.data_ptr() - 8
    others = [_native.empty_bytes(1 << 16) for _ in range(8)]
    assert address not in {other.data_ptr() for other in others}
    thread = threading.Thread(target=lambda retained: retained.clear(), args=([view],))
    del view
    thread.start()
    thread.join()
    assert address in {_native.empty_bytes(1 << 16).data_ptr()}, "its block serves again"


def test_results_are_tensors_of_their_dtype():
    ids, slots = torch.tensor([4, 9]), np.zeros(0, np.int32)
    directory = _native.Directory(3, _native.DirectoryClock(1, 1, 1.0, 0), "lru")
    directory.step(ids, None, None, 0)
    columns = directory.rows()
    assert [array.dtype for array in columns] == [torch.int64] + [torch.int32] * 6
    assert columns[0].tolist() == [4, 9] and not columns[0].requires_grad
    assert a_plan(ids[:0]).entries.shape == slots.shape
