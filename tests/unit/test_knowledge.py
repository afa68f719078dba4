"""Knowledge graphs: scores, ranks, losses and known answers against slow twins; candidates of all ranks; files."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch.nn.functional import logsigmoid

import colonnade
from colonnade import SGD, Adam, Batch, Feature, Ids, Mesh, RowOptimizer, Table, Uniform
from colonnade.cli import app
from colonnade.config.run import build_config
from colonnade.data import open_source, open_triple_tensors
from colonnade.data.contract import Position
from colonnade.data.triples import TripleIndex
from colonnade.errors import ConfigError, DataError, NonFiniteError
from colonnade.models.knowledge import ComplEx, DistMult, RotatE, TransE
from colonnade.models.link_prediction import (
    KnowledgeGraph,
    LinkPredictionObjective,
    compute_filtered_ranks,
    compute_link_loss,
    sampled_softmax_loss,
)
from colonnade.predict.predictor import Predictor
from colonnade.run.run import open_run
from colonnade.train.dense import DenseGradients
from colonnade.train.objective import get_objective

MODELS = {"transe": TransE, "distmult": DistMult, "complex": ComplEx, "rotate": RotatE}
SQUARED = {"norm": 2, "squared": True}
KINDS = [
    *((name, {}) for name in MODELS),
    *((name, settings) for name in ("transe", "rotate") for settings in ({"norm": 2}, SQUARED)),
    *((name, {"reciprocal": True}) for name in MODELS),
    ("rotate", {"center": 0.3}),
]
ENTITIES, RELATIONS, DIM = 11, 3, 6


def build(
    name, dtype="float64", optimizer=None, entities=ENTITIES, dim=DIM, **settings
) -> KnowledgeGraph:
    kind, optimizer = MODELS[name], optimizer or SGD(lr=0.5)
    vectors = 2 if settings.get("reciprocal") else 1
    start = Uniform(scale=0.5)
    tables = [
        Table("entity", dim, rows=entities, dtype=dtype, optimizer=optimizer, initializer=start),
        Table(
            "relation",
            int(dim * kind.relation_share) * vectors,
            rows=RELATIONS,
            dtype=dtype,
            optimizer=optimizer,
            initializer=start,
        ),
    ]
    features = [
        Feature("head", "entity"),
        Feature("relation", "relation"),
        Feature("tail", "entity"),
        Feature("candidate", "entity", pooling="sequence"),
    ]
    return kind(tables, features, **settings)


def triples(seed: int, size: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    h, t = torch.randint(ENTITIES, (2, size), generator=random)
    return torch.stack([h, torch.randint(RELATIONS, (size,), generator=random), t], 1)


def opened(seed=0, size=40, **options):
    every = triples(seed, size)
    return open_triple_tensors(
        every,
        triples(seed + 1, 5),
        triples(seed + 2, 5),
        num_entities=ENTITIES,
        num_relations=RELATIONS,
        **options,
    )


def slow_score(model, h, r, t) -> float:
    """Compute the score of one triple by the papers' formulas."""
    h, r, t = h.tolist(), r.tolist(), t.tolist()
    half = len(h) // 2

    def numbers(v):
        return [complex(a, b) for a, b in zip(v[:half], v[half:], strict=True)]

    def far(differences):
        total = sum(abs(difference) ** model.norm for difference in differences)
        return total if model.squared else total ** (1 / model.norm)

    if isinstance(model, TransE):
        return -far(a + b - c for a, b, c in zip(h, r, t, strict=True))
    if isinstance(model, ComplEx):
        return sum(
            (a * b * c.conjugate()).real
            for a, b, c in zip(numbers(h), numbers(r), numbers(t), strict=True)
        )
    if isinstance(model, DistMult):
        return sum(a * b * c for a, b, c in zip(h, r, t, strict=True))
    turns = [complex(math.cos(x), math.sin(x)) for x in (a * math.pi / 0.5 for a in r)]
    return -far(a * b - c for a, b, c in zip(numbers(h), turns, numbers(t), strict=True))


