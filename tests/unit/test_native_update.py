"""sum_rows and update: against their twins, on every path, for any number of threads."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_batches import batches, everywhere, running_on, same_bits

from colonnade import _native
from colonnade.ops import optimizers, reference

DIMS = (1, 3, 16, 17, 32, 64, 128, 530)
KINDS = {name: kind for kind, name in enumerate(_native.OPTIMIZERS)}
LAST = optimizers.LAST_UPDATE
CLOCKS = [0, 0, 0, 1, 254, 255, 256, 65535, 2**24, LAST - 1, LAST]
CLOCKS += [optimizers.IS_LOADED | updates for updates in (1, 1, 2, 256, LAST)]


def table_of(dims, state_elements, *, capacity_rows, seed, rows=0, scale=0.0):
    """Settings of a table with parts of these widths, whose state is all 0 at first."""
    return _native.TableSettings(
        parts=[_native.PartInitialValues(dim, 0, scale, 0.0, 0) for dim in dims],
        state_elements=state_elements,
        rows=rows,
        capacity_rows=capacity_rows,
        seed=seed,
    )


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def address(tensor, column=0):
    return tensor.data_ptr() + column * tensor.itemsize


class Gradients:
    """Random parts for a batch's tables, reads of some of them, and gradients of what was read with gaps between
    rows; the same by lookup and summed by row."""

    def __init__(self, batch, dtype):
        self.rng = rng = np.random.default_rng(batch.seed + 1)
        self.batch, self.dtype = batch, dtype
        self.plan = batch.plan()
        self.known = {}
        self.dims = []  # by table, its parts' dims
        for dim in batch.dims:
            self.dims.append([[dim], [dim], [dim, 1], [4, dim], [dim, 16, 3]][rng.integers(5)])
        self.columns = [[sum(dims[:i]) for i in range(len(dims))] for dims in self.dims]
        self.widths = [sum(dims) for dims in self.dims]
        self.reads = []  # (feature, first part, end part): of neighbours at once, and maybe not all
        for f, t in enumerate(batch.feature_tables):
            first = 0
            while first < len(self.dims[t]):
                end = int(rng.integers(first + 1, len(self.dims[t]) + 1))
                if rng.random() < 0.8:
                    self.reads.append((f, first, end))
                first = end
        rng.shuffle(self.reads)
        self.outputs = []
        for f, first, end in self.reads:
            width = sum(self.dims[batch.feature_tables[f]][first:end]) + rng.choice([0, 2])
            out = torch.from_numpy(rng.standard_normal((batch.outputs(f), width))).to(dtype)
            out[::5] = -0.0  # copied, not added to 0
            self.outputs.append(out)
        tables = [batch.feature_tables[f] for f, _, _ in self.reads]
        self.source = _native.OutputGradients(
            batch.lookups(),
            _native.Reads(
                int32(*[f for f, _, _ in self.reads]),
                int32(
                    *[self.columns[t][i] for t, (_, i, _) in zip(tables, self.reads, strict=True)]
                ),
                int32(
                    *[
                        sum(self.dims[t][i:j])
                        for t, (_, i, j) in zip(tables, self.reads, strict=True)
                    ]
                ),
            ),
            torch.tensor([address(out) for out in self.outputs], dtype=torch.int64),
            torch.tensor([out.shape[1] * out.itemsize for out in self.outputs], dtype=torch.int64),
            name_of(dtype),
        )

    @property
    def parts(self):
        """Yield (table, number in the table, column, dim) of each part."""
        for t, dims in enumerate(self.dims):
            for i, dim in enumerate(dims):
                yield t, i, self.columns[t][i], dim

    def native_parts(self, states=None):
        tables, _, columns, dims = zip(*self.parts, strict=True)
        states = states or [0] * len(tables)
        return _native.Parts(int32(*tables), int32(*columns), int32(*dims), int32(*states))

    def sums(self, t, i):
        """Return the twin's sums (U_t, D) for part i of table t."""
        if (t, i) not in self.known:
            self.known[t, i] = self._sums(t, i)
        return self.known[t, i]

    def _sums(self, t, i):
        terms = torch.zeros(len(self.batch.ids), self.dims[t][i], dtype=self.batch.dtype)
        is_read = torch.zeros(len(terms), dtype=torch.bool)
        lookups = [lookups for _, lookups, _ in self.batch.features()]
        for (f, first, end), out in zip(self.reads, self.outputs, strict=True):
            if self.batch.feature_tables[f] == t and first <= i < end:
                own, weights = lookups[f], self.batch.weights
                column = self.columns[t][i] - self.columns[t][first]
                terms[own] = reference.lookup_gradients(
                    out[:, column : column + self.dims[t][i]],
                    self.batch.bags(f),
                    self.batch.poolings[f],
                    None if weights is None else weights[own],
                )
                is_read[own] = True
        lo, hi = self.plan.block_offsets[t : t + 2].tolist()
        offsets = self.plan.segment_offsets[lo : hi + 1]
        return reference.sum_rows(terms, offsets, self.plan.entries, is_read)

    def row_sums(self, t):
        """Return sums (U_t, width)."""
        return torch.cat([self.sums(t, i) for i in range(len(self.dims[t]))], dim=1)

    def packed(self):
        """The native sums, rows one after the other: (elements, element offset of each row)."""
        widths = np.repeat(self.widths, self.plan.block_offsets.diff().numpy())
        index = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
        out = torch.full((int(index[-1]) + 1,), torch.nan, dtype=self.batch.dtype)
        _native.sum_rows(
            self.plan.segment_offsets,
            self.plan.entries,
            self.source,
            self.plan.block_offsets,
            self.native_parts(),
            out.data_ptr(),
            torch.from_numpy(index[:-1]),
            self.batch.dtype_name,
        )
        assert out[-1].isnan()
        return out[:-1], torch.from_numpy(index[:-1])


