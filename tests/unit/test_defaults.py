"""Settings that nobody gave: what follows from the number of samples, and how good it is beside logistic regression."""

from __future__ import annotations

import io
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.console import Console

from colonnade import Mesh
from colonnade.batch import Ids
from colonnade.checkpoint.header import list_checkpoints, resolve_step
from colonnade.config.run import RunConfig, override_settings
from colonnade.data import Splits, TensorSource, open_source, open_tensors
from colonnade.data.tabular.formats import FORMATS
from colonnade.data.tensors import TensorColumns
from colonnade.run.defaults import (
    BAG_POOLING,
    MODEL_PRESETS,
    PRESETS,
    choose_initial_accumulator,
    choose_open_settings,
    choose_training_settings,
    describe_settings,
    get_preset,
    open_data,
)
from colonnade.run.run import open_run
from colonnade.train.progress import describe_single_classes, describe_stuck_loss

QUICK = {"train.threads": 1}


def test_a_run_says_whose_metric_it_follows():
    config = override_settings(RunConfig(), {"train.monitor": "auc"})
    assert describe_settings(config, ["click"]).endswith("monitor auc")
    assert describe_settings(config, ["click", "buy"]).endswith("monitor auc of click")
    config = override_settings(config, {"train.monitor": "auc_buy"})
    assert describe_settings(config, ["click", "buy"]).endswith("monitor auc_buy")


@pytest.mark.parametrize(("model", "factor"), [("lr", 4), ("fm", 4), ("deepfm", 1), ("dcn", 1)])
def test_linear_models_have_longer_dense_steps(model, factor):
    data = Splits(open_tensors(ids={"user": torch.arange(9)}, label=torch.ones(9)))
    config = RunConfig.model_validate({"data": {"name": "csv"}, "model": {"name": model}})
    suggested = choose_training_settings(10_000)
    chosen = choose_open_settings(config, suggested, data)
    assert chosen["dense.lr"] == pytest.approx(factor * suggested.dense_lr, rel=1e-2)


@pytest.mark.parametrize(
    ("model", "num_samples", "top"),
    [("dlrm", 199_999, [32]), ("dcn", 900, [32]), ("dcnv2", 200_000, None), ("deepfm", 900, None)],
)
def test_few_samples_have_a_small_last_network(model, num_samples, top):
    data = Splits(open_tensors(ids={"user": torch.arange(9)}, label=torch.ones(9)))
    config = RunConfig.model_validate({"data": {"name": "csv"}, "model": {"name": model}})
    suggested = choose_training_settings(num_samples)
    chosen = choose_open_settings(config, suggested, data)
    assert chosen.get("model.top") == top
    assert chosen.get("model.keep_fields") == (True if model == "dlrm" else None)
    own = override_settings(config, {"model.top": [7]})
    assert "model.top" not in choose_open_settings(own, suggested, data)


@pytest.mark.parametrize(
    ("num_columns", "bag_size", "num_samples", "lr"),
    [(40, 0, 8000, 0.025), (3, 0, 8000, 0.25), (20, 0, 10**6, 0.05), (1, 9, 8000, 0.1), (40, 0, 1900, 0.05)],
)  # fmt: skip
def test_the_more_ids_a_sample_has_the_shorter_are_the_steps_of_rows(
    num_columns, bag_size, num_samples, lr
):
    ids = {f"c{i}": torch.arange(9) for i in range(num_columns)}
    ids |= {"bag": Ids(torch.arange(9 * bag_size), torch.arange(10) * bag_size)} if bag_size else {}
    data = Splits(open_tensors(ids=ids, label=torch.ones(9)))
    suggested = choose_training_settings(num_samples)
    config = get_preset("csv", "deepfm")
    assert choose_open_settings(config, suggested, data)["embedding.lr"] == lr
    for model, largest in (("dlrm", 0.05), ("dcnv2", 0.05), ("dcn", 0.025)):
        other = choose_open_settings(get_preset("csv", model), suggested, data)
        assert other["embedding.lr"] == min(lr, largest if num_samples >= 2000 else lr)
    for own in (0.01, 0.05):
        own_config = override_settings(config, {"embedding.lr": own})
        assert "embedding.lr" not in choose_open_settings(own_config, suggested, data)


