"""GPLVMF against a twin that loops over users, with `torch.distributions` for densities, in float64: bound, gradients,
predictions; N ranks train what one trains; draws and shares of penalties do not depend on batches."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pyarrow as pa
import pytest
import torch
from ranks import run_ranks
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from colonnade import SGD, Adam, Feature, Mesh, PlanConfig, Table, Uniform, build_plan, fit
from colonnade.data import Splits, open_arrow
from colonnade.data.counter import read_words, stream_key
from colonnade.data.ratings import UserSource
from colonnade.errors import ConfigError, DataError
from colonnade.models.gplvmf import (
    BIAS_VARIANCE,
    FIRST_VARIANCE,
    GPLVMF,
    JITTER,
    WARM_UP_STEPS,
    MarginalLikelihood,
    draw_normals,
)
from colonnade.row_state import dense_state_dict

NAMES = ("user", "item", "mood")
DIMS = {"item": 3, "mood": 2}
SCHEMA = {
    "fields": {
        "rating": {"type": "label", "kind": "number"},
        "item": {"type": "category", "dtype": "integer"},
        "mood": {"type": "category", "dtype": "integer"},
        "user": {"type": "category", "dtype": "integer"},
        "hour": {"type": "number"},
    }
}


def ratings(num_users: int = 13, **options) -> Splits:
    """Return ratings of users with 1 to 9 each, of which the last fifth is held out."""
    draw = np.random.default_rng(0)
    user = np.repeat(np.arange(num_users) * 7 - 20, draw.integers(1, 10, num_users))
    draw.shuffle(user)
    size = len(user)
    item, mood, hour = (
        draw.integers(0, 6, size),
        draw.integers(0, 3, size),
        draw.normal(12, 5, size),
    )
    rating = 3 + np.sin(item + mood + hour / 9) + 0.2 * draw.normal(size=size) + 0.1 * (user % 3)
    columns = {"user": user, "item": item, "mood": mood, "hour": hour, "rating": rating}
    table = {name: values.tolist() for name, values in columns.items()}
    return open_arrow(pa.table(table), schema=SCHEMA, test_fraction=0.2, group_by="user", **options)


def build_model(prior: bool = True, optimizer=None, dtype: str = "float64") -> GPLVMF:
    optimizer = optimizer or SGD(lr=1.0)
    zero, scale = Uniform(scale=0.0), Uniform(scale=0.9)
    tables = [Table("user", {"bias": 1}, optimizer=optimizer, initializer=scale, dtype=dtype)] + [
        Table(
            name, {"mean": dim, "log_variance": dim, "bias": 1}, optimizer=optimizer, dtype=dtype,
            initializer={"mean": scale, "log_variance": scale, "bias": scale if prior else zero},
        )
        for name, dim in DIMS.items()
    ]  # fmt: skip
    features = [Feature(name, name) for name in NAMES]
    return GPLVMF(tables, features, num_dense=4, prior=prior, seed=3).double()


def open_alone(model: GPLVMF) -> None:
    collection = model.embeddings
    collection.open(build_plan(collection.tables, Mesh().world, PlanConfig()), Mesh())
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            draw = torch.Generator().manual_seed(number)
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))


def draw_slowly(seed: int, step: int, table: int, id: int, dim: int) -> torch.Tensor:
    """Draw the normal vector of one id, number by number."""
    key = stream_key(seed, step, table)
    first = (id % 2**64) * 2 * dim
    positions = np.array([(first + n) % 2**64 for n in range(2 * dim)], np.uint64)
    uniform = [int(word >> np.uint64(11)) / 2**53 for word in read_words(key, positions)]
    pairs = zip(uniform[:dim], uniform[dim:], strict=True)
    normal = [math.sqrt(-2 * math.log1p(-u)) * math.cos(2 * math.pi * v) for u, v in pairs]
    return torch.tensor(normal, dtype=torch.float64)


class Twin:
    """The model's formulas for one user at a time, over leaf tensors of the rows that a batch reads."""

    def __init__(self, model: GPLVMF, batch, *, is_drawn: bool) -> None:
        self.model, self.batch, self.step = model, batch, model.embeddings.step
        fields = model.embeddings(batch)
        self.rows = {name: {} for name in fields}
        for name, values in fields.items():
            for id, value in zip(
                batch.ids[name.partition(".")[0]].values.tolist(), values, strict=True
            ):
                self.rows[name].setdefault(id, value.detach().clone().requires_grad_(True))  # fmt: skip
        order = sorted(NAMES)
        self.z = {}
        for name, dim in DIMS.items():
            for id, mean in self.rows[f"{name}.mean"].items():
                variance = FIRST_VARIANCE * self.rows[f"{name}.log_variance"][id].exp()
                noise = draw_slowly(3, self.step, order.index(name), id, dim) if is_drawn else 0.0
                self.z[name, id] = mean + variance.sqrt() * noise

    def of(self, sample: int):
        """Return the input, the prior mean and the rating of a sample, in units of the scale."""
        ids = {name: int(self.batch.ids[name].values[sample]) for name in NAMES}
        x = [*(self.z[name, ids[name]] for name in DIMS), self.batch.dense[sample, :1].double()]
        mean = self.model.mean + sum(self.rows[f"{name}.bias"][id][0] for name, id in ids.items())
        rating = (float(self.batch.label[sample, 0]) - self.model.offset) / self.model.scale
        return torch.cat(x), mean, rating

    def covariance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        relevance = self.model.log_relevance.exp()
        distance = torch.stack([torch.stack([(relevance * (x - y) ** 2).sum() for y in b]) for x in a])  # fmt: skip
        return self.model.log_amplitude.exp() * torch.exp(-distance / 2)

    def expect_covariance(self, a: int, b: int) -> torch.Tensor:
        """Integrate the kernel of two samples over the posterior of their latent vectors, by quadrature."""
        relevances = self.model.log_relevance.exp().split([*DIMS.values(), 1])
        value = self.model.log_amplitude.exp()
        difference = (self.batch.dense[a, 0] - self.batch.dense[b, 0]).double()
        value = value * torch.exp(-relevances[-1][0] * difference**2 / 2)
        nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(60))
        for name, relevance in zip(DIMS, relevances, strict=False):
            first, second = (int(self.batch.ids[name].values[sample]) for sample in (a, b))
            if first == second:
                continue
            means, logs = self.rows[f"{name}.mean"], self.rows[f"{name}.log_variance"]
            sd = (FIRST_VARIANCE * (logs[first].exp() + logs[second].exp())).sqrt()
            z = (means[first] - means[second])[:, None] + sd[:, None] * nodes
            density = weights / math.sqrt(2 * math.pi)
            value = value * (torch.exp(-relevance[:, None] * z**2 / 2) * density).sum(1).prod()
        return value

    @property
    def noise(self) -> torch.Tensor:
        return self.model.log_noise.exp() + JITTER

    def samples_by_user(self):
        training, queries = {}, {}
        users = self.batch.ids["user"].values.tolist()
        for sample, user in enumerate(users):
            part = training if self.batch.dense[sample, 1] > 0 else queries
            part.setdefault(user, []).append(sample)
        return training, queries

    def negative_bound(self) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for samples in self.samples_by_user()[0].values():
            x, mean, rating = map(torch.stack, zip(*map(self.of, samples), strict=True))
            K = self.covariance(x, x) + self.noise * torch.eye(len(samples), dtype=torch.float64)
            total = total - MultivariateNormal(mean, K).log_prob(rating)
            total = total + len(samples) * self.model.scale.log()
        warm_up = min(1.0, self.step / WARM_UP_STEPS)
        for sample in range(self.batch.size):
            for column, name in enumerate(NAMES, 1):
                id = int(self.batch.ids[name].values[sample])
                count = float(self.batch.dense[sample, column])
                total = total + self.rows[f"{name}.bias"][id][0] ** 2 / (2 * BIAS_VARIANCE * count)
                if self.model.prior and name in DIMS:
                    mean = self.rows[f"{name}.mean"][id]
                    sd = (FIRST_VARIANCE * self.rows[f"{name}.log_variance"][id].exp()).sqrt()
                    prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
                    total = total + warm_up * kl_divergence(Normal(mean, sd), prior).sum() / count
        return total

    def predict(self) -> torch.Tensor:
        """Condition the joint normal of each user's ratings on the training ratings."""
        training, queries = self.samples_by_user()
        predictions = {}
        for user, samples in queries.items():
            known = training.get(user, [])
            for sample in samples:
                x, mean, rating = map(torch.stack, zip(*map(self.of, [*known, sample]), strict=True))  # fmt: skip
                pairs = [
                    [self.expect_covariance(i, j) for j in (*known, sample)]
                    for i in (*known, sample)
                ]
                K = torch.stack([torch.stack(row) for row in pairs])
                K = K + self.noise * torch.eye(len(x), dtype=torch.float64)
                weights = torch.linalg.solve(K[:-1, :-1], K[:-1, -1])
                value = mean[-1] + weights @ (rating - mean)[:-1]
                variance = K[-1, -1] - weights @ K[:-1, -1]
                columns = [value * self.model.scale + self.model.offset]
                columns.append(variance.sqrt() * self.model.scale)
                predictions[sample] = torch.stack(columns)
        return torch.stack([predictions[sample] for sample in sorted(predictions)])


