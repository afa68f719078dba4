"""pool and all_finite: against their twins, on every path, for any number of threads."""

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_batches import batches, everywhere, running_on, same_bits

from colonnade import _native
from colonnade.lookup.reads import pool_squares
from colonnade.ops import reference

ROUNDED = [torch.float32, torch.bfloat16, torch.float16]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


class Places:
    """Random rows for a batch's tables, reads of some of their columns, and outputs with gaps between rows that
    nobody may touch."""

    def __init__(self, batch, row_dtype, out_dtype, num_rows=50, gap=3):
        rng = np.random.default_rng(batch.seed)
        self.batch, self.row_dtype, self.out_dtype = batch, row_dtype, out_dtype
        self.tables = []
        for dim in batch.dims:
            width = dim + int(rng.choice([0, 1, 16, 40]))
            table = torch.from_numpy(rng.standard_normal((num_rows, width))).to(row_dtype)
            table[::5] = -0.0  # copied, not added to 0
            table[1::5] *= 2e4  # sums beyond float16
            table[2::5] *= 1e-6  # and subnormal there
            self.tables.append(table)
        self.index = torch.from_numpy(rng.integers(0, num_rows, size=len(batch.ids))).int()
        self.reads = []  # (feature, column, dim), in any order, none or several of a feature
        for f, _, dim in batch.features():
            for _ in range(rng.choice([1, 1, 2, 0])):
                width = self.tables[batch.feature_tables[f]].shape[1]
                self.reads.append((f, int(rng.choice([0, width - dim])), dim))
        rng.shuffle(self.reads)
        self.outputs = [
            torch.full((batch.outputs(f), dim + gap), torch.nan, dtype=out_dtype)
            for f, _, dim in self.reads
        ]

    def ordered(self):
        """All lookups by row, feature by feature; those of the first two are mixed."""
        feature = np.empty(len(self.index), dtype=np.int64)
        for f, part, _ in self.batch.features():
            feature[part] = max(f, 1)
        return torch.from_numpy(np.lexsort((self.index.numpy(), feature))).int()

    def pool(self, order=None):
        features, columns, dims = zip(*self.reads, strict=True) if self.reads else ([], [], [])
        _native.pool(
            self.batch.lookups(),
            self.index,
            torch.tensor([table.data_ptr() for table in self.tables]),
            torch.tensor([table.stride(0) * table.itemsize for table in self.tables]),
            _native.Reads(int32(features), int32(columns), int32(dims)),
            torch.tensor([out.data_ptr() for out in self.outputs], dtype=torch.int64),
            torch.tensor([out.shape[1] * out.itemsize for out in self.outputs], dtype=torch.int64),
            name_of(self.row_dtype),
            name_of(self.out_dtype),
            order,
        )

    def twin(self):
        parts = [part for _, part, _ in self.batch.features()]
        for f, column, dim in self.reads:
            rows = self.tables[self.batch.feature_tables[f]][self.index[parts[f]].long()]
            weights = None if self.batch.weights is None else self.batch.weights[parts[f]]
            yield reference.pool(
                rows[:, column : column + dim],
                self.batch.bags(f),
                self.batch.poolings[f],
                weights,
                self.out_dtype,
            )


@settings(max_examples=examples(20, 60), deadline=None)
@given(
    batches(dims=(1, 3, 8, 16, 17, 32, 64, 100, 128, 200, 1024)),
    st.sampled_from(ROUNDED),
    st.sampled_from(ROUNDED),
    st.booleans(),
)
def test_equals_twin(batch, row_dtype, out_dtype, is_ordered):
    if batch.dtype == torch.float64:
        row_dtype = out_dtype = torch.float64
    places = Places(batch, row_dtype, out_dtype)
    wanted = list(places.twin())
    order = places.ordered() if is_ordered else None
    for isa, num_threads in everywhere():
        with running_on(isa, num_threads):
            places.pool(order)
        for (f, _, dim), out, values in zip(places.reads, places.outputs, wanted, strict=True):
            assert same_bits(out[:, :dim], values), (isa, num_threads, f)
            assert out[:, dim:].isnan().all()
            out.fill_(torch.nan)


