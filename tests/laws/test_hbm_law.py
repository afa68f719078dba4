"""The tier law where rows lie in a device's memory: any budget of it, of memory below it, and any lookahead gives the
bits of all rows in memory.

On "cpu" that is exact: the kernels on tensors have the bits of the native ones. On a GPU the network's own products are
summed in another order than the processor's, so the same trainings are compared closely there, and with each other to
the bit.
"""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from ranks import run_ranks
from scenario import STAYS, Trained, assert_close, assert_same_bits, tables, train

from colonnade import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Batch,
    Concat,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    RowWiseAdagrad,
    RowWiseAdam,
    Table,
    build_plan,
)
from colonnade.errors import BudgetExceeded

SIZES = [23, 1, 0, 37, 23, 23, 2, 23]
BUDGETS = [1 << 20, 16_000, 11_000]


def assert_same(wanted: Trained, result: Trained, device: str) -> None:
    if device == "cpu":
        assert_same_bits(wanted, result)
    else:
        assert_close(
            wanted, result, rtol=1e-4 if wanted.rows["item"].dtype == torch.float32 else 1e-9
        )


@pytest.fixture(scope="module", params=["float32", "float64"])
def all_in_memory(request):
    return request.param, train(Mesh(), sizes=SIZES, dtype=request.param)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hbm_bytes", BUDGETS)
def test_budgets_and_lookahead(all_in_memory, device, hbm_bytes, tmp_path):
    dtype, wanted = all_in_memory
    if dtype == "float64":
        hbm_bytes *= 2
    for number, (dram_bytes, lookahead) in enumerate([(None, 2), (60_000, 0), (30_000, 5)]):
        result = train(
            Mesh(),
            sizes=SIZES,
            dtype=dtype,
            device=device,
            hbm_bytes=hbm_bytes,
            dram_bytes=dram_bytes,
            lookahead=lookahead,
            folder=tmp_path / str(number) if dram_bytes else None,
            evaluate_every=3,
        )
        assert_same(wanted, result, device)


def test_the_smallest_budget_above_does_evict():
    plan = build_plan(tables("float32"), 1, PlanConfig(memory={"hbm": BUDGETS[-1]}))
    assert any(table.hbm_rows < 100 for table in plan.tables) and not plan.needs_backing


def test_a_budget_below_one_batch_is_refused_and_names_the_table():
    with pytest.raises(
        BudgetExceeded, match=r"'user'.* on the device .*raise plan.memory.hbm"
    ) as caught:
        train(Mesh(), sizes=[200], hbm_bytes=2_000)
    assert "lookahead" not in str(caught.value)


OPTIMIZERS = [
    SGD(lr=0.1, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, nesterov=True),
    Adagrad(lr=0.1, initial_accumulator=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.01),
    RowWiseAdam(lr=0.01),
    AdamW(lr=0.01),
    FTRL(lr=0.1, l1=1e-3),
    LAMB(lr=0.01, weight_decay=0.01),
]
NARROW = {"bfloat16": {"dtype": "bfloat16"}, "split": {"dtype": "bfloat16", "master": True}}
KINDS = {name: {"dtype": name} for name in ("float32", "float64", "float16")} | NARROW


