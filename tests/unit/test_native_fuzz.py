"""One wrong argument at a time for every function of the core that writes: refused, and nothing is written."""

import math

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade import _native

REFUSED = (TypeError, ValueError, IndexError, MemoryError, BufferError)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def longs(*values):
    return torch.tensor(values, dtype=torch.int64)


# What an array becomes.
WRECKS = {
    "float16": lambda a: a.to(torch.float16 if a.dtype != torch.float16 else torch.float32),
    "int8": lambda a: a.to(torch.int8),
    "bool": lambda a: a.to(torch.bool),
    "other width": lambda a: a.to(
        {
            torch.int32: torch.int64,
            torch.int64: torch.int32,
            torch.float32: torch.float64,
            torch.float64: torch.float32,
        }.get(a.dtype, torch.int64)
    ),
    "complex": lambda a: a.to(torch.complex64),
    "strided": lambda a: a.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda a: a.flatten()[:1].expand(3, *a.shape)[..., 0] if a.numel() else a[None],
    "nested": lambda a: a[None],
    "scalar": lambda a: torch.zeros((), dtype=a.dtype),
    "longer": lambda a: torch.cat([a, a[-1:] if len(a) else torch.zeros(1, dtype=a.dtype)]),
    "shorter": lambda a: a[:-1],
    "empty": lambda a: a[:0],
    "wider": lambda a: torch.cat([a, a], -1),
    "meta": lambda a: a.to("meta"),
    "sparse": lambda a: a.to_sparse(),
    "gradient": lambda a: a.to(
        torch.float32 if a.dtype == torch.float64 else torch.float64
    ).requires_grad_(),
    "none": lambda _: None,
    "list": lambda a: a.tolist(),
    "text": lambda _: "float32",
    "number": lambda _: -1,
    "large number": lambda _: 2**70,
}
NUMBERS = [-(2**63), -1, 2**31, 2**63 - 1, 2**64, 1.5, None, "float32", "int8", "", longs(1)]


def vectors(*shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) / 8


def a_dram():
    """Table 0 direct, table 1 hashed; rows 1, 2 of the one and 5 of the other are pinned."""
    parts = _native.Parts(int32(0, 1), int32(0, 0), int32(4, 4), int32(0, 0))
    tables = [
        _native.TableSettings(
            parts=[_native.PartInitialValues(4, 0, 0.1, 0.0, 0)],
            state_elements=state_elements,
            rows=rows,
            capacity_rows=capacity_rows,
            seed=seed,
        )
        for state_elements, rows, capacity_rows, seed in ((1, 9, 9, 1), (8, 0, 10, 2))
    ]
    dram = _native.Dram(tables, "float32", False)
    slots = torch.empty(3, dtype=torch.int32)
    dram.acquire(longs(1, 2, 5), longs(0, 2, 3), slots, True)
    return dram, parts, slots


def records(dram):
    everything = []
    for t in range(2):
        ids, slots = dram.resident(t)
        packed = torch.empty(len(ids), 16 + 4 * (1, 8)[t] + 8, dtype=torch.uint8)
        dram.pack(t, slots, packed)
        everything += [ids.tolist(), slots.tolist(), packed.tolist(), dram.dirty(t)[0].tolist()]
    return everything


def three_lookups():
    return _native.Lookups(
        longs(1, 2, 5), longs(0, 2, 3), int32(0, 1), torch.tensor([2, 2]).byte(), 0, None, None
    )