@given(st.integers(1, 10**11))
def test_settings_follow_the_number_of_samples(num_samples):
    chosen, larger = (
        choose_training_settings(num_samples),
        choose_training_settings(num_samples * 2),
    )
    assert chosen.batch_size in [64 << n for n in range(7)]
    assert chosen.batch_size <= larger.batch_size and chosen.prior >= larger.prior
    assert chosen.dense_weight_decay > larger.dense_weight_decay
    assert 1 <= chosen.epochs <= 20
    assert (chosen.patience > 0) == (chosen.validation_fraction > 0) == (num_samples >= 2000)
    if 20_000 <= num_samples < 1_000_000:  # few enough to follow, many enough to learn from
        steps = num_samples / chosen.batch_size
        assert 160 <= steps <= 320
    if num_samples > 8_000_000:
        assert chosen.epochs == 1


def test_a_first_accumulator_does_not_depend_on_the_batch_size():
    """Gradients are of a batch's mean: the prior of an id is the same number of samples in any batch."""
    for size in (64, 4096):
        assert math.sqrt(choose_initial_accumulator(20, size)) * size == pytest.approx(20, rel=1e-3)


@pytest.mark.parametrize("num_samples", [900, 23_456, 240_000, 3_000_000])
def test_chosen_settings_are_written_as_people_write_them(num_samples):
    chosen = choose_training_settings(num_samples)
    for value in (chosen.dense_lr, chosen.dense_weight_decay):
        assert len(f"{value}".replace("0.", "").lstrip("0").partition("e")[0]) <= 4, value


def test_a_part_without_samples_validates_nothing():
    columns = {"ids": {"user": torch.arange(10)}, "label": torch.ones(10)}
    empty = {"ids": {"user": torch.arange(0)}, "label": torch.ones(0)}
    data = Splits(open_tensors(**columns), validation=open_tensors(**empty))
    config = RunConfig.model_validate({"data": {"name": "csv"}, "model": {"name": "deepfm"}})
    chosen = choose_open_settings(config, choose_training_settings(10_000), data)
    assert chosen["train.epochs"] <= 3 and "train.patience" not in chosen


def write_csv(path: Path, num_samples: int, seed: int = 0) -> Path:
    """Two categories of 20 values and a number, whose true probabilities have an AUC of 0.72."""
    random = np.random.RandomState(seed)
    weights = np.random.RandomState(1).standard_normal((2, 20)) * 0.55
    user, item = random.randint(0, 20, (2, num_samples))
    number = random.standard_normal(num_samples)
    logit = weights[0, user] + weights[1, item] + 0.5 * number
    label = random.random(num_samples) < 1 / (1 + np.exp(-logit))
    lines = [
        f"u{u},i{i},{x:.3f},{int(y)}" for u, i, x, y in zip(user, item, number, label, strict=True)
    ]
    path.write_text("user,item,number,label\n" + "\n".join(lines) + "\n")
    return path


def train(config: RunConfig, folder: Path | None, data: Splits | None = None):
    """Train and return the outcome and the printed text."""
    console = Console(width=200, record=True, quiet=False, file=io.StringIO())
    run = open_run(config, Mesh(), folder, console=console, data=data)
    try:
        return run.train(), console.export_text()
    finally:
        run.close()


def test_a_small_csv_is_learnt_without_a_setting(tmp_path):
    path, test = write_csv(tmp_path / "train.csv", 3000), write_csv(tmp_path / "test.csv", 3000, 2)
    config = override_settings(
        get_preset("csv"), {"data.path": str(path), "data.options.test": str(test), **QUICK}
    )
    outcome, printed = train(config, tmp_path / "run")
    assert outcome.metrics["test_auc"] >= 0.70
    assert "chosen for 3,000 training samples" in printed and "train.batch_size=64" in printed
    assert "dense.weight_decay=0.0001," in printed and "train.monitor=log_loss" in printed
    assert "model deepfm, dim 16; rows: " in printed and "; monitor log_loss" in printed
    assert "has not moved" not in printed
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["train"]["batch_size"] == 64 and recorded["train"]["monitor"] == "log_loss"
    assert recorded["data"]["options"]["validation_fraction"] == 0.1
    assert resolve_step(tmp_path / "run", None) == outcome.best_step