@pytest.mark.parametrize("name, settings", KINDS)
def test_both_questions_have_the_score_of_the_triple(name, settings):
    model = build(name, **settings)
    source = opened(candidates=2).train
    (batch,) = source.batches(40)
    links = model(batch)
    forward_relation = backward_relation = model.embeddings(batch)["relation"]
    outcomes = [(links.heads, forward_relation, links.tails)] * 2
    if model.reciprocal:  # "which head?" has a relation of its own, which leads from the tail
        forward_relation, backward_relation = forward_relation.chunk(2, 1)
        outcomes = [
            (links.heads, forward_relation, links.tails),
            (links.tails, backward_relation, links.heads),
        ]
    for queries, answers, triple in (
        (links.tail_queries, links.tails, outcomes[0]),
        (links.head_queries, links.heads, outcomes[1]),
    ):
        scores = [slow_score(model, *row) for row in zip(*triple, strict=True)]
        wanted = torch.tensor(scores, dtype=torch.float64)
        torch.testing.assert_close(model.compare_pairs(queries, answers), wanted)
        torch.testing.assert_close(model.compare(queries, answers).diagonal(), wanted)


def test_vectors_of_entities_are_rows_around_their_center():
    model = build("rotate", center=0.3)
    ids = torch.arange(ENTITIES)
    collection = model.embeddings.open(mesh=Mesh())
    center = torch.tensor([0.3] * 3 + [0.0] * 3, dtype=torch.float64)
    wanted = collection.rows("entity", ids) + center
    assert torch.equal(model.entities(ids), wanted)
    (batch,) = opened().train.batches(40)
    links = model(batch)
    for name, result in (
        ("head", links.heads),
        ("tail", links.tails),
        ("candidate", links.candidates),
    ):
        assert torch.equal(result, wanted[batch.ids[name].values])


@given(seed=st.integers(0, 10**6), size=st.integers(0, 30))
def test_known_answers_are_those_of_a_search(seed, size):
    every, outcomes = triples(seed, size), triples(seed + 1, 7)
    facts = TripleIndex(every, ENTITIES)
    known, listed = facts.find_answers(outcomes), {tuple(row) for row in every.tolist()}
    counts = facts.count_known_tails_and_heads(outcomes)
    for i, (h, r, t) in enumerate(outcomes.tolist()):
        tails = sorted({c for a, b, c in listed if (a, b) == (h, r)})
        heads = sorted({a for a, b, c in listed if (b, c) == (r, t)})
        for bags, wanted, count in (
            (known.tails, tails, counts[0]),
            (known.heads, heads, counts[1]),
        ):
            first, last = bags.offsets[i : i + 2].tolist()
            assert bags.values[first:last].tolist() == wanted
            assert int(count[i]) == len(wanted)


@given(seed=st.integers(0, 10**6), levels=st.integers(1, 4), size=st.integers(0, 4))
def test_ranks_are_the_slow_ones(seed, levels, size):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (size, ENTITIES), generator=random).double()
    truth = torch.randint(ENTITIES, (size,), generator=random)
    bags = [{int(t), *torch.randint(ENTITIES, (3,), generator=random).tolist()} for t in truth]
    offsets = torch.tensor([0, *map(len, bags)]).cumsum(0)
    known = Ids(torch.tensor([i for bag in bags for i in sorted(bag)], dtype=torch.int64), offsets)
    result = compute_filtered_ranks(scores, truth, known).tolist()
    for row, t, bag, rank in zip(scores.tolist(), truth.tolist(), bags, result, strict=True):
        others = [s for i, s in enumerate(row) if i not in bag]
        above, level = sum(s > row[t] for s in others), sum(s == row[t] for s in others)
        assert rank == 1 + above + level / 2


def test_scores_that_are_no_numbers_are_refused():
    none = Ids(torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]))
    with pytest.raises(NonFiniteError, match="diverged"):
        compute_filtered_ranks(
            torch.full((1, 3), math.nan), torch.zeros(1, dtype=torch.int64), none
        )


