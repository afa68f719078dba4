"""N ranks with batch b train the model that 1 rank trains with batch N*b; at one N, every run gives the same bits."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from scenario import assert_close, assert_same_bits, train

from colonnade import Mesh

SIZES = [23, 23, 1, 0, 24, 2, 23]  # shares of zero samples, uneven shares


def train_twice(mesh, folder):
    plain = train(mesh, sizes=SIZES)
    tiered = train(mesh, sizes=SIZES, dram_bytes=40_000, folder=folder, lookahead=3)
    single = train(mesh, sizes=SIZES, dtype="float32")
    return plain, tiered, single


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_world(num_ranks, tmp_path):
    wanted = train(Mesh(), sizes=SIZES)
    rounded = train(Mesh(), sizes=SIZES, dtype="float32")
    for plain, tiered, single in run_ranks(num_ranks, train_twice, tmp_path):
        assert_close(wanted, plain, rtol=1e-10)
        assert_same_bits(plain, tiered)
        assert_close(rounded, single, rtol=2e-3)


def train_once(mesh):
    return train(mesh, sizes=SIZES, dtype="float32")


def test_the_same_world_gives_the_same_bits():
    first, second = (run_ranks(2, train_once) for _ in range(2))
    assert_same_bits(first[0], second[0])
    assert_same_bits(first[0], first[1])
