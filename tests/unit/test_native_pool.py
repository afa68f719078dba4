"""pool and all_finite: against their twins, on every path, for any number of threads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from native_batches import batches, everywhere, running_on, same_bits

from colonnade import _native
from colonnade.ops import reference


class Places:
    """Random rows for a batch's tables, and outputs with gaps between rows that nobody may touch."""

    def __init__(self, batch, num_rows=50, gap=3):
        rng = np.random.default_rng(batch.seed)
        self.batch = batch
        self.tables = [
            torch.from_numpy(rng.standard_normal((num_rows, dim))).to(batch.dtype)
            for dim in batch.dims
        ]
        for table in self.tables:
            table[::5] = -0.0  # copied, not added to 0
        self.index = torch.from_numpy(rng.integers(0, num_rows, size=len(batch.ids))).int()
        self.outputs = [
            torch.full((batch.outputs(f), dim + gap), torch.nan, dtype=batch.dtype)
            for f, _, dim in batch.features()
        ]

    def pool(self):
        _native.pool(
            self.batch.lookups(),
            self.index,
            torch.tensor([table.data_ptr() for table in self.tables]),
            torch.tensor([table.stride(0) * table.itemsize for table in self.tables]),
            torch.tensor(self.batch.dims, dtype=torch.int32),
            torch.tensor([out.data_ptr() for out in self.outputs]),
            torch.tensor([out.shape[1] * out.itemsize for out in self.outputs]),
            self.batch.dtype_name,
        )


@settings(max_examples=60, deadline=None)
@given(batches(dims=(1, 3, 8, 16, 17, 32, 64, 128, 200)))
def test_equals_twin(batch):
    places = Places(batch)
    wanted = []
    for f, part, _ in batch.features():
        rows = places.tables[batch.feature_tables[f]][places.index[part].long()]
        weights = None if batch.weights is None else batch.weights[part]
        wanted.append(reference.pool(rows, batch.bags(f), batch.poolings[f], weights))
    for isa, num_threads in everywhere():
        with running_on(isa, num_threads):
            places.pool()
        for f, _, dim in batch.features():
            assert same_bits(places.outputs[f][:, :dim], wanted[f]), (isa, num_threads, f)
            assert places.outputs[f][:, dim:].isnan().all()
            places.outputs[f].fill_(torch.nan)


@pytest.mark.parametrize("dim", [16, 48, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_that_are_streamed(dim, dtype):
    """Two features side by side in one aligned output of more than a mebibyte, as the trainer lays them out."""
    batch_size, num_rows = 4099, 1000
    table = torch.randn(num_rows, dim, dtype=dtype)
    index = torch.randint(0, num_rows, (2 * batch_size,), dtype=torch.int32)
    lookups = _native.Lookups(
        index.long(),
        torch.tensor([0, batch_size, 2 * batch_size]),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.uint8),
        batch_size,
        None,
        None,
    )
    storage = torch.empty(batch_size * 2 * dim + 16, dtype=dtype)
    skip = -storage.data_ptr() % 64 // table.itemsize
    out = storage[skip : skip + batch_size * 2 * dim].view(batch_size, 2 * dim)
    for isa, num_threads in everywhere():
        out.fill_(torch.nan)
        with running_on(isa, num_threads):
            _native.pool(
                lookups,
                index,
                torch.tensor([table.data_ptr()]),
                torch.tensor([dim * table.itemsize]),
                torch.tensor([dim], dtype=torch.int32),
                torch.tensor([out.data_ptr(), out.data_ptr() + dim * table.itemsize]),
                torch.tensor([2 * dim * table.itemsize] * 2),
                str(dtype).removeprefix("torch."),
            )
        rows = table[index.long()].view(2, batch_size, dim)
        assert same_bits(out, torch.cat([rows[0], rows[1]], dim=1))


def simple_call(**change):
    table = torch.zeros(4, 2)
    arguments = {
        "ids": torch.tensor([0, 1]),
        "index": torch.tensor([0, 1], dtype=torch.int32),
        "bases": torch.tensor([table.data_ptr()]),
        "strides": torch.tensor([8]),
        "dims": torch.tensor([2], dtype=torch.int32),
        "weights": None,
        "dtype": "float32",
        **change,
    }
    out = torch.zeros(2, 2)
    lookups = _native.Lookups(
        arguments["ids"],
        torch.tensor([0, 2]),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([0], dtype=torch.uint8),
        2,
        None,
        arguments["weights"],
    )
    _native.pool(
        lookups,
        arguments["index"],
        arguments["bases"],
        arguments["strides"],
        arguments["dims"],
        torch.tensor([out.data_ptr()]),
        torch.tensor([8]),
        arguments["dtype"],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": torch.tensor([0, -1], dtype=torch.int32)}, "lookup 1 has no row"),
        ({"index": torch.tensor([0], dtype=torch.int32)}, "index has 1 elements, wanted 2"),
        ({"index": torch.tensor([0, 1])}, "index: got int64"),
        ({"strides": torch.tensor([8, 8])}, "strides has 2 elements, wanted 1"),
        ({"dims": torch.tensor([0], dtype=torch.int32)}, "table 0 has dim 0"),
        ({"dtype": "float16"}, "got 'float16', choose from float32, float64"),
        ({"weights": torch.ones(2).double()}, "weights are float64, the tables float32"),
        (
            {
                "bases": torch.empty(0, dtype=torch.int64),
                "strides": torch.empty(0, dtype=torch.int64),
                "dims": torch.empty(0, dtype=torch.int32),
            },
            "feature 0 names table 0 of 0",
        ),
    ],
)
def test_refused(change, message):
    simple_call()
    with pytest.raises(ValueError, match=message):
        simple_call(**change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 17, 140_003])
def test_all_finite(n, dtype):
    values = torch.randn(n, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    values[: n // 2] = torch.finfo(dtype).max
    for isa, num_threads in everywhere():
        with running_on(isa, num_threads):
            assert _native.all_finite(values.data_ptr(), n, name)
            for bad in (-torch.inf, torch.nan):
                for at in {0, n // 2, n - 1} if n else ():
                    spoilt = values.clone()
                    spoilt[at] = bad
                    assert not reference.all_finite(spoilt)
                    assert not _native.all_finite(spoilt.data_ptr(), n, name)
