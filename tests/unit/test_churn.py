"""Churn: what is measured equals the formulas, standard errors cover, and runs on other samples are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.cli import app
from colonnade.cli.churn import Predictions, compare_predictions, list_sample_settings
from colonnade.config.run import DataConfig
from colonnade.errors import DataError
from colonnade.models.ranking import NUM_BLOCKS, assign_blocks
from colonnade.predict.churn import TOP, Estimate, estimate_ratio, measure_churn


def draw(seed: int, size: int):
    random = np.random.default_rng(seed)
    first, second = random.integers(0, 8, (2, size)) / 8  # many ties, many at 1/2
    labels = random.choice([0.0, 1.0, math.nan], size)
    return first, second, labels, random.random(size), random.integers(-3, 3, size)


@given(st.integers(0, 2**32), st.integers(1, 120), st.booleans())
def test_measures_equal_the_formulas(seed, size, has_weights):
    """The slow twin goes sample by sample and group by group."""
    first, second, labels, weights, groups = draw(seed, size)
    weights = weights if has_weights else np.ones(size)
    measured = measure_churn(
        first, second, labels, weights=weights if has_weights else None, groups=groups
    )
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    total = sum(weights)
    gap = sum(w * abs(p - q) for w, (p, q) in zip(weights, pairs, strict=True))
    middle = sum(w * (p + q) / 2 for w, (p, q) in zip(weights, pairs, strict=True))
    flips = sum(w * ((p > 0.5) != (q > 0.5)) for w, (p, q) in zip(weights, pairs, strict=True))
    expected = {"churn": gap / total, "flips": flips / total}
    expected["relative churn"] = gap / middle if middle else math.nan
    overlaps = []
    for group in set(groups.tolist()):
        members = [i for i in range(size) if groups[i] == group]
        if len(members) > TOP:
            tops = [
                set(sorted(members, key=lambda i, column=column: (-column[i], i))[:TOP])
                for column in (first, second)
            ]
            overlaps.append(len(tops[0] & tops[1]) / len(tops[0] | tops[1]))
    expected[f"jaccard@{TOP}"] = np.mean(overlaps) if overlaps else math.nan
    known = [i for i in range(size) if not math.isnan(labels[i])]
    losses = []
    for column in (first, second):
        sums = 0.0
        for i in known:
            p = min(max(column[i], 1e-7), 1 - 1e-7)
            sums -= weights[i] * math.log(p if labels[i] else 1 - p)
        losses.append(sums / sum(weights[known]) if known else math.nan)
    expected |= {"log loss 1": losses[0], "log loss 2": losses[1]}
    expected["log loss 2 - 1"] = losses[1] - losses[0]
    assert set(measured) == set(expected)
    for name, value in expected.items():
        assert measured[name].value == pytest.approx(value, nan_ok=True), name


def test_the_standard_error_of_a_mean_of_equal_blocks_is_the_usual_one():
    blocks = np.repeat(np.arange(NUM_BLOCKS), 5)
    values = np.random.default_rng(0).random(len(blocks))
    means = values.reshape(NUM_BLOCKS, 5).mean(1)
    estimate = estimate_ratio(values, np.ones(len(values)), blocks)
    assert estimate.value == pytest.approx(means.mean())
    assert estimate.standard_error == pytest.approx(means.std(ddof=1) / NUM_BLOCKS**0.5)


@pytest.mark.parametrize("is_grouped", [False, True])
def test_intervals_cover_the_true_churn(is_grouped):
    """Groups have a churn of their own: blocks of samples instead of groups would cover less than 0.8 of the time."""
    random = np.random.default_rng(1)
    hits = []
    for _ in range(200):
        groups = random.integers(0, 300, 3000)
        spread = random.exponential(0.05, 300)[groups] if is_grouped else np.full(3000, 0.05)
        gap = np.minimum(spread * random.random(3000) * 2, 0.5)
        measured = measure_churn(
            np.full(3000, 0.5),
            0.5 - gap,
            np.zeros(3000),
            groups=groups if is_grouped else None,
        )["churn"]
        hits.append(abs(measured.value - 0.05) < 2 * measured.standard_error)
    assert 0.9 <= np.mean(hits) <= 0.99


def test_without_samples_or_blocks_there_is_no_figure():
    empty = np.empty(0)
    assert all(math.isnan(x) for e in measure_churn(empty, empty, empty).values() for x in e)
    alone = estimate_ratio(np.array([1.0]), np.array([2.0]), assign_blocks(np.array([0])))
    assert alone == Estimate(0.5, pytest.approx(math.nan, nan_ok=True))
    with pytest.raises(DataError, match="as many of each"):
        measure_churn(np.zeros(3), np.zeros(3), np.zeros(2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of other seeds on one file, one on another file, and one of a retrieval model."""
    folder = tmp_path_factory.mktemp("churn")
    random = np.random.default_rng(0)
    for name in ("clicks", "others"):
        user, item = random.integers(0, 20, (2, 600))
        label = (random.random(600) < (user + item) / 40).astype(int)
        rows = [f"{y},u{u},i{i},{i % 3 + 1}" for y, u, i in zip(label, user, item, strict=True)]
        text = "\n".join(["label,user,item,rating", *rows])
        (folder / f"{name}.csv").write_text(text)
    interactions = ["--data", "interactions", "--path", str(folder / "clicks.csv")]
    for name, arguments in (
        ("a", ["--data", "csv", "--path", str(folder / "clicks.csv")]),
        ("b", ["--data", "csv", "--path", str(folder / "clicks.csv"), "--set", "train.seed=1"]),
        ("other", ["--data", "csv", "--path", str(folder / "others.csv")]),
        ("less", ["--data", "csv", "--path", str(folder / "clicks.csv")]),
        ("retrieval", [*interactions, "--set", "train.max_steps=2"]),
    ):
        if name != "retrieval":
            share = 0.2 if name == "less" else 0.3
            arguments += ["--set", f"data.options.test_fraction={share}"]
        assert app.run_command(["train", *arguments, "--run", str(folder / name)]) == 0
    return folder


