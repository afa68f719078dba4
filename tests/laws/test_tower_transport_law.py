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
from colonnade.wire.tower_transport import order_peers, plan_tower_chunks

NUM_RANKS, TOWERS = 6, 3
CASES = {
    "values": (VALUES, "whole", {}),
    "modules": (MODULES, "split", {}),
    "modules ahead": (MODULES, "whole", {"staleness": 2}),
}
PAUSES = (0.0, 0.03, 0.01)


def run_all(mesh):
    results = {}
    for name, (consumers, places, more) in CASES.items():
        results[name] = train(mesh, consumers, "towers", places, TOWERS, **more)
    results["flat"] = train(mesh, VALUES, "pooled", "whole", TOWERS)
    send, sent = Mesh.all_to_all, []

    def late(self, channel, *settings, scope=ALL, **names):
        sent.append(scope)
        time.sleep(PAUSES[(self.rank + len(sent)) % len(PAUSES)] if scope != ALL else 0.0)
        return send(self, channel, *settings, scope=scope, **names)

    with patch.object(Mesh, "all_to_all", late):
        results["late"] = train(mesh, MODULES, "towers", "split", TOWERS)
    assert any(scope.is_across for scope in sent)
    return results


@pytest.fixture(scope="module")
def everyone():
    return run_ranks(NUM_RANKS, run_all, ranks_per_host=2)


def test_ranks_train_what_one_does(everyone):
    for name, (consumers, _, more) in CASES.items():
        outputs, remaining, *_ = train(Mesh(), consumers, **more)
        for step, output in enumerate(outputs):
            for key, value in output.items():
                result = torch.cat([rank[name][0][step][key] for rank in everyone])
                close(result, value, f"{name}, step {step}, {key}")
        for rank in everyone:
            for key, value in remaining.items():
                close(rank[name][1][key], value, f"{name}, {key}")


@pytest.mark.parametrize(("result", "wanted"), [("values", "flat"), ("late", "modules")])
def test_bits_are_the_same(everyone, result, wanted):
    for rank in everyone:
        output, remaining, *_ = rank[result]
        as_seen, as_left, *_ = rank[wanted]
        for step, outputs in enumerate(as_seen):
            for name, value in outputs.items():
                assert torch.equal(output[step][name], value), (step, name)
        for name, value in as_left.items():
            assert torch.equal(remaining[name], value), name


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rank_serves_itself_last(rank):
    peers = order_peers(rank, 2, NUM_RANKS)
    assert peers[-1] == rank
    assert sorted(peers) == list(range(rank % 2, NUM_RANKS, 2))
    sizes = [3, 0, 5, 7, 11, 13]
    others = sum(sizes[index] for index in range(rank % 2, NUM_RANKS, 2) if index != rank)
    turns = plan_tower_chunks(rank, 2, tuple(sizes))
    assert [turn.num_samples for turn in turns] == [others, sizes[rank]]
    for turn in turns:
        samples = torch.arange(sum(sizes)).split(sizes)
        wanted = torch.cat([samples[index] for index in turn.ranks])
        if turn.rows is not None:
            assert torch.equal(torch.arange(sum(sizes))[turn.rows], wanted)
        assert sum(turn.counts) == len(wanted)