def test_a_run_that_learns_nothing_in_its_first_epoch_says_so(tmp_path):
    lines = write_csv(tmp_path / "train.csv", 2500).read_text().splitlines()
    labels = np.random.RandomState(3).randint(0, 2, len(lines))
    lines[1:] = [f"{line[:-1]}{y}" for line, y in zip(lines[1:], labels[1:], strict=True)]
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")
    config = override_settings(
        get_preset("csv"), {"data.path": str(tmp_path / "train.csv"), "train.epochs": 2, **QUICK}
    )
    _, printed = train(config, None)
    printed = " ".join(printed.split())
    assert printed.count("the loss has not moved: log loss on the validation part is 1.0") == 1
    assert (
        "predicting the mean label" in printed and "other learning rates (embedding.lr" in printed
    )


def test_metrics_that_one_class_does_not_have_are_explained_not_printed(tmp_path):
    path = write_csv(tmp_path / "train.csv", 300)
    lines = path.read_text().splitlines()
    lines[200:] = [f"{line[:-1]}1" for line in lines[200:]]
    path.write_text("\n".join(lines) + "\n")
    settings = {"data.path": str(path), "data.options.validation_fraction": 0.2, "train.epochs": 2}
    _, printed = train(override_settings(get_preset("csv"), settings | QUICK), None)
    assert "nan" not in printed and "epoch 2: validation log loss" in printed
    line = "the label is 1 in all 60 samples of the validation part: AUC and normalized entropy are not"
    assert " ".join(printed.split()).count(line) == 1
    rates = {"test_num_samples": 9.0, "test_positive_rate": 0.5, "test_num_samples_buy": 8.0}
    (line,) = describe_single_classes(
        rates | {"test_positive_rate_buy": 0.0, "my_positive_rate": 1.0}
    )
    assert line.startswith("the label buy is 0 in all 8 samples of the test part")


@pytest.mark.parametrize(
    ("metrics", "is_stuck"),
    [
        ({"validation_normalized_entropy": 1.0002, "validation_auc": 0.51}, True),
        ({"test_normalized_entropy": 1.3, "test_auc": 0.5}, True),
        ({"validation_normalized_entropy": 0.998, "validation_auc": 0.51}, False),
        ({"validation_normalized_entropy": 1.1, "validation_auc": 0.7}, False),
        ({"validation_normalized_entropy": math.nan}, False),
        ({"validation_recall@20": 0.1}, False),
        ({}, False),
    ],
)
def test_which_scores_are_those_of_no_model(metrics, is_stuck):
    assert any(describe_stuck_loss(metrics)) == is_stuck


@pytest.mark.parametrize(
    "model", ["dlrm", *(pytest.param(model, marks=pytest.mark.slow) for model in ("fm", "dcnv2"))]
)
def test_two_columns_of_ids_are_learnt_without_a_setting(model, tmp_path):
    """Dots of vectors near 0 tell a network nothing: DLRM over such a file had an AUC of 0.50."""
    rows = write_csv(tmp_path / "train.csv", 6000).read_text().splitlines()
    pairs = [",".join(np.array(row.split(","))[[0, 1, 3]]) for row in rows]
    (tmp_path / "train.csv").write_text("\n".join(pairs) + "\n")
    config = override_settings(
        get_preset("csv", model),
        {"data.path": str(tmp_path / "train.csv"), "train.epochs": 8, **QUICK},
    )
    outcome, _ = train(config, tmp_path / "run")
    assert outcome.metrics["validation_auc"] >= 0.62


