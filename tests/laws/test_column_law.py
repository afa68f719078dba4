"""Rows that are cut by columns train the bits of whole ones: first values, roundings and updates of a column depend on
nothing beside it."""

from __future__ import annotations

import pytest
import torch
from plans import by_table
from ranks import run_ranks
from scenario import assert_close, assert_same_bits, probe_ids, train

from colonnade import (
    SGD,
    Adagrad,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Table,
    build_plan,
)
from colonnade.errors import ConfigError
from colonnade.publish.transfer import load_rows, trained_ids
from colonnade.topology.sharding import column_wise, grid, host_wise, row_wise, table_wise

SIZES = [23, 1, 0, 24]
TABLES = list(probe_ids())
POOLED = dict.fromkeys(("user", "item", "tag"), "pooled")  # "wide" is read as a sequence
SINGLE = {"sizes": SIZES, "stays": "single weights"}
LEAVES = {"sizes": SIZES, "stays": "single weights that leave"}


def mixed(num_ranks):
    """Rows that are cut beside whole ones."""
    return {
        "user": column_wise(range(num_ranks)),
        "item": table_wise(num_ranks - 1),
        "wide": column_wise([0, num_ranks - 1]),
    }


def train_cut(mesh, folder):
    n = mesh.num_ranks
    cut = {name: column_wise(range(n)) for name in TABLES}
    one = {name: table_wise(n - 1) for name in TABLES}
    return {
        "row_wise": train(mesh, **SINGLE),
        "cut": train(mesh, **SINGLE, shardings=cut),
        "mixed": train(mesh, **SINGLE, shardings=mixed(n)),
        "tiered": train(mesh, **SINGLE, shardings=cut, dram_bytes=30_000, folder=folder / "tiers",
                        lookahead=3, evaluate_every=2),
        "on a device": train(mesh, **SINGLE, shardings=cut, hbm_bytes=20_000,
                             folder=folder / "device"),
    }, {
        "row_wise": train(mesh, **SINGLE, exchanges=POOLED),
        "cut": train(mesh, **SINGLE, exchanges=POOLED, shardings=cut),
        "mixed": train(mesh, **SINGLE, exchanges={"user": "pooled", "item": "pooled"},
                       shardings=mixed(n)),
    }, {
        "whole": train(mesh, **LEAVES, shardings=one),
        "cut": train(mesh, **LEAVES, shardings=cut),
        "tiered": train(mesh, **LEAVES, shardings=cut, dram_bytes=30_000, folder=folder / "left"),
    }, [
        train(mesh, **SINGLE, staleness=2),
        train(mesh, **SINGLE, staleness=2, shardings=cut),
        train(mesh, **SINGLE, staleness=2, shardings=mixed(n)),
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_columns_train_the_bits_of_rows(num_ranks, tmp_path):
    """Bags, means, weighted ones, sequences and parts, at dims that no number of ranks divides."""
    wanted = train(Mesh(), **SINGLE)
    for rows, pooled, remaining, stale in run_ranks(num_ranks, train_cut, tmp_path):
        assert_close(wanted, rows["row_wise"], rtol=1e-10)
        for name, result in rows.items():
            print("rows", name)
            assert_same_bits(rows["row_wise"], result)
        for name, result in pooled.items():
            print("pooled", name)
            assert_close(wanted, result, rtol=1e-10)
        for result in remaining.values():
            assert_same_bits(remaining["whole"], result)
        for result in stale[1:]:
            assert_same_bits(stale[0], result)


def train_grid(mesh):
    world = mesh.world
    cut = {name: grid(world, [0, 1]) for name in TABLES}
    beside = {"user": cut["user"], "wide": cut["wide"], "tag": column_wise([1, 2])}
    one = {name: host_wise(world, 1) for name in TABLES}
    return [
        train(mesh, **SINGLE),
        train(mesh, **SINGLE, shardings=cut),
        train(mesh, **SINGLE, shardings=beside),
    ], [
        train(mesh, **SINGLE, exchanges=POOLED, shardings=cut),
        train(mesh, **SINGLE, exchanges=POOLED, shardings=beside),
    ], [train(mesh, **LEAVES, shardings=one), train(mesh, **LEAVES, shardings=cut)]  # fmt: skip


def test_a_grid_trains_the_bits_of_rows():
    """Two hosts of two ranks: each host has a slice of the columns, dealt to its ranks by rows."""
    wanted = train(Mesh(), **SINGLE)
    for rows, pooled, remaining in run_ranks(4, train_grid, ranks_per_host=2):
        assert_close(wanted, rows[0], rtol=1e-10)
        for result in rows[1:]:
            assert_same_bits(rows[0], result)
        for result in pooled:
            assert_close(wanted, result, rtol=1e-10)
        assert_same_bits(*remaining)


DIM = 7
IDS = torch.arange(40)


def sixteen_bits(mesh, dtype, master, on_device, sharding):
    """Rows before and after three steps, and the norm of all gradients of one of them."""
    tables = [
        Table("deep", DIM, rows=40, optimizer=Adagrad(lr=0.1), dtype=dtype, master=master),
        Table("flat", DIM, optimizer=SGD(lr=0.1, momentum=0.9), dtype=dtype, master=master),
    ]
    collection = EmbeddingCollection(tables, [Feature("a", "deep"), Feature("b", "flat")], seed=5)
    shardings = {} if sharding is None else dict.fromkeys(("deep", "flat"), sharding)
    plan = build_plan(
        tables,
        mesh.num_ranks,
        PlanConfig(
            memory={"hbm": 30_000 if on_device else None}, tables=by_table(sharding=shardings)
        ),
    )
    collection.open(plan, mesh)
    first = [collection.rows(table.name, IDS) for table in tables]
    rows, norms = RowOptimizer(collection), []
    for step in range(3):
        ids = (torch.arange(24) * (3 * mesh.rank + step + 1)) % 40
        batch = Batch(24, torch.zeros(24, 0), {"a": Ids(ids), "b": Ids(ids.flip(0))})
        outputs = list(collection(batch).values())
        values = torch.randn(24, DIM, generator=torch.Generator().manual_seed(step + mesh.rank))
        torch.autograd.backward(outputs, [values, values.flip(1)])
        if step == 1:
            norms.append(float(rows.clip_grad_norm_(1e9)))
        rows.step()
    return first, [collection.rows(table.name, IDS) for table in tables], norms


def all_sixteen_bits(mesh):
    results = []
    for dtype, master in (("bfloat16", False), ("bfloat16", True), ("float16", False)):
        for on_device in (False, True):
            results.append([
                sixteen_bits(mesh, dtype, master, on_device, sharding)
                for sharding in (row_wise(mesh.num_ranks), column_wise(range(mesh.num_ranks)))
            ])  # fmt: skip
    return results


def test_first_values_and_roundings_of_columns_are_those_of_rows():
    """16-bit weights are rounded at random by their column in the whole row; a norm is over all slices."""
    for results in run_ranks(3, all_sixteen_bits):
        for whole, cut in results:
            for actual, expected in zip([*whole[0], *whole[1]], [*cut[0], *cut[1]], strict=True):
                assert torch.equal(actual, expected)
            assert not torch.equal(whole[0][0], whole[1][0])
            assert whole[2] == pytest.approx(cut[2], rel=1e-6) and whole[2][0] > 0.5


def refused(mesh):
    """Return the error for a limit of row norms that is set while training, and the rows."""
    table = Table("t", DIM, rows=40, optimizer=SGD(lr=0.1))
    collection = EmbeddingCollection([table], [Feature("t", "t")])
    sharding = column_wise(range(mesh.num_ranks))
    collection.open(
        build_plan([table], mesh.num_ranks, PlanConfig(tables={"t": {"sharding": sharding}})), mesh
    )
    rows = RowOptimizer(collection)
    load_rows(collection, "t", torch.arange(280.0).view(40, DIM))
    rows.param_groups[0]["max_norm"] = 1.0
    collection(Batch(1, torch.zeros(1, 0), {"t": Ids(IDS[:1])}))["t"].sum().backward()
    try:
        rows.step()
    except ConfigError as error:
        message = str(error)
    retained = collection.rows("t", IDS)
    collection.delete("t", IDS[:20])
    return (
        message,
        retained,
        trained_ids(collection, "t"),
        [r.weights for r in collection.scan("t")],
    )


def test_whole_rows_go_in_and_come_out():
    """And a slice does not take what is of a whole row while it trains."""
    for rank, (text, retained, trained, scanned) in enumerate(run_ranks(2, refused)):
        assert "param group 't': got max_norm=1.0 for rows cut by columns" in text
        assert torch.equal(retained, torch.arange(280.0).view(40, DIM))
        assert torch.equal(trained, IDS[20:])
        columns = slice(0, 3) if rank == 0 else slice(3, DIM)
        assert torch.equal(torch.cat(scanned).sort(0).values, retained[20:, columns])