def squares_twin(places, read):
    """Return sums, sums of squares, and rows of one read, in plain PyTorch."""
    batch, (f, column, dim) = places.batch, read
    part = next(part for g, part, _ in batch.features() if g == f)
    rows = places.tables[batch.feature_tables[f]][places.index[part].long()][
        :, column : column + dim
    ]
    weights = None if batch.weights is None else batch.weights[part]
    bag = (batch.bags(f), batch.poolings[f] if batch.has_bags else "sequence", weights)
    return (
        reference.pool(rows, *bag, batch.dtype),
        pool_squares(rows.to(batch.dtype), bag),
        rows.to(batch.dtype),
    )


@settings(max_examples=examples(20, 60), deadline=None)
@given(batches(dims=(1, 3, 8, 16, 17, 32, 100)), st.sampled_from(ROUNDED), st.integers(0, 2**16))
def test_squares_equal_twin(batch, row_dtype, seed):
    """Sums and squares of one pass have the bits of plain PyTorch; reads may share a place or leave one out."""
    row_dtype = torch.float64 if batch.dtype == torch.float64 else row_dtype
    places = Places(batch, row_dtype, batch.dtype)
    reads = [read for read in places.reads if batch.poolings[read[0]] != "sequence"]
    rng = np.random.default_rng(seed)
    wants = rng.random((len(reads), 3)) < 0.7  # sums, squares, copies
    wants[:, 0] |= ~wants[:, 1]
    adds = rng.random((len(reads), 2)) < 0.5
    twins = [squares_twin(places, read) for read in reads]
    dims = [dim for *_, dim in reads]
    shared = {dim: torch.zeros(2, batch.batch_size, dim, dtype=batch.dtype) for dim in dims}
    for n, dim in enumerate(dims):
        for kind in range(2):
            if wants[n, kind] and adds[n, kind]:
                shared[dim][kind].add_(twins[n][kind])
    features, columns, _ = zip(*reads, strict=True) if reads else ([], [], [])
    for isa, num_threads in everywhere():
        totals = {dim: torch.zeros_like(total) for dim, total in shared.items()}
        alone = [
            [torch.full((batch.batch_size, d + 3), torch.nan, dtype=batch.dtype) for _ in range(2)]
            for d in dims
        ]
        copies = [torch.full_like(twin[2], torch.nan) for twin in twins]
        numbers = []
        for n, dim in enumerate(dims):
            outs = [totals[dim][kind] if adds[n, kind] else alone[n][kind] for kind in range(2)]
            for kind, out in enumerate(outs):
                address = (out.data_ptr(), out.stride(0) * out.itemsize, bool(adds[n, kind]))
                numbers += address if wants[n, kind] else (0, 0, 0)
            numbers.append(copies[n].data_ptr() if wants[n, 2] else 0)
        with running_on(isa, num_threads):
            _native.pool_squares(
                batch.lookups(),
                places.index,
                torch.tensor([table.data_ptr() for table in places.tables]),
                torch.tensor([table.stride(0) * table.itemsize for table in places.tables]),
                _native.Reads(int32(features), int32(columns), int32(dims)),
                torch.tensor(numbers, dtype=torch.int64).view(-1, 7),
                name_of(row_dtype),
            )
        for n, dim in enumerate(dims):
            for kind in range(2):
                if wants[n, kind] and not adds[n, kind]:
                    assert same_bits(alone[n][kind][:, :dim], twins[n][kind]), (isa, n, kind)
                    assert alone[n][kind][:, dim:].isnan().all()
            if wants[n, 2]:
                assert same_bits(copies[n], twins[n][2])
        for dim, total in shared.items():
            assert same_bits(totals[dim], total), (isa, num_threads)