@pytest.mark.parametrize("name, settings", KINDS)
def test_the_loss_is_the_slow_one(name, settings):
    model, temperature = build(name, temperature=0.7, margin=1.5, **settings), 0.7
    source = opened(candidates=2).train
    (batch,) = source.batches(40)
    result = LinkPredictionObjective().loss(model, batch, Mesh())
    links, total = model(batch), 0.0
    start = 1.5 + float(model.offset.detach())
    for queries, answers, known in (
        (links.tail_queries, links.tails, batch.key.tails),
        (links.head_queries, links.heads, batch.key.heads),
    ):
        for i in range(batch.size):
            first, last = known.offsets[i : i + 2].tolist()
            true = set(known.values[first:last].tolist())
            wrong = [c for c, e in enumerate(links.candidate_ids.tolist()) if e not in true]
            score = model.compare_pairs(queries[i : i + 1], answers[i : i + 1])[0] + start
            scores = model.compare(queries[i : i + 1], links.candidates[wrong])[0] + start
            item = -logsigmoid(score)
            item = item - ((scores * temperature).softmax(0) * logsigmoid(-scores)).sum()
            total = total + item / 4 * float(batch.sample_weight[i])
    torch.testing.assert_close(result, total / float(batch.sample_weight.sum()))


@pytest.mark.parametrize("name, settings", KINDS)
def test_softmax_over_all_entities_is_cross_entropy(name, settings):
    """Softmax has nothing to estimate if each entity is a candidate once."""
    model = build(name, loss="softmax", temperature=0.7, **settings)
    (batch,) = opened().train.batches(40)
    links = model(batch)
    ids = torch.arange(ENTITIES)
    links = replace(links, candidates=model.entities(ids), candidate_ids=ids)
    result = compute_link_loss(model, links, batch.key, Mesh())
    total = 0.0
    for queries, answers, known in (
        (links.tail_queries, batch.ids["tail"], batch.key.tails),
        (links.head_queries, batch.ids["head"], batch.key.heads),
    ):
        scores = 0.7 * model.compare(queries, links.candidates)
        for i, answer in enumerate(answers.values.tolist()):
            first, last = known.offsets[i : i + 2].tolist()
            other = [t for t in known.values[first:last].tolist() if t != answer]
            retained = scores[i].index_fill(0, torch.tensor(other, dtype=torch.int64), -math.inf)
            total = total - retained.log_softmax(0)[answer] / 2 * float(batch.sample_weight[i])
    torch.testing.assert_close(result, total / float(batch.sample_weight.sum()))


@pytest.mark.parametrize("name, settings", KINDS)
def test_the_penalty_is_the_cubes_of_the_triples_own_numbers(name, settings):
    """Penalty is weighted as the loss is; of both questions the mean, and nothing of a rotation, whose numbers are of
    size 1."""
    plain = build(name, loss="softmax", **settings)
    stored = build(name, loss="softmax", penalty=0.3, **settings)
    (batch,) = opened(candidates=2).train.batches(40)
    result = LinkPredictionObjective().loss(stored, batch, Mesh()) - LinkPredictionObjective().loss(
        plain, batch, Mesh()
    )
    links, relation = plain(batch), plain.embeddings(batch)["relation"]

    def cubes(row):
        numbers = row.tolist()
        if plain.is_complex:
            half = len(numbers) // 2
            numbers = map(complex, numbers[:half], numbers[half:])
        return sum(abs(number) ** 3 for number in numbers)

    total = 0.0
    for i, weight in enumerate(batch.sample_weight.tolist()):
        total += weight * (cubes(links.heads[i]) + cubes(links.tails[i]))
        if name != "rotate":
            requested = relation[i].chunk(2) if plain.reciprocal else [relation[i]]
            total += weight * sum(cubes(number) for number in requested) / len(requested)
    assert float(result.detach()) == pytest.approx(0.3 * total / float(batch.sample_weight.sum()))