def gradient_dtype(batch, dtype):
    return torch.float64 if batch.dtype == torch.float64 else dtype


NARROW = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=30, deadline=None)
@given(batches(dims=DIMS), NARROW)
def test_sum_rows_equals_twin(batch, dtype):
    gradients = Gradients(batch, gradient_dtype(batch, dtype))
    wanted = torch.cat([gradients.row_sums(t).flatten() for t in range(len(batch.dims))])
    for isa, num_threads in everywhere():
        with running_on(isa, num_threads):
            assert same_bits(gradients.packed()[0], wanted), (isa, num_threads)


SETTINGS = st.builds(
    optimizers.Settings,
    lr=st.just(0.05),
    weight_decay=st.sampled_from([0.0, 0.01]),
    eps=st.sampled_from([0.0, 1e-6]),
    beta1=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.99, 0.999]),
    nesterov=st.booleans(),
    l1=st.sampled_from([0.0, 0.5]),
    l2=st.sampled_from([0.0, 0.1]),
    beta=st.sampled_from([0.0, 1.0]),
    max_norm=st.sampled_from([math.inf, 0.7]),
    clip_value=st.sampled_from([math.inf, 0.5]),
    weight_bound=st.sampled_from([math.inf, 0.3]),
    gradient_scale=st.sampled_from([1.0, 0.3]),
)


def numbers(s):
    """The row of settings that `_native.update` takes."""
    values = [s.lr, s.weight_decay, s.eps, s.beta1, s.beta2, s.nesterov]
    values += [s.l1, s.l2, s.beta, s.max_norm, s.clip_value, s.weight_bound]
    return [*values, s.gradient_scale, 0.0, 0.0, 0.0]


class Table:
    """Twin of the rows of one table."""

    def __init__(self, gradients, t, ids, row_dtype, is_split, states, num_states, clocks):
        self.ids, self.seed, self.row_dtype, self.is_split = ids, t, row_dtype, is_split
        computed = gradients.batch.dtype
        width, num_rows = gradients.widths[t], len(ids)
        rng = np.random.default_rng(gradients.batch.seed + 2 + t)
        weights = torch.from_numpy(rng.uniform(-0.5, 0.5, (num_rows, width))).to(computed)
        self.weights = weights if is_split else weights.to(row_dtype)
        self.state = torch.from_numpy(rng.uniform(0, 0.1, (num_rows, num_states))).to(computed)
        self.states, self.clocks = states, clocks

    def update(self, gradients, t, first_part, kinds, all_settings):
        updated = self.weights.clone()
        for i, dim in enumerate(gradients.dims[t]):
            column, state, p = gradients.columns[t][i], self.states[i], first_part + i
            values = self.weights[:, column : column + dim].to(self.state.dtype)
            own = self.state[:, state : state + _native.optimizer_state_elements(kinds[p], dim)]
            sums = gradients.sums(t, i)
            optimizers.apply_optimizer(
                _native.OPTIMIZERS[kinds[p]], values, own, self.clocks, sums, all_settings[p]
            )
            if self.weights.dtype.itemsize == 2:
                values = optimizers.round_stochastically(
                    values, self.ids, self.clocks, self.seed, self.row_dtype, first_column=column
                )
            updated[:, column : column + dim] = values
        self.weights = updated
        self.clocks = optimizers.advance_clocks(self.clocks)

    def records(self):
        if self.is_split:
            highs, lows = reference.split_masters(self.weights)
            return reference.pack(highs, self.state, self.clocks, lows)
        return reference.pack(self.weights, self.state, self.clocks)


