"""Retrieval by default settings beside models of `implicit`: the same splits, masks and metrics.

A peer is fitted to the training part with each of a few settings. The best one by validation is fitted to training and
validation part and tested. Colonnade's models train on the training part alone, and stop by the validation part.

Legend: U users, I items, B queries.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import BenchError, Measured, say
from rich.console import Console
from torch import Tensor

from colonnade import Mesh
from colonnade.batch import Ids
from colonnade.config.run import override_settings
from colonnade.data import open_source
from colonnade.data.contract import Source, Splits
from colonnade.data.interactions.samples import concat_bags
from colonnade.data.interactions.splits import InteractionSplit
from colonnade.models.retriever import (
    CUTOFFS,
    POPULARITY,
    RetrievalObjective,
    mask_items,
    measure_ranking,
    top_items,
)
from colonnade.run.defaults import get_preset
from colonnade.run.run import open_run

Scores = Callable[[Tensor], np.ndarray]
"""Function from users (B,) to scores of all items (B, I)."""
POPULAR = "popularity"
FACTORS = 64


@dataclass(frozen=True)
class RankingCase:
    """Data, the models that are trained on it, and the metric that compares them. `path`: in the folder of data, or
    the name of a synthetic set."""

    name: str
    data: str
    path: str
    metric: str
    options: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ("two_tower", "sasrec")
    has_peers: bool = True


LAST_OF_99 = {"order": "file", "ranked_negatives": 99}
CASES = (
    RankingCase("ml-1m", "interactions", "ml-1m/ratings.parquet", "hit_rate@10", LAST_OF_99),
    RankingCase("gowalla", "gowalla", "gowalla", "recall@20", models=("two_tower",)),
    RankingCase("groups", "interactions", "groups", "recall@20", has_peers=False),
    RankingCase("walks", "interactions", "walks", "recall@20", {"order": "file"}, has_peers=False),
)


def make_interactions(name: str) -> pa.Table:
    """Draw 60,000 interactions of 3,000 users with 500 items. groups: each user likes a tenth of the items, and popular
    ones among them. walks: the next item is one of three that follow the last."""
    random = np.random.RandomState(0)
    users = np.repeat(np.arange(3000), 20)
    if name == "groups":
        shares = 1 / np.arange(1, 51)
        items = random.choice(50, len(users), p=shares / shares.sum()) * 10 + users % 10
    else:
        following = random.randint(0, 500, (500, 3))
        paths = [random.randint(0, 500, 3000)]
        for choice in random.randint(0, 3, (19, 3000)):
            paths.append(following[paths[-1], choice])
        items = np.stack(paths, axis=1).ravel()
    return pa.table({"user": users, "item": items})


def train_model(case: RankingCase, model: str, path: Path, seed: int) -> dict[str, float]:
    """Train by default settings; return the metrics of the test part by name."""
    settings: dict[str, Any] = {f"data.options.{name}": x for name, x in case.options.items()}
    settings |= {"data.path": str(path), "train.threads": 1, "train.seed": seed}
    config = override_settings(get_preset(case.data, model), settings)
    run = open_run(config, Mesh(), None, console=Console(quiet=True))
    try:
        metrics = run.train().metrics
    finally:
        run.close()
    return {name.removeprefix("test_"): x for name, x in metrics.items() if name[:5] == "test_"}


def measure_scores(source: Source, scores_of: Scores) -> dict[str, float]:
    """Measure a peer by the masks and metrics of `source`."""
    values = []
    for batch in source.batches(512):
        scores = torch.from_numpy(scores_of(batch.group)).float()
        if (candidates := batch.key.candidates) is None:
            scores = mask_items(scores, batch.key.excluded)
        else:
            rows, columns = candidates.samples, candidates.values
            ranked = torch.full_like(scores, -torch.inf)
            ranked[rows, columns] = scores[rows, columns]
            scores = ranked
        values.append(torch.stack(measure_ranking(top_items(scores, max(CUTOFFS)), batch.key)))
    means = torch.cat(values, dim=1).mean(1).tolist()
    return dict(zip(RetrievalObjective.metrics, means, strict=True))


def to_matrix(bags: Ids, num_items: int) -> Any:
    """Return bags of items (U,) as a sparse matrix (U, I) of ones."""
    from scipy.sparse import csr_matrix

    ones = np.ones(len(bags.values), np.float32)
    assert bags.offsets is not None
    shape = len(bags.counts), num_items
    return csr_matrix((ones, bags.values.numpy(), bags.offsets.numpy()), shape)


def list_peers(penalties: Sequence[float]) -> Iterator[tuple[str, str, Callable[[Any], Scores]]]:
    """Yield each peer with each of its settings: name, settings, and the function that fits it to a matrix (U, I).

    penalties: regularizations of least squares."""
    try:
        from implicit.als import AlternatingLeastSquares
        from implicit.bpr import BayesianPersonalizedRanking
        from implicit.nearest_neighbours import CosineRecommender
    except ModuleNotFoundError as error:
        raise BenchError(f"this bench needs {error.name}: pip install implicit") from None
    quiet = {"random_state": 0, "num_threads": 1, "use_gpu": False}

    def fit_factors(model: Any, matrix: Any) -> Scores:
        model.fit(matrix, show_progress=False)
        return lambda users: model.user_factors[users.numpy()] @ model.item_factors.T

    def fit_neighbours(size: int, matrix: Any) -> Scores:
        model = CosineRecommender(size, num_threads=1)
        model.fit(matrix, show_progress=False)
        return lambda users: (matrix[users.numpy()] @ model.similarity.T).toarray()

    for penalty, alpha in itertools.product(penalties, (1.0, 10.0, 40.0)):
        als = AlternatingLeastSquares(FACTORS, penalty, alpha, iterations=15, **quiet)
        yield "ALS", f"regularization {penalty}, alpha {alpha}", partial(fit_factors, als)
    for rate, penalty in itertools.product((0.05, 0.01), (0.01, 0.001)):
        bpr = BayesianPersonalizedRanking(FACTORS, rate, penalty, iterations=100, **quiet)
        yield "BPR", f"rate {rate}, regularization {penalty}", partial(fit_factors, bpr)
    for size in (20, 100, 500):
        yield "item-kNN", f"{size} neighbours", partial(fit_neighbours, size)


def measure_peers(
    splits: Splits, penalties: Sequence[float] = (0.01, 0.1)
) -> dict[str, dict[str, float]]:
    """Return the test metrics of each peer: with the settings that are best in validation, fitted to both parts."""
    split: InteractionSplit = splits.train.interactions  # type: ignore[attr-defined]
    assert splits.validation is not None and splits.test is not None
    train = to_matrix(split.train, split.num_items)
    history = to_matrix(concat_bags(split.train, split.validation), split.num_items)
    best: dict[str, tuple[float, Callable[[Any], Scores]]] = {}
    for name, settings, fit in list_peers(penalties):
        validation = measure_scores(splits.validation, fit(train))["ndcg@20"]
        say(f"{name}, {settings}: validation NDCG@20 {validation:.4f}")
        best[name] = max(best.get(name, (-1.0, fit)), (validation, fit), key=lambda pair: pair[0])
    return {name: measure_scores(splits.test, fit(history)) for name, (_, fit) in best.items()}


def measure_case(case: RankingCase, folder: Path, num_seeds: int) -> list[Measured]:
    """Train each model with each seed, and the peers once. Raises BenchError if the data are absent."""
    with tempfile.TemporaryDirectory() as own:
        path = folder / case.path
        if case.path in ("groups", "walks"):
            path = Path(own) / f"{case.path}.parquet"
            pq.write_table(make_interactions(case.path), path)
        if not path.exists():
            raise BenchError(f"{path} is absent; set COLONNADE_DATA to the folder that holds it")
        results: dict[str, list[float]] = {}
        for model in case.models:
            for seed in range(num_seeds):
                metrics = train_model(case, model, path, seed)
                results.setdefault(model, []).append(metrics[case.metric])
                results[POPULAR] = [metrics[f"{POPULARITY}{case.metric}"]]
                say(f"{case.name}, {model}, seed {seed}: {case.metric} {metrics[case.metric]:.4f}")
        if case.has_peers:
            splits = open_source(case.data, path, **case.options)
            for name, metrics in measure_peers(splits).items():
                results[name] = [metrics[case.metric]]
                say(f"{case.name}, {name}: {case.metric} {metrics[case.metric]:.4f}")
    return [Measured(case.name, system, case.metric, x) for system, x in results.items()]


def compute_ranking_ratios(measured: list[Measured]) -> dict[str, float]:
    """Compute the ratios of the cases that were measured."""
    by_case: dict[str, dict[str, float]] = {}
    cases = {case.name: case for case in CASES}
    for m in measured:
        if m.case in cases:
            by_case.setdefault(m.case, {})[m.system] = float(np.mean(m.values))
    if not by_case:
        return {}
    ratios = {
        "below_popularity": float(
            sum(
                systems[model] < systems[POPULAR]
                for name, systems in by_case.items()
                for model in cases[name].models
            )
        )
    }
    if "ALS" in (systems := by_case.get("ml-1m", {})):
        zoo = max(systems[model] for model in cases["ml-1m"].models)
        peers = max(systems[peer] for peer in ("ALS", "BPR", "item-kNN"))
        ratios |= {
            "zoo_vs_best_peer_hr10": zoo / peers,
            "two_tower_vs_als_hr10": systems["two_tower"] / systems["ALS"],
        }
    if "ALS" in (systems := by_case.get("gowalla", {})):
        ratios["gowalla_recall20"] = systems["two_tower"] / max(systems["ALS"], systems["BPR"])
    return ratios
