"""GraphSAGE against dense matrices, over ranks, with copies of rows, and as a model that learns a graph's law."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from edge_law import neighbour_probabilities
from plans import cache_settings
from ranks import run_ranks
from torch import nn
from torch.nn.functional import normalize

import colonnade
from colonnade import SGD, Adam, Batch, Feature, Ids, Mesh, RowOptimizer, Table, Uniform
from colonnade.data import open_source
from colonnade.data.interactions.samples import HeldOutItems
from colonnade.data.sets.power_law import build_edge_distribution
from colonnade.errors import ConfigError, DataError
from colonnade.models.graphsage import GraphSAGE
from colonnade.models.retriever import RetrievalObjective, mask_items, recall_and_ndcg, top_items
from colonnade.staleness import TableCache, row_clock
from colonnade.train.dense import DenseGradients
from colonnade.train.objective import get_objective

DIM = 6


def build(nodes, hops=2, dtype="float64", dim=DIM, optimizer=None, **settings) -> GraphSAGE:
    start = Uniform(scale=0.5)
    table = Table(
        "node", dim, rows=nodes, dtype=dtype, optimizer=optimizer or SGD(lr=0.5), initializer=start
    )
    features = [
        Feature(f"{role}_hop{hop}" if hop else role, "node", pooling="sequence" if hop else "sum")
        for role in ("query", "item")
        for hop in range(hops + 1)
    ]
    torch.manual_seed(1)
    return GraphSAGE([table], features, **settings).to(getattr(torch, dtype))


def flat(lists) -> Ids:
    sizes = torch.tensor([0, *map(len, lists)])
    return Ids(torch.tensor([i for one in lists for i in one]), sizes.cumsum(0))


def test_with_all_neighbours_it_is_the_dense_one():
    """A ring, where each node has two: vectors, loss, gradients of weights and new rows, by an adjacency matrix."""
    n = 7
    model, nodes = build(n, log_q=0, temperature=0.3), torch.arange(n)
    beside = [[(i - 1) % n, (i + 1) % n] for i in range(n)]
    hop2 = [[j for i in one for j in beside[i]] for one in beside]
    after = (nodes + 3) % n
    at = {"query": nodes, "item": after}
    ids = {}
    for role, order in at.items():
        ids[role] = Ids(order)
        ids[f"{role}_hop1"] = flat([beside[i] for i in order])
        ids[f"{role}_hop2"] = flat([hop2[i] for i in order])
    log_q = torch.rand(n, 1, dtype=torch.float64)
    weight = torch.rand(n, dtype=torch.float64)
    taken = flat([[i, (i + 1) % n] for i in range(n)])
    key = HeldOutItems(Ids(after, torch.arange(n + 1)), taken)
    batch = Batch(n, log_q, ids, sample_weight=weight, key=key)

    rows = model.embeddings.rows("node", nodes).requires_grad_(True)
    beside_all = torch.zeros(n, n, dtype=torch.float64)
    for i, one in enumerate(beside):
        beside_all[i, one] = 0.5
    h = rows
    for layer, last in zip(model.layers, (False, True), strict=True):
        h = torch.cat([h, beside_all @ h], 1) @ layer.weight.T + layer.bias
        h = normalize(h if last else h.relu(), dim=1)
    # What log_q adds to a score, the correction of training takes off.
    scores = h @ h[after].T / 0.3
    scores = scores.masked_fill(
        torch.tensor([[int(a) in (i, (i + 1) % n) for a in after] for i in range(n)]), -math.inf
    )
    losses = nn.functional.cross_entropy(scores, nodes, reduction="none")
    wanted = (losses * weight).sum() / weight.sum()
    gradients = torch.autograd.grad(wanted, [*model.parameters(), rows])

    loss = RetrievalObjective().loss(model, batch, Mesh())
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=False):
        torch.testing.assert_close(parameter.grad, gradient)
    RowOptimizer(model.embeddings).step()
    result = model.embeddings.rows("node", nodes)
    torch.testing.assert_close(result, (rows - 0.5 * gradients[-1]).detach())


def test_a_rank_without_samples():
    (batch,) = graph().train.batches(10**6)
    model = build(80, log_q=0)
    none = Ids(torch.empty(0, dtype=torch.int64))
    bags = Ids(none.values, torch.zeros(1, dtype=torch.int64))
    ids = {
        name: none if field_ids.offsets is None else bags for name, field_ids in batch.ids.items()
    }
    empty = Batch(0, batch.dense[:0], ids, key=HeldOutItems(bags, bags))
    assert len(model(empty).queries) == 0
    assert len(model.queries(empty)) == len(model.items(empty)) == 0


def graph(**options):
    settings = {"nodes": 80, "degree": 8, "communities": 4, "fan_outs": [3, 2], **options}
    return open_source("power_law", **settings)


def train(mesh, plan=None):
    """Losses, weights, rows and scores of a few steps. Module level: ranks import it."""
    model, data = build(80, log_q=0), graph()
    collection = model.embeddings.open(plan, mesh=mesh)
    rows, dense = RowOptimizer(collection), DenseGradients(list(model.parameters()), mesh)
    dense.build_buckets()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    batches = data.train.batches(160, rank=mesh.rank, num_ranks=mesh.num_ranks)
    for batch in collection.lookahead(batches):
        dense.zero_gradients()
        loss = RetrievalObjective().loss(model, batch, mesh)
        loss.backward()
        dense.reduce(finite=collection.pipeline.gradients.are_finite(), stop=False)
        rows.step(agreed=True)
        optimizer.step()
        losses.append(float(mesh.all_reduce("control", loss.detach().clone())))
    scored = RetrievalObjective().evaluate(model, data.test, 30, mesh)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return losses, weights, collection.rows("node", torch.arange(80)), scored


def train_with_copies(mesh):
    table = build(80).embeddings.tables[0]
    caches = {"node": TableCache(40, row_clock(0), "lru")}
    return train(
        mesh,
        colonnade.build_plan(
            [table], mesh.num_ranks, colonnade.PlanConfig(cache=cache_settings(caches))
        ),
    )


@pytest.mark.parametrize("how", [train, train_with_copies])
def test_ranks_train_and_score_what_one_does(how):
    losses, weights, rows, scored = train(Mesh())
    assert losses[-1] < losses[0]
    for found_losses, found_weights, found_rows, found_scored in run_ranks(2, how):
        torch.testing.assert_close(found_losses, losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found_rows, rows, rtol=1e-10, atol=1e-12)
        for name, value in weights.items():
            torch.testing.assert_close(found_weights[name], value, rtol=1e-10, atol=1e-12)
        assert found_scored == pytest.approx(scored)


def recall(source, scores_of) -> float:
    results = []
    for batch in source.batches(100):
        top = top_items(mask_items(scores_of(batch.group).clone(), batch.key.excluded), 20)
        results.append(recall_and_ndcg(top, batch.key.truth, 20)[0])
    return float(torch.cat(results).mean())


@pytest.mark.slow
def test_a_power_law_graph_is_learned():
    """Beyond popularity by far, and towards whoever knows what edges are drawn by."""
    made = {"nodes": 600, "communities": 12, "mixing": 0.05}
    data = graph(**made, degree=16, fan_outs=[5, 3])
    law = build_edge_distribution(600, exponent=2.5, communities=12, mixing=0.05, graph_seed=0)
    model = build(600, dtype="float32", dim=16, optimizer=Adam(lr=0.01), log_q=0)
    assert isinstance(get_objective(model), RetrievalObjective)
    result = colonnade.fit(model, data, epochs=10, batch_size=256, dense_lr=0.005, quiet=True)
    ceiling = recall(data.test, partial(neighbour_probabilities, law))
    popular = recall(data.test, lambda nodes: law.share.expand(len(nodes), -1))
    reached = result.metrics["test_recall@20"]
    print(f"popularity {popular:.4f} graphsage {reached:.4f} ceiling {ceiling:.4f}")
    assert reached > popular + 0.5 * (ceiling - popular)


def test_what_does_not_fit_is_refused():
    table = Table("node", 4, rows=3)
    with pytest.raises(ConfigError, match=r"wanted query, item and for each hop"):
        GraphSAGE([table], [Feature("query", "node"), Feature("item", "node")])
    model = build(80)
    (batch, *_) = graph().train.batches(16)
    batch.key = None
    with pytest.raises(DataError, match="key is NoneType, wanted HeldOutItems"):
        model(batch)
    (batch, *_) = graph().train.batches(16)
    lists = [batch.ids["item_hop2"].values[:5].tolist(), *[[1]] * 15]
    batch.ids["item_hop2"] = flat(lists)
    with pytest.raises(DataError, match="20 nodes in item_hop2 below 48"):
        model(batch)