@pytest.mark.parametrize("prior", [True, False])
@pytest.mark.parametrize("step", [0, 37, 10**4])
def test_bound_and_gradients_equal_the_twin(prior, step):
    model = build_model(prior)
    open_alone(model)
    batch = next(iter(ratings().train.batches(6)))
    model.fit_scale(batch.label, Mesh())
    model.embeddings.step = step
    got = model.compute_negative_bound(batch)
    twin = Twin(model, batch, is_drawn=prior)
    wanted = twin.negative_bound()
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    parameters = [*model.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(got, parameters), torch.autograd.grad(wanted, parameters, retain_graph=True),
        rtol=1e-8, atol=1e-9,
    )  # fmt: skip


def test_rows_get_the_twins_gradients():
    """One step of SGD with lr 1 changes rows by the gradient of the twin's mean."""
    model = build_model()
    source = ratings().train
    first = next(iter(source.batches(6)))
    before = {}

    class Watched(MarginalLikelihood):
        def loss(self, model, batch, mesh):
            loss = super().loss(model, batch, mesh)
            twin = Twin(model, batch, is_drawn=True)
            (twin.negative_bound() / batch.size).backward()
            before["rows"] = twin.rows
            for parameter in model.parameters():
                parameter.grad = None
            return loss

    settings = {"batch_size": 6, "max_steps": 1, "dense_optimizer": "sgd", "dense_lr": 0.0}
    fit(model, source, objective=Watched(), quiet=True, **settings)
    after = model.embeddings(first)
    compared = 0
    for name, values in after.items():
        for id, value in zip(
            first.ids[name.partition(".")[0]].values.tolist(), values, strict=True
        ):
            old = before["rows"][name][id]
            torch.testing.assert_close(value.detach(), old.detach() - old.grad, rtol=1e-9, atol=1e-10)  # fmt: skip
            compared += 1
    assert compared > 50


