"""Objectives: a ranking model of a user's own gets its own loss, metric and predictions from `fit` and `Predictor`."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import logsigmoid

import colonnade
from colonnade import (
    SGD,
    EmbeddingCollection,
    Feature,
    Mesh,
    Predictor,
    RowOptimizer,
    Table,
    average_metrics,
    evaluation_mode,
)
from colonnade.data import Splits, open_tensors
from colonnade.errors import ConfigError
from colonnade.train.objective import Probability, get_objective

USERS, ITEMS = 12, 20
CARDINALITIES = {"user": USERS, "liked": ITEMS, "other": ITEMS}


class Pairwise:
    """Objective of a user's own: BPR, judged by the place of the liked item among all items."""

    monitor = "reciprocal"
    metrics = ("reciprocal", "places_error")

    def loss(self, model, batch, mesh):
        return -logsigmoid(model(batch)).sum() / batch.world_weight

    def check_source(self, source):
        if source.num_samples == 0:
            raise ConfigError("got no pairs, wanted one at least; give this part some")

    def evaluate(self, model, source, batch_size, mesh):
        def measure(batch):
            places = model.places(batch)
            return {"reciprocal": 1 / places, "places_error": places - 1}

        with evaluation_mode(model):
            return average_metrics(measure, self.metrics, source, batch_size, mesh)

    def predict(self, model, batch):
        return torch.sigmoid(model(batch))


class Preferences(nn.Module):
    """Scores of pairs of items, as vectors in the order of a batch: what is liked above what is not."""

    objective = Pairwise()

    def __init__(self):
        super().__init__()
        optimizer = SGD(lr=2.0)
        tables = [
            Table("user", 4, rows=USERS, dtype="float64", optimizer=optimizer),
            Table("item", 4, rows=ITEMS, dtype="float64", optimizer=optimizer),
        ]
        features = [Feature("user", "user"), Feature("liked", "item"), Feature("other", "item")]
        self.embeddings = EmbeddingCollection(tables, features, seed=3)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, batch):
        rows = self.embeddings(batch)
        return self.scale * (rows["user"] * (rows["liked"] - rows["other"])).sum(1)

    def places(self, batch):
        """Places of the liked items among those of the batch, from 1."""
        rows = self.embeddings(batch)
        scores = rows["user"] @ rows["other"].T
        liked = (rows["user"] * rows["liked"]).sum(1, keepdim=True)
        return (scores > liked).sum(1) + 1.0


def pairs(count, seed):
    random = torch.Generator().manual_seed(seed)
    user, place, other = (torch.randint(60, (count,), generator=random) for _ in range(3))
    ids = {
        "user": user % USERS,
        "liked": (place * 4 + user % 4) % ITEMS,
        "other": (other * 4 + (user + 1) % 4) % ITEMS,
    }
    return open_tensors(ids, cardinalities=CARDINALITIES, shuffle_seed=seed)


def parts():
    return Splits(train=pairs(600, 0), validation=pairs(80, 1), test=pairs(90, 2))


SETTINGS = {"batch_size": 60, "quiet": True, "dense_optimizer": "sgd", "dense_lr": 0.1}


def test_fit_learns_the_loss_of_the_models_own_objective():
    model, twin = Preferences(), Preferences()
    fitted = colonnade.fit(model, parts(), epochs=2, **SETTINGS)
    rows, dense = RowOptimizer(twin.embeddings), torch.optim.SGD(twin.parameters(), lr=0.1)
    for epoch in range(2):
        batches = parts().train.batches(60, start=colonnade.data.Position(epoch=epoch))
        for batch in twin.embeddings.lookahead(batches):
            dense.zero_grad()
            (-logsigmoid(twin(batch)).mean()).backward()
            rows.step()
            dense.step()
    torch.testing.assert_close(model.state_dict()["scale"], twin.state_dict()["scale"])
    for name, size in (("user", USERS), ("item", ITEMS)):
        one, other = (m.embeddings.rows(name, torch.arange(size)) for m in (model, twin))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    places = torch.cat([twin.places(batch) for batch in parts().test.batches(60)])
    assert fitted.metrics["test_reciprocal"] == pytest.approx(float((1 / places).mean()))
    assert fitted.metrics["test_places_error"] == pytest.approx(float(places.mean()) - 1)
    assert fitted.metrics["test_num_samples"] == 90 and "test_auc" not in fitted.metrics


