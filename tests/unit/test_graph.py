"""Graphs: neighbours and what is drawn of them, against a slow twin; pairs that are no edges; made-up power laws."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from edge_law import neighbour_probabilities
from hypothesis import given
from hypothesis import strategies as st

from colonnade.batch import Ids
from colonnade.data import Position, open_source
from colonnade.data.counter import random_words, stream_key
from colonnade.data.graph import build_graph, sample_hops
from colonnade.data.sets.power_law import EdgeDistribution, build_edge_distribution
from colonnade.errors import ConfigError

NODES = 9
EDGES = st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)), max_size=25)


def beside(edges) -> list[list[int]]:
    results = [set() for _ in range(NODES)]
    for a, b in edges:
        results[a].add(b)
        results[b].add(a)
    return [sorted(one) for one in results]


def build(edges):
    ends = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2)
    return build_graph(ends[:, 0], ends[:, 1], NODES)


@given(edges=EDGES, key=st.integers(0, 2**63), nodes=st.lists(st.integers(0, NODES - 1)))
def test_neighbours_are_drawn_as_by_a_loop(edges, key, nodes):
    graph, lists = build(edges), beside(edges)
    drawn = random_words(key, 0, 4 * len(nodes)).reshape(len(nodes), 4)
    without = [(3 * node + 1) % NODES for node in nodes]
    for left_out in (None, without):
        wanted = []
        for i, node in enumerate(nodes):
            retained = [n for n in lists[node] if left_out is None or n != left_out[i]]
            wanted += [
                retained[int(word % np.uint64(len(retained)))] if retained else node
                for word in drawn[i]
            ]
        others = None if left_out is None else torch.tensor(left_out, dtype=torch.int64)
        result = graph.sample_neighbours(torch.tensor(nodes, dtype=torch.int64), drawn, others)
        assert result.tolist() == wanted


@given(edges=EDGES, key=st.integers(0, 2**63))
def test_no_hop_goes_between_the_nodes_of_a_pair(edges, key):
    """A node whose only neighbour is left out is drawn itself, and was asked for that neighbour at the next hop."""
    graph, nodes = build(edges), torch.arange(NODES)
    others = (3 * nodes + 1) % NODES
    result = sample_hops("x", nodes, graph, (3, 2, 2), key, excluded_P=others)
    above, size = nodes, 1
    for hop, fan_out in enumerate((3, 2, 2), 1):
        below = result[f"x_hop{hop}"].values
        one, other = (item.repeat_interleave(size * fan_out) for item in (nodes, others))
        above = above.repeat_interleave(fan_out)
        is_pair = ((above == one) & (below == other)) | ((above == other) & (below == one))
        assert not (is_pair & (one != other)).any()
        above, size = below, size * fan_out


def test_neighbours_are_drawn_alike():
    """Chi-squared of 30,000 draws from four neighbours, one of five left out: 99.9 % lie below 16.3."""
    graph = build([(0, n) for n in (2, 3, 5, 7, 8)])
    drawn = random_words(stream_key(1), 0, 30_000).reshape(1, -1)
    counts = Counter(graph.sample_neighbours(torch.tensor([0]), drawn, torch.tensor([5])).tolist())
    assert set(counts) == {2, 3, 7, 8}
    assert sum((count - 7500) ** 2 / 7500 for count in counts.values()) < 16.3


@given(edges=EDGES, key=st.integers(0, 2**63))
def test_hops_go_from_neighbour_to_neighbour(edges, key):
    graph, lists = build(edges), beside(edges)
    nodes = torch.arange(NODES)
    result = sample_hops("x", nodes, graph, (3, 2), key)
    assert list(result) == ["x", "x_hop1", "x_hop2"]
    assert result["x_hop1"].offsets.tolist() == list(range(0, 3 * NODES + 1, 3))
    assert result["x_hop2"].offsets.tolist() == list(range(0, 6 * NODES + 1, 6))
    one, two = result["x_hop1"].values, result["x_hop2"].values
    for above, below in ((nodes.repeat_interleave(3), one), (one.repeat_interleave(2), two)):
        for a, b in zip(above.tolist(), below.tolist(), strict=True):
            assert b in (lists[a] or [a])
    # Draws belong to numbers, not to calls.
    rest = sample_hops("x", nodes[4:], graph, (3, 2), key, first_sample=4)
    assert torch.equal(rest["x_hop2"].values, two[6 * 4 :])


def gowalla(folder):
    (folder / "train.txt").write_text("0 0 1 2 3 7\n1 0 1 2 3 4 8 9 10 11 12\n2 5 6\n3 1\n")
    (folder / "valid.txt").write_text("0 4\n1 6 5\n")
    return folder


@pytest.fixture
def opened(tmp_path):
    return open_source(
        "gowalla", gowalla(tmp_path), samples="neighbours", fan_outs=[3, 2], max_pairs=4
    )


def test_a_pair_is_no_edge_of_its_sample(opened):
    result = opened.train.interactions
    pairs = {
        (user, item) for user, items in enumerate(beside_users(result.train)) for item in items
    }
    visited = set()
    for epoch in range(12):
        (batch,) = opened.train.batches(100, start=Position(epoch=epoch))
        query, item = batch.ids["query"].values, batch.ids["item"].values - 4
        visited |= set(zip(query.tolist(), item.tolist(), strict=True))
        assert max(Counter(query.tolist()).values()) == 4
        assert torch.equal(batch.key.truth.values, item)
        for i, (q, t) in enumerate(zip(query.tolist(), item.tolist(), strict=True)):
            around_q = batch.ids["query_hop1"].values[3 * i : 3 * i + 3].tolist()
            around_t = batch.ids["item_hop1"].values[3 * i : 3 * i + 3].tolist()
            assert t + 4 not in around_q and q not in around_t
            assert all((q, n - 4) in pairs or n == q for n in around_q)
            assert all((n, t) in pairs or n == t + 4 for n in around_t)
            first, last = batch.key.excluded.offsets[i : i + 2].tolist()
            assert {(q, n) for n in batch.key.excluded.values[first:last].tolist()} <= pairs
    assert visited == pairs  # others each epoch


def beside_users(bags: Ids) -> list[list[int]]:
    return [bags.values[a:b].tolist() for a, b in pairwise(bags.offsets.tolist())]


def test_a_query_is_drawn_about_once_and_ranks_places(opened):
    (batch,) = opened.test.batches(10)
    assert batch.ids["query"].values.tolist() == [0, 1]
    assert batch.key.truth.values.tolist() == [4, 6, 5]
    (again,) = opened.test.batches(10, start=Position(epoch=3))
    assert torch.equal(again.ids["query_hop2"].values, batch.ids["query_hop2"].values)
    catalogue = opened.test.catalogue
    assert catalogue.ids["item"].values.tolist() == list(range(4, 17))
    (pair,) = opened.train.batches(100)
    assert list(pair.ids) == [column.name for column in opened.train.schema.categorical]


@pytest.mark.parametrize("fan_outs", [[], [3, 0], [2.5], ["3"]])
def test_fan_outs_that_are_none(tmp_path, fan_outs):
    with pytest.raises(ConfigError, match="wanted a number of neighbours for each hop"):
        open_source("gowalla", gowalla(tmp_path), samples="neighbours", fan_outs=fan_outs)


LAW = {"exponent": 2.5, "communities": 4, "mixing": 0.2, "graph_seed": 3}


def test_edges_follow_their_law():
    """40,000 edges: how often each pair of communities meets, and each node, within five standard errors."""
    law, count = build_edge_distribution(60, **LAW), 40_000
    ends = law.draw_edges(count, stream_key(7))
    chance = law.share[:, None] * neighbour_probabilities(law, torch.arange(60))
    assert float(chance.sum()) == pytest.approx(1)
    torch.testing.assert_close(chance, chance.T)  # so both ends have the same law
    for result, wanted in (
        (torch.bincount(ends[0], minlength=60), chance.sum(1)),
        (torch.bincount(ends[1], minlength=60), chance.sum(0)),
        (torch.bincount(ends[0] * 60 + ends[1], minlength=3600).reshape(60, 60), chance),
    ):
        error = (count * wanted * (1 - wanted)).sqrt()
        assert ((result - count * wanted).abs() < 5 * error + 1).all()


def test_shares_are_a_power_law():
    share = build_edge_distribution(1000, **LAW).share.sort(descending=True).values
    assert float((share[0] / share[99]).log() / torch.tensor(100.0).log()) == pytest.approx(2 / 3)


def test_scores_are_likelihoods():
    law = EdgeDistribution(torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0, 0, 1]), 0.25)
    wanted = [0.5 * (0.75 / 0.8 + 0.25), 0.3 * (0.75 / 0.8 + 0.25), 0.2 * 0.25]
    torch.testing.assert_close(
        neighbour_probabilities(law, torch.tensor([1]))[0], torch.tensor(wanted).double()
    )


def test_a_made_up_graph_has_each_edge_in_one_part_and_both_ways():
    data = open_source("power_law", nodes=200, degree=8, communities=5, fan_outs=[2])
    result = data.train.interactions
    edges = []
    for bags in (result.train, result.validation, result.test):
        pairs = {
            (node, other) for node, others in enumerate(beside_users(bags)) for other in others
        }
        assert all((b, a) in pairs and a != b for a, b in pairs)
        edges.append(pairs)
    assert not (edges[0] & edges[1] or edges[0] & edges[2] or edges[1] & edges[2])
    total = sum(map(len, edges))
    assert 0.05 < len(edges[2]) / total < 0.15 and 0.02 < len(edges[1]) / total < 0.08
    other = open_source("power_law", nodes=200, degree=8, communities=5, fan_outs=[2], seed=5)
    assert torch.equal(other.train.interactions.train.values, result.train.values)
    for batch in data.test.batches(50):  # no node is ranked for itself
        ends = batch.key.excluded.offsets.tolist()
        for node, a, b in zip(batch.group.tolist(), ends, ends[1:], strict=False):
            assert node in batch.key.excluded.values[a:b].tolist()


@pytest.mark.parametrize(
    "name, value",
    [("nodes", 1), ("degree", 0), ("exponent", 2.0), ("communities", 0), ("mixing", 1.5)],
)
def test_numbers_that_make_no_graph(name, value):
    with pytest.raises(ConfigError, match=rf"got {name}=.*data\.options\.{name}"):
        open_source("power_law", **{name: value})


def test_any_number_of_ranks_draws_the_same():
    source = open_source("power_law", nodes=60, degree=6, communities=3, fan_outs=[3, 2]).train
    start = Position(epoch=1, step=1)
    whole = list(source.batches(32, start=start))
    parts = [list(source.batches(32, rank=r, num_ranks=3, start=start)) for r in range(3)]
    for step, batch in enumerate(whole):
        for name, ids in batch.ids.items():
            joined = torch.cat([part[step].ids[name].values for part in parts])
            assert torch.equal(joined, ids.values)
    first = next(iter(source.batches(32)))
    other = next(iter(replace(source).batches(32, start=Position(epoch=1))))
    assert not torch.equal(first.ids["item_hop2"].values, other.ids["item_hop2"].values)