def test_predictions_equal_the_twin():
    model = build_model()
    open_alone(model)
    data = ratings()
    model.fit_scale(data.train.ratings.label, Mesh())
    for batch in data.test.batches(5):
        got = model.objective.predict(model, batch)
        torch.testing.assert_close(got, Twin(model, batch, is_drawn=False).predict(), rtol=1e-8, atol=1e-9)  # fmt: skip


def train(mesh: Mesh, **settings):
    model = build_model(optimizer=Adam(lr=0.05, eps=1e-3))
    data = ratings()
    result = fit(
        model, data, mesh=mesh, batch_size=4, epochs=8, dense_lr=0.02, quiet=True, test_at="evaluations", **settings
    )  # fmt: skip
    everything = UserSource.gather_users(data.train, torch.arange(data.train.num_samples))
    rows = {name: value.detach() for name, value in model.embeddings(everything).items()}
    return {**rows, **dense_state_dict(model)}, result.metrics


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_train_what_one_rank_trains(num_ranks):
    wanted, metrics = train(Mesh())
    results = run_ranks(num_ranks, train)
    for got, got_metrics in results:
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)
        assert got_metrics == pytest.approx(metrics, rel=1e-9)
    again = run_ranks(num_ranks, train)
    for name, value in results[0][0].items():
        assert torch.equal(value, again[0][0][name]), name


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    whole, metrics = train(Mesh())
    train(Mesh(), run=tmp_path / "run", max_steps=13)
    resumed, again = train(Mesh(), run=tmp_path / "run")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert again == metrics


