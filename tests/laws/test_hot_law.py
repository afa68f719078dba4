"""Hot rows lie on every rank, and training is what it would be without: values, updates, clocks, whoever reads them."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from scenario import assert_close, assert_same_bits, probe_ids, train

from colonnade import Mesh
from colonnade.topology.sharding import row_wise, table_wise

SIZES = [23, 1, 0, 24]
IDS = probe_ids()
HOT = {
    "user": range(7),
    "item": IDS["item"][:30],
    "tag": [4, 1, 0],
    "wide": IDS["wide"][:9].flip(0),
}
POOLED = dict.fromkeys(("user", "item", "tag"), "pooled")  # "wide" is read as a sequence
CASE = {"sizes": SIZES}


def train_hot(mesh):
    return {
        "whole": train(mesh, **CASE),
        "hot": train(mesh, **CASE, hot=HOT),
        "again": train(mesh, **CASE, hot=HOT),
    }


def test_thin():
    wanted = train(Mesh(), **CASE)
    for found in run_ranks(2, train_hot):
        for name, each in found.items():
            print(name)
            assert_close(wanted, each, rtol=1e-10)
        assert_same_bits(found["hot"], found["again"])
