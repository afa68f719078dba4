"""Arms of `bench quality` that a configuration says: fields grouped by affinity, models with towers, and models of
MovieLens-1M.

Suite affinity has a stream of 26 fields in eight groups, and pairs of a group interact: an id has two numbers, whose
products within a group are half of the logit's variance, and an effect of its own. What is planted can be learned:
fields have 12 to 96 ids of skewed popularity, and the logit's standard deviation is 2 (ceiling 0.871).

Suite towers has a stream of 24 fields in four groups of two sides. An id has five numbers and an effect of its own. The
products of a side's sums with those of the other side of its group are half of the logit's variance, effects the other
half; its standard deviation is 3 (ceiling 0.918). Rows have 16 columns: with 8, flat models find the products late. So

* a tower that has a whole group lets ten sums and an effect out, of 24 columns at a ratio of 4;
* a tower with fields of all groups has to let out five numbers of each field, 30, where it has 24 at a ratio of 4. At 2
  it has 48, but two vectors of a tower, for DLRM's products.

What towers lose depends on how long all is trained, so the number of samples is part of a figure. On MovieLens-1M rates
stay and the best epoch by validation samples is scored, because rates that fall to zero left the flat model overfitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from colonnade import Ids, fit
from colonnade.cli.feature_sample import FeatureSample, measure_affinity
from colonnade.comm.mesh import Mesh
from colonnade.config.run import RunConfig, build_config, override_settings
from colonnade.data import Splits, open_source
from colonnade.data.batches import read_rank_batches
from colonnade.data.contract import Column, Source
from colonnade.data.tensors import TensorSource, open_tensors
from colonnade.models.build import build_model
from colonnade.plan.towers.affinity import AffinityKind
from colonnade.plan.towers.partition import build_tower_map
from colonnade.run.defaults import get_preset
from colonnade.topology.towers import Partition, build_round_robin_partition
from colonnade.train.metrics import auc
from colonnade.train.objective import Probability
from workers.quality_case import TOWER_SETTINGS, Run

BLOCKS, LEAST = 50, 200
"""Blocks of test samples, where each has as many samples as that; fewer of few samples."""
NAMES = tuple(f"C{f + 1}" for f in range(26))
GROUPS = tuple(NAMES[26 * g // 8 : 26 * (g + 1) // 8] for g in range(8))
"""Neighbours, so that striped towers have some of each."""
STREAM: dict[str, Any] = {
    "label_model": "pairs", "groups": GROUPS, "cardinalities": tuple((12, 24, 48, 96)[f % 4] for f in range(26)),
    "exponent": 0.6, "signal": 2.0,
}  # fmt: skip
SIDED = tuple(NAMES[6 * g : 6 * g + 6] for g in range(4))
"""Groups of the stream of suite towers; the first three fields are one side."""
NUM_FACTORS, NUM_IDS = 5, 8
"""Numbers of an id, and ids of a field."""
FALLING = {"name": "linear"}
TEST_SAMPLES = 1_000_000
STREAM_SETTINGS: dict[str, Any] = {
    "model.dim": 16, "model.top": [64, 32], "embedding.optimizer": "adagrad", "embedding.lr": 0.4,
    "embedding.schedule": FALLING, "dense.lr": 3e-3, "dense.schedule": FALLING, "train.batch_size": 1024,
    "train.epochs": 1,
}  # fmt: skip
MODEL_SETTINGS: dict[str, dict[str, Any]] = {
    "dlrm": {"model.bottom": [64, 32], "model.keep_fields": False},
    "dcnv2": {"model.cross_layers": 2, "model.cross_rank": 32},
}
SIDED_SETTINGS = {"model.keep_fields": None, "embedding.init_scale": 1.0, "dense.lr": 1e-2}
AFFINITY, TOWERS, MOVIELENS = "affinity", "towers", "ml-1m"
"""Data: the streams of two suites, and MovieLens-1M."""
MOVIELENS_SETTINGS: dict[str, dict[str, Any]] = {
    "dlrm": {},
    "dcnv2": {"model.keep_fields": None, **MODEL_SETTINGS["dcnv2"]},
}
PROBED = 8
"""Number of batches that measure the affinity of fields."""
NUM_TOWERS = 4
IDS_EPOCHS = 8
HISTORY_PART = 0.3
"""Part of the training samples whose films make the histories."""

Values = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Towers:
    """Tower modules: kind of the towers, "learned" or "striped", and `model.tower_ratio`."""

    kind: str
    ratio: int


class BlockScores(Probability):
    """Objective that remembers the AUC of each block of test samples, of every evaluation, by its test AUC."""

    def __init__(self, test: Source) -> None:
        self.test = test
        self.by_auc: dict[float, list[float]] = {}

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        result = super().evaluate(model, source, batch_size, mesh)
        if source is self.test:
            self.by_auc[result["auc"]] = block_aucs(model, source, mesh)
        return result


@torch.no_grad()
def block_aucs(model: nn.Module, source: Source, mesh: Mesh) -> list[float]:
    """Return AUC by block, to six digits; the few samples behind the last one are left out. The model has one task and
    is in one process; its training flag is put back."""
    was_training, results = model.training, []
    model.eval()
    size = block_size(source)
    for batch in read_rank_batches(source, size, mesh, channel="evaluate"):
        if batch.size == size:
            assert batch.label is not None
            results.append(round(auc(model(batch).double(), batch.label), 6))
    model.train(was_training)
    return results


def block_size(source: Source) -> int:
    """Return the block size of a source that knows its number of samples."""
    assert source.num_samples
    return source.num_samples // max(1, min(BLOCKS, source.num_samples // LEAST))


def train_run(config: RunConfig, data: Splits) -> tuple[list[float], nn.Module]:
    """Train as the command line does. Return the AUC of each block of test samples after the best epoch, and the model.

    Raises KeyboardInterrupt if a signal ended training early: its model says nothing of the whole run.
    """
    assert data.test is not None
    model, objective = build_model(data.train.schema, config), BlockScores(data.test)
    config = override_settings(config, {"train.test_at": "evaluations", "train.threads": 1})
    done = fit(model, data, config=config, objective=objective, mesh=Mesh(), quiet=True)
    if done.outcome.stopped:
        raise KeyboardInterrupt
    return objective.by_auc[done.metrics["test_auc"]], model


@cache
def open_stream(samples: int) -> Splits:
    """Open the stream of suite affinity; the same whatever the seed of rows and weights."""
    num_test = min(TEST_SAMPLES, samples // 4)
    return open_source("synthetic", num_train=samples, num_test=num_test, **STREAM)


@cache
def open_sided(samples: int, seed: int = 0) -> tuple[Splits, float]:
    """Open the stream of suite towers; return the AUC of its test samples' true probabilities, too."""
    random = np.random.default_rng(seed)
    size = samples + min(TEST_SAMPLES, samples // 4)
    sums = np.zeros((2, len(SIDED), NUM_FACTORS, size), np.float32)
    effects, ids = np.zeros(size, np.float32), {}
    for group, names in enumerate(SIDED):
        for number, name in enumerate(names):
            ids[name] = (random.random(size) ** 1.2 * NUM_IDS).astype(np.int64)
            factors = random.standard_normal((NUM_FACTORS, NUM_IDS), np.float32)[:, ids[name]]
            sums[number // 3, group] += standardize(factors)
            effects += standardize(random.standard_normal(NUM_IDS, np.float32)[ids[name]])
    logit = standardize((sums[0] * sums[1]).sum((0, 1))) + standardize(effects)
    probability = 1 / (1 + np.exp(-3 * standardize(logit)))
    label = (random.random(size) < probability).astype(np.float32)
    source = open_tensors(ids, cardinalities=dict.fromkeys(ids, NUM_IDS), label=label)
    train, test = torch.arange(size).split([samples, size - samples])
    ceiling = auc(torch.from_numpy(probability)[test], torch.from_numpy(label)[test, None])
    return Splits(replace(source, rows=train), test=replace(source, rows=test)), ceiling


def standardize(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return values of mean 0 and deviation 1 along the last axis."""
    return (values - values.mean(-1, keepdims=True)) / values.std(-1, keepdims=True)


def stream_config(model: str, seed: int, **settings: Any) -> RunConfig:
    return override_settings(
        build_config({}),
        {"model.name": model, "train.seed": seed, **STREAM_SETTINGS, **MODEL_SETTINGS.get(model, {}), **settings},
    )  # fmt: skip


def movielens_config(model: str, seed: int, **settings: Any) -> RunConfig:
    base = get_preset("movielens", "dlrm")
    fixed = {"model.name": model, "train.seed": seed, "train.patience": 0}
    return override_settings(base, {**fixed, **settings})


def open_case(model: str, data: str, run: Run) -> tuple[RunConfig, Splits]:
    """Return a flat model's configuration and its data: of suite affinity, of suite towers, or MovieLens-1M. A pilot
    has half of the samples, of another stream."""
    if data == MOVIELENS:
        settings = {"train.epochs": 1 if run.is_quick else 5, **MOVIELENS_SETTINGS[model]}
        config = movielens_config(model, run.seed, **settings)
        return config, open_source("movielens", seed=run.seed)
    if data == AFFINITY:
        return stream_config(model, run.seed), open_stream(run.samples)
    config = stream_config(model, run.seed, **{**SIDED_SETTINGS, "embedding.lr": run.lr})
    return config, open_sided(run.samples // (1 + run.is_pilot), int(run.is_pilot))[0]


@cache
def train_flat(model: str, data: str, run: Run) -> tuple[list[float], nn.Module, Splits]:
    """Train the flat model once for itself and for its seed's learned towers: block AUCs, the model, and its data."""
    config, splits = open_case(model, data, run)
    return *train_run(config, splits), splits


def measure_fields(
    model: nn.Module, data: Splits, kind: AffinityKind = "interactions"
) -> FeatureSample:
    """Measure the affinities of a flat model's fields."""
    return measure_affinity(model, model.embeddings, data.train, 1024, PROBED, kind=kind)


def measure_purity(model: str, kind: AffinityKind, run: Run) -> Values:
    """Make as many towers as there are planted groups from a flat model, and count the fields in the tower of their
    group."""
    aucs, network, data = train_flat(model, AFFINITY, run)
    sample = measure_fields(network, data, kind)
    towers = build_tower_map(
        sample.affinity, sample.loads, len(GROUPS), silent=sample.silent, halves=sample.halves
    )
    assert towers.agreement is not None
    largest = (max(len(set(tower) & set(g)) for g in GROUPS) for tower in towers.partition.towers)
    return {"AUC": aucs, "purity": [sum(largest) / len(NAMES)], "agreement": [towers.agreement]}


def build_towers(data: Splits, probe: FeatureSample | None, seed: int) -> Partition:
    """Build towers by the affinities of a probe; without one, deal the fields round."""
    if probe is None:
        names = [column.name for column in data.train.schema.categorical]
        return build_round_robin_partition(names, NUM_TOWERS)
    return build_tower_map(
        probe.affinity, probe.loads, NUM_TOWERS, silent=probe.silent, seed=seed
    ).partition


def share_of_pairs_together(partition: Partition) -> float:
    """Return the share of pairs of one planted group that are in one tower."""
    pairs = [pair for group in SIDED for pair in combinations(group, 2)]
    return fmean(partition.tower_of(one) == partition.tower_of(other) for one, other in pairs)


def train_towers(model: str, data: str, towers: Towers | None, run: Run) -> Values:
    """Train a model on the stream or on MovieLens-1M, flat or with towers."""
    config, splits = open_case(model, data, run)
    if towers is None:
        aucs = train_flat(model, data, run)[0]
        return {"AUC": aucs} | (
            {} if data == MOVIELENS else {"ceiling": [open_sided(run.samples)[1]]}
        )
    probe = None
    if towers.kind == "learned":
        probe = measure_fields(*train_flat(model, data, run)[1:])
    partition = build_towers(splits, probe, run.seed)
    settings = {f"model.{name}": value for name, value in TOWER_SETTINGS[model].items()}
    settings |= {
        "model.towers": [list(tower) for tower in partition.towers],
        "model.tower_ratio": towers.ratio,
    }
    aucs = train_run(override_settings(config, settings), splits)[0]
    together = (
        {}
        if data == MOVIELENS
        else {"planted pairs together": [share_of_pairs_together(partition)]}
    )
    return {"AUC": aucs, **together}


@cache
def open_films(seed: int, length: int) -> Splits:
    """Open MovieLens-1M with a bag `history` of at most `length` films that the user rated 4 or more; 0: without.

    They come from HISTORY_PART of the training samples, which are left out, so that no sample sees a label of its own.
    """
    data, random = open_source("movielens", seed=seed), np.random.RandomState(0)
    train = data.train
    assert isinstance(train, TensorSource) and train.rows is not None
    if not length:
        return data
    columns = train.columns
    is_history = torch.from_numpy(random.rand(len(train.rows)) < HISTORY_PART)
    user, films = columns.ids["user"].values, columns.ids["movie"].values
    source = train.rows[is_history]
    source = source[columns.label[source, 0] > 0]
    lists: dict[int, list[int]] = {}
    for reader, film in zip(user[source].tolist(), films[source].tolist(), strict=True):
        if len(own := lists.setdefault(reader, [])) < length:
            own.append(film)
    bags = [lists.get(reader, []) for reader in user.tolist()]
    offsets = torch.tensor([0, *map(len, bags)]).cumsum(0)
    history = Ids(torch.tensor([film for bag in bags for film in bag]), offsets)
    movie = next(column for column in train.schema.categorical if column.name == "movie")
    bag = Column("history", movie.cardinality, "bag", "movie")
    schema = replace(train.schema, categorical=(*train.schema.categorical, bag))
    extended = replace(columns, ids={**columns.ids, "history": history})

    def extend(part: Source | None, rows: torch.Tensor | None = None) -> TensorSource:
        assert isinstance(part, TensorSource)
        rows = part.rows if rows is None else rows
        return TensorSource(schema, extended, rows=rows, shuffle_key=part.shuffle_key)

    rows = train.rows[~is_history]
    return Splits(
        train=extend(train, rows), validation=extend(data.validation), test=extend(data.test)
    )


def train_ids(model: str, history: int, over: str, run: Run) -> Values:
    """Train a model whose pairs are of ids, or of fields: the pooled bags of genres and of films."""
    settings = {
        "model.over": over, "model.keep_fields": None, "train.patience": 1,
        "train.epochs": 1 if run.is_quick else IDS_EPOCHS,
    }  # fmt: skip
    if model == "fm":
        settings["model.top"] = None
    config = movielens_config(model, run.seed, **settings)
    return {"AUC": train_run(config, open_films(run.seed, history))[0]}