@settings(max_examples=examples(20, 50), deadline=None)
@given(
    batches(dims=DIMS),
    st.lists(st.tuples(st.sampled_from(range(len(KINDS))), SETTINGS), min_size=12, max_size=12),
    st.sampled_from(["plain", "plain", "bfloat16", "float16", "split"]),
    NARROW,
    st.booleans(),
)
def test_update_equals_twin(batch, chosen, rows, dtype, from_rows):
    is_split = rows == "split" and batch.dtype == torch.float32
    row_dtype = batch.dtype
    if batch.dtype == torch.float32 and rows != "plain":
        row_dtype = torch.float16 if rows == "float16" else torch.bfloat16
    gradients = Gradients(batch, gradient_dtype(batch, dtype))
    plan, num_tables = gradients.plan, len(batch.dims)
    num_parts = len(list(gradients.parts))
    kinds = [kind for kind, _ in chosen[:num_parts]]
    all_settings = [s for _, s in chosen[:num_parts]]

    states, num_states = [], [1] * num_tables  # with gaps
    for p, (t, _, _, dim) in enumerate(gradients.parts):
        states.append(num_states[t])
        num_states[t] += _native.optimizer_state_elements(kinds[p], dim) + p % 2
    parts = gradients.native_parts(states)

    source, segment_offsets, entries = gradients.source, plan.segment_offsets, plan.entries
    if from_rows:  # sums that were made before, one a row
        sums, index = gradients.packed()
        source = _native.RowGradients(sums.data_ptr(), index, batch.dtype_name)
        segment_offsets = torch.arange(plan.num_unique + 1, dtype=torch.int32)
        entries = segment_offsets[:-1].clone()

    tables, before, wanted, p = [], [], [], 0
    for t, ids in enumerate(ids_of(plan)):
        clocks = torch.from_numpy(gradients.rng.choice(CLOCKS, size=len(ids)))
        end = p + len(gradients.dims[t])
        table = Table(gradients, t, ids, row_dtype, is_split, states[p:end], num_states[t], clocks)
        before.append(table.records())
        for _ in range(2):
            table.update(gradients, t, p, kinds, all_settings)
        wanted.append(table.records())
        tables.append(table)
        p = end

    for isa, num_threads in everywhere():
        is_declared = batch.seed % 2 and max(batch.table_rows) < 20_000
        dram = _native.Dram(
            [
                table_of(
                    gradients.dims[t],
                    num_states[t],
                    rows=batch.table_rows[t] if is_declared else 0,
                    capacity_rows=20_000,
                    seed=t,
                )
                for t in range(num_tables)
            ],
            name_of(row_dtype),
            is_split,
        )
        slots = torch.empty(plan.num_unique, dtype=torch.int32)
        dram.acquire(plan.unique_ids, plan.block_offsets, slots, False)
        by_table = slots.split(plan.block_offsets.diff().tolist())
        for t, own in enumerate(by_table):
            dram.unpack(t, own.contiguous(), before[t])
        with running_on(isa, num_threads):
            for _ in range(2):
                _native.update(
                    dram,
                    slots,
                    plan.block_offsets,
                    segment_offsets,
                    entries,
                    source,
                    parts,
                    int32(*kinds),
                    torch.tensor([numbers(s) for s in all_settings], dtype=torch.float64),
                )
        for t, own in enumerate(by_table):
            records = torch.empty_like(wanted[t])
            dram.pack(t, own.contiguous(), records)
            assert same_bits(records, wanted[t]), (isa, num_threads, t, kinds)


def ids_of(plan):
    return plan.unique_ids.split(plan.block_offsets.diff().tolist())


def one_hot(ids, rows=0):
    """Lookups of one feature, one a sample, and their plan."""
    lookups = _native.Lookups(
        ids, torch.tensor([0, len(ids)]), int32(0), torch.zeros(1).byte(), len(ids), None, None
    )
    return lookups, _native.make_plan(lookups, torch.tensor([rows]), torch.tensor([1]))