class Call:
    """Right arguments of one function, by name; `snapshot()`: all it may write, as it is now."""

    def __init__(self, name):
        self.dram, self.parts, self.slots = a_dram()
        self.buffers = [torch.full((3, 4), 7.0), torch.ones(3, 4)]
        getattr(self, name)()

    def snapshot(self):
        written = [a for a in self.arguments.values() if torch.is_tensor(a)]
        for a in self.arguments.values():
            written += [x for x in a if torch.is_tensor(x)] if isinstance(a, list) else []
        written = [a.tolist() for a in [*written, *self.buffers] if a.device.type == "cpu"]
        return records(self.dram), written

    def bind(self, function, **arguments):
        self.function, self.arguments = function, arguments

    # Each function, right.

    def pool(self):
        out, rows = self.buffers
        self.bind(
            _native.pool,
            lookups=three_lookups(),
            index=int32(0, 1, 2),
            bases=longs(rows.data_ptr(), rows.data_ptr()),
            strides=longs(16, 16),
            reads=_native.Reads(int32(0, 1), int32(0, 0), int32(4, 4)),
            out_bases=longs(out.data_ptr(), out[2].data_ptr()),
            out_strides=longs(16, 16),
            dtype="float32",
            out_dtype="float32",
        )

    def source(self):
        gradients = self.buffers[1]
        return _native.OutputGradients(
            three_lookups(),
            _native.Reads(int32(0, 1), int32(0, 0), int32(4, 4)),
            longs(gradients.data_ptr(), gradients[2].data_ptr()),
            longs(16, 16),
            "float32",
        )

    def output_gradients(self):
        self.bind(
            _native.OutputGradients,
            lookups=three_lookups(),
            reads=_native.Reads(int32(0, 1), int32(0, 0), int32(4, 4)),
            bases=longs(self.buffers[1].data_ptr(), self.buffers[1][2].data_ptr()),
            strides=longs(16, 16),
            dtype="float32",
        )

    def row_gradients(self):
        base = self.buffers[1].data_ptr()
        self.bind(_native.RowGradients, base=base, index=int32(0, 4, 8), dtype="float32")

    def sum_rows(self):
        self.bind(
            _native.sum_rows,
            segment_offsets=int32(0, 1, 2, 3),
            entries=int32(0, 1, 2),
            source=self.source(),
            offsets=longs(0, 2, 3),
            parts=self.parts,
            out_base=self.buffers[0].data_ptr(),
            out_index=int32(0, 4, 8),
            dtype="float32",
        )

    def update(self):
        row = [0.1, 0.0, 1e-6, 0.9, 0.99, 0, 0, 0, 0, math.inf, math.inf, 1.0, 0, 0, 0, 0]
        self.bind(
            _native.update,
            dram=self.dram,
            slots=self.slots,
            offsets=longs(0, 2, 3),
            segment_offsets=int32(0, 1, 2, 3),
            entries=int32(0, 1, 2),
            source=self.source(),
            parts=self.parts,
            optimizers=int32(1, 4),
            settings=torch.tensor([row, row], dtype=torch.float64),
        )

    def acquire(self):
        slots = int32(7, 7, 7)
        ids, offsets = longs(3, 2, 6), longs(0, 2, 3)
        self.bind(self.dram.acquire, ids=ids, offsets=offsets, slots=slots, initialise=True)

    def release(self):
        self.bind(self.dram.release, slots=self.slots, offsets=longs(0, 2, 3), dirty=True)

    def initialise(self):
        self.bind(self.dram.initialise, ids=longs(1, 2), slots=self.slots[:2], table=0)

    def pack(self):
        out = torch.zeros(2, 28, dtype=torch.uint8)
        self.bind(self.dram.pack, table=0, slots=self.slots[:2], records=out)

    def unpack(self):
        rows = torch.zeros(2, 28, dtype=torch.uint8)
        self.bind(self.dram.unpack, table=0, slots=self.slots[:2], records=rows)

    def read(self):
        self.bind(self.dram.read, table=0, ids=longs(1, 8), out=torch.zeros(2, 4))

    def initial_values(self):
        self.bind(self.dram.initial_values, table=1, ids=longs(1, 8), out=torch.zeros(2, 4))

    def clean(self):
        self.bind(self.dram.clean, table=0, slots=self.slots[:2])

    def clocks(self):
        self.bind(self.dram.clocks, table=0, slots=self.slots[:2])

    def erase(self):
        self.bind(self.dram.erase, table=1, ids=longs(4, 5))

    def make_parts(self):
        zeros = int32(0, 0)
        self.bind(_native.Parts, tables=int32(0, 1), columns=zeros, dims=int32(4, 4), states=zeros)

    def make_reads(self):
        self.bind(_native.Reads, features=int32(0, 1), columns=int32(0, 0), dims=int32(4, 4))

    def take(self):
        out = int32(0, 0)
        self.bind(_native.take, values=int32(5, 6, 7), index=int32(2, 0), out=out)

    def pairwise_dot(self):
        arrays = [vectors(3, 1, 4), vectors(3, 2, 4)]
        self.bind(_native.pairwise_dot, vectors=arrays, copied=[0], out=torch.zeros(3, 7))

    def pairwise_dot_gradient(self):
        self.bind(
            _native.pairwise_dot_gradient,
            vectors=[vectors(3, 1, 4), vectors(3, 2, 4)],
            copied=[0],
            gradient=vectors(3, 7),
            out=[None, torch.zeros(3, 2, 4)],
        )

    def fm(self):
        self.bind(_native.fm, vectors=[vectors(3, 2, 4)], out=torch.zeros(3, 1))

    def fm_gradient(self):
        arrays, out = [vectors(3, 2, 4)], [torch.zeros(3, 2, 4)]
        self.bind(_native.fm_gradient, vectors=arrays, gradient=vectors(3, 1), out=out)

    def cross(self):
        x = vectors(3, 4)
        self.bind(_native.cross, first=x, factor=x + 1, input=x + 2, out=torch.zeros(3, 4))

    def cross_gradient(self):
        names = ("first", "factor", "gradient", "of_first", "of_factor")
        self.bind(
            _native.cross_gradient, **{name: vectors(3, 4) + i for i, name in enumerate(names)}
        )


