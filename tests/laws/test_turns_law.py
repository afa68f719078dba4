"""Three towers of two ranks each: what is served in turns, and moves inside a tower out of the order of ranks, trains
what one rank trains; the same bits, however late whose messages come."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from test_towers_law import MODULES, VALUES, close, train

from colonnade import Mesh
from colonnade.comm.mesh import ALL
from colonnade.wire.tower_transport import order_peers, plan_chunks

NUM_RANKS, TOWERS = 6, 3
CASES = {
    "values": (VALUES, "whole", {}),
    "modules": (MODULES, "split", {}),
    "modules ahead": (MODULES, "whole", {"staleness": 2}),
}
PAUSES = (0.0, 0.03, 0.01)


def run_all(mesh):
    found = {}
    for name, (consumers, places, more) in CASES.items():
        found[name] = train(mesh, consumers, "towers", places, TOWERS, **more)
    found["flat"] = train(mesh, VALUES, "pooled", "whole", TOWERS)
    send, sent = Mesh.all_to_all, []

    def late(self, channel, *settings, scope=ALL, **names):
        sent.append(scope)
        time.sleep(PAUSES[(self.rank + len(sent)) % len(PAUSES)] if scope != ALL else 0.0)
        return send(self, channel, *settings, scope=scope, **names)

    with patch.object(Mesh, "all_to_all", late):
        found["late"] = train(mesh, MODULES, "towers", "split", TOWERS)
    assert any(scope.is_across for scope in sent)
    return found


@pytest.fixture(scope="module")
def everyone():
    return run_ranks(NUM_RANKS, run_all, ranks_per_host=2)


def test_ranks_train_what_one_does(everyone):
    for name, (consumers, _, more) in CASES.items():
        outputs, left, *_ = train(Mesh(), consumers, **more)
        for step, seen in enumerate(outputs):
            for each, value in seen.items():
                found = torch.cat([rank[name][0][step][each] for rank in everyone])
                close(found, value, f"{name}, step {step}, {each}")
        for rank in everyone:
            for each, value in left.items():
                close(rank[name][1][each], value, f"{name}, {each}")


@pytest.mark.parametrize(("found", "wanted"), [("values", "flat"), ("late", "modules")])
def test_bits_are_the_same(everyone, found, wanted):
    for rank in everyone:
        seen, left, *_ = rank[found]
        as_seen, as_left, *_ = rank[wanted]
        for step, outputs in enumerate(as_seen):
            for each, value in outputs.items():
                assert torch.equal(seen[step][each], value), (step, each)
        for each, value in as_left.items():
            assert torch.equal(left[each], value), each


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rank_serves_itself_last(rank):
    peers = order_peers(rank, 2, NUM_RANKS)
    assert peers[-1] == rank
    assert sorted(peers) == list(range(rank % 2, NUM_RANKS, 2))
    sizes = [3, 0, 5, 7, 11, 13]
    others = sum(sizes[each] for each in range(rank % 2, NUM_RANKS, 2) if each != rank)
    turns = plan_chunks(rank, 2, tuple(sizes))
    assert [turn.num_samples for turn in turns] == [others, sizes[rank]]
    for turn in turns:
        samples = torch.arange(sum(sizes)).split(sizes)
        wanted = torch.cat([samples[each] for each in turn.ranks])
        if turn.rows is not None:
            assert torch.equal(torch.arange(sum(sizes))[turn.rows], wanted)
        assert sum(turn.counts) == len(wanted)
