"""Approximate ranking beside its slow twin, the exact one."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.batch import Ids
from colonnade.errors import ConfigError
from colonnade.models.retriever import rank_items
from colonnade.predict import approximate
from colonnade.predict.approximate import build_index, check_index_kind, lengthen

pytest.importorskip("usearch")


def make_vectors(num_items: int, dim: int, seed: int) -> torch.Tensor:
    """Vectors of very different lengths, as of popular and rare items."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.rand(num_items, 1, generator=generator) * 3
    return torch.randn(num_items, dim, generator=generator) * lengths


def make_bags(lists: list[list[int]]) -> Ids:
    offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
    return Ids(torch.tensor([i for one in lists for i in one], dtype=torch.int64), offsets)


def measure(top: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((wanted[:, :, None] == top[:, None, :]).any(2).double().mean())


@pytest.mark.parametrize("dim", [8, 32])
def test_recall_and_scores_beside_the_exact_ranking(dim):
    items, queries = make_vectors(4000, dim, 0), make_vectors(64, dim, 1)
    index = build_index(items, make_vectors(100, dim, 2))
    masked = make_bags([list(range(row)) for row in range(64)])
    top, scores = index.rank(queries, masked, 10)
    wanted, _ = rank_items(queries, items, masked, 10)
    assert top.shape == scores.shape == (64, 10)
    assert measure(top, wanted) >= 0.9 and index.recall >= 0.9
    for row in range(64):
        assert len(set(top[row].tolist())) == 10 and min(top[row].tolist()) >= row
        torch.testing.assert_close(scores[row], items[top[row]] @ queries[row])
        assert scores[row].tolist() == sorted(scores[row].tolist(), reverse=True)


def test_the_measured_recall_is_that_of_its_answers():
    """A graph that looks at too little of itself says so."""
    items, queries = make_vectors(4000, 32, 0), make_vectors(100, 32, 2)
    index = build_index(items, queries)
    index.graph.expansion_search = 1
    poor = approximate.measure_recall(index.graph, items, queries)
    top = approximate.search_graph(index.graph, queries, 10)
    wanted, _ = rank_items(queries, items, make_bags([[]] * 100), 10)
    assert poor == pytest.approx(measure(top, wanted)) and poor < index.recall


def test_the_longest_dot_is_the_nearest_neighbour():
    items, queries = make_vectors(200, 6, 3), make_vectors(20, 6, 4)
    longer = lengthen(items)
    torch.testing.assert_close(longer.norm(dim=1), items.norm(dim=1).max().expand(200))
    distances = torch.cdist(torch.cat([queries, torch.zeros(20, 1)], dim=1), longer)
    assert torch.equal(distances.argmin(1), (queries @ items.T).argmax(1))


@settings(max_examples=examples(40, 300), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(0, 4), st.integers(0, 60)),
    k=st.integers(1, 70),
    share=st.floats(0, 1),
)
def test_few_items_are_ranked_exactly(seed, shape, k, share):
    """Masked items never come, and as many others come as there are: also where the graph has too few."""
    num_queries, num_items = shape
    generator = torch.Generator().manual_seed(seed)
    items = torch.randn(num_items, 4, generator=generator)
    queries = torch.randn(num_queries, 4, generator=generator)
    masks = [
        torch.randperm(num_items, generator=generator)[: int(share * num_items)].tolist()
        for _ in range(num_queries)
    ]
    top, scores = build_index(items).rank(queries, make_bags(masks), k)
    wanted, wanted_scores = rank_items(queries, items, make_bags(masks), k)
    if not num_items:
        wanted, wanted_scores = (
            wanted.reshape(num_queries, 0),
            wanted_scores.reshape(num_queries, 0),
        )
    assert top.shape == wanted.shape
    for row in range(num_queries):
        shown = [item for item in top[row].tolist() if item >= 0]
        assert not set(shown) & set(masks[row])
        assert len(shown) == min(k, num_items - len(masks[row]))
        assert all(value == -math.inf for value in scores[row, len(shown) :].tolist())
        if k + len(masks[row]) > approximate.MAX_SHARE * num_items:
            assert torch.equal(top[row], wanted[row])
            torch.testing.assert_close(scores[row], wanted_scores[row])


def test_an_index_is_built_while_another_one_answers():
    """usearch builds without the interpreter's lock: answers go on."""
    items, queries = make_vectors(6000, 32, 0), make_vectors(1, 32, 1)
    index = build_index(items[:2000])
    num_answers = 0
    thread = threading.Thread(target=build_index, args=(items,))
    thread.start()
    while thread.is_alive():
        index.rank(queries, make_bags([[]]), 10)
        num_answers += 1
    thread.join()
    assert num_answers > 20


def test_a_missing_package_and_a_wrong_kind_are_named(monkeypatch):
    with pytest.raises(ConfigError, match="got 'faiss', choose from 'exact', 'hnsw'"):
        check_index_kind("faiss")
    monkeypatch.setattr(approximate, "find_spec", lambda name: None)
    check_index_kind("exact")
    with pytest.raises(ConfigError, match="needs usearch; install it: pip install 'colonnade"):
        check_index_kind("hnsw")
