"""Shardings train the same bits on one number of ranks, and those of one rank to rounding."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from scenario import assert_close, assert_same_bits, probe_ids, train

from colonnade import Mesh
from colonnade.topology.sharding import host_wise, replicated, row_wise, table_wise
from colonnade.topology.world import World

SIZES = [23, 1, 0, 24]
TABLES = list(probe_ids())


def mixed(num_ranks):
    """Every kind of sharding that deals rows, on tables open and closed, with parts, sequences and bags."""
    hosts = World(num_hosts=num_ranks, ranks_per_host=1)
    return {
        "user": table_wise(num_ranks - 1),
        "item": row_wise(num_ranks),
        "tag": host_wise(hosts, 0),
        "wide": table_wise(0),
    }


def train_sharded(mesh, folder):
    n = mesh.num_ranks
    ours = mixed(n)
    copies = {name: replicated(n) for name in TABLES}
    beside = ours | {"user": replicated(n), "tag": replicated(n)}
    first = {name: table_wise(0) for name in TABLES}  # the other ranks have no rows at all

    def tiered(name, shardings):
        place = folder / name
        return train(mesh, sizes=SIZES, shardings=shardings, dram_bytes=60_000, folder=place,
                     lookahead=3, evaluate_every=2)  # fmt: skip

    return {
        "row_wise": train(mesh, sizes=SIZES),
        "mixed": tiered("mixed", ours),
        "on one rank": tiered("first", first),
        "replicated": tiered("copies", copies),
        "copies beside others": tiered("beside", beside),
        "on a device": train(mesh, sizes=SIZES, shardings=beside, hbm_bytes=20_000,
                             folder=folder / "device"),
    }  # fmt: skip


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_sharding_trains_the_same_bits(num_ranks, tmp_path):
    wanted = train(Mesh(), sizes=SIZES)
    for results in run_ranks(num_ranks, train_sharded, tmp_path):
        assert_close(wanted, results["row_wise"], rtol=1e-10)
        for name, trained in results.items():
            print("sharding", name)
            assert_same_bits(results["row_wise"], trained)


def train_stale(mesh, folder):
    n = mesh.num_ranks
    copies = {name: replicated(n) for name in TABLES}
    return [
        train(mesh, sizes=SIZES, staleness=2),
        train(mesh, sizes=SIZES, staleness=2, shardings=mixed(n), dram_bytes=60_000, folder=folder),
        train(mesh, sizes=SIZES, staleness=2, shardings=copies),
        train(mesh, sizes=SIZES, staleness=2, shardings=mixed(n) | {"item": replicated(n)}),
    ]


def test_every_sharding_reads_as_late(tmp_path):
    for wanted, *others in run_ranks(2, train_stale, tmp_path):
        for result in others:
            assert_same_bits(wanted, result)
