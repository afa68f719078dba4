"""Ids by towers are ids: owners hear what they hear straight, to the byte, so all exchanges train to the same bits, in
T - 1 slow messages of a rank and not N - L; what is handed on inside towers is what formulas say."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from simulated import run_simulated
from test_towers_law import MODULES, SIZES, VALUES, close, train

from colonnade import (
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    RowOptimizer,
    Table,
    World,
    build_plan,
)
from colonnade.errors import ConfigError, WorldError
from colonnade.exchange.letters import across, by_towers, delivered
from colonnade.plan.paths import Paths

HEAD = 8
WORLDS = {  # and how many towers
    "hosts": (World(num_hosts=4, ranks_per_host=2), 4),
    "pairs of hosts": (World(num_hosts=4, ranks_per_host=2), 2),
    "parts of hosts": (World(num_hosts=2, ranks_per_host=4), 4),
    "hosts of three": (World(num_hosts=2, ranks_per_host=3), 2),
    "one host": (World(ranks_per_host=4), 2),
    "a rank each": (World(num_hosts=3), 3),
    "all ranks": (World(ranks_per_host=3), 1),
}


def letters_of(rank: int, lengths: np.ndarray) -> np.ndarray:
    """lengths (N, E): every byte says whose it is, of which part, for whom."""
    random = np.random.default_rng([rank, *lengths.ravel().tolist()])
    return random.integers(0, 256, int(lengths.sum()) + HEAD * len(lengths), dtype=np.uint8)


def both_ways(mesh, lengths: np.ndarray, num_towers: int):
    """lengths (N, N, E), from each rank to each: what came, and what was sent, straight and by towers."""
    mine, found = lengths[mesh.rank].astype(np.int32), []
    for way in (mesh, by_towers(mesh, num_towers)):
        mesh.traffic.sent_bytes.clear()
        mesh.traffic.messages.clear()
        came = delivered(way, mine, letters_of(mesh.rank, mine), HEAD, "route", "route")
        sent = dict(mesh.traffic.sent_bytes), dict(mesh.traffic.messages)
        found.append((came, sent, way.relay))
    return found


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(WORLDS)), st.integers(1, 3), st.data())
def test_what_comes_is_what_comes_straight(case, num_parts, data):
    world, num_towers = WORLDS[case]
    n = world.num_ranks
    seed = data.draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 40, (n, n, num_parts)) * random.integers(0, 2, (n, n, 1))
    everyone = run_simulated(world, both_ways, lengths, num_towers)
    size = n // num_towers
    for rank, ((straight, _, _), (relayed, (_, messages), relay)) in enumerate(everyone):
        assert np.array_equal(straight[0], lengths[:, rank])
        for found, wanted in zip(relayed, straight, strict=True):
            assert np.array_equal(found, wanted)
        assert relay == (size if 1 < size < n else 0)
        if relay and size % world.ranks_per_host == 0 == world.num_hosts % num_towers:
            # Of hosts: sizes, and letters, to the peer in each other tower.
            wanted = 2 * (num_towers - 1 + size - world.ranks_per_host)
            assert messages["route", "remote"] == wanted
    # Bytes by link are what the formula makes of letters, pair by pair.
    pairs = lengths.sum(2) + 4 * num_parts + HEAD
    for way in (0, 1):
        paths, wanted = Paths(world, num_towers, ids_by_towers=bool(way)), Counter()
        for rank in range(n):
            asks = np.zeros(n)
            asks[rank] = 1
            asked = paths.asked(asks, pairs[rank].astype(float))
            for link, mean in asked.by_link.items():
                wanted[link] += mean * n
        for link in ("local", "remote"):
            sent = sum(each[way][1][0].get(("route", link), 0) for each in everyone)
            assert sent == pytest.approx(wanted[link]), (way, link)


@given(st.integers(1, 6), st.integers(1, 6))
def test_rows_after_rows_are_columns_after_columns(rows, columns):
    table = np.arange(rows * columns).reshape(rows, columns)
    assert across(table.ravel().tolist(), rows, columns) == table.T.ravel().tolist()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(WORLDS)), st.integers(0, 2**32 - 1))
def test_what_is_handed_on_is_what_neither_comes_from_a_peer_nor_goes_to_one(case, seed):
    world, num_towers = WORLDS[case]
    n, random = world.num_ranks, np.random.default_rng(seed)
    asks, owns = random.integers(0, 2, n).astype(float), random.integers(0, 5, n).astype(float)
    size = n // num_towers
    handed_on, near, far = np.zeros(n), 0.0, 0.0
    for asker in range(n):
        for owner in range(n):
            peer = owner // size * size + asker % size
            bytes_ = asks[asker] * owns[owner]
            for one, other in ((asker, peer), (peer, owner)):
                is_near = one // world.ranks_per_host == other // world.ranks_per_host
                near += bytes_ * (is_near and one != other)
                far += bytes_ * (not is_near)
            handed_on[peer] += bytes_ * (peer not in (asker, owner))
    asked = Paths(world, num_towers, ids_by_towers=True).asked(asks, owns)
    assert np.allclose(asked.handed_on, handed_on)
    assert asked.near * n == pytest.approx(near) and asked.far * n == pytest.approx(far)
    straight = Paths(world, num_towers).asked(asks, owns)
    more = (asked.near + asked.far - straight.near - straight.far) * n
    assert more == pytest.approx(handed_on.sum())
    rates = 1 / world.local_bytes_per_second, 1 / world.remote_bytes_per_second
    for each in (asked, straight):  # links out of ranks and hosts carry it
        assert each.there[:n].sum() == pytest.approx(each.near * n * rates[0])
        out = each.there[2 * n : 2 * n + world.num_hosts].sum()
        assert out == pytest.approx(each.far * n * rates[1])


def wrong(mesh, num_towers):
    """What is said where rank 3 tells a size that is none, of what it has for rank 4."""
    sizes = np.full((mesh.num_ranks, 1), 5, np.int32)
    if mesh.rank == 3:
        sizes[4] = -1
    letters = np.zeros(int((sizes + HEAD).sum()), np.uint8)
    if mesh.rank == 4 + 3 % 2:  # its peer, which hears it first
        with pytest.raises(WorldError, match=r"rank 3 told sizes \[-1\] of its messages"):
            delivered(by_towers(mesh, num_towers), sizes, letters, HEAD, "route", "route")
        mesh.office.close()
        return True
    with pytest.raises(AssertionError):  # lost ranks are the presence's to name
        delivered(by_towers(mesh, num_towers), sizes, letters, HEAD, "route", "route")
    return True


def test_sizes_that_are_none_are_refused_by_who_hears_them_first():
    assert all(run_simulated(World(num_hosts=4, ranks_per_host=2), wrong, 4))


TRAINED = {
    "flat": ("pooled", "whole", "straight"),
    "whole": ("towers", "whole", "straight"),
    "whole, ids by towers": ("towers", "whole", "by_towers"),
    "flat, ids by towers": ("pooled", "whole", "by_towers"),
    "cut": ("towers", "cut", "straight"),
    "cut, ids by towers": ("towers", "cut", "by_towers"),
    "split": ("towers", "split", "straight"),
    "split, ids by towers": ("towers", "split", "by_towers"),
    "rows": ("rows", "over hosts", "straight"),
    "rows, ids by towers": ("rows", "over hosts", "by_towers"),
    "mixed": ("mixed", "split", "straight"),
    "mixed, ids by towers": ("mixed", "split", "by_towers"),
}
SAME = {name: name.removesuffix(", ids by towers") for name in TRAINED} | {"whole": "flat"}


def trained(mesh, towers, names):
    found = {}
    for name in names:
        exchange, places, route = TRAINED[name]
        consumers = MODULES if exchange == "mixed" else VALUES
        found[name] = train(mesh, consumers, exchange, places, towers, route=route)
    return found


def assert_same_bits(everyone, names):
    for rank in everyone:
        for name in names:
            (seen, left, *_), (wanted, rows, *_) = rank[name], rank[SAME[name]]
            for step, outputs in enumerate(wanted):
                for each, value in outputs.items():
                    assert torch.equal(seen[step][each], value), (name, step, each)
            for each, value in rows.items():
                assert torch.equal(left[each], value), (name, each)


@pytest.mark.parametrize(
    ("world", "towers"),
    [(World(num_hosts=4, ranks_per_host=2), 4), (World(num_hosts=2, ranks_per_host=2), 2)],
    ids=str,
)
def test_simulated_worlds_train_to_the_same_bits(world, towers):
    everyone = run_simulated(world, trained, towers, list(TRAINED))
    assert_same_bits(everyone, TRAINED)
    n, local = world.num_ranks, world.ranks_per_host
    for rank in everyone:
        for name in TRAINED:
            slow = rank[name][3][1]["route", "remote"] / len(SIZES)
            is_by_towers = TRAINED[name][2] == "by_towers"
            assert slow == 2 * (towers - 1 if is_by_towers else n - local), name


SOME = ["mixed", "mixed, ids by towers", "cut", "cut, ids by towers"]


@pytest.mark.parametrize(("num_ranks", "local", "towers"), [(2, 1, 2), (3, 1, 3), (4, 2, 2)])
def test_ranks_train_to_the_same_bits(num_ranks, local, towers):
    names = SOME if num_ranks == 4 else ["whole", "whole, ids by towers", "flat"]
    everyone = run_ranks(num_ranks, trained, towers, names, ranks_per_host=local)
    assert_same_bits(everyone, names)
    outputs, left, *_ = train(Mesh(), MODULES if num_ranks == 4 else VALUES, route="by_towers")
    name = names[1]
    for step, seen in enumerate(outputs):
        for each, value in seen.items():
            close(torch.cat([rank[name][0][step][each] for rank in everyone]), value, (step, each))
    for rank in everyone:
        for each, value in left.items():
            close(rank[name][1][each], value, each)


def test_what_cannot_be_is_refused():
    tables = [Table("t", 4, rows=10)]
    with pytest.raises(ConfigError, match="unknown route 'round'; choose from straight, by_towers"):
        build_plan(tables, 2, route="round")
    with pytest.raises(ConfigError, match="3 towers on 4 ranks"):
        by_towers(Mesh(World(num_hosts=2, ranks_per_host=2)), 3)
    collection = EmbeddingCollection(tables, [Feature("t", "t")])
    plan = build_plan(tables, 1, towers=1, route="by_towers")
    collection.open(plan, Mesh())  # on one rank nothing travels
    assert plan == type(plan).from_json(plan.to_json())


def without_a_lookahead(mesh, route):
    mine = [Table("t", 4, rows=50)]
    collection = EmbeddingCollection(mine, [Feature("t", "t")])
    collection.open(build_plan(mine, mesh.num_ranks, route=route, towers=2), mesh)
    rows = RowOptimizer(collection)
    for step in range(3):
        ids = torch.tensor([step, 7, 10 + mesh.rank])
        collection(Batch(3, torch.zeros(3, 0), {"t": Ids(ids)}))["t"].sum().backward()
        rows.step()
    return collection.rows("t", torch.arange(50))


def test_batches_of_no_lookahead_go_straight():
    world = World(num_hosts=2, ranks_per_host=2)
    ways = [run_simulated(world, without_a_lookahead, route) for route in ("straight", "by_towers")]
    for straight, by in zip(*ways, strict=True):
        assert torch.equal(straight, by)