def test_bags_of_files_are_pooled_by_default_and_a_recorded_run_keeps_its_mean(tmp_path):
    path = tmp_path / "train.libsvm"
    path.write_text("".join(f"{i % 2} {i % 7}:1 {7 + i % 5}:1\n" for i in range(300)))
    config = override_settings(
        get_preset("libsvm"), {"data.path": str(path), "train.max_steps": 2, **QUICK}
    )
    _, printed = train(config, tmp_path / "run")
    assert f"embedding.pooling={BAG_POOLING}" in printed
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["embedding"]["pooling"] == BAG_POOLING
    # A run of before pooling was a setting.
    train(override_settings(config, {"embedding.pooling": "mean"}), tmp_path / "before")
    recorded_file = tmp_path / "before" / "config.yaml"
    recorded_file.write_text(recorded_file.read_text().replace("  pooling: mean\n", ""))
    assert "pooling" not in recorded_file.read_text()
    opened, _, _ = open_data(config, tmp_path / "before")
    assert opened.embedding.pooling is None
    no_bag = override_settings(
        get_preset("csv"), {"data.path": str(write_csv(tmp_path / "a.csv", 300))}
    )
    assert open_data(no_bag, None)[0].embedding.pooling is None


def test_a_run_keeps_what_was_chosen_for_it_when_its_data_change(tmp_path):
    path = write_csv(tmp_path / "train.csv", 2500)
    config = override_settings(
        get_preset("csv"), {"data.path": str(path), "train.max_steps": 3, **QUICK}
    )
    train(config, tmp_path / "run")
    write_csv(path, 1000)  # fewer: nothing would be held out
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    more = {"train.max_steps": 5, "data.options.schema": recorded["data"]["options"]["schema"]}
    _, printed = train(override_settings(config, more), tmp_path / "run")
    assert "chosen" not in printed and list_checkpoints(tmp_path / "run")[-1] == 5


@pytest.mark.parametrize(
    "inputs", [
        {"train.batch_size": 100}, {"train.epochs": 2}, {"train.patience": 0}, {"train.patience": 1},
        {"train.monitor": "auc"}, {"dense.lr": 0.5}, {"dense.weight_decay": 0.0},
        {"embedding.initial_accumulator": 0.0},
        {"data.options.validation_fraction": 0.3}, {"data.options.shuffle_window": 0},
    ],
)  # fmt: skip
def test_what_a_user_says_wins(tmp_path, inputs):
    path = write_csv(tmp_path / "train.csv", 2500)
    config = override_settings(get_preset("csv"), {"data.path": str(path), **inputs})
    opened, data, _ = open_data(config, None)
    values = opened.model_dump()
    for name, value in inputs.items():
        place = values
        for part in name.split(".")[:-1]:
            place = place[part]
        assert place[name.split(".")[-1]] == value
    assert data.validation is not None


def test_tiny_data_are_trained_on_whole_and_the_run_says_that_it_is_short(tmp_path):
    path = write_csv(tmp_path / "train.csv", 300)
    config = override_settings(get_preset("csv"), {"data.path": str(path), **QUICK})
    outcome, printed = train(config, tmp_path / "run")
    assert outcome.best_step is None and "validation_fraction" not in printed
    assert f"at most {outcome.steps} steps: below 500" in " ".join(printed.split())


def test_every_preset_stops_early_where_a_part_validates():
    for data, config in PRESETS.items():
        if (
            data == "synthetic" or data == "criteo" or data in FORMATS
        ):  # no such part; chosen by size
            continue
        for model in (None, *MODEL_PRESETS.get(data, {})):
            assert get_preset(data, model).train.patience, (data, model)
        assert config.train.epochs is not None


# ---- beside logistic regression: run in pieces, `pytest -m slow tests/unit/test_defaults.py -k criteo10k-0.1`


def columns_of(name: str, folder: Path) -> tuple[object, TensorColumns]:
    """All samples of a data set."""
    if name == "criteo10k":
        whole = open_source("criteo", folder / name, test_fraction=0.0).train
        columns = next(whole.batches(whole.num_samples))
    else:
        whole = open_source("movielens", folder / name).train
        assert isinstance(whole, TensorSource)
        columns = whole.columns
    return whole.schema, TensorColumns(dense=columns.dense, ids=columns.ids, label=columns.label)