def gradients_of(lookups, gradients):
    return _native.OutputGradients(
        lookups,
        _native.Reads(int32(0), int32(0), int32(gradients.shape[1])),
        torch.tensor([gradients.data_ptr()]),
        torch.tensor([gradients.stride(0) * gradients.itemsize]),
        name_of(gradients.dtype),
    )


def one_part(dim, state=0):
    return _native.Parts(int32(0), int32(0), int32(dim), int32(state))


def test_one_row_with_most_lookups():
    """A row is summed by one thread, in entry order, however many entries it has."""
    ids = torch.where(torch.arange(20_011) % 3 == 0, torch.arange(20_011) % 101, 7)
    lookups, plan = one_hot(ids)
    gradients = torch.randn(len(ids), 16)
    wanted = reference.sum_rows(gradients, plan.segment_offsets, plan.entries)
    for isa, num_threads in everywhere():
        out = torch.full((101, 16), torch.nan)
        with running_on(isa, num_threads):
            _native.sum_rows(
                plan.segment_offsets,
                plan.entries,
                gradients_of(lookups, gradients),
                plan.block_offsets,
                one_part(16),
                out.data_ptr(),
                torch.arange(0, 101 * 16, 16, dtype=torch.int32),
                "float32",
            )
        assert same_bits(out, wanted)


def test_by_page_is_the_same_rows_in_the_order_of_their_pages():
    rng = np.random.default_rng(3)
    counts, lengths = [0, 5000, 63, 4097, 300], rng.integers(1, 4, 9460)
    offsets = torch.tensor([0, *np.cumsum(counts)])
    slots = torch.from_numpy(rng.permutation(2**20)[: offsets[-1]].astype(np.int32))
    slots[offsets[4] :] = slots[offsets[4] :].sort()[0]  # in order already
    segments = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    entries = torch.from_numpy(rng.permutation(int(segments[-1])).astype(np.int32))
    for _, num_threads in everywhere():
        with running_on("portable", num_threads):
            result = _native.by_page(slots, offsets, segments, entries)
        moved, starts, expected = (torch.as_tensor(part) for part in result)
        options = dict(zip(slots.tolist(), entries.split(lengths.tolist()), strict=True))
        assert starts[0] == 0 and starts[-1] == len(expected)
        for slot, actual in zip(
            moved.tolist(), expected.split(starts.diff().tolist()), strict=True
        ):
            assert torch.equal(options[slot], actual)
        for t, (first, last) in enumerate(pairwise(offsets)):
            assert set(moved[first:last].tolist()) == set(slots[first:last].tolist())
            groups = moved[first:last] >> 9  # 2^20 slots in 2^11 groups
            if t in (1, 3):
                assert (groups.diff() >= 0).all()
                assert not torch.equal(moved[first:last], slots[first:last])
            else:  # few rows, and rows in order, stay as they are
                assert torch.equal(moved[first:last], slots[first:last])
        assert _native.by_page(moved, offsets, starts, expected) is None


def test_what_is_no_rows_with_segments_is_left_to_update():
    rows, offsets = torch.arange(100, 0, -1, dtype=torch.int32), torch.tensor([0, 100])
    ramp = torch.arange(101, dtype=torch.int32)
    assert _native.by_page(rows, offsets, ramp, ramp[:-1].contiguous()) is not None
    for wrong in (
        (rows, torch.tensor([0, 99]), ramp, ramp[:-1].contiguous()),
        (rows, offsets, ramp[:-1].contiguous(), ramp[:-1].contiguous()),
        (rows, offsets, ramp, ramp[:-2].contiguous()),
        (rows, offsets, ramp.flip(0), ramp[:-1].contiguous()),
    ):
        assert _native.by_page(*wrong) is None


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.05)),
        ("momentum", lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.05)),
        ("adagrad", lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.05, eps=1e-8)),
        ("adam", lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.05)),
        ("adamw", lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.05)),
    ],
)
def test_learns_what_torch_learns(name, make):
    """Known answer in float64: torch's optimizer on one parameter a row, stepped when touched; duplicates add up."""
    dim, rng = 5, np.random.default_rng(3)
    rows = [torch.nn.Parameter(torch.zeros(dim, dtype=torch.float64)) for _ in range(4)]
    stepped = [make([row]) for row in rows]
    num_states = _native.optimizer_state_elements(KINDS[name], dim)
    table = table_of([dim], num_states, rows=4, capacity_rows=4, seed=1, scale=0.5)
    dram = _native.Dram([table], "float64", False)
    first = torch.empty(4, dim, dtype=torch.float64)
    dram.initial_values(0, torch.arange(4), first)
    for row, values in zip(rows, first, strict=True):
        row.data.copy_(values)
    s = optimizers.Settings(lr=0.1, weight_decay=0.05)
    for _ in range(6):
        ids = torch.from_numpy(rng.integers(0, 4, size=3))
        gradients = torch.from_numpy(rng.standard_normal((3, dim)))
        for i in ids.unique().tolist():
            rows[i].grad = gradients[ids == i].sum(0)
            stepped[i].step()
        lookups, plan = one_hot(ids, 4)
        slots = torch.empty(plan.num_unique, dtype=torch.int32)
        dram.acquire(plan.unique_ids, plan.block_offsets, slots, True)
        _native.update(
            dram,
            slots,
            plan.block_offsets,
            plan.segment_offsets,
            plan.entries,
            gradients_of(lookups, gradients),
            one_part(dim),
            int32(KINDS[name]),
            torch.tensor([numbers(s)], dtype=torch.float64),
        )
    trained = torch.empty(4, dim, dtype=torch.float64)
    assert dram.read(0, torch.arange(4), trained).tolist() == []
    torch.testing.assert_close(trained, torch.stack(rows).detach(), rtol=1e-12, atol=1e-12)


