"""Hot rows lie on every rank, and training is what it would be without: values, updates, clocks, whoever reads them."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from scenario import assert_close, assert_same_bits, probe_ids, train

from colonnade import Mesh
from colonnade.topology.sharding import host_wise, table_wise

SIZES = [23, 1, 0, 24]
IDS = probe_ids()
HOT = {"user": range(7), "item": IDS["item"][:30], "tag": [4, 1, 0], "wide": IDS["wide"][:9].flip(0)}  # fmt: skip
SOME = {"item": IDS["item"][[1, 0, 5, 399]], "wide": [0]}
POOLED = dict.fromkeys(("user", "item", "tag"), "pooled")  # "wide" is read as a sequence
MIXED = {"user": "pooled", "item": "rows", "tag": "pooled"}
CASE = {"sizes": SIZES}


def train_hot(mesh, folder):
    n = mesh.num_ranks
    dealt = {"user": table_wise(n - 1), "item": table_wise(0), "tag": host_wise(mesh.world, 0)}
    return [
        train(mesh, **CASE, hot=HOT),
        train(mesh, **CASE, hot=HOT),
        train(mesh, **CASE, hot=HOT, dram_bytes=30_000, folder=folder / "tiers", lookahead=3,
              evaluate_every=2),
        train(mesh, **CASE, hot=HOT, hbm_bytes=20_000, folder=folder / "device"),
    ], [
        train(mesh, **CASE),
        train(mesh, **CASE, hot=SOME),
        train(mesh, **CASE, hot=HOT, shardings=dealt),
        train(mesh, **CASE, hot=HOT, exchanges=POOLED),
        train(mesh, **CASE, hot=HOT, exchanges=MIXED, shardings=dealt),
        train(mesh, **CASE, hot={"wide": HOT["wide"]}, exchanges=POOLED, dram_bytes=30_000,
              folder=folder / "pooled"),
    ], [
        train(mesh, **CASE, staleness=2),
        train(mesh, **CASE, staleness=2, hot=HOT),
        train(mesh, **CASE, staleness=2, hot=HOT, exchanges=POOLED),
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_hot_rows_train_what_rows_do(num_ranks, tmp_path):
    """Bags, means, weighted ones, sequences and parts, of vocabulary and of open tables."""
    wanted = train(Mesh(), **CASE)
    assert_same_bits(wanted, train(Mesh(), **CASE, hot=HOT))
    for bits, close, stale in run_ranks(num_ranks, train_hot, tmp_path):
        for number, found in enumerate(bits):
            print("bits", number)
            assert_same_bits(bits[0], found)
        for number, found in enumerate([bits[0], *close]):
            print("close", number)
            assert_close(wanted, found, rtol=1e-10)
        for found in stale[1:]:
            assert_close(stale[0], found, rtol=1e-10)
