"""MRMN against a slow twin and the formulas of CML, LRML and the author's code; several ranks; what is refused."""

from __future__ import annotations

import math
import random

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import colonnade
from colonnade import (
    SGD,
    Adam,
    Batch,
    ConfigError,
    Feature,
    Ids,
    Mesh,
    RowOptimizer,
    Table,
    Uniform,
)
from colonnade.data import open_interactions
from colonnade.data.interactions.samples import HeldOutItems
from colonnade.models import mrmn
from colonnade.models.mrmn import MRMN
from colonnade.models.retriever import embed_items, rank_candidates, rank_items, top_items
from colonnade.report.pages import render_run_page
from colonnade.report.reading import read_run_folder
from colonnade.train.dense import DenseGradients

USERS, ITEMS, DIM, TYPES = 11, 30, 6, ("buy", "cart", "view")
LR = 0.5
OF_ONE_TYPE = {
    "types": ("all",), "type_column": None, "item_bias": False, "squared": True, "negatives": 8
}  # fmt: skip
CASES = {
    "softmax, own": {},
    "softmax, positive": {"negative_relation": "positive"},
    "softmax, primary": {"negative_relation": "primary", "margins": (0.9, 0.3, 0.6)},
    "linear, own": {"attention": "linear", "type_weights": (1.0, 0.5, 0.25)},
    "linear, primary": {"attention": "linear", "negative_relation": "primary"},
    "no memory": {"slots": 0},
    "squared, no bias": {"squared": True, "item_bias": False, "negatives": 20},
    "one negative": {"negatives": 1},
}


def build(dtype: str = "float64", **settings) -> MRMN:
    settings = {"types": TYPES, "type_column": 1, "slots": 4, **settings}
    bias = settings.get("item_bias", True)
    tables = [
        Table(name, dim, rows=rows, optimizer=SGD(lr=LR), initializer=Uniform(scale=0.6), dtype=dtype)
        for name, dim, rows in (("user", DIM, USERS), ("item", DIM + bias, ITEMS), ("age", 2, 5))
    ]  # fmt: skip
    torch.manual_seed(1)
    features = [Feature(name, name) for name in ("user", "age", "item")]
    return MRMN(tables, features, **settings).to(getattr(torch, dtype))


def draw_batch(size: int = 9, seed: int = 0, num_items: int = ITEMS // 2) -> Batch:
    random = torch.Generator().manual_seed(seed)
    users = torch.randint(0, USERS, (size,), generator=random)
    items = torch.randint(0, num_items, (size,), generator=random)
    known = Ids(torch.randint(0, ITEMS, (3 * size,), generator=random), torch.arange(size + 1) * 3)
    key = HeldOutItems(Ids(items, torch.arange(size + 1)), known)
    types = torch.randint(0, len(TYPES), (size, 1), generator=random).double()
    weight = torch.rand(size, generator=random, dtype=torch.float64)
    dense = torch.cat([torch.zeros_like(types), types], 1)
    return Batch(
        size, dense, {"user": Ids(users), "item": Ids(items)}, sample_weight=weight, key=key
    )


def cut(vector: Tensor) -> Tensor:
    return vector if vector.norm() <= 1 else vector / vector.norm()


def compute_slowly(model: MRMN, batch: Batch, user: Tensor, item: Tensor) -> Tensor:
    """Compute the loss sample by sample and candidate by candidate, from all rows."""

    def relate(u, v, t):
        if model.keys is None:
            return torch.zeros(DIM, dtype=torch.float64)
        weights = (u * v) @ model.keys[t]
        weights = weights.softmax(0) if model.attention == "softmax" else weights
        return sum(weight * slot for weight, slot in zip(weights, model.memory, strict=True))

    def score(u, v, row, relation):
        square = (v - u - relation).square().sum()
        distance = square if model.squared else (square + 1e-3).sqrt()
        return (row[DIM] if model.item_bias else 0) - distance

    losses = 0.0
    excluded = batch.key.excluded
    for s in range(batch.size):
        t = 0 if model.type_column is None else int(batch.dense[s, 1])
        u, row = cut(user[batch.ids["user"].values[s]]), item[batch.ids["item"].values[s]]
        v = cut(row[:DIM])
        right = score(u, v, row, relate(u, v, t))
        own = {int(batch.ids["item"].values[s]), *excluded.values[excluded.samples == s].tolist()}
        wrong = []
        for step in range(model.negatives):
            other = int(batch.ids["item"].values[(s + 1 + step) % batch.size])
            if other not in own:
                z = cut(item[other][:DIM])
                pair = (z, t) if model.negative_relation == "own" else (v, t)
                pair = (v, 0) if model.negative_relation == "primary" else pair
                relation = relate(u, *pair)
                wrong.append(score(u, z, item[other], relation))
        if wrong:
            hinge = (model.margins[t] + max(wrong) - right).clamp(min=0)
            losses = losses + batch.sample_weight[s] * model.type_weights[t] * hinge
    return losses / batch.sample_weight.sum()


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_rows_are_those_of_a_slow_twin(name):
    model, batch = build(**CASES[name]), draw_batch()
    user, item = (
        model.embeddings.rows(table, torch.arange(rows)).requires_grad_(True)
        for table, rows in (("user", USERS), ("item", ITEMS))
    )
    wanted = compute_slowly(model, batch, user, item)
    gradients = torch.autograd.grad(
        wanted, [*model.parameters(), user, item], materialize_grads=True
    )
    loss = model.objective.loss(model, batch, Mesh())
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    assert loss > 0
    loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=False):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
    RowOptimizer(model.embeddings).step()
    for table, rows, gradient in zip(("user", "item"), (user, item), gradients[-2:], strict=True):
        result = model.embeddings.rows(table, torch.arange(len(rows)))
        torch.testing.assert_close(result, (rows - LR * gradient).detach(), rtol=1e-10, atol=1e-12)