CALLS = [
    name
    for name in vars(Call)
    if not name.startswith("_") and name not in ("snapshot", "bind", "source")
]


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_right(name):
    call = Call(name)
    call.function(**call.arguments)


@pytest.mark.parametrize("name", CALLS)
def test_any_wrong_argument(name):
    """All wrecks of all arrays, one at a time."""
    accepted = set()
    for argument, value in Call(name).arguments.items():
        for wreck in WRECKS if torch.is_tensor(value) or isinstance(value, list) else ():
            call = Call(name)
            whole = call.arguments[argument]
            if torch.is_tensor(whole):
                wrong = WRECKS[wreck](whole)
            elif any(torch.is_tensor(x) for x in whole):
                wrong = [WRECKS[wreck](x) if torch.is_tensor(x) else x for x in whole]
            else:
                wrong = WRECKS[wreck](torch.tensor(whole))
            before = call.snapshot()
            try:
                call.function(**{**call.arguments, argument: wrong})
            except REFUSED as error:
                assert str(error)
                assert call.snapshot() == before, (argument, wreck)
            else:
                accepted.add((argument, wreck))
    # Shapes that are right as well: a shorter list of parts, vectors with strides, no gradient wanted.
    right = {"empty", "shorter", "longer", "strided", "expanded", "nested", "list", "none", "wider"}
    assert {wreck for _, wreck in accepted} <= right, accepted


@settings(max_examples=examples(40, 150), deadline=None)
@given(st.sampled_from(CALLS), st.integers(0, 8), st.sampled_from(NUMBERS), st.integers(0, 63))
def test_any_wrong_number(name, place, number, element):
    """Numbers and names of any type, and ids, offsets, slots and entries of any value."""
    call = Call(name)
    argument = list(call.arguments)[place % len(call.arguments)]
    value = call.arguments[argument]
    if "base" in argument or argument == "strides" or (name == "pool" and argument == "index"):
        return  # addresses cannot be checked
    if argument in ("out_index", "index", "out_strides") and name != "take":
        return
    before = call.snapshot()
    if torch.is_tensor(value) and not value.is_floating_point():
        if not isinstance(number, int):
            return
        info = torch.iinfo(value.dtype)
        value = value.clone()
        value.view(-1)[element % value.numel()] = min(max(number, info.min), info.max)
    elif not isinstance(value, list):
        value = number
    try:
        call.function(**{**call.arguments, argument: value})
    except REFUSED as error:
        assert str(error)
        if name == "acquire":  # gives no slot then
            assert call.arguments["slots"].tolist() in ([7] * 3, [-1] * 3)
            call.arguments["slots"].fill_(7)
        assert call.snapshot() == before


def test_outputs_must_be_writable():
    for name, argument in (("take", "out"), ("acquire", "slots"), ("read", "out"), ("fm", "out")):
        call = Call(name)
        out = call.arguments[argument].numpy().copy()
        out.flags.writeable = False
        before = call.snapshot(), np.copy(out)
        with pytest.raises(TypeError):
            call.function(**{**call.arguments, argument: out})
        assert call.snapshot() == before[0]
        assert (out == before[1]).all()


def test_first_part_of_no_table():
    with pytest.raises(ValueError, match="part 0 is of table -1, wanted 0:"):
        _native.Parts(int32(-1), int32(0), int32(4), int32(0))


def test_columns_beyond_32_bits():
    """Their sum is no 32-bit number."""
    with pytest.raises(ValueError, match=f"starts at column 0, wanted {2**31}:"):
        _native.Parts(
            int32(0, 0, 0), int32(0, 2**31 - 1, 0), int32(2**31 - 1, 1, 1), int32(0, 0, 0)
        )
