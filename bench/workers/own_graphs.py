"""TransE by default settings on a thin knowledge graph, beside a sweep of learning rates and batch sizes.

The graph is FB15k-237's training triples among entities drawn at random, and of these as many as give three triples an
entity. Triples of a twentieth each validate and test.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
from harness import BenchError, Measured, say
from rich.console import Console

from colonnade import Mesh
from colonnade.config.run import override_settings
from colonnade.run.defaults import get_preset
from colonnade.run.run import open_run

CASE = "thin graph"
METRIC = "hits@10"
NUM_ENTITIES = 4000
"""Number of drawn entities; some are in no triple."""
TRIPLES_PER_ENTITY = 3
RATES = (0.005, 0.02, 0.05)
BATCH_SIZES = (128, 512)


def thin_triples(triples: np.ndarray, seed: int) -> np.ndarray:
    """Draw triples (n, 3) of head, tail, relation among drawn entities, TRIPLES_PER_ENTITY for each that has any."""
    random = np.random.RandomState(seed)
    chosen = random.permutation(int(triples[:, :2].max()) + 1)[:NUM_ENTITIES]
    inside = triples[np.isin(triples[:, :2], chosen).all(1)]
    inside = inside[random.permutation(len(inside))]
    return inside[: TRIPLES_PER_ENTITY * len(np.unique(inside[:, :2]))]


def train_transe(path: Path, seed: int, settings: dict[str, float]) -> float:
    """Train with these settings beyond the defaults; return hits@10 of the test triples."""
    own = {"data.path": str(path), "train.seed": seed, "train.threads": 1}
    config = override_settings(get_preset("triples", "transe"), own | settings)
    run = open_run(config, Mesh(), None, console=Console(quiet=True))
    try:
        return run.train().metrics[f"test_{METRIC}"]
    finally:
        run.close()


def measure_thin_graph(folder: Path, num_seeds: int) -> list[Measured]:
    """Train by defaults and by each setting of the sweep with each seed. Raises BenchError without FB15k-237."""
    source = folder / "fb15k237" / "train2id.txt"
    if not source.exists():
        raise BenchError(f"{source} is absent; set COLONNADE_DATA to the folder that holds it")
    triples = np.loadtxt(source, np.int64, skiprows=1)
    sweep = {
        f"lr {rate}, batch {size}": {"embedding.lr": rate, "train.batch_size": size}
        for rate, size in itertools.product(RATES, BATCH_SIZES)
    }
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as own:
        for seed in range(num_seeds):
            path = Path(own) / f"graph{seed}.tsv"
            drawn = thin_triples(triples, seed)[:, [0, 2, 1]]
            np.savetxt(path, drawn, "%d", "\t", header="head\trelation\ttail", comments="")
            for name, settings in {"default": {}, **sweep}.items():
                hits = train_transe(path, seed, settings)
                results.setdefault(name, []).append(hits)
                say(f"{CASE}, {len(drawn):,} triples, seed {seed}, {name}: {METRIC} {hits:.4f}")
    return [Measured(CASE, name, METRIC, x) for name, x in results.items()]


def compute_graph_ratios(measured: list[Measured]) -> dict[str, float]:
    """Compute the mean of the defaults over that of the best setting of the sweep."""
    means = {m.system: float(np.mean(m.values)) for m in measured if m.case == CASE}
    if not means:
        return {}
    default = means.pop("default")
    return {"thin_graph_of_best": default / max(means.values())}