@given(seed=st.integers(0, 10**6))
def test_candidates_stand_for_all_wrong_entities(seed):
    """The mean of exp over draws is the sum over all, over how many there are; a share of 1 / m of each counts."""
    random = torch.Generator().manual_seed(seed)
    right = torch.randn(3, generator=random, dtype=torch.float64)
    wrong = torch.randn(3, 5, generator=random, dtype=torch.float64)
    out = torch.rand(3, 5, generator=random) < 0.3
    all_wrong = torch.tensor([7.0, 100.0, 1e6], dtype=torch.float64)
    result = sampled_softmax_loss(right, wrong, out, all_wrong, 0.5)
    for i in range(3):
        retained = [math.exp(0.5 * float(wrong[i, j])) for j in range(5) if not out[i, j]]
        others = float(all_wrong[i]) * sum(retained) / len(retained) if retained else 0.0
        own = math.exp(0.5 * float(right[i]))
        assert float(result[i]) == pytest.approx(-math.log(own / (own + others)))


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
def test_a_batch_whose_candidates_are_all_true_has_a_loss(loss):
    model = build("transe", loss=loss)
    every = torch.stack([torch.zeros(ENTITIES), torch.zeros(ENTITIES), torch.arange(ENTITIES)], 1)
    one = open_triple_tensors(
        every.long(), every[:1].long(), every[:1].long(), num_entities=ENTITIES, num_relations=1
    )
    (batch,) = one.train.batches(ENTITIES)
    loss = LinkPredictionObjective().loss(model, batch, Mesh())
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


def test_any_number_of_ranks_draws_the_same_candidates():
    source = opened(candidates=3).train
    (whole,) = source.batches(40, start=Position(epoch=2))
    epoch = Position(epoch=2)
    parts = [next(iter(source.batches(40, rank=r, num_ranks=3, start=epoch))) for r in range(3)]
    for name in ("head", "relation", "tail", "candidate"):
        joined = torch.cat([part.ids[name].values for part in parts])
        assert torch.equal(joined, whole.ids[name].values)
    (other,) = source.batches(40, start=Position(epoch=3))
    assert not torch.equal(other.ids["candidate"].values, whole.ids["candidate"].values)
    assert float(source.weight.mean()) == pytest.approx(1)


def train(mesh, name, settings):
    """Three steps over all ranks' samples, the last smaller than their number. Module level: ranks import it."""
    model, source = build(name, **settings), opened(size=82, candidates=2).train
    collection = model.embeddings.open(mesh=mesh)
    rows, dense = RowOptimizer(collection), DenseGradients(list(model.parameters()), mesh)
    dense.build_buckets()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    batches = source.batches(40, rank=mesh.rank, num_ranks=mesh.num_ranks)
    for batch in collection.lookahead(batches):
        dense.zero_gradients()
        loss = LinkPredictionObjective().loss(model, batch, mesh)
        loss.backward()
        dense.reduce(finite=collection.pipeline.gradients.are_finite(), stop=False)
        rows.step(agreed=True)
        optimizer.step()
        losses.append(float(mesh.all_reduce("control", loss.detach().clone())))
    scored = LinkPredictionObjective().evaluate(model, opened(size=82).test, 3, mesh)
    return losses, collection.rows("entity", torch.arange(ENTITIES)), scored


@pytest.mark.parametrize(
    "name, settings",
    [
        ("transe", {}),
        (
            "rotate",
            {**SQUARED, "loss": "softmax", "reciprocal": True, "center": 0.3, "penalty": 0.1},
        ),
    ],
)
def test_three_ranks_train_and_score_what_one_does(name, settings):
    losses, rows, scored = train(Mesh(), name, settings)
    assert scored["num_samples"] == 10
    for found_losses, found_rows, found_scored in run_ranks(3, train, name, settings):
        torch.testing.assert_close(found_losses, losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found_rows, rows, rtol=1e-10, atol=1e-12)
        assert found_scored == pytest.approx(scored)


