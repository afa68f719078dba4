"""sum_rows and update: against their twins, on every path, for any number of threads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_batches import batches, everywhere, running_on, same_bits

from colonnade import _native
from colonnade.ops import reference

DIMS = (1, 3, 16, 17, 32, 64, 128, 1030)


class Gradients:
    """Random gradients of a batch's outputs, with gaps between rows; the same by lookup and by row."""

    def __init__(self, batch):
        rng = np.random.default_rng(batch.seed + 1)
        self.batch = batch
        self.plan = batch.plan()
        self.outputs = [
            torch.from_numpy(rng.standard_normal((batch.outputs(f), dim + 2))).to(batch.dtype)
            for f, _, dim in batch.features()
        ]
        for out in self.outputs:
            out[::5] = -0.0  # copied, not added to 0
        self.source = _native.OutputGradients(
            batch.lookups(),
            torch.tensor([out.data_ptr() for out in self.outputs], dtype=torch.int64),
            torch.tensor([out.shape[1] * out.itemsize for out in self.outputs]),
        )

    def sums(self, t):
        """(U_t, D): the twin's sums for table t."""
        terms = torch.zeros(len(self.batch.ids), self.batch.dims[t], dtype=self.batch.dtype)
        for f, part, dim in self.batch.features():
            if self.batch.feature_tables[f] == t:
                weights = None if self.batch.weights is None else self.batch.weights[part]
                terms[part] = reference.lookup_gradients(
                    self.outputs[f][:, :dim], self.batch.bags(f), self.batch.poolings[f], weights
                )
        lo, hi = self.plan.block_offsets[t : t + 2].tolist()
        return reference.sum_rows(terms, self.plan.segment_offsets[lo : hi + 1], self.plan.entries)

    def packed(self):
        """The native sums, rows one after the other: (elements, element offset of each row)."""
        widths = np.repeat(self.batch.dims, self.plan.block_offsets.diff().numpy())
        index = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
        out = torch.full((int(index[-1]) + 1,), torch.nan, dtype=self.batch.dtype)
        _native.sum_rows(
            self.plan.segment_offsets,
            self.plan.entries,
            self.source,
            self.plan.block_offsets,
            torch.tensor(self.batch.dims, dtype=torch.int32),
            out.data_ptr(),
            torch.from_numpy(index[:-1]),
            self.batch.dtype_name,
        )
        assert out[-1].isnan()
        return out[:-1], torch.from_numpy(index[:-1])


@settings(max_examples=60, deadline=None)
@given(batches(dims=DIMS))
def test_sum_rows_equals_twin(batch):
    gradients = Gradients(batch)
    tables = range(len(batch.dims))
    wanted = torch.cat([gradients.sums(t).flatten() for t in tables])
    for isa, num_threads in everywhere():
        with running_on(isa, num_threads):
            assert same_bits(gradients.packed()[0], wanted), (isa, num_threads)


@settings(max_examples=60, deadline=None)
@given(
    batches(dims=DIMS),
    st.lists(st.sampled_from([0, 1]), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.01]),
    st.booleans(),
)
def test_update_equals_twin(batch, optimizers, weight_decay, from_rows):
    gradients = Gradients(batch)
    plan, num_tables = gradients.plan, len(batch.dims)
    optimizers = optimizers[:num_tables]
    lr, eps, initial = 0.05, 1e-6, 0.125
    settings_ = torch.zeros(num_tables, 8, dtype=torch.float64)
    settings_[:, :3] = torch.tensor([lr, weight_decay, eps], dtype=torch.float64)

    source, segment_offsets, entries = gradients.source, plan.segment_offsets, plan.entries
    if from_rows:  # sums that were made before, one a row
        sums, index = gradients.packed()
        source = _native.RowGradients(sums.data_ptr(), index)
        segment_offsets = torch.arange(plan.num_unique + 1, dtype=torch.int32)
        entries = segment_offsets[:-1].clone()

    wanted = []
    for t, (ids, dim) in enumerate(zip(ids_of(plan), batch.dims, strict=True)):
        weights = reference.birth_values(ids, dim, t, 0.3, batch.dtype)
        state = torch.full((len(ids), optimizers[t]), initial, dtype=batch.dtype)
        for _ in range(2):
            if optimizers[t]:
                reference.rowwise_adagrad(
                    weights, state[:, 0], gradients.sums(t), lr, weight_decay, eps
                )
            else:
                reference.sgd(weights, gradients.sums(t), lr, weight_decay)
        wanted.append(reference.pack(weights, state, torch.full((len(ids),), 2)))

    for isa, num_threads in everywhere():
        dram = _native.Dram(
            batch.dims,
            optimizers,
            [0] * num_tables,
            [10_000] * num_tables,
            list(range(num_tables)),
            [0.3] * num_tables,
            [initial] * num_tables,
            batch.dtype_name,
            1,
        )
        slots = torch.empty(plan.num_unique, dtype=torch.int32)
        dram.acquire(plan.unique_ids, plan.block_offsets, slots, True)
        with running_on(isa, num_threads):
            for _ in range(2):
                _native.update(
                    dram,
                    slots,
                    plan.block_offsets,
                    segment_offsets,
                    entries,
                    source,
                    torch.tensor(optimizers, dtype=torch.int32),
                    settings_,
                )
        for t, mine in enumerate(slots.split(plan.block_offsets.diff().tolist())):
            records = torch.empty_like(wanted[t])
            dram.pack(t, mine.contiguous(), records)
            assert same_bits(records, wanted[t]), (isa, num_threads, t)


def ids_of(plan):
    return plan.unique_ids.split(plan.block_offsets.diff().tolist())