def compare_with_formula(model: MRMN, batch: Batch, compute_squares) -> None:
    """Compare with the sum of [m + d(u, v)^2 - d(u, v')^2]_+ over pairs: the negative is the nearest of the others."""
    rows = [model.embeddings.rows(name, torch.arange(n)) for name, n in (("user", USERS), ("item", ITEMS))]  # fmt: skip
    p, q = (x / x.norm(dim=1, keepdim=True).clamp(min=1) for x in rows)
    users, items = batch.ids["user"].values, batch.ids["item"].values
    total = 0.0
    for s, (u, v) in enumerate(zip(users, items, strict=True)):
        known = {int(v), *batch.key.excluded.values[3 * s : 3 * s + 3].tolist()}
        others = [
            n for n in items.tolist() if n not in known
        ]  # negatives=8: all others of the batch
        nearest = min(compute_squares(p[u], q[v], q[n]) for n in others)
        hinge = (0.5 + compute_squares(p[u], q[v], q[v]) - nearest).clamp(min=0)
        total = total + batch.sample_weight[s] * hinge
    wanted = total / batch.sample_weight.sum()
    loss = model.objective.loss(model, batch, Mesh())
    assert float(loss) > 0.1 and abs(float(loss) - float(wanted)) < 1e-12


def test_cml_is_a_setting():
    """CML, eq. 1: squared Euclidean distances of user and item."""
    model = build(slots=0, **OF_ONE_TYPE)
    assert not list(model.parameters())
    compare_with_formula(model, draw_batch(), lambda p, q, z: (p - z).square().sum())


def test_lrml_is_a_setting():
    """LRML, eqs. 2 to 6: one relation of the positive pair, from the softmax over keys, for both distances."""
    model = build(negative_relation="positive", **OF_ONE_TYPE)

    def compute_squares(p, q, z):
        attention = torch.exp(model.keys[0].T @ (p * q))
        relation = (attention / attention.sum()) @ model.memory
        return (p + relation - z).square().sum()

    compare_with_formula(model, draw_batch(), compute_squares)


def test_the_authors_code_is_a_setting():
    """Linear attention, and the primary type's relation of the positive pair for the negative."""
    model = build(attention="linear", negative_relation="primary", item_bias=False)
    batch = draw_batch(2)
    batch.key = HeldOutItems(batch.key.truth, Ids(torch.empty(0).long(), torch.zeros(3).long()))
    with torch.no_grad():
        p, q = model.queries(batch), model.items(batch)[:, :-1]
        total = 0.0
        for s, other in ((0, 1), (1, 0)):
            t = int(batch.dense[s, 1])
            relations = [((p[s] * q[s]) @ model.keys[k]) @ model.memory for k in range(3)]
            right = ((q[s] - p[s] - relations[t]).square().sum() + 1e-3).sqrt()
            wrong = ((q[other] - p[s] - relations[0]).square().sum() + 1e-3).sqrt()
            total += batch.sample_weight[s] * (model.margins[t] + right - wrong).clamp(min=0)
        loss = model.objective.loss(model, batch, Mesh())
    assert abs(float(loss) - float(total / batch.sample_weight.sum())) < 1e-12