@pytest.mark.parametrize(
    "name, settings",
    [
        pytest.param("complex", {}, marks=pytest.mark.slow),
        pytest.param("rotate", {"margin": 4.0}, marks=pytest.mark.slow),
        pytest.param(
            "rotate", {"norm": 2, "loss": "softmax", "temperature": 4.0}, marks=pytest.mark.slow
        ),
        ("rotate", {**SQUARED, "loss": "softmax", "reciprocal": True}),
    ],
)
def test_a_ring_is_learned(name, settings):
    """Entities in a ring and relations that go 1, 2 and -1 places on, half of them unseen: what a rotation can say."""
    n = 30
    every = torch.tensor(
        [[e, r, (e + step) % n] for e in range(n) for r, step in enumerate((1, 2, -1))]
    )
    stored = torch.zeros(len(every), dtype=torch.bool)
    stored[2::9] = True
    data = open_triple_tensors(
        every[~stored],
        every[stored],
        every[stored],
        num_entities=n,
        num_relations=RELATIONS,
        candidates=4,
    )
    model = build(name, "float32", Adam(lr=0.05), n, 16, **settings)
    assert isinstance(get_objective(model), LinkPredictionObjective)
    result = colonnade.fit(model, data, epochs=60, batch_size=20)
    assert result.metrics["test_hits@1"] > 0.9


def write(folder, **parts):
    text = {
        "entity2id": "3\na 0\nb 1\nc 2\n",
        "relation2id": "2\nr 0\ns 1\n",
        "train2id": "2\n0 1 0\n2 0 1\n",
        "valid2id": "1\n1 2 0\n",
        "test2id": "1\n1 0 1",
    }
    for name, facts in {**text, **parts}.items():
        (folder / f"{name}.txt").write_text(facts)
    return folder


def test_files_are_head_tail_relation(tmp_path):
    data = open_source("fb15k237", write(tmp_path))
    assert data.train.triples.tolist() == [[0, 0, 1], [2, 1, 0]]
    assert data.test.triples.tolist() == [[1, 1, 0]]
    assert [column.cardinality for column in data.train.schema.categorical] == [3, 2, 3, 3]
    (batch,) = data.test.batches(8)
    assert batch.key.heads.values.tolist() == [1, 2]  # one of them trains


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train2id": "2\n0 1 0\n"}, "got 1 triples, wanted 2"),
        ({"train2id": "1\n0 1 2\n"}, "line 2.*got '0 1 2'.*below 2"),
        ({"train2id": "1\n0 3 1\n"}, "line 2"),
        ({"train2id": "1\n0 1\n"}, "line 2"),
        ({"train2id": "1\n0 -1 1\n"}, "line 2"),
        ({"entity2id": "many\n"}, "entity2id.txt, line 1.*'many'"),
        ({"entity2id": ""}, "entity2id.txt: got an empty file"),
    ],
)
def test_damaged_files_are_named(tmp_path, parts, message):
    with pytest.raises(DataError, match=message):
        open_source("fb15k237", write(tmp_path, **parts))


def test_what_does_not_fit_is_refused():
    features = [Feature("head", "entity"), Feature("tail", "entity")]
    with pytest.raises(ConfigError, match="wanted head, tail and the sequence candidate"):
        TransE([Table("entity", 4, rows=3)], features)
    with pytest.raises(ConfigError, match="even number"):
        build("rotate", dim=5)
    with pytest.raises(ConfigError, match=r"got norm=3, wanted 1 or 2"):
        build("rotate", norm=3)
    with pytest.raises(ConfigError, match=r"got center=inf, wanted a finite number"):
        build("rotate", center=math.inf)
    with pytest.raises(ConfigError, match=r"got penalty=-1, wanted a finite number, 0 or more"):
        build("complex", penalty=-1)
    with pytest.raises(ConfigError, match=r"got squared with norm=1.*set norm=2"):
        build("transe", squared=True)
    with pytest.raises(ConfigError, match="got loss='hinge', wanted sigmoid or softmax"):
        build("complex", loss="hinge")
    with pytest.raises(ConfigError, match=r"got margin=3 with loss=softmax.*leave margin out"):
        build("transe", loss="softmax", margin=3.0)
    with pytest.raises(ConfigError, match=r"open table of entities.*Table"):
        build("transe", loss="softmax", entities=None)
    model, source = build("transe"), opened().test
    with pytest.raises(ConfigError, match="no entities to rank"):
        LinkPredictionObjective().evaluate(model, replace_schema(source), 4, Mesh())