def test_its_metric_stops_early_and_its_predictions_are_served(tmp_path, colonnade):
    from colonnade import fit

    run = tmp_path / "run"
    fitted = fit(Preferences(), parts(), run=run, epochs=40, patience=2, **SETTINGS)
    assert fitted.outcome.steps < 400 and fitted.outcome.best_step is not None
    assert fitted.metrics["validation_reciprocal"] > 0.2
    (batch,) = parts().test.batches(90)
    with Predictor.open(run, model=Preferences()) as predictor:
        chances = predictor(batch)
        assert torch.equal(chances, torch.sigmoid(predictor.model(batch)))
        assert float((chances > 0.5).double().mean()) > 0.9
    status, shown, errors = colonnade("report", run)
    assert status == 0, errors
    pages = "".join(path.read_text() for path in run.glob("*.html"))
    assert "reciprocal" in pages or "reciprocal" in shown


def train_and_score(mesh):
    """Train over all ranks' shares. Module level: ranks import it."""
    model = Preferences()
    fitted = colonnade.fit(model, parts(), epochs=2, mesh=mesh, **SETTINGS | {"quiet": False})
    return fitted.metrics, model.embeddings.rows("item", torch.arange(ITEMS))


def test_ranks_learn_and_predict_what_one_does():
    metrics, rows = train_and_score(Mesh())
    results = run_ranks(2, train_and_score)
    assert results[0][0] == results[1][0]
    for _, other in results:
        torch.testing.assert_close(other, rows, rtol=1e-10, atol=1e-12)
    assert results[0][0]["test_num_samples"] == metrics["test_num_samples"]


def count_queries(mesh):
    """Average the ids of users, which no forward is needed for. Module level: ranks import it."""
    source = open_tensors({"user": torch.arange(7)}, cardinalities={"user": 7})

    def measure(batch):
        users = batch.ids["user"].values.double()
        return {"user": users.repeat(2), "third": 1 / (users.repeat(2) + 3)}

    return average_metrics(measure, ("user", "third"), source, 3, mesh)


def test_means_are_those_of_all_queries_in_any_world():
    means = count_queries(Mesh())
    thirds = [1 / (user + 3) for user in range(7)] * 2
    assert means == {"user": 3.0, "third": math.fsum(thirds) / 14, "num_samples": 14.0}
    assert run_ranks(3, count_queries) == [means] * 3


def test_no_queries_have_no_means():
    source = open_tensors({"user": torch.zeros(0, dtype=torch.int64)}, cardinalities={"user": 7})
    means = average_metrics(lambda batch: {"x": torch.zeros(0)}, ("x",), source, 3, Mesh())
    assert math.isnan(means["x"]) and means["num_samples"] == 0


def test_evaluation_mode_restores_the_flag():
    model = nn.Dropout(0.5)
    for flag in (True, False):
        model.train(flag)
        with pytest.raises(KeyError), evaluation_mode(model):
            assert not model.training and not torch.is_grad_enabled()
            raise KeyError
        assert model.training == flag and torch.is_grad_enabled()


def test_what_is_passed_to_fit_comes_before_the_models_own():
    class Counting(Pairwise):
        monitor, metrics = "half", ("half",)

        def evaluate(self, model, source, batch_size, mesh):
            return {"half": 0.5}

    data = parts()
    assert isinstance(get_objective(Preferences()), Pairwise)
    fitted = colonnade.fit(Preferences(), data, objective=Counting(), **SETTINGS)
    assert fitted.metrics["test_half"] == 0.5
    fitted = colonnade.fit(Preferences(), data, loss=lambda out, batch: out.square(), **SETTINGS)
    assert "test_loss" in fitted.metrics
    assert isinstance(get_objective(nn.Linear(1, 1)), Probability)


def test_what_does_not_fit_is_refused_before_training():
    model, data = Preferences(), parts()
    with pytest.raises(ConfigError, match=r"train\.monitor=auc, wanted.*places_error, reciprocal"):
        colonnade.fit(model, data, monitor="auc", **SETTINGS)
    empty = Splits(train=data.train, validation=data.validation, test=pairs(0, 0))
    with pytest.raises(ConfigError, match="the test part: got no pairs"):
        colonnade.fit(model, empty, **SETTINGS)
    model.objective = "clicks"
    with pytest.raises(ConfigError, match=r"Preferences\.objective: got a str without monitor"):
        colonnade.fit(model, data, **SETTINGS)
    assert float(model.scale.detach()) == 1


def test_a_predictor_of_an_objective_without_predictions_refuses(tmp_path):
    class Silent(Pairwise):
        predict = None

    colonnade.fit(Preferences(), parts(), run=tmp_path / "run", **SETTINGS)
    model = Preferences()
    model.objective = Silent()
    (batch,) = parts().test.batches(90)
    with (
        Predictor.open(tmp_path / "run", model=model) as predictor,
        pytest.raises(ConfigError, match=r"objective Silent has no `predict`.*predictor\.model"),
    ):
        predictor(batch)