def train(mesh, settings, sizes=(9, 2, 7, 1)):
    """Train a step on each batch; return losses, dense weights and rows. Some ranks' shares are empty."""
    model = build(**settings)
    collection = model.embeddings.open(mesh=mesh)
    rows, dense = RowOptimizer(collection), DenseGradients(list(model.parameters()), mesh)
    dense.build_buckets()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in collection.lookahead(
        take_share(draw_batch(n, n), mesh.rank, mesh.num_ranks) for n in sizes
    ):
        dense.zero_gradients()
        loss = model.objective.loss(model, batch, mesh)
        loss.backward()
        dense.reduce(finite=collection.pipeline.gradients.are_finite(), stop=False)
        rows.step(agreed=True)
        optimizer.step()
        losses.append(float(mesh.all_reduce("control", loss.detach().clone())))
    tables = [collection.rows(t.name, torch.arange(t.rows)) for t in collection.tables]
    return losses, [p.detach().clone() for p in model.parameters()], tables


def take_share(batch: Batch, rank: int, num_ranks: int) -> Batch:
    begin, end = batch.size * rank // num_ranks, batch.size * (rank + 1) // num_ranks
    ids = {name: Ids(column.values[begin:end]) for name, column in batch.ids.items()}
    truth = Ids(batch.key.truth.values[begin:end], torch.arange(end - begin + 1))
    known = Ids(batch.key.excluded.values[3 * begin : 3 * end], torch.arange(end - begin + 1) * 3)
    return Batch(
        end - begin, batch.dense[begin:end], ids, sample_weight=batch.sample_weight[begin:end],
        key=HeldOutItems(truth, known),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["softmax, own", "linear, primary"])
def test_the_nearest_negative_is_that_of_all_ranks(name):
    """The world law: three ranks train what one trains with the whole batch."""
    wanted = train(Mesh(), CASES[name])
    assert wanted[0][0] > 0
    for result in run_ranks(3, train, CASES[name]):
        torch.testing.assert_close(result, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1, 50, 1 << 20])
def test_items_are_ranked_by_scores_of_the_primary_type(size, monkeypatch):
    """Blocks of any size; rankings of all items and of candidates follow the same scores."""
    monkeypatch.setattr(mrmn, "BLOCK_FLOATS", size)
    monkeypatch.setattr(mrmn, "CHUNK", min(size, 7))
    model = build()
    with torch.no_grad():
        users = model.queries(
            Batch(USERS, torch.zeros(USERS, 0), {"user": Ids(torch.arange(USERS))})
        )
        items = model.items(Batch(ITEMS, torch.zeros(ITEMS, 0), {"item": Ids(torch.arange(ITEMS))}))
        scores = model.score(users, items)
        for u in range(USERS):
            for i in range(ITEMS):
                vector = items[i, :DIM]
                relation = ((users[u] * vector) @ model.keys[0]).softmax(0) @ model.memory
                distance = ((vector - users[u] - relation).square().sum() + 1e-3).sqrt()
                assert float(scores[u, i]) == pytest.approx(float(items[i, DIM] - distance), abs=1e-12)  # fmt: skip
        nothing = Ids(torch.empty(0).long(), torch.zeros(USERS + 1).long())
        ranked, _ = rank_items(users, items, nothing, 7, score=model.score)
        assert torch.equal(ranked, top_items(scores, 7))
        bags = Ids(torch.arange(ITEMS).repeat(USERS), torch.arange(USERS + 1) * ITEMS)
        assert torch.equal(rank_candidates(users, items, bags, 7, model.score), ranked)


def test_a_user_that_took_all_candidates_adds_nothing():
    model, batch = build(), draw_batch(4)
    everything = Ids(torch.arange(ITEMS).repeat(4), torch.arange(5) * ITEMS)
    batch.key = HeldOutItems(batch.key.truth, everything)
    loss = model.objective.loss(model, batch, Mesh())
    loss.backward()
    assert float(loss) == 0 and not any(p.grad.any() for p in model.parameters())


def test_an_item_at_its_place_has_gradients():
    """The root of a distance of 0 has no gradient."""
    model = build(slots=0)
    users = torch.zeros(1, DIM, dtype=torch.float64, requires_grad=True)
    items = torch.zeros(1, DIM + 1, dtype=torch.float64)
    right, _ = model.network(users, items, items[:, None], torch.zeros(1, dtype=torch.int64))
    right.sum().backward()
    assert users.grad.isfinite().all() and math.isfinite(float(right))


def test_bfloat16_and_compilation():
    model, batch = build("float32"), draw_batch()
    batch.dense = batch.dense.float()
    exact = model.objective.loss(model, batch, Mesh())
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model.objective.loss(model, batch, Mesh()), exact)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"margins": [0.5]}, "margins.*each type: buy, cart, view"),
        ({"margins": [0.5, -1, 1]}, "margins"),
        ({"type_weights": [1, 2]}, "type_weights"),
        ({"attention": "hard"}, "attention='hard', wanted one of softmax, linear"),
        ({"negative_relation": "none"}, "negative_relation='none'"),
        ({"type_column": None}, "3 types and no column"),
    ],
)
def test_what_does_not_fit_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        build(**settings)