def replace_schema(source):
    """A source without `num_entities`."""

    class Bare:
        schema, num_samples, batches = source.schema, source.num_samples, source.batches

    return Bare()


@pytest.mark.parametrize("name, settings", KINDS)
def test_an_answer_that_is_reached_has_a_gradient(name, settings):
    """Gradient of RotatE was NaN: hypot's at (0, 0)."""
    model = build(name, **settings)
    queries = torch.ones(2, DIM, dtype=torch.float64, requires_grad=True)
    answers = torch.ones(2, DIM, dtype=torch.float64)
    model.compare_pairs(queries, answers).sum().backward()
    (alone,) = torch.autograd.grad(model.compare(queries, answers).diagonal().sum(), queries)
    assert torch.equal(queries.grad, alone)


@pytest.mark.parametrize("more", [{}, {**SQUARED, "reciprocal": True}])
def test_predictions_of_links_are_refused_with_what_to_do(tmp_path, more):
    message = {
        "data": {"name": "fb15k237", "path": str(write(tmp_path))},
        "model": {"name": "rotate", "dim": 4, **more},
        "train": {"epochs": 1, "batch_size": 2, "threads": 1},
    }
    run = open_run(build_config(message), Mesh(), tmp_path / "run")
    try:
        run.train()
    finally:
        run.close()
    predictor = Predictor.open(tmp_path / "run")
    (batch,) = open_source("fb15k237", tmp_path).test.batches(8)
    with pytest.raises(ConfigError, match=r"RotatE.*predictor\.model\.entities"):
        predictor(batch)
    entities = predictor.model.entities(torch.arange(3))
    links = predictor.model(batch)
    assert predictor.model.compare(links.tail_queries, entities).shape == (1, 3)


@pytest.mark.parametrize(
    "options",
    [{"candidates": 0}, {"candidates": 1.5}, {"max_validation": -3}, {"candidates": None}],
)
def test_numbers_of_candidates_and_validations(options):
    one = torch.tensor([[0, 0, 1]])
    (name,) = options
    with pytest.raises(ConfigError, match=rf"got {name}=.*data\.options\.{name}"):
        open_triple_tensors(one, one, one, num_entities=2, num_relations=1, **options)


def test_a_batch_of_nothing():
    model = build("distmult")
    (batch,) = opened().train.batches(40)
    none = Ids(torch.empty(0, dtype=torch.int64))
    empty = Ids(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    ids = {"head": none, "relation": none, "tail": none, "candidate": empty}
    key = replace(batch.key, tails=empty, heads=empty)
    bare = Batch(0, torch.empty(0, 0), ids, sample_weight=torch.empty(0), key=key)
    assert float(LinkPredictionObjective().loss(model, bare, Mesh()).detach()) == 0


@pytest.mark.parametrize(
    ("parts", "train", "evaluate"),
    [({"train2id": "0\n"}, 2, None), ({"test2id": "0\n"}, 0, 2)],
)
def test_no_samples_are_no_success(tmp_path, parts, train, evaluate, capsys):
    run, data = tmp_path / "run", tmp_path / "data"
    data.mkdir()
    message = ["--data", "fb15k237", "--path", str(write(data, **parts)), "--run", str(run)]
    small = ["--set", "model.dim=4", "--set", "train.epochs=1", "--set", "train.batch_size=2"]
    assert app.run_command(["train", *message, *small]) == train
    if evaluate is None:
        assert "got no samples to train on" in capsys.readouterr().err
        return
    assert app.run_command(["evaluate", str(run)]) == evaluate
    assert "got no samples in the test part" in capsys.readouterr().err