def test_squared_norm():
    for n in (0, 1, 31, 33, 2**16, 2**16 + 1, 300_007):
        for dtype in (torch.float32, torch.float64):
            values = torch.randn(n, dtype=dtype)
            wanted = reference.squared_norm(values)
            assert wanted == pytest.approx(float((values.double() ** 2).sum()), rel=1e-12)
            for isa, num_threads in everywhere():
                with running_on(isa, num_threads):
                    norm = _native.squared_norm(values.data_ptr(), n, name_of(dtype))
                    assert norm == wanted, (isa, num_threads, n)
    with pytest.raises(ValueError, match="dtype bfloat16, wanted float32 or float64"):
        _native.squared_norm(0, 0, "bfloat16")


def two_rows(name, **change):
    row = numbers(optimizers.Settings(lr=0.1))
    for column, value in change.items():
        row[int(column.removeprefix("s"))] = value
    return {
        "optimizers": int32(KINDS["rowwise_adagrad"], KINDS[name]),
        "settings": torch.tensor([numbers(optimizers.Settings(lr=0.1)), row], dtype=torch.float64),
    }


def small_update(**change):
    """Table 0: ids 1 and 2, table 1: id 5, each looked up once."""
    lookups = _native.Lookups(
        torch.tensor([1, 2, 5]),
        torch.tensor([0, 2, 3]),
        int32(0, 1),
        torch.tensor([2, 2], dtype=torch.uint8),
        0,
        None,
        change.pop("weights", None),
    )
    gradients = torch.ones(3, 4)
    state_elements = change.pop("state_elements", [1, 8])
    parts = _native.Parts(int32(0, 1), int32(0, 0), int32(4, 4), int32(0, 0))
    tables = [table_of([4], n, capacity_rows=10, seed=t) for t, n in enumerate(state_elements, 1)]
    dram = _native.Dram(tables, "float32", False)
    slots = torch.empty(3, dtype=torch.int32)
    offsets = torch.tensor([0, 2, 3])
    dram.acquire(torch.tensor([1, 2, 5]), offsets, slots, True)
    before = torch.empty(2, 4)
    dram.read(0, torch.tensor([1, 2]), before)
    try:
        reads = _native.Reads(*change.pop("reads", (int32(0, 1), int32(0, 0), int32(4, 4))))
        dtype = change.pop("dtype", "float32")
        bases = [gradients.data_ptr(), gradients[2].data_ptr()]
        arguments = {
            "slots": slots,
            "offsets": offsets,
            "segment_offsets": torch.arange(4, dtype=torch.int32),
            "entries": torch.arange(3, dtype=torch.int32),
            "source": _native.OutputGradients(
                lookups, reads, torch.tensor(bases), torch.tensor([16, 16]), dtype
            ),
            "parts": parts,
            **two_rows("sgd"),
            **change,
        }
        if arguments["source"] == "two row gradients":
            arguments["source"] = _native.RowGradients(gradients.data_ptr(), int32(0, 4), "float32")
        _native.update(dram, *arguments.values())
    except (ValueError, TypeError):
        after = torch.empty(2, 4)
        dram.read(0, torch.tensor([1, 2]), after)
        assert torch.equal(before, after)
        assert dram.clocks(0, slots[:2]).tolist() == [0, 0]
        raise


