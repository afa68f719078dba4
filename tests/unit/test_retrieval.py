"""Retrieval: metrics against a slow twin, two towers and SASRec against plain PyTorch, negatives of all ranks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy, normalize, scaled_dot_product_attention

from colonnade import SGD, Batch, Feature, Ids, Mesh, RowOptimizer, Table, Uniform
from colonnade.errors import ConfigError, DataError, NonFiniteError
from colonnade.models import retriever
from colonnade.models.dlrm import DLRM
from colonnade.models.retriever import (
    ContrastiveBatch,
    RetrievalObjective,
    contrastive_loss,
    mask_items,
    recall_and_ndcg,
    top_items,
)
from colonnade.models.sasrec import SASRec
from colonnade.models.two_tower import TwoTower
from colonnade.train.dense import DenseGradients
from colonnade.train.objective import Probability, get_objective

ITEMS = 30


def bags(lists) -> Ids:
    sizes = torch.tensor([0, *map(len, lists)])
    flat = [int(item) for one in lists for item in one]
    return Ids(torch.tensor(flat, dtype=torch.int64), sizes.cumsum(0))


def slow_metrics(scores, truth, k):
    """One query, a loop over places."""
    order = sorted(range(len(scores)), key=lambda item: (-scores[item], item))
    order = [item for item in order if scores[item] > -math.inf][:k]
    hits = [place for place, item in enumerate(order) if item in truth]
    gain = sum(1 / math.log2(place + 2) for place in hits)
    perfect = sum(1 / math.log2(place + 2) for place in range(min(k, len(truth))))
    return len(hits) / len(truth), gain / perfect


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(0, 5), st.integers(1, 12)),
    k=st.integers(1, 14),
    levels=st.integers(1, 6),  # few levels: many ties
)
def test_metrics_are_the_slow_ones(seed, shape, k, levels):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, shape, generator=random).double()
    order = torch.rand(shape, generator=random).argsort(1)
    cuts = torch.randint(1, shape[1] + 1, (shape[0],), generator=random).tolist()
    truth = [order[q, :cut].tolist() for q, cut in enumerate(cuts)]
    observed = [order[q, cut : cut + 2].tolist() for q, cut in enumerate(cuts)]
    scores = mask_items(scores, bags(observed))
    top = top_items(scores, k)
    assert top.shape == (shape[0], min(k, shape[1]))
    recall, ndcg = recall_and_ndcg(top, bags(truth), k)
    for q in range(shape[0]):
        wanted = slow_metrics(scores[q].tolist(), set(truth[q]), k)
        assert (float(recall[q]), float(ndcg[q])) == pytest.approx(wanted)


def test_known_metrics():
    top = torch.tensor([[3, 1, 2], [0, 4, 5]])
    recall, ndcg = recall_and_ndcg(top, bags([[1, 9], [7]]), 3)
    assert recall.tolist() == [0.5, 0.0]
    assert ndcg.tolist() == pytest.approx([(1 / math.log2(3)) / (1 + 1 / math.log2(3)), 0.0])


@pytest.mark.parametrize(("num_items", "column"), [(2, 1), (200, 70), (200, 199)])
def test_scores_that_are_no_numbers_are_refused(num_items, column):
    """Few scores; many, in whole tiles and behind them."""
    scores = torch.zeros(1, num_items)
    scores[0, column] = math.nan
    with pytest.raises(NonFiniteError, match="diverged"):
        top_items(scores, 1)


def two_tower(dtype="float64", **settings):
    sgd, scale = SGD(lr=0.5), Uniform(scale=0.5)
    tables = [
        Table(name, 6, rows=rows, optimizer=sgd, initializer=scale, dtype=dtype)
        for name, rows in (("user", 11), ("item", ITEMS), ("year", 5))
    ]
    features = [
        Feature("user", "user"),
        Feature("history", "item", pooling="mean"),
        Feature("item", "item"),
        Feature("year", "year"),
    ]
    torch.manual_seed(1)
    settings = {"item_columns": ["item", "year"], "top": [7], **settings}
    model = TwoTower(tables, features, num_dense=2, log_q=1, **settings)
    return model.to(getattr(torch, dtype))


def pair_batch(size=8, seed=0) -> Batch:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (size,), generator=random).tolist()
    item = torch.randint(0, ITEMS // 3, (size,), generator=random)  # some pairs share an item
    ids = {
        "user": Ids(torch.randint(0, 11, (size,), generator=random)),
        "history": bags(
            [torch.randint(0, ITEMS, (n,), generator=random).tolist() for n in lengths]
        ),
        "item": Ids(item),
        "year": Ids(item % 5),
    }
    dense = torch.rand(size, 2, generator=random, dtype=torch.float64)
    weight = torch.rand(size, generator=random, dtype=torch.float64)
    return Batch(size, dense, ids, sample_weight=weight)


def test_two_towers_are_plain_torch():
    """Loss, gradients of the towers and new rows; softmax over the batch, what a sample has taken left out."""
    model, batch = two_tower(), pair_batch()
    user, item, year = (
        model.embeddings.rows(name, torch.arange(rows)).requires_grad_(True)
        for name, rows in (("user", 11), ("item", ITEMS), ("year", 5))
    )
    history = torch.stack(
        [
            item[batch.ids["history"].values[a:b]].mean(0) if b > a else torch.zeros(6).double()
            for a, b in zip(batch.ids["history"].offsets, batch.ids["history"].offsets[1:], strict=False)
        ]
    )  # fmt: skip
    layers = [dict(tower.named_parameters()) for tower in (model.query_tower, model.item_tower)]

    def tower(x, p):
        return normalize(
            torch.relu(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"], dim=1
        )

    ids = batch.ids["item"].values
    query = tower(
        torch.cat([batch.dense[:, :1], user[batch.ids["user"].values], history], 1), layers[0]
    )
    vector = tower(torch.cat([item[ids], year[batch.ids["year"].values]], 1), layers[1])
    scores = query @ vector.T / 0.1  # how likely an item is is taken off what it adds
    offsets, past = batch.ids["history"].offsets, batch.ids["history"].values
    taken = torch.tensor(
        [[int(i) in past[a:b].tolist() for i in ids] for a, b in pairwise(offsets)]
    )  # fmt: skip
    other = ((ids[:, None] == ids) | taken) & ~torch.eye(len(ids), dtype=torch.bool)
    losses = cross_entropy(scores.masked_fill(other, -math.inf), torch.arange(8), reduction="none")
    wanted = (losses * batch.sample_weight).sum() / batch.sample_weight.sum()
    gradients = torch.autograd.grad(wanted, [*model.parameters(), user, item, year])

    loss = RetrievalObjective().loss(model, batch, Mesh())
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients[:-3], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    RowOptimizer(model.embeddings).step()
    for name, rows, gradient in zip(
        ("user", "item", "year"), (user, item, year), gradients[-3:], strict=True
    ):
        result = model.embeddings.rows(name, torch.arange(len(rows)))
        torch.testing.assert_close(result, (rows - 0.5 * gradient).detach())


def test_an_item_that_occurs_often_scores_higher():
    model, batch = two_tower(), pair_batch()
    with torch.no_grad():
        queries = model.queries(
            Batch(8, batch.dense, {n: batch.ids[n] for n in ("user", "history")})
        )
        columns = {n: batch.ids[n] for n in ("item", "year")}
        items = model.items(Batch(8, batch.dense[:, 1:], columns))
        contrast = model(batch)
    scores = queries @ items.T / model.temperature
    cosines = queries[:, :-1] @ items[:, :-1].T / model.temperature
    torch.testing.assert_close(scores, cosines + batch.dense[:, 1])
    # In training, what log_q adds is taken off: negatives are drawn with that frequency.
    torch.testing.assert_close(contrast.queries, queries[:, :-1])
    torch.testing.assert_close(contrast.candidates, items[:, :-1])


def sasrec(dtype="float64", **settings):
    table = Table(
        "item", 6, rows=ITEMS, optimizer=SGD(lr=0.5), initializer=Uniform(scale=0.5), dtype=dtype
    )
    names = ("history", "target", "negative")
    features = [Feature(name, "item", pooling="sequence") for name in names]
    torch.manual_seed(1)
    settings = {"blocks": 2, "heads": 2, "max_length": 4, **settings}
    return SASRec([table], features, **settings).to(getattr(torch, dtype))  # fmt: skip


def sequence_batch(size=5, seed=0) -> Batch:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(
        0, 7, (size,), generator=random
    ).tolist()  # some empty, some over max_length

    def draw(sizes):
        return bags([torch.randint(0, ITEMS, (n,), generator=random).tolist() for n in sizes])

    ids = {"history": draw(lengths), "target": draw(lengths), "negative": draw([3] * size)}
    weight = torch.rand(size, generator=random, dtype=torch.float64)
    return Batch(size, torch.empty(size, 0), ids, sample_weight=weight)


@pytest.mark.parametrize("positions", [True, False])
def test_sasrec_is_plain_torch(positions):
    """A sequence at a time, nothing padded; loss, gradients and new rows."""
    model, batch = sasrec(positions=positions), sequence_batch()
    item = model.embeddings.rows("item", torch.arange(ITEMS)).requires_grad_(True)

    def block(layer, x):
        y = nn.functional.layer_norm(
            x, (6,), layer.before_attention.weight, layer.before_attention.bias
        )
        query, key, value = (y @ layer.qkv.weight.T + layer.qkv.bias).split(6, dim=1)
        heads = []
        for h in range(2):
            part = slice(3 * h, 3 * h + 3)
            score = query[:, part] @ key[:, part].T / math.sqrt(3)
            later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
            heads.append(score.masked_fill(later, -math.inf).softmax(1) @ value[:, part])
        x = x + torch.cat(heads, 1) @ layer.out.weight.T + layer.out.bias
        y = nn.functional.layer_norm(x, (6,), layer.before_hidden.weight, layer.before_hidden.bias)
        return x + layer.hidden(y)

    history, target = batch.ids["history"], batch.ids["target"]
    negative, losses, total = batch.ids["negative"].values, 0.0, 0.0
    for s in range(batch.size):
        begin, end = int(history.offsets[s]), int(history.offsets[s + 1])
        begin = max(begin, end - 4)
        x = item[history.values[begin:end]]
        if positions:
            x = x + model.places[: end - begin]
        for layer in model.blocks:
            x = block(layer, x)
        x = normalize(nn.functional.layer_norm(x, (6,), model.last.weight, model.last.bias), dim=1)
        for place in range(end - begin):
            true = int(target.values[begin + place])
            taken = {*history.values[begin:end].tolist(), *target.values[begin:end].tolist()}
            others = [int(n) for n in negative if int(n) not in taken]
            unit = normalize(item[[true, *others]], dim=1)
            scores = unit @ x[place] / 0.1
            losses = losses + batch.sample_weight[s] * -scores.log_softmax(0)[0]
            total += batch.sample_weight[s]
    wanted = losses / total
    gradients = torch.autograd.grad(wanted, [*model.parameters(), item])
    loss = RetrievalObjective().loss(model, batch, Mesh())
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=False):
        torch.testing.assert_close(parameter.grad, gradient)
    RowOptimizer(model.embeddings).step()
    result = model.embeddings.rows("item", torch.arange(ITEMS))
    torch.testing.assert_close(result, (item - 0.5 * gradients[-1]).detach())


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(0, 9), st.integers(0, 12)),
    block=st.integers(1, 60),
    temperature=st.sampled_from([0.001, 0.1, 1.0]),  # at 0.001 shares underflow
)
def test_the_loss_by_blocks_is_that_of_all_scores(seed, shape, block, temperature):
    """One softmax over a matrix, differentiated by torch; known candidates and weights."""
    num_positions, num_candidates = shape
    random = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=random, dtype=torch.float64)

    vectors = [
        draw(n, 3).requires_grad_(True) for n in (num_positions, num_positions, num_candidates)
    ]
    queries, positives, candidates = vectors
    sample = torch.arange(num_positions) // 2
    ids = torch.arange(num_candidates) % 7
    known = sample.repeat(3), torch.randint(0, 9, (3 * num_positions,), generator=random)
    contrast = ContrastiveBatch(
        queries, positives, draw(num_positions).abs(), sample, known, candidates, ids
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retriever, "LOSS_SCORES", block)
        loss = contrastive_loss(contrast, temperature, Mesh())
    gradients = torch.autograd.grad(3 * loss, vectors)

    pairs = set(zip(*(column.tolist() for column in known), strict=True))
    is_known = [[(s, item) in pairs for item in ids.tolist()] for s in sample.tolist()]
    scores = queries @ candidates.T / temperature
    scores = scores.masked_fill(torch.tensor(is_known, dtype=torch.bool).view(shape), -math.inf)
    positive = (queries * positives).sum(1) / temperature
    shares = torch.cat([positive[:, None], scores], 1).log_softmax(1)[:, 0]
    wanted = -(shares * contrast.weight).sum() / max(float(contrast.weight.sum()), 1e-12)
    torch.testing.assert_close(loss, wanted)
    for gradient, other in zip(gradients, torch.autograd.grad(3 * wanted, vectors), strict=True):
        torch.testing.assert_close(gradient, other)


def test_a_query_is_the_last_place_of_a_history():
    model, batch = sasrec(), sequence_batch()
    model.eval()
    with torch.no_grad():
        queries = model.queries(Batch(5, batch.dense, {"history": batch.ids["history"]}))
        contrast = model(batch)
    ends = batch.ids["history"].offsets.diff().clamp(max=4).cumsum(0)
    for s, length in enumerate(batch.ids["history"].offsets.diff()):
        wanted = contrast.queries[ends[s] - 1] if length else torch.zeros(6).double()
        torch.testing.assert_close(queries[s], wanted)


def test_what_comes_later_is_not_seen():
    model = sasrec(max_length=50)
    model.eval()
    with torch.no_grad():
        one = model.queries(Batch(1, torch.empty(1, 0), {"history": bags([[3, 1, 4]])}))
        ids = {
            "history": bags([[3, 1, 4, 1]]),
            "target": bags([[1, 4, 1, 5]]),
            "negative": bags([[0]]),
        }
        pair = model(Batch(1, torch.empty(1, 0), ids)).queries
    torch.testing.assert_close(pair[2], one[0])


MODELS = {"two_tower": (two_tower, pair_batch), "sasrec": (sasrec, sequence_batch)}


def share_of(batch: Batch, rank: int, num_ranks: int) -> Batch:
    begin, end = batch.size * rank // num_ranks, batch.size * (rank + 1) // num_ranks
    ids = {}
    for name, column in batch.ids.items():
        if column.offsets is None:
            ids[name] = Ids(column.values[begin:end])
        else:
            first, last = int(column.offsets[begin]), int(column.offsets[end])
            ids[name] = Ids(column.values[first:last], column.offsets[begin : end + 1] - first)
    return Batch(
        end - begin, batch.dense[begin:end], ids, sample_weight=batch.sample_weight[begin:end]
    )


def train(mesh, name, sizes=(8, 2, 7, 1)):
    """Losses, dense weights and rows after a step on each batch; some ranks' shares are empty."""
    build, make = MODELS[name]
    model = build()
    collection = model.embeddings.open(mesh=mesh)
    rows, dense = RowOptimizer(collection), DenseGradients(list(model.parameters()), mesh)
    dense.build_buckets()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    batches = (share_of(make(n, n), mesh.rank, mesh.num_ranks) for n in sizes)
    for batch in collection.lookahead(batches):
        dense.zero_gradients()
        loss = RetrievalObjective().loss(model, batch, mesh)
        loss.backward()
        dense.reduce(finite=collection.pipeline.gradients.are_finite(), stop=False)
        rows.step(agreed=True)
        optimizer.step()
        losses.append(float(mesh.all_reduce("control", loss.detach().clone())))
    tables = {t.name: collection.rows(t.name, torch.arange(t.rows)) for t in collection.tables}
    return losses, {k: v.detach().clone() for k, v in model.named_parameters()}, tables