def test_one_row_with_most_lookups():
    """A row is summed by one thread, in entry order, however many entries it has."""
    ids = torch.where(torch.arange(20_011) % 3 == 0, torch.arange(20_011) % 101, 7)
    lookups = _native.Lookups(
        ids,
        torch.tensor([0, len(ids)]),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.uint8),
        len(ids),
        None,
        None,
    )
    plan = _native.make_plan(lookups, torch.tensor([0]), 1)
    gradients = torch.randn(len(ids), 16)
    wanted = reference.sum_rows(gradients, plan.segment_offsets, plan.entries)
    source = _native.OutputGradients(
        lookups, torch.tensor([gradients.data_ptr()]), torch.tensor([64])
    )
    for isa, num_threads in everywhere():
        out = torch.full((101, 16), torch.nan)
        with running_on(isa, num_threads):
            _native.sum_rows(
                plan.segment_offsets,
                plan.entries,
                source,
                plan.block_offsets,
                torch.tensor([16], dtype=torch.int32),
                out.data_ptr(),
                torch.arange(0, 101 * 16, 16, dtype=torch.int32),
                "float32",
            )
        assert same_bits(out, wanted)


def test_learns_what_torch_learns():
    """Known answer: the same steps with torch.optim.SGD on a dense copy."""
    ids = torch.tensor([3, 1, 3, 0])
    gradients = torch.randn(4, 5, dtype=torch.float64)
    lookups = _native.Lookups(
        ids,
        torch.tensor([0, 4]),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.uint8),
        4,
        None,
        None,
    )
    plan = _native.make_plan(lookups, torch.tensor([4]), 1)
    dram = _native.Dram([5], [0], [4], [4], [1], [0.5], [0.0], "float64", 1)
    slots = torch.empty(3, dtype=torch.int32)
    dram.acquire(plan.unique_ids, plan.block_offsets, slots, True)
    dense = torch.nn.Parameter(torch.empty(4, 5, dtype=torch.float64))
    dram.birth_values(0, torch.arange(4), dense.data)
    (dense[ids] * gradients).sum().backward()
    torch.optim.SGD([dense], lr=0.1).step()
    _native.update(
        dram,
        slots,
        plan.block_offsets,
        plan.segment_offsets,
        plan.entries,
        _native.OutputGradients(lookups, torch.tensor([gradients.data_ptr()]), torch.tensor([40])),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([[0.1] + [0.0] * 7], dtype=torch.float64),
    )
    trained = torch.empty(3, 5, dtype=torch.float64)
    assert dram.read(0, plan.unique_ids, trained).tolist() == []
    torch.testing.assert_close(trained, dense.detach()[plan.unique_ids])
    assert dram.clocks(0, slots).tolist() == [1, 1, 1]


def small_update(**change):
    """Table 0: ids 1 and 2, table 1: id 5, each looked up once."""
    lookups = _native.Lookups(
        torch.tensor([1, 2, 5]),
        torch.tensor([0, 2, 3]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([2, 2], dtype=torch.uint8),
        0,
        None,
        change.pop("weights", None),
    )
    gradients = torch.ones(3, 4)
    bases = torch.tensor([gradients.data_ptr(), gradients[2].data_ptr()])
    state_elements = change.pop("state_elements", [1, 1])
    dram = _native.Dram(
        [4, 4], state_elements, [0, 0], [10, 10], [1, 2], [0.1, 0.1], [0.0, 0.0], "float32", 1
    )
    slots = torch.empty(3, dtype=torch.int32)
    offsets = torch.tensor([0, 2, 3])
    dram.acquire(torch.tensor([1, 2, 5]), offsets, slots, True)
    arguments = {
        "slots": slots,
        "offsets": offsets,
        "segment_offsets": torch.arange(4, dtype=torch.int32),
        "entries": torch.arange(3, dtype=torch.int32),
        "source": _native.OutputGradients(lookups, bases, torch.tensor([16, 16])),
        "optimizers": torch.tensor([1, 0], dtype=torch.int32),
        "settings": torch.full((2, 8), 0.1, dtype=torch.float64),
        **change,
    }
    if arguments["source"] == "two row gradients":
        arguments["source"] = _native.RowGradients(gradients.data_ptr(), int32(0, 4))
    before = torch.empty(2, 4)
    dram.read(0, torch.tensor([1, 2]), before)
    try:
        _native.update(dram, *arguments.values())
    except (ValueError, TypeError):
        after = torch.empty(2, 4)
        dram.read(0, torch.tensor([1, 2]), after)
        assert torch.equal(before, after)
        assert dram.clocks(0, slots[:2]).tolist() == [0, 0]
        raise


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": int32(0, 10, 0)}, "a slot of table 0 is not in 0 .. 9"),
        ({"slots": int32(0, 1, -1)}, "a slot of table 1"),
        ({"slots": int32(0, 1)}, "2 slots for 3 unique rows"),
        ({"offsets": torch.tensor([0, 3])}, "names table 1 of 1"),
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
        ({"optimizers": int32(1, 2)}, "table 1 has optimizer 2"),
        ({"optimizers": int32(1)}, "speak of 2, 1 and 2 tables"),
        ({"settings": torch.zeros(2, 7, dtype=torch.float64)}, r"settings: got float64 \(2, 7\)"),
        ({"settings": torch.zeros(3, 8, dtype=torch.float64)}, "speak of 2, 2 and 3 tables"),
        ({"state_elements": [0, 1]}, "table 0 has no state elements"),
        ({"weights": torch.ones(3).double()}, "weights are float64, the tables float32"),
    ],
)
def test_refused_and_nothing_changed(change, message):
    small_update()
    with pytest.raises((ValueError, TypeError), match=message):
        small_update(**change)