def test_rows_of_other_widths_are_refused():
    tables = [Table("user", 4, rows=3), Table("item", 4, rows=3)]
    features = [Feature("user", "user"), Feature("item", "item")]
    with pytest.raises(ConfigError, match=r"rows of D and D \+ 1"):
        MRMN(tables, features)
    assert MRMN(tables, features, item_bias=False).types == ("all",)
    with pytest.raises(ConfigError, match="wanted user and item"):
        MRMN(tables, features[:1], item_bias=False)


def test_numbers_that_are_no_types_are_refused():
    model, batch = build(), draw_batch()
    batch.dense[3, 1] = 7
    with pytest.raises(ConfigError, match="to 7, wanted 0 to 2"):
        model.objective.loss(model, batch, Mesh())


def open_tastes(tmp_path, shuffle: bool = False, num_users: int = 60):
    """Draw events of users with one taste each: they buy of it alone, put much of it into the cart, view all."""
    draw = random.Random(0)
    rows = []
    for user in range(num_users):
        own = [item for item in range(80) if item % 4 == user % 4]
        rows += [(user, item, "buy") for item in draw.sample(own, 12)]
        rows += [(user, item, "cart") for item in draw.sample(own, 8) + draw.sample(range(80), 6)]
        rows += [(user, item, "view") for item in draw.sample(range(80), 20)]
    if shuffle:
        events = [event for *_, event in rows]
        draw.shuffle(events)
        rows = [(user, item, event) for (user, item, _), event in zip(rows, events, strict=True)]
    path = tmp_path / f"tastes{shuffle}.csv"
    path.write_text("\n".join(["user,item,event", *(",".join(map(str, row)) for row in rows)]))
    return open_interactions(path, types=TYPES, max_history=0)


def fit_tastes(data, run=None) -> tuple[MRMN, dict[str, dict[str, float]]]:
    """Train on drawn events; return the model and the figures of its types."""
    adam = {"optimizer": Adam(lr=0.01), "initializer": Uniform(scale=0.2)}
    tables = [Table("user", 8, **adam), Table("item", 9, **adam)]
    torch.manual_seed(0)
    features = [Feature("user", "user"), Feature("item", "item")]
    model = MRMN(tables, features, types=TYPES, type_column=1, log_q=0)
    colonnade.fit(model, data, run=run, epochs=12, batch_size=64, quiet=True, patience=0)
    return model, model.objective.evaluate(model, data.test, 64, Mesh()).by_type


def test_types_are_as_strong_as_users_mean_them(tmp_path):
    """A slow twin of the table, and the order of strengths; with shuffled types there is none."""
    data = open_tastes(tmp_path)
    model, by_type = fit_tastes(data, tmp_path / "run")
    page = render_run_page(read_run_folder(tmp_path / "run"))
    table = page[page.index("Types of feedback") :]
    assert all(name in table for name in (*TYPES, "active hinges", "strength", "diversity", "auc"))
    assert f"{by_type['cart']['samples']:,.4g}" in table
    buy, cart, view = (by_type[name]["strength"] for name in TYPES)
    assert buy > cart + 0.3 > view + 0.6
    assert [by_type[name]["margin"] for name in TYPES] == pytest.approx([0.5, 0.35, 0.2])
    split = data.train.interactions
    items = embed_items(model, data.test.catalogue)
    users = model.queries(Batch(60, torch.zeros(60, 0), {"user": split.users["user"]}))
    for number, name in enumerate(TYPES):
        figures = by_type[name]
        of_type = split.types == number
        assert figures["samples"] == int(of_type.sum())
        scores = model.score_type(users, items, torch.full((60,), number)).detach()
        is_known = torch.zeros(60, split.num_items, dtype=torch.bool)
        is_known[split.train.samples, split.train.values.long()] = True
        users_of, items_of = split.train.samples[of_type], split.train.values[of_type].long()
        wins = [
            float((scores[u, v] > scores[u][~is_known[u]]).float().mean())
            for u, v in zip(users_of, items_of, strict=True)
        ]
        assert figures["auc"] == pytest.approx(sum(wins) / len(wins), abs=0.03)
        others = scores[~is_known]
        strength = (scores[users_of, items_of].mean() - others.mean()) / others.std()
        assert figures["strength"] == pytest.approx(float(strength), abs=0.15)
        assert 0 < figures["active_hinges"] < 1 and 1 <= figures["diversity"] <= 20
    strengths = [x["strength"] for x in fit_tastes(open_tastes(tmp_path, shuffle=True))[1].values()]
    assert max(strengths) - min(strengths) < 0.5
