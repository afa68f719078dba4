"""Metrics against their definitions, O(n^2) where the definition is a sum over pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.batch import Batch
from colonnade.errors import DataError, NonFiniteError
from colonnade.train.metrics import CLIP, Evaluation, auc, ceiling, log_loss


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
    whole.add(scores, labels, weights)
    order = torch.tensor([i for i in shuffle if i < len(scores)], dtype=torch.int64)
    ranks = [Evaluation(), Evaluation()]
    for rank, part in zip(ranks, order.tensor_split(2), strict=True):
        rank.add(scores[part][:, None], labels[part][:, None], weights[part])
    pooled = Evaluation()
    for rank in ranks:
        pooled.add(*rank.columns())
    assert repr(pooled.result()) == repr(whole.result())  # the same bits; nan prints as nan


@given(SAMPLES)
def test_log_loss_and_positive_rate_are_weighted_means(samples):
    p, labels, weights = columns(samples)
    evaluation = Evaluation()
    evaluation.add(torch.from_numpy(p), torch.from_numpy(labels), torch.from_numpy(weights))
    result = evaluation.result()
    total = math.fsum(weights)
    if total == 0:
        assert math.isnan(result["log_loss"]) and math.isnan(result["positive_rate"])
        return
    clipped = [min(max(x, CLIP), 1 - CLIP) for x in p]
    losses = [-math.log(x if y == 1 else 1 - x) for x, y in zip(clipped, labels, strict=True)]
    assert result["log_loss"] == pytest.approx(math.fsum(losses * weights) / total, abs=1e-8)
    assert result["positive_rate"] == pytest.approx(math.fsum(labels * weights) / total)
    assert result["num_samples"] == len(p)
    assert log_loss(p, labels, weights) == result["log_loss"]


def test_known_answers():
    assert auc([0.1, 0.2, 0.3], [0, 1, 1]) == 1.0
    assert auc(torch.tensor([[0.5], [0.5]]), torch.tensor([[0.0], [1.0]])) == 0.5
    assert math.isnan(auc([0.1, 0.2], [1, 1]))
    assert math.isnan(auc([], []))
    assert log_loss([0.25], [1]) == pytest.approx(math.log(4))


def test_auc_of_a_million_samples_is_exact():
    """Scores 0 .. n-1, positives at the odd ones: (n/2)(n/2 + 1) / 2 pairs won of (n/2)^2."""
    n = 1_000_000
    scores = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    half = n // 2
    assert auc(scores, scores % 2) == (half + 1) / 2 / half


def test_an_evaluation_copies_what_it_is_given():
    evaluation, p = Evaluation(), torch.tensor([0.2, 0.8])
    evaluation.add(p, torch.tensor([0.0, 1.0]))
    p.fill_(0.5)
    assert evaluation.result()["auc"] == 1.0


def test_an_empty_evaluation_has_no_result_but_nan():
    result = Evaluation().result()
    assert result["num_samples"] == 0 and math.isnan(result["auc"])


def test_bad_input_is_named():
    with pytest.raises(NonFiniteError, match="score 1 of 2 is nan"):
        auc([0.0, float("nan")], [0, 1])
    with pytest.raises(DataError, match=r"labels such as 2\.0, wanted 0 or 1"):
        auc([0.0, 1.0], [0, 2])
    with pytest.raises(DataError, match="wanted as many"):
        auc([0.0, 1.0], [0])
    with pytest.raises(DataError, match="sigmoid"):
        log_loss([-3.0, 0.5], [0, 1])
    with pytest.raises(DataError, match="negative or not finite"):
        auc([0.0, 1.0], [0, 1], [1.0, -1.0])
    with pytest.raises(DataError, match="one task at a time"):
        Evaluation().add(torch.zeros(3, 2), torch.zeros(3))


def test_a_ceiling_needs_true_probabilities():
    batch = Batch(size=1, dense=torch.empty(1, 0), ids={}, label=torch.ones(1, 1))
    with pytest.raises(DataError, match="only synthetic streams"):
        ceiling([batch])