def test_two_runs_are_compared_and_a_run_agrees_with_itself(runs, colonnade):
    a, b = runs / "a", runs / "b"
    status, output, _ = colonnade("churn", a, b, "--group", "user")
    assert status == 0 and "180 samples" in output
    assert f"jaccard@{TOP}" in output and "log loss 2 - 1" in output
    same = [
        line.split("│")[1:3] for line in colonnade("churn", a, a)[1].splitlines() if "│" in line
    ]
    values = {name.strip(): value.strip() for name, value in same}
    assert {values[n] for n in ("churn", "relative churn", "flips", "log loss 2 - 1")} == {
        "0.00000"
    }
    assert values["log loss 1"] == values["log loss 2"] != "-"
    status, output, _ = colonnade("compare", a, b, "--churn")
    assert status == 0 and "settings that differ" in output and "relative churn" in output


@pytest.mark.parametrize(
    ("first", "second", "options", "message"),
    [
        ("a", "other", [], "got runs with other samples: data.path is '"),
        (
            "a",
            "less",
            [],
            "got runs with other samples: data.options.test_fraction is 0.3 and 0.2, wanted",
        ),
        ("a", "b", ["--group", "label"], "wanted a column with one id a sample: user, item"),
        ("a", "b", ["--part", "final"], "unknown part 'final'"),
        ("a", "retrieval", [], "TwoTower gives no logits"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs, colonnade, first, second, options, message):
    status, _, text = colonnade("churn", runs / first, runs / second, *options)
    assert status == 2 and message in text


def test_samples_of_one_class_are_told_apart_by_their_settings():
    """Labels that are all 0 are equal, whatever the samples; a separate file alone says which these are."""
    data = DataConfig(name="csv", path="a.csv", options={"test_fraction": 0.3, "threads": 2})
    other = DataConfig(name="csv", path="b.csv", options={"test_fraction": 0.3, "threads": 1})
    zeros = np.zeros((5, 1))
    one, two = (
        Predictions(1, list_sample_settings(d, "test"), ("label",), zeros, zeros, None, None)
        for d in (data, other)
    )
    with pytest.raises(DataError, match=r"data.path is 'a.csv' and 'b.csv', wanted the same"):
        list(compare_predictions(one, two))
    with pytest.raises(DataError, match=r"other samples \(5 and 5, or other labels"):
        list(compare_predictions(one, replace(one, labels=zeros + 1)))
    files = [
        list_sample_settings(DataConfig(name="csv", path=path, options={"test": "t.csv"}), "test")
        for path in ("a.csv", "b.csv")
    ]
    assert files[0] == files[1] == {"data.options.test": "t.csv"}
    shares = [{"test_fraction": 0.3, "validation_fraction": share} for share in (0.0, 0.1)]
    parts = [
        [list_sample_settings(DataConfig(name="csv", options=o), p) for o in shares]
        for p in ("test", "validation")
    ]
    assert parts[0][0] == parts[0][1] and parts[1][0] != parts[1][1]
