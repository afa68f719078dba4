"""Arms of `bench quality` that a configuration says: towers on a stream made for them, and models of MovieLens-1M.

The stream has 26 fields in eight groups that interact within and with no others. To tell losses of 0.0005 apart, the
flat model must come close to the ceiling and its seeds close to each other. So

* what is planted can be learned: two numbers of each id, whose products within a group are half of the logit's
  variance, its own effect, and numbers; three of 16 columns hold an id's, so a ratio of 8 (two columns) has to lose;
* fields have 12 to 96 ids of skewed popularity, and the logit's standard deviation is 2 (ceiling 0.871);
* rows are trained with Adagrad by element, in batches of 1,024, and rates fall evenly to zero.

Products of small vectors are learned slowly at first, by towers through a layer more, so what they lose depends on how
long and how fast all is trained: the number of samples is part of a figure. On MovieLens-1M rates stay and the best
epoch by validation samples is scored, because rates that fall to zero left the flat model overfitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

from colonnade import Ids, fit
from colonnade.cli.feature_sample import FeatureSample, measure_affinity
from colonnade.comm.mesh import Mesh
from colonnade.config.run import RunConfig, build_config, override_settings
from colonnade.data import Splits, open_source
from colonnade.data.batches import read_rank_batches
from colonnade.data.contract import Column, Source
from colonnade.data.tensors import TensorSource
from colonnade.models.build import build_model
from colonnade.plan.towers.affinity import AffinityKind
from colonnade.plan.towers.partition import build_tower_map
from colonnade.run.defaults import get_preset
from colonnade.topology.towers import Partition, build_round_robin_partition
from colonnade.train.metrics import auc
from colonnade.train.objective import Probability
from workers.quality_case import Run

BLOCKS, LEAST = 50, 200
"""Blocks of test samples, where each has as many samples as that; fewer of few samples."""
NAMES = tuple(f"C{f + 1}" for f in range(26))
GROUPS = tuple(NAMES[26 * g // 8 : 26 * (g + 1) // 8] for g in range(8))
"""Neighbours, so that striped towers have some of each."""
STREAM: dict[str, Any] = {
    "label_model": "pairs", "groups": GROUPS, "cardinalities": tuple((12, 24, 48, 96)[f % 4] for f in range(26)),
    "exponent": 0.6, "signal": 2.0,
}  # fmt: skip
FALLING = {"name": "linear"}
DIM, TEST_SAMPLES = 16, 1_000_000
STREAM_SETTINGS: dict[str, Any] = {
    # Rows' rate: flat is as good at 0.2, where towers learn later (docs/decisions/measuring.md).
    "model.dim": DIM, "model.top": [64, 32], "embedding.optimizer": "adagrad", "embedding.lr": 0.4,
    "embedding.schedule": FALLING, "dense.lr": 3e-3, "dense.schedule": FALLING, "train.batch_size": 1024,
    "train.epochs": 1,
}  # fmt: skip
MODEL_SETTINGS: dict[str, dict[str, Any]] = {
    "dlrm": {"model.bottom": [64, 32]},
    "dcnv2": {"model.cross_layers": 2, "model.cross_rank": 32},
}
LEARNED_SAMPLES = 2_000_000
"""Samples of a flat model's run from which the stream's learned towers are made."""
PROBED = 8
"""Number of batches that measure the affinity of fields."""
NATURAL = {
    2: [["user", "sex", "age", "occupation", "zip3"], ["movie", "year", "genres"]],
    4: [["user"], ["sex", "age", "occupation", "zip3"], ["movie"], ["year", "genres"]],
}
"""Fields of MovieLens-1M, put together by what they tell of: people or films."""
IDS_EPOCHS = 8
HISTORY_PART = 0.3
"""Part of the training samples whose films make the histories."""

Values = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Towers:
    """Tower modules: number and kind of the towers; ratio: dim over the columns of a field that a module lets out."""

    number: int
    kind: str
    ratio: int = 2


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


def block_ceiling(source: Source) -> float:
    """Return the mean AUC of the true probabilities, which synthetic samples carry."""
    size = block_size(source)
    return fmean(
        auc(batch.key, batch.label)
        for batch in source.batches(size)
        if batch.size == size and batch.key is not None and batch.label is not None
    )


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
    """Open the stream with planted groups; the same whatever the seed of rows and weights."""
    num_test = min(TEST_SAMPLES, samples // 4)
    return open_source("synthetic", num_train=samples, num_test=num_test, **STREAM)


def stream_config(model: str, seed: int, **settings: Any) -> RunConfig:
    return override_settings(
        build_config({}),
        {"model.name": model, "train.seed": seed, **STREAM_SETTINGS, **MODEL_SETTINGS.get(model, {}), **settings},
    )  # fmt: skip


def movielens_config(model: str, seed: int, **settings: Any) -> RunConfig:
    base = get_preset("movielens", "dlrm")
    fixed = {"model.name": model, "train.seed": seed, "train.patience": 0}
    return override_settings(base, {**fixed, **settings})


@cache
def train_flat(model: str, seed: int, samples: int) -> tuple[list[float], nn.Module, Splits]:
    """Train the flat model on the stream: block AUCs, the model, and its data."""
    data = open_stream(samples)
    return *train_run(stream_config(model, seed), data), data


def measure_fields(
    model: nn.Module, data: Splits, kind: AffinityKind = "interactions"
) -> FeatureSample:
    """Measure the affinities of a flat model's fields."""
    return measure_affinity(model, model.embeddings, data.train, 1024, PROBED, kind=kind)


