"""Rankings of bench own_data: peers are measured by the masks and metrics of the models."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import workers.own_ranking as bench
from harness import BenchError, Measured

from colonnade.data import open_source


@pytest.mark.parametrize("ranked_negatives", [None, 30])
def test_a_ranking_of_counts_has_the_metrics_of_popularity(tmp_path, ranked_negatives):
    """Compute by hand the share of held-out items among the first 20 that are not masked."""
    path = tmp_path / "walks.parquet"
    pq.write_table(bench.make_interactions("walks").slice(0, 4000), path)
    splits = open_source("interactions", path, order="file", ranked_negatives=ranked_negatives)
    split = splits.train.interactions
    train = bench.to_matrix(split.train, split.num_items)
    counts = np.asarray(train.sum(0)).ravel() - np.arange(split.num_items) * 1e-6
    metrics = bench.measure_scores(splits.test, lambda users: np.tile(counts, (len(users), 1)))
    hits = []
    for batch in splits.test.batches(64):
        for row in range(batch.size):
            one = [bag and bag.values[bag.samples == row].tolist() for bag in (
                batch.key.truth, batch.key.excluded, batch.key.candidates
            )]  # fmt: skip
            truth, excluded, candidates = one
            allowed = candidates or [i for i in range(split.num_items) if i not in excluded]
            best = sorted(allowed, key=lambda i: -counts[i])[:20]
            hits.append(len({*truth} & {*best}) / len(truth))
    assert metrics["recall@20"] == pytest.approx(np.mean(hits), abs=1e-6)


def test_peers_of_implicit_beat_popularity(tmp_path):
    pytest.importorskip("implicit")
    path = tmp_path / "groups.parquet"
    pq.write_table(bench.make_interactions("groups").slice(0, 20000), path)
    peers = bench.measure_peers(open_source("interactions", path))
    assert set(peers) == {"ALS", "BPR", "item-kNN"}
    assert min(metrics["recall@20"] for metrics in peers.values()) > 0.3


def test_ratios_compare_means_and_count_models_below_popularity():
    values = {
        "ml-1m": {"two_tower": [0.6, 0.8], "sasrec": [0.8], "popularity": [0.75], "ALS": [0.7], "BPR": [0.5],
                  "item-kNN": [0.75]},
        "walks": {"two_tower": [0.5], "sasrec": [0.6], "popularity": [0.1]},
    }  # fmt: skip
    measured = [
        Measured(case, system, "hit_rate@10", x)
        for case, systems in values.items()
        for system, x in systems.items()
    ]
    ratios = bench.compute_ranking_ratios(measured)
    assert ratios["below_popularity"] == 1
    assert ratios["zoo_vs_best_peer_hr10"] == pytest.approx(0.8 / 0.75)
    assert ratios["two_tower_vs_als_hr10"] == pytest.approx(1)
    assert "gowalla_recall20" not in ratios and not any(map(math.isnan, ratios.values()))


def test_absent_data_are_named(tmp_path):
    case = replace(bench.CASES[0], path="none.parquet")
    with pytest.raises(BenchError, match=r"none\.parquet is absent"):
        bench.measure_case(case, Path(tmp_path), 1)