def parts(tables, columns, dims, states):
    return _native.Parts(int32(*tables), int32(*columns), int32(*dims), int32(*states))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": int32(0, 10, 0)}, "a slot of table 0 is not in 0 .. 9"),
        ({"slots": int32(0, 1, -1)}, "a slot of table 1"),
        ({"slots": int32(0, 1)}, "2 slots for 3 unique rows"),
        ({"offsets": torch.tensor([0, 3])}, "got 2 elements, wanted 3"),
        ({"offsets": torch.tensor([0, 3, 2])}, "offsets decrease at table 1: 3 -> 2"),
        ({"offsets": torch.tensor([0, 2, 4])}, "span 0 .. 4, wanted 0 .. 3"),
        ({"segment_offsets": int32(0, 2, 1, 3)}, "must ascend"),
        ({"segment_offsets": int32(0, 1, 2, 4)}, "must ascend"),
        ({"segment_offsets": int32(-1, 1, 2, 3)}, "must ascend"),
        ({"segment_offsets": int32()}, "segment_offsets is empty"),
        ({"entries": int32(0, 1, 1)}, "of table 1 name one that is not among the table's lookups"),
        ({"entries": int32(0, 3, 2)}, "of table 0 name one that is not among"),
        ({"entries": int32(-1, 1, 2)}, "of table 0 name one that is not among"),
        ({"source": "two row gradients"}, "not among the table's gradients"),
        ({"source": "gradients"}, "wanted OutputGradients or RowGradients"),
        ({"parts": parts([0], [0], [4], [0])}, "parts are of 1 tables, dram has 2"),
        ({"parts": parts([0, 1], [0, 0], [4, 3], [0, 0])}, "have 3 columns, its rows 4"),
        (
            {"parts": parts([0, 1, 1], [0, 0, 4], [4, 4, 1], [0, 0, 0])},
            "have 5 columns, its rows 4",
        ),
        ({"reads": (int32(0, 1), int32(0, 1), int32(4, 3))}, "reads columns 1 .. 3 of table 1"),
        ({"reads": (int32(0, 2), int32(0, 0), int32(4, 4))}, "read 1 is of feature 2 of 2"),
        ({"reads": (int32(1, 1), int32(0, 0), int32(4, 4))}, "both of feature 1, column 0"),
        ({"reads": (int32(1), int32(0), int32(4))}, "2 bases and 2 strides for 1 reads"),
        ({"dtype": "float64"}, "gradients are float64, their sums float32"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"optimizers": int32(1, 9)}, "part 1 has optimizer 9, wanted 0 .. 8"),
        ({"optimizers": int32(1)}, "speak of 1 and 2 parts, parts of 2"),
        ({"settings": torch.zeros(2, 7, dtype=torch.float64)}, r"settings: got float64 \(2, 7\)"),
        ({"settings": torch.zeros(3, 16, dtype=torch.float64)}, "speak of 2 and 3 parts"),
        ({"state_elements": [0, 8]}, "part 0 keeps 1 state elements from 0 on"),
        ({"state_elements": [1, 7], **two_rows("adam")}, "part 1 keeps 8 state elements"),
        (two_rows("sgd", s0=-0.1), "part 1 has lr -0.1"),
        (two_rows("sgd", s0=math.nan), "part 1 has lr nan"),
        (two_rows("ftrl", s0=0.0), "wanted more than 0, because it is a divisor"),
        (two_rows("ftrl", s6=-1.0), "part 1 has l1 -1"),
        (two_rows("adam", s3=1.0), "part 1 has beta1 1"),
        (two_rows("momentum", s3=-0.1), "part 1 has momentum -0.1"),
        (two_rows("lamb", s4=1.0), "part 1 has beta2 1"),
        (two_rows("sgd", s9=0.0), "part 1 has max_norm 0.0+, wanted more than 0, inf for none"),
        (two_rows("sgd", s10=math.nan), "part 1 has clip_value nan"),
        (two_rows("sgd", s11=-1.0), "part 1 has weight_bound -1"),
        (two_rows("sgd", s12=math.inf), "part 1 has gradient_scale inf"),
        ({"weights": torch.ones(3).double()}, "weights are float64, the sums float32"),
    ],
)
def test_refused_and_nothing_changed(change, message):
    small_update()
    with pytest.raises((ValueError, TypeError), match=message):
        small_update(**change)