def measure_purity(model: str, kind: AffinityKind, run: Run) -> Values:
    """Make as many towers as there are planted groups from a flat model, and count the fields in the tower of their
    group."""
    aucs, network, data = train_flat(model, run.seed, run.samples)
    sample = measure_fields(network, data, kind)
    towers = build_tower_map(
        sample.affinity, sample.loads, len(GROUPS), silent=sample.silent, halves=sample.halves
    )
    assert towers.agreement is not None
    largest = (max(len(set(tower) & set(g)) for g in GROUPS) for tower in towers.partition.towers)
    return {"AUC": aucs, "purity": [sum(largest) / len(NAMES)], "agreement": [towers.agreement]}


@cache
def train_movielens_flat(seed: int, epochs: int) -> tuple[list[float], FeatureSample]:
    """Train the flat model once for itself and for its seed's learned towers: block AUCs, and affinity of fields."""
    config = movielens_config("dlrm", seed, **{"train.epochs": epochs})
    data = open_source("movielens", seed=seed)
    aucs, model = train_run(config, data)
    return aucs, measure_fields(model, data)


def build_towers(
    towers: Towers, natural: list[list[str]], probe: FeatureSample | None, seed: int
) -> Partition:  # fmt: skip
    """Build the partition of a kind. natural: towers of fields that belong together. probe: for learned towers."""
    if probe is not None:
        return build_tower_map(
            probe.affinity, probe.loads, towers.number, silent=probe.silent, seed=seed
        ).partition
    if towers.kind == "striped":
        return build_round_robin_partition(list(chain(*natural)), towers.number)
    return Partition(tuple(map(tuple, natural)))


def tower_settings(partition: Partition, ratio: int) -> dict[str, Any]:
    return {
        "model.towers": [list(tower) for tower in partition.towers],
        "model.tower_dim": max(1, DIM // ratio),
    }


def planted_groups(number: int) -> list[list[str]]:
    """Put the stream's groups together to `number` towers."""
    return [list(chain(*GROUPS[8 * t // number : 8 * (t + 1) // number])) for t in range(number)]


def share_of_pairs_together(partition: Partition) -> float:
    """Return the share of pairs of one planted group that are in one tower."""
    pairs = [pair for group in GROUPS for pair in combinations(group, 2)]
    return fmean(partition.tower_of(one) == partition.tower_of(other) for one, other in pairs)


def train_stream_towers(model: str, towers: Towers | None, run: Run) -> Values:
    """Train a model on the stream, flat or with towers."""
    data = open_stream(run.samples)
    assert data.test is not None
    if towers is None:
        return {
            "AUC": train_run(stream_config(model, run.seed), data)[0],
            "ceiling": [block_ceiling(data.test)],
        }
    probe = None
    if towers.kind == "learned":
        probe = measure_fields(*train_flat(model, run.seed, min(run.samples, LEARNED_SAMPLES))[1:])
    partition = build_towers(towers, planted_groups(towers.number), probe, run.seed)
    config = stream_config(model, run.seed, **tower_settings(partition, towers.ratio))
    return {
        "AUC": train_run(config, data)[0],
        "planted pairs together": [share_of_pairs_together(partition)],
    }


def train_movielens_towers(towers: Towers | None, run: Run) -> Values:
    """Train the preset's DLRM on MovieLens-1M, flat or with towers."""
    epochs = 1 if run.is_quick else 5
    if towers is None:
        return {"AUC": train_movielens_flat(run.seed, epochs)[0]}
    probe = train_movielens_flat(run.seed, epochs)[1] if towers.kind == "learned" else None
    partition = build_towers(towers, NATURAL[towers.number], probe, run.seed)
    settings = {"train.epochs": epochs, **tower_settings(partition, towers.ratio)}
    config = movielens_config("dlrm", run.seed, **settings)
    return {"AUC": train_run(config, open_source("movielens", seed=run.seed))[0]}


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