@pytest.mark.parametrize("name", MODELS)
def test_negatives_come_from_all_ranks(name):
    """The world law: N ranks train what one trains with the whole batch."""
    losses, dense, tables = train(Mesh(), name)
    for found_losses, found_dense, found_tables in run_ranks(3, train, name):
        torch.testing.assert_close(found_losses, losses, rtol=1e-10, atol=1e-12)
        for key, value in dense.items():
            torch.testing.assert_close(found_dense[key], value, rtol=1e-10, atol=1e-12)
        for key, value in tables.items():
            torch.testing.assert_close(found_tables[key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_and_compilation_of_the_towers(name):
    build, make = MODELS[name]
    model, batch = build("float32"), make()
    exact = model(batch)
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(batch).queries, exact.queries)
    model.autocast = torch.bfloat16
    contrast = model(batch)
    assert contrast.queries.dtype == contrast.candidates.dtype == torch.float32
    torch.testing.assert_close(contrast.queries, exact.queries, rtol=0.1, atol=0.1)
    assert not torch.equal(contrast.queries, exact.queries)
    contrastive_loss(contrast, model.temperature, Mesh()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_attention_with_a_gap_would_be_seen():
    """Padding relies on this: causal attention of a place does not look at what stands after it."""
    x = torch.randn(1, 1, 3, 4)
    longer = torch.cat([x, torch.randn(1, 1, 2, 4)], 2)
    short = scaled_dot_product_attention(x, x, x, is_causal=True)
    long = scaled_dot_product_attention(longer, longer, longer, is_causal=True)
    torch.testing.assert_close(short, long[:, :, :3])


def test_objectives_follow_from_the_model():
    assert isinstance(get_objective(two_tower()), RetrievalObjective)
    table = Table("a", 2, rows=3)
    assert isinstance(get_objective(DLRM([table], [Feature("a", "a")], num_dense=0)), Probability)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="films"):
        two_tower(item_columns=["films"])
    with pytest.raises(ConfigError, match="user"):
        two_tower(item_columns=["item", "user"], query_columns=["user"])
    with pytest.raises(ConfigError, match="query_columns"):
        two_tower(query_columns=[])
    with pytest.raises(ConfigError, match="5 heads"):
        sasrec(heads=5)
    with pytest.raises(ConfigError, match="history, target, negative"):
        SASRec([Table("item", 4, rows=3)], [Feature("item", "item")])
    batch = sequence_batch()
    batch.ids["target"] = bags([[1]] * 5)
    with pytest.raises(DataError, match="different lengths"):
        sasrec()(batch)
    pairs = pair_batch()
    pairs.ids["item"] = bags([[1, 2]] * 8)
    with pytest.raises(DataError, match="one item"):
        two_tower()(pairs)
    with pytest.raises(ConfigError, match="catalogue"):
        RetrievalObjective().evaluate(two_tower(), object(), 4, Mesh())