def train_every_optimizer(kind, device, hbm_rows, *, output_dtype=None, clip=False):
    """Two batches a step, two backwards of the first; parts that a feature shares a table for, and clipping."""
    declared = [
        Table(f"t{i}", {"deep": 7, "wide": 1}, optimizer=optimizer, max_norm=0.9, **KINDS[kind])
        for i, optimizer in enumerate(OPTIMIZERS)
    ]
    feature = [
        Feature(f"{t.name}.{p}", t.name, pooling=p) for t in declared for p in ("mean", "sum")
    ]
    consumers = {f"c{t.name}": (Concat(), [f"{t.name}.mean.deep"]) for t in declared}
    collection = EmbeddingCollection(
        declared, feature, consumers=consumers, output_dtype=output_dtype, seed=2
    ).to(device)
    room = hbm_rows and hbm_rows * len(declared) * max(t.record_bytes for t in declared)
    collection.open(build_plan(declared, 1, PlanConfig(memory={"hbm": room}, lookahead=1)))
    rows = RowOptimizer(collection, clip_value=0.6 if clip else None)
    random = torch.Generator().manual_seed(5)

    def batches():
        for _ in range(8):
            sizes = [torch.randint(0, 4, (9,), generator=random) for _ in feature]
            offsets = [torch.cat([torch.zeros(1, dtype=torch.int64), n.cumsum(0)]) for n in sizes]
            yield Batch(
                9,
                torch.zeros(9, 0),
                {
                    optimizer.name: Ids(
                        torch.randint(0, 200, (int(ends[-1]),), generator=random),
                        ends,
                        torch.rand(int(ends[-1]), generator=random) if i % 3 else None,
                    )
                    for i, (optimizer, ends) in enumerate(zip(feature, offsets, strict=True))
                },
            )

    norms, outputs = [], []
    for number, batch in enumerate(collection.lookahead(batches())):
        result = collection(batch)
        outputs.append({name: value.detach().cpu() for name, value in result.items()})
        loss = sum(
            (value.float() - 0.1 * i).square().sum() for i, value in enumerate(result.values())
        )
        for _ in range(1 + number % 2):
            loss.backward(retain_graph=True)
        if number % 2:
            if clip:
                norms.append(float(rows.clip_grad_norm_(3.0)))
            rows.step()
    ids = torch.arange(200)
    if hbm_rows:
        assert collection.store.sources.evicted_dirty > 50
    return outputs, norms, {table.name: collection.rows(table.name, ids) for table in declared}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_optimizer_and_kind_of_row(device, kind):
    """Rounding at random depends on no place, and masters travel whole."""
    narrow = torch.bfloat16 if kind == "float16" else None
    settings = {"output_dtype": narrow, "clip": kind in ("float32", "float64", "split")}
    wanted = train_every_optimizer(kind, "cpu", None, **settings)
    result = train_every_optimizer(kind, device, 100, **settings)
    assert wanted[1] or not settings["clip"]
    if device == "cpu":
        assert wanted[1] == result[1]
        for one, other in zip(wanted[0], result[0], strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
        assert all(torch.equal(rows, result[2][name]) for name, rows in wanted[2].items())
    else:
        loose = 2e-2 if kind in ("bfloat16", "float16") else 1e-4
        for name, rows in wanted[2].items():
            torch.testing.assert_close(rows, result[2][name], rtol=loose, atol=loose)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("staleness", [1, 3])
def test_bounded_staleness(device, staleness, tmp_path):
    settings = {"sizes": SIZES, "staleness": staleness, "lookahead": 1}
    wanted = train(Mesh(), **settings)
    result = train(
        Mesh(), **settings, device=device, hbm_bytes=60_000, dram_bytes=100_000, folder=tmp_path
    )
    assert_same(wanted, result, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stays", list(STAYS))
def test_rows_that_come_and_go(device, stays, tmp_path):
    settings = {"sizes": SIZES, "stays": stays}
    wanted = train(Mesh(), **settings)
    result = train(
        Mesh(), **settings, device=device, hbm_bytes=60_000, dram_bytes=60_000, folder=tmp_path
    )
    assert_same(wanted, result, device)


def train_twice(mesh, device, folder):
    settings = {"sizes": [23, 1, 0, 23], "dram_bytes": 60_000}
    wanted = train(mesh, **settings, folder=folder / "dram")
    return wanted, train(mesh, **settings, device=device, hbm_bytes=30_000, folder=folder / "hbm")


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks(device, tmp_path):
    for wanted, results in run_ranks(2, train_twice, device, tmp_path):
        assert_same(wanted, results, device)