def encode(columns: TensorColumns, schema, rows: NDArray, vocabularies: dict):
    """One-hot categories (bags: shares) and numbers as they are; ids that training had not are left out."""
    from scipy import sparse

    batch, blocks = columns.gather_rows(torch.from_numpy(rows)), []
    for column in schema.categorical:
        ids = batch.ids[column.name]
        counts = np.ones(batch.size, int) if ids.offsets is None else ids.offsets.diff().numpy()
        sample, value = np.repeat(np.arange(batch.size), counts), ids.values.numpy()
        share = np.repeat(1 / np.maximum(counts, 1), counts)
        known = vocabularies.setdefault(column.name, np.unique(value))
        place = np.searchsorted(known, value).clip(max=len(known) - 1)
        right = known[place] == value
        blocks.append(
            sparse.csr_matrix(
                (share[right], (sample[right], place[right])), (batch.size, len(known))
            )
        )
    return batch.dense.numpy(), sparse.hstack(blocks).tocsr(), batch.label[:, 0].numpy()


def logistic_regression(schema, columns: TensorColumns, train_rows: NDArray, test_rows: NDArray):
    """Return (AUC, log loss) of scikit-learn's logistic regression, with its C by cross validation."""
    from scipy import sparse
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.metrics import log_loss, roc_auc_score
    from sklearn.preprocessing import StandardScaler

    vocabularies: dict = {}
    numbers, x, y = encode(columns, schema, train_rows, vocabularies)
    test_numbers, test_x, test_y = encode(columns, schema, test_rows, vocabularies)
    if numbers.shape[1]:
        scaler = StandardScaler().fit(numbers)
        x = sparse.hstack([scaler.transform(numbers), x]).tocsr()
        test_x = sparse.hstack([scaler.transform(test_numbers), test_x]).tocsr()
    is_small = len(y) < 20_000
    cs = np.logspace(-4, 2, 13) if is_small else np.logspace(-1, 0.5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LogisticRegressionCV(
            Cs=cs, cv=5 if is_small else 3, scoring="neg_log_loss", max_iter=500
        )
        scores = model.fit(x, y).predict_proba(test_x)[:, 1]
    return roc_auc_score(test_y, scores), log_loss(test_y, scores)


def compare(name: str, share: float, split: int, folder: Path) -> tuple[float, float]:
    """Return (AUC, log loss) of the default, less those of logistic regression, on the same samples."""
    schema, columns = columns_of(name, folder)
    order = np.random.RandomState(1000 + split).permutation(columns.num_samples)
    num_train = int(0.8 * len(order))
    rows, test_rows = order[: int(num_train * share)], order[num_train:][:20_000]
    wanted = choose_training_settings(len(rows))
    num_fit = len(rows) - round(len(rows) * wanted.validation_fraction)

    def part(rows: NDArray, shuffle_key: int | None = None) -> TensorSource | None:
        if not len(rows):
            return None
        return TensorSource(schema, columns, rows=torch.from_numpy(rows), shuffle_key=shuffle_key)

    data = Splits(part(rows[:num_fit], 0), part(rows[num_fit:]), part(test_rows))
    config = get_preset("csv")
    config = override_settings(
        config, choose_open_settings(config, wanted, data) | QUICK | {"train.seed": split}
    )
    outcome, _ = train(config, None, data)
    auc, log_loss = logistic_regression(schema, columns, rows, test_rows)
    return outcome.metrics["test_auc"] - auc, outcome.metrics["test_log_loss"] - log_loss


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "share", "num_splits"),
    [
        ("criteo10k", 0.01, 10), ("criteo10k", 0.1, 10), ("criteo10k", 1.0, 10),
        ("ml-1m", 0.01, 10), ("ml-1m", 0.1, 10), ("ml-1m", 1.0, 2),
    ],
)  # fmt: skip
def test_the_default_is_not_below_logistic_regression(name, share, num_splits, shared_data):
    pytest.importorskip("sklearn")
    result = np.array([compare(name, share, split, shared_data) for split in range(num_splits)])
    auc, log_loss = result.mean(0)
    print(f"{name} {share:.0%}: AUC {auc:+.4f}, log loss {log_loss:+.4f} over {num_splits} splits")
    assert auc >= -0.005 and log_loss <= 0.01, result