def test_all_parts_of_the_first_step_have_one_scale():
    """A step has several batches with train.accumulate."""
    model = build_model()
    open_alone(model)
    first, second, *_ = ratings().train.batches(4)
    model.objective.loss(model, first, Mesh())
    fitted = model.offset.clone(), model.scale.clone()
    assert float(fitted[0]) != 0
    model.objective.loss(model, second, Mesh())
    assert (model.offset, model.scale) == fitted


def test_penalties_of_an_epoch_count_each_id_once():
    """Compare the sums of an epoch in small batches and in one: likelihoods and penalties are the same."""
    model = build_model()
    open_alone(model)
    model.embeddings.step = 10**4
    source = ratings().train
    sums = []
    for batch_size in (3, 100):
        total = torch.zeros((), dtype=torch.float64)
        for batch in source.batches(batch_size):
            total += model.compute_negative_bound(batch).detach()
        sums.append(total)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-11, atol=0)


def test_draws_are_standard_normals_of_the_id_alone():
    ids = torch.tensor([5, -3, 5, 2**63 - 1, 0])
    noise = draw_normals(9, ids, 4)
    assert torch.equal(noise[0], noise[2]) and torch.equal(draw_normals(9, ids[3:4], 4), noise[3:4])
    assert not torch.equal(draw_normals(10, ids, 4), noise)
    sample = draw_normals(1, torch.arange(20_000), 3).numpy().ravel()
    grid = np.linspace(-3, 3, 25)
    cdf = np.searchsorted(np.sort(sample), grid) / len(sample)
    assert np.abs(cdf - [NormalDist().cdf(x) for x in grid]).max() < 1.63 / math.sqrt(len(sample))
    assert abs(np.corrcoef(sample.reshape(-1, 3).T)[0, 1]) < 0.03


def test_a_context_that_changes_nothing_has_no_relevance():
    model = build_model()
    open_alone(model)
    data = ratings()
    model.fit_scale(data.train.ratings.label, Mesh())
    with torch.no_grad():
        model.log_relevance[3:5] = -50.0  # of mood
        model.log_relevance[5] = 20.0  # of hour
    metrics = MarginalLikelihood().evaluate(model, data.test, 4, Mesh())
    assert metrics["relevance_mood"] < 1e-15 and 0 < metrics["relevance_item"] < 1
    assert metrics["relevance_hour"] > 0.5 and metrics["num_samples"] == data.test.num_samples


def test_tables_and_batches_that_cannot_be_right_are_refused():
    tables = [Table("user", {"bias": 1}), Table("item", {"mean": 2, "log_variance": 2, "bias": 1})]
    features = [Feature("user", "user"), Feature("item", "item"), Feature("mood", "item")]
    with pytest.raises(ConfigError, match="a table of its own for each"):
        GPLVMF(tables, features, num_dense=3)
    with pytest.raises(ConfigError, match="got 1 dense columns for 2 features"):
        GPLVMF(tables, features[:2], num_dense=1)
    model = build_model()
    open_alone(model)
    batch = next(iter(ratings().test.batches(3)))
    with pytest.raises(DataError, match="with held-out ratings"):
        MarginalLikelihood().loss(model, batch, Mesh())
