"""Metrics against their definitions, O(n^2) where the definition is a sum over pairs."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

from colonnade import Mesh
from colonnade.batch import Batch
from colonnade.data.contract import START, Schema, iterate_rank_blocks
from colonnade.errors import DataError, NonFiniteError
from colonnade.train.metrics import (
    CLIP,
    Evaluation,
    auc,
    best_possible_metrics,
    evaluate,
    group_auc,
)


def auc_by_pairs(scores, labels, weights):
    """The definition: over all (positive, negative) pairs, won = 1, tied = 1/2, weighted by both."""
    won = total = 0.0
    for s, y, w in zip(scores, labels, weights, strict=True):
        for t, z, v in zip(scores, labels, weights, strict=True):
            if y == 1 and z == 0:
                won += w * v * (1.0 if s > t else 0.5 if s == t else 0.0)
                total += w * v
    return won / total if total else float("nan")


# Few distinct scores, so that ties are the rule.
SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]) | st.floats(0, 1),
        st.integers(0, 1),
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    ),
    max_size=40,
)


def columns(samples):
    array = np.array(samples, dtype=np.float64).reshape(-1, 3)
    return array[:, 0], array[:, 1], array[:, 2]


def metric(name, probabilities, labels, weights=None):
    """Return one metric of samples."""
    evaluation = Evaluation()
    weights = np.ones(len(labels)) if weights is None else weights
    evaluation.add_predictions(
        *(
            torch.as_tensor(np.asarray(values)).double()
            for values in (probabilities, labels, weights)
        )
    )
    return evaluation.compute_metrics()[name]


@given(SAMPLES)
def test_auc_is_its_definition(samples):
    scores, labels, weights = columns(samples)
    for w in (None, weights):
        expected = auc_by_pairs(scores, labels, np.ones(len(scores)) if w is None else w)
        assert auc(scores, labels, w) == pytest.approx(expected, abs=1e-12, nan_ok=True)


@given(SAMPLES, st.permutations(range(40)))
def test_results_do_not_depend_on_order_or_on_who_saw_what(samples, shuffle):
    scores, labels, weights = (torch.from_numpy(column.copy()) for column in columns(samples))
    whole = Evaluation()
    whole.add_predictions(scores, labels, weights)
    order = torch.tensor([i for i in shuffle if i < len(scores)], dtype=torch.int64)
    ranks = [Evaluation(), Evaluation()]
    for rank, part in zip(ranks, order.tensor_split(2), strict=True):
        rank.add_predictions(scores[part][:, None], labels[part][:, None], weights[part])
    pooled = Evaluation()
    for rank in ranks:
        pooled.add_predictions(*rank.concatenate_columns())
    assert repr(pooled.compute_metrics()) == repr(
        whole.compute_metrics()
    )  # the same bits; nan prints as nan


@given(SAMPLES)
def test_log_loss_and_positive_rate_are_weighted_means(samples):
    p, labels, weights = columns(samples)
    evaluation = Evaluation()
    evaluation.add_predictions(
        torch.from_numpy(p), torch.from_numpy(labels), torch.from_numpy(weights)
    )
    result = evaluation.compute_metrics()
    total = math.fsum(weights)
    if total == 0:
        assert math.isnan(result["log_loss"]) and math.isnan(result["positive_rate"])
        return
    clipped = [min(max(x, CLIP), 1 - CLIP) for x in p]
    losses = [-math.log(x if y == 1 else 1 - x) for x, y in zip(clipped, labels, strict=True)]
    assert result["log_loss"] == pytest.approx(math.fsum(losses * weights) / total, abs=1e-8)
    assert result["positive_rate"] == pytest.approx(math.fsum(labels * weights) / total)
    assert result["num_samples"] == len(p)
    assert metric("log_loss", p, labels, weights) == result["log_loss"]


def test_known_answers():
    assert auc([0.1, 0.2, 0.3], [0, 1, 1]) == 1.0
    assert auc(torch.tensor([[0.5], [0.5]]), torch.tensor([[0.0], [1.0]])) == 0.5
    assert math.isnan(auc([0.1, 0.2], [1, 1]))
    assert math.isnan(auc([], []))
    assert metric("log_loss", [0.25], [1]) == pytest.approx(math.log(4))


def test_auc_of_a_million_samples_is_exact():
    """Scores 0 .. n-1, positives at the odd ones: (n/2)(n/2 + 1) / 2 pairs won of (n/2)^2."""
    n = 1_000_000
    scores = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    half = n // 2
    assert auc(scores, scores % 2) == (half + 1) / 2 / half


def test_an_evaluation_copies_what_it_is_given():
    evaluation, p = Evaluation(), torch.tensor([0.2, 0.8])
    evaluation.add_predictions(p, torch.tensor([0.0, 1.0]))
    p.fill_(0.5)
    assert evaluation.compute_metrics()["auc"] == 1.0


def test_an_empty_evaluation_has_no_result_but_nan():
    result = Evaluation().compute_metrics()
    assert result["num_samples"] == 0 and math.isnan(result["auc"])


def test_bad_input_is_named():
    with pytest.raises(NonFiniteError, match="score 1 of 2 is nan"):
        auc([0.0, float("nan")], [0, 1])
    with pytest.raises(DataError, match=r"labels such as 2\.0, wanted 0 or 1"):
        auc([0.0, 1.0], [0, 2])
    with pytest.raises(DataError, match="wanted as many"):
        auc([0.0, 1.0], [0])
    with pytest.raises(DataError, match="sigmoid"):
        metric("log_loss", [-3.0, 0.5], [0, 1])
    with pytest.raises(DataError, match="negative or not finite"):
        auc([0.0, 1.0], [0, 1], [1.0, -1.0])
    with pytest.raises(DataError, match="one task at a time"):
        Evaluation().add_predictions(torch.zeros(3, 2), torch.zeros(3))


def test_a_ceiling_needs_true_probabilities():
    batch = Batch(size=1, dense=torch.empty(1, 0), ids={}, label=torch.ones(1, 1))
    with pytest.raises(DataError, match="only synthetic streams"):
        best_possible_metrics([batch])


def many(num_samples=200_000, num_groups=5_000, seed=0):
    """Scores with ties, labels that follow them, weights, skewed groups."""
    random = np.random.default_rng(seed)
    scores = random.beta(2, 5, num_samples).round(3)
    labels = (random.random(num_samples) < scores).astype(np.float64)
    weights = random.choice([0.5, 1.0, 2.0], num_samples)
    groups = (num_groups * random.random(num_samples) ** 3).astype(np.int64) - 7
    return scores, labels, weights, groups


def test_metrics_are_scikit_learns():
    learn = pytest.importorskip("sklearn.metrics")
    scores, labels, weights, _ = many(20_000)
    for w in (None, weights):
        wanted = learn.roc_auc_score(labels, scores, sample_weight=w)
        assert auc(scores, labels, w) == pytest.approx(wanted, abs=1e-12)
        clipped = scores.clip(CLIP, 1 - CLIP)
        loss = learn.log_loss(labels, clipped, sample_weight=w)
        assert metric("log_loss", scores, labels, w) == pytest.approx(loss, rel=1e-9)
        rate = np.average(labels, weights=w)
        base = learn.log_loss(labels, np.full(len(labels), rate), sample_weight=w)
        assert metric("normalized_entropy", scores, labels, w) == pytest.approx(
            loss / base, rel=1e-9
        )
        predicted = np.average(scores, weights=w)
        assert metric("calibration", scores, labels, w) == pytest.approx(predicted / rate, rel=1e-9)


def test_group_auc_is_the_weighted_mean_of_scikit_learns():
    learn = pytest.importorskip("sklearn.metrics")
    scores, labels, weights, groups = many(4_000, 200)
    aucs, totals = [], []
    for group in np.unique(groups):
        own = groups == group
        if len(set(labels[own])) == 2:
            aucs.append(learn.roc_auc_score(labels[own], scores[own], sample_weight=weights[own]))
            totals.append(weights[own].sum())
    assert len(aucs) < len(np.unique(groups))  # some have one class only
    wanted = np.average(aucs, weights=totals)
    assert group_auc(scores, labels, groups, weights) == pytest.approx(wanted, abs=1e-12)


@given(SAMPLES, st.lists(st.integers(-1, 2), min_size=40, max_size=40))
def test_group_auc_is_its_definition(samples, groups):
    scores, labels, weights = columns(samples)
    groups = np.array(groups[: len(scores)], dtype=np.int64)
    parts = [(columns(samples)[0][groups == g], g) for g in np.unique(groups)]
    results = [
        (auc_by_pairs(part, labels[groups == g], weights[groups == g]), weights[groups == g].sum())
        for part, g in parts
    ]
    results = [(value, weight) for value, weight in results if not math.isnan(value)]
    wanted = float("nan")
    if results:
        values, totals = zip(*results, strict=True)
        wanted = np.average(values, weights=totals)
    got = group_auc(scores, labels, groups, weights)
    assert got == pytest.approx(wanted, abs=1e-12, nan_ok=True)


def test_calibration_error_by_bins():
    learn = pytest.importorskip("sklearn.calibration")
    scores, labels, _, _ = many(20_000)
    scores = scores + 1e-4  # none lies on the border of two bins
    actual, predicted = learn.calibration_curve(labels, scores, n_bins=15)
    counts = np.histogram(scores, np.linspace(0, 1, 16))[0]
    wanted = np.average(np.abs(actual - predicted), weights=counts[counts > 0])
    assert metric("expected_calibration_error", scores, labels) == pytest.approx(wanted, abs=1e-9)
    assert metric("expected_calibration_error", [0.3, 0.3], [0, 1]) == pytest.approx(0.2)


def test_a_large_evaluation_takes_less_than_a_second():
    scores, labels, weights, groups = (torch.from_numpy(column) for column in many())
    evaluation = Evaluation()
    evaluation.add_predictions(scores, labels, weights, groups)
    start = time.perf_counter()
    result = evaluation.compute_metrics()
    assert time.perf_counter() - start < 4.0  # 0.3 s on a machine of its own
    assert set(result) >= {"auc", "group_auc", "normalized_entropy", "calibration"}


def test_labels_that_nobody_knows_are_left_out():
    evaluation = Evaluation()
    nan = float("nan")
    groups = torch.tensor([1, 1, 1, 2])
    evaluation.add_predictions(
        torch.tensor([0.2, 0.8, 0.9, 0.1]), torch.tensor([0, 1, nan, nan]), None, groups
    )
    result = evaluation.compute_metrics()
    assert result["num_samples"] == 2 and result["auc"] == result["group_auc"] == 1.0
    with pytest.raises(DataError, match="with all or with none"):
        evaluation.add_predictions(torch.zeros(1), torch.zeros(1))


class TwoTasks(nn.Module):
    """Logits are the dense columns."""

    def forward(self, batch):
        return batch.dense


class Labelled:
    """Samples with two labels, the second not always known, and groups."""

    def __init__(self, num_samples=500):
        random = torch.Generator().manual_seed(3)
        self.logits = torch.randn(num_samples, 2, generator=random)
        chance = torch.rand(num_samples, 2, generator=random)
        self.label = (chance < torch.sigmoid(self.logits)).float()
        self.label[::3, 1] = float("nan")
        self.group = torch.randint(0, 20, (num_samples,), generator=random)
        self.weight: torch.Tensor | None = None
        self.schema = Schema(("a", "b"), (), labels=("click", "buy"))
        self.num_samples = num_samples

    def batches(self, batch_size, *, rank=0, num_ranks=1, start=START):
        for begin, end in iterate_rank_blocks(
            self.num_samples, batch_size, rank=rank, num_ranks=num_ranks, start=start
        ):
            yield Batch(
                end - begin, self.logits[begin:end], {}, self.label[begin:end],
                group=self.group[begin:end],
                sample_weight=None if self.weight is None else self.weight[begin:end],
            )  # fmt: skip


def evaluate_two_tasks(mesh):
    return evaluate(TwoTasks(), Labelled(), 64, mesh)


def test_tasks_have_metrics_of_their_own_on_any_number_of_ranks():
    result, data = evaluate_two_tasks(Mesh()), Labelled()
    scores = torch.sigmoid(data.logits.double())
    assert result["auc"] == auc(scores[:, 0], data.label[:, 0])
    known = ~data.label[:, 1].isnan()
    assert result["auc_buy"] == auc(scores[known, 1], data.label[known, 1])
    assert result["num_samples_buy"] == int(known.sum())
    assert result["group_auc"] == group_auc(scores[:, 0], data.label[:, 0], data.group)
    for ranks in run_ranks(2, evaluate_two_tasks):
        assert ranks == result


def test_a_weight_of_n_counts_a_sample_n_times_in_every_metric_of_every_task():
    weighted, repeated = Labelled(), Labelled()
    times = torch.randint(0, 4, (500,), generator=torch.Generator().manual_seed(5))
    weighted.weight = times.float()
    for name in ("logits", "label", "group"):
        setattr(repeated, name, getattr(weighted, name).repeat_interleave(times, 0))
    repeated.num_samples = int(times.sum())
    result, wanted = (evaluate(TwoTasks(), source, 64, Mesh()) for source in (weighted, repeated))
    plain = evaluate(TwoTasks(), Labelled(), 64, Mesh())
    assert result.keys() == wanted.keys() == plain.keys()
    for name, value in result.items():
        if not name.startswith("num_samples"):
            assert value == pytest.approx(wanted[name], rel=1e-12), name
            assert abs(value - plain[name]) > 1e-4, name