def test_squares_of_sequences_are_refused():
    index = int32([0, 1])
    lookups = _native.Lookups(
        index.long(), torch.tensor([0, 2]), int32([0]), torch.tensor([2], dtype=torch.uint8), 1,
        None, None,
    )  # fmt: skip
    table, out = torch.ones(2, 4), torch.empty(2, 4)
    arguments = [
        lookups, index, torch.tensor([table.data_ptr()]), torch.tensor([16]),
        _native.Reads(int32([0]), int32([0]), int32([4])),
        torch.tensor([[out.data_ptr(), 16, 0, 0, 0, 0, 0]]), "float32",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="feature 0 is a sequence"):
        _native.pool_squares(*arguments)
    arguments[5] = torch.tensor([[out.data_ptr(), 8, 0, 0, 0, 0, 0]])
    with pytest.raises(ValueError, match="writes 16 bytes into output rows that are 8"):
        _native.pool_squares(*arguments)


@pytest.mark.parametrize("dim", [16, 48, 64, 80])
@pytest.mark.parametrize(
    ("row_dtype", "out_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_outputs_that_are_streamed(dim, row_dtype, out_dtype):
    """Two features side by side in one aligned output of more than a mebibyte, as the trainer lays them out."""
    batch_size, num_rows = 8209, 1000
    table = torch.randn(num_rows, dim).to(row_dtype)
    index = torch.randint(0, num_rows, (2 * batch_size,), dtype=torch.int32)
    lookups = _native.Lookups(
        index.long(),
        torch.tensor([0, batch_size, 2 * batch_size]),
        int32([0, 0]),
        torch.zeros(2, dtype=torch.uint8),
        batch_size,
        None,
        None,
    )
    storage = torch.empty(batch_size * 2 * dim + 32, dtype=out_dtype)
    skip = -storage.data_ptr() % 64 // out_dtype.itemsize
    out = storage[skip : skip + batch_size * 2 * dim].view(batch_size, 2 * dim)
    rows = table[index.long()].to(out_dtype).view(2, batch_size, dim)
    for isa, num_threads in everywhere():
        storage.fill_(torch.nan)
        with running_on(isa, num_threads):
            _native.pool(
                lookups,
                index,
                torch.tensor([table.data_ptr()]),
                torch.tensor([dim * table.itemsize]),
                _native.Reads(int32([0, 1]), int32([0, 0]), int32([dim, dim])),
                torch.tensor([out.data_ptr(), out.data_ptr() + dim * out.itemsize]),
                torch.tensor([2 * dim * out.itemsize] * 2),
                name_of(row_dtype),
                name_of(out_dtype),
            )
        assert same_bits(out, torch.cat([rows[0], rows[1]], dim=1))
        assert storage[:skip].isnan().all()
        assert storage[skip + out.numel() :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [16, 5])
def test_rounding_is_torchs(dim, dtype):
    """Rounding of float32 around every number of the 16-bit type, half-way ones included; and every one of them
    widened."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    around = numbers[~numbers.isnan()].float().view(torch.int32)
    half = 1 << (15 if dtype == torch.bfloat16 else 12)
    steps = torch.tensor([-half - 1, -half, -half + 1, -1, 0, 1, half - 1, half, half + 1])
    values = (around[:, None] + steps).int().view(torch.float32)
    limits = torch.tensor([torch.inf, -torch.inf, 65519.0, 65520.0, 2**-25, 2**-25 + 2**-40])
    values = torch.cat([values[~values.isnan()], limits, torch.finfo(torch.float32).max * limits])
    for given_values, out_dtype in ((values, dtype), (numbers, torch.float32)):
        rows = given_values[: len(given_values) // dim * dim].view(-1, dim)
        for isa in _native.available_isas():
            out = torch.empty(rows.shape, dtype=out_dtype)
            with running_on(isa, 1):
                call(rows, out)
            nan = rows.isnan()
            assert same_bits(out[~nan], rows.to(out_dtype)[~nan]), isa
            assert out.isnan().equal(nan)


def call(table, out, **change):
    """All rows of a table, one after the other."""
    n, dim = out.shape
    arguments = {
        "index": torch.arange(n, dtype=torch.int32),
        "bases": torch.tensor([table.data_ptr()]),
        "strides": torch.tensor([table.stride(0) * table.itemsize]),
        "reads": [0, 0, dim],
        "out_bases": torch.tensor([out.data_ptr()]),
        "out_strides": torch.tensor([out.stride(0) * out.itemsize]),
        "dtype": name_of(table.dtype),
        "out_dtype": name_of(out.dtype),
        "weights": None,
        **change,
    }
    weights = arguments.pop("weights")
    arguments["reads"] = _native.Reads(*(int32([value]) for value in arguments["reads"]))
    lookups = _native.Lookups(
        torch.arange(n),
        torch.tensor([0, n]),
        int32([0]),
        torch.zeros(1, dtype=torch.uint8),
        n,
        None,
        weights,
    )
    _native.pool(lookups, **arguments)


NOTHING = torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": int32([0, -1])}, "lookup 1 has no row"),
        ({"index": int32([0])}, "index has 1 elements, wanted 2"),
        ({"index": torch.tensor([0, 1])}, "index: got int64"),
        ({"strides": torch.tensor([8, 8])}, "strides has 2 elements, wanted 1"),
        ({"out_bases": NOTHING}, "out_bases has 0 elements, wanted 1"),
        ({"out_strides": NOTHING}, "out_strides has 0 elements, wanted 1"),
        ({"reads": [0, 0, 0]}, "read 0 is of feature 0, column 0, dim 0"),
        ({"reads": [1, 0, 2]}, "read 0 is of feature 1 of 1"),
        ({"reads": [0, 1, 2]}, "read 0 ends at byte 12 of rows that are 8 bytes apart"),
        ({"reads": [0, 2**31 - 1, 2**31 - 1]}, "ends at byte 17179869176 of rows"),
        ({"out_strides": torch.tensor([4])}, "writes 8 bytes into output rows that are 4 bytes"),
        ({"dtype": "int8"}, "got 'int8', choose from bfloat16, float16, float32, float64"),
        ({"out_dtype": "float64"}, "float32 rows give float32, bfloat16 or float16 outputs"),
        ({"dtype": "float64", "strides": torch.tensor([16])}, "give float64 outputs, not float32"),
        ({"weights": torch.ones(2).double()}, "weights are float64, wanted float32"),
        ({"bases": NOTHING, "strides": NOTHING}, "feature 0 names table 0 of 0"),
    ],
)
def test_refused(change, message):
    table, out = torch.zeros(2, 2), torch.full((2, 2), torch.nan)
    with pytest.raises(ValueError, match=message):
        call(table, out, **change)
    assert out.isnan().all()


def test_absent_row_found_before_anything_is_written():
    """However far behind it lies."""
    table = torch.zeros(100_003, 2)
    for at in (0, 65_537, 100_002):
        out = torch.full((100_003, 2), torch.nan)
        index = torch.arange(100_003, dtype=torch.int32)
        index[at] = -1
        with pytest.raises(ValueError, match=f"lookup {at} has no row"):
            call(table, out, index=index)
        assert out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, *ROUNDED])
@pytest.mark.parametrize("n", [0, 1, 17, 140_003])
def test_all_finite(n, dtype):
    values = torch.randn(n).to(dtype)
    name = name_of(dtype)
    values[: n // 2] = torch.finfo(dtype).max
    for isa, num_threads in everywhere():
        with running_on(isa, num_threads):
            assert _native.all_finite(values.data_ptr(), n, name)
            for bad in (-torch.inf, torch.nan):
                for at in {0, n // 2, n - 1} if n else ():
                    spoilt = values.clone()
                    spoilt[at] = bad
                    assert not _native.all_finite(spoilt.data_ptr(), n, name)
