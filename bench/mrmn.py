"""Rank the films that users will rate 5, by all of their ratings: MRMN beside models of one type, MovieLens-1M.

Minutes: 150 (quick 5).

    ndcg_vs_primary        NDCG@10 of MRMN with ratings as types over that of MRMN trained on fives alone
    ndcg_vs_best_peer      the same over the best other: CML, LRML and two towers, trained on fives or on all ratings
                           alike, and least squares and BPR of `implicit`, tuned by validation, of both
    strength_ordered       share of seeds in which the measured strength of types falls from 5 to 4 to 3 to {1, 2}
    strength_ordered_shuffled    the same where training ratings are shuffled; by chance 1/24

The ratings have no times, so the order of the file stands for it: the last of each user's fives tests, and the one
before it validates. All models rank all films that the user did not rate in training, with whatever number. Colonnade's
models take equally many steps of equally many samples; the best of four evaluations by validation is tested. `--users`
takes some of the users, to try.

Data come from $COLONNADE_DATA, else from ../shared/data beside the checkout.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import ROOT, ArmFile, BenchError, Measured, open_parser, run_script, say
from rich.console import Console
from workers.own_ranking import measure_peers

from colonnade import Mesh
from colonnade.config.run import override_settings
from colonnade.data import Splits, open_interactions
from colonnade.data.interactions.columns import to_positions
from colonnade.data.interactions.samples import QuerySource, group_items_by_user
from colonnade.run.defaults import get_preset
from colonnade.run.run import open_run

DATA = Path(os.environ.get("COLONNADE_DATA", ROOT.parent / "shared" / "data"))
TYPES = [5, 4, 3, [2, 1]]
STEPS, BATCH_SIZE, NUM_SEEDS = 8000, 1024, 5
CASE, UNIT, STRENGTH = "ml-1m", "ndcg@10", "strength"
FIVES, ALL, TYPED, SHUFFLED = "fives", "all ratings", "types", "shuffled types"
PENALTIES = (0.1, 3.0, 30.0)
"""Regularizations of least squares: of ratings, a large one is best."""
CML = {"model.slots": 0, "model.squared": True, "model.item_bias": False}
LRML = {"model.negative_relation": "positive", "model.squared": True, "model.item_bias": False}


@dataclass(frozen=True)
class Arm:
    """Model that is trained on a part of the ratings, with each of some seeds."""

    name: str
    rows: str
    model: str = "mrmn"
    num_seeds: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


MRMN_TYPED, MRMN_FIVES, MRMN_SHUFFLED = "mrmn", "mrmn, fives", "mrmn, shuffled types"
ARMS = (
    Arm(MRMN_TYPED, TYPED, num_seeds=NUM_SEEDS),
    Arm(MRMN_FIVES, FIVES, num_seeds=3),
    *(
        Arm(f"{name}, {rows}", rows, model, settings=settings)
        for name, model, settings in (
            ("cml", "mrmn", CML),
            ("lrml", "mrmn", LRML),
            ("two_tower", "two_tower", {}),
        )
        for rows in (FIVES, ALL)
    ),
    Arm(MRMN_SHUFFLED, SHUFFLED, num_seeds=NUM_SEEDS),
)


def write_files(folder: Path, num_users: int | None) -> None:
    """Write the training ratings of each kind, and the fives that validate and test, to Parquet files."""
    path = DATA / "ml-1m" / "ratings.parquet"
    if not path.exists():
        raise BenchError(f"{path} is absent; set COLONNADE_DATA to the folder that holds ml-1m")
    ratings = pq.read_table(
        path, columns=["user_id", "movie_id", "rating"]
    ).replace_schema_metadata()
    if num_users is not None:
        users = ratings["user_id"].to_numpy()
        drawn = np.random.RandomState(0).permutation(np.unique(users))[:num_users]
        ratings = ratings.filter(pa.array(np.isin(users, drawn)))
    splits = open_interactions(ratings, event="rating", types=TYPES, order="file")
    split: Any = splits.train.interactions  # type: ignore[attr-defined]
    pairs = {
        (int(split.user_keys[u]), int(split.item_keys[v])): part
        for part in ("validation", "test")
        for u, v in zip(getattr(split, part).samples, getattr(split, part).values, strict=True)
    }
    columns = [ratings[name].to_pylist() for name in ("user_id", "movie_id")]
    parts = np.array([pairs.get(pair, "train") for pair in zip(*columns, strict=True)])
    for part in ("validation", "test"):
        pq.write_table(ratings.filter(pa.array(parts == part)), folder / f"{part}.parquet")
    train = ratings.filter(pa.array(parts == "train"))
    numbers = train["rating"].to_numpy()
    shuffled = pa.array(np.random.RandomState(1).permutation(numbers))
    for name, table in {
        FIVES: train.filter(pa.array(numbers == 5)),
        ALL: train,
        TYPED: train,
        SHUFFLED: train.set_column(2, "rating", shuffled),
    }.items():
        pq.write_table(table, folder / f"{name}.parquet")


def build_options(folder: Path, rows: str) -> dict[str, Any]:
    """Return the options by which the training ratings of a kind are opened, with the held-out fives."""
    options: dict[str, Any] = {
        part: str(folder / f"{part}.parquet") for part in ("validation", "test")
    }
    return options | ({"event": "rating", "types": TYPES} if rows in (TYPED, SHUFFLED) else {})


def exclude_rated(splits: Splits, rated: pa.Table) -> Splits:
    """Return the splits whose queries rank no film that the user rated in training, with any number."""

    def exclude(source: Any) -> QuerySource:
        split = source.interactions
        users, items = (
            to_positions(keys, rated[name].to_numpy())
            for keys, name in ((split.user_keys, "user_id"), (split.item_keys, "movie_id"))
        )
        is_known = (users >= 0) & (items >= 0)
        bags = group_items_by_user(users[is_known], items[is_known], len(split.user_keys))
        return replace(source, excluded=(*source.excluded, bags))

    return replace(splits, validation=exclude(splits.validation), test=exclude(splits.test))


def train(arm: Arm, folder: Path, seed: int, steps: int) -> tuple[float, dict[str, float]]:
    """Train a model; return its NDCG@10 of the test part and the strength of each type."""
    settings: dict[str, Any] = {
        f"data.options.{name}": value for name, value in build_options(folder, arm.rows).items()
    }
    settings |= {
        "data.path": str(folder / f"{arm.rows}.parquet"), "train.threads": 1, "train.seed": seed,
        "train.batch_size": BATCH_SIZE, "train.max_steps": steps, "train.epochs": 1000, "train.patience": 0,
        "train.evaluate_steps": steps // 4, **arm.settings,
    }  # fmt: skip
    config = override_settings(get_preset("interactions", arm.model), settings)
    run = open_run(config, Mesh(), None, console=Console(quiet=True))
    try:
        rated = pq.read_table(folder / f"{ALL}.parquet")
        run.trainer.data = exclude_rated(run.trainer.data, rated)
        metrics = run.train().metrics
        by_type = getattr(run.trainer.evaluate(run.trainer.data.test), "by_type", {})
    finally:
        run.close()
    return metrics["test_ndcg@10"], {name: figures["strength"] for name, figures in by_type.items()}


def measure_arm(arm: Arm, folder: Path, num_seeds: int, steps: int) -> list[Measured]:
    """Train an arm with each seed; say what came out."""
    scores, strengths = [], []
    for seed in range(min(num_seeds, arm.num_seeds)):
        score, by_type = train(arm, folder, seed, steps)
        scores.append(score)
        strengths.append(list(by_type.values()))
        beside = ", ".join(f"{name} {value:.3f}" for name, value in by_type.items())
        say(
            f"{arm.name}, seed {seed}: {UNIT} {score:.4f}{f'; strength {beside}' if beside else ''}"
        )
    measured = [Measured(CASE, arm.name, UNIT, scores)]
    for number, values in enumerate(zip(*strengths, strict=True)):
        measured.append(Measured(CASE, arm.name, f"{STRENGTH} of type {number}", list(values)))
    return measured


def measure_implicit(folder: Path) -> Iterator[Measured]:
    """Measure the peers of `implicit` on fives, and on all ratings alike."""
    rated = pq.read_table(folder / f"{ALL}.parquet")
    for rows in (FIVES, ALL):
        splits = open_interactions(folder / f"{rows}.parquet", **build_options(folder, rows))
        for name, metrics in measure_peers(exclude_rated(splits, rated), PENALTIES).items():
            say(f"{name}, {rows}: {UNIT} {metrics[UNIT]:.4f}")
            yield Measured(CASE, f"{name}, {rows}", UNIT, [metrics[UNIT]])


def compute_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    scores = {m.system: float(np.mean(m.values)) for m in measured if m.unit == UNIT}
    ratios = {}
    if MRMN_TYPED in scores:
        own = scores.pop(MRMN_TYPED)
        scores.pop(MRMN_SHUFFLED, None)
        if MRMN_FIVES in scores:
            ratios["ndcg_vs_primary"] = own / scores.pop(MRMN_FIVES)
        if scores:
            ratios["ndcg_vs_best_peer"] = own / max(scores.values())
    for name, system in (("", MRMN_TYPED), ("_shuffled", MRMN_SHUFFLED)):
        strengths = [
            m.values for m in measured if m.system == system and m.unit.startswith(STRENGTH)
        ]
        if strengths:
            is_ordered = [
                list(x) == sorted({*x}, reverse=True) for x in zip(*strengths, strict=True)
            ]
            ratios[f"strength_ordered{name}"] = float(np.mean(is_ordered))
    return ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(
        __doc__.splitlines()[0], "400 users, 300 steps, one seed: to try, not to quote"
    )
    parser.add_argument("--users", type=int, help="number of users; default: all")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of Colonnade's models")
    parser.add_argument("--arms", nargs="*", help="arms to train, and `implicit`; default: all")
    options = parser.parse_args(arguments)
    num_seeds, steps, users = NUM_SEEDS, options.steps, options.users
    if options.quick:
        num_seeds, steps, users = 1, 300, 400
    file = ArmFile(options.json, "mrmn", compute_ratios, {"torch": torch.__version__})
    known = {m.system for m in file.measured}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, users)
        for arm in ARMS:
            if arm.name not in known and (options.arms is None or arm.name in options.arms):
                file.add(measure_arm(arm, folder, num_seeds, steps))
        if options.arms is None or "implicit" in options.arms:
            for row in measure_implicit(folder):
                file.add([row])
    for ratio, value in compute_ratios(file.measured).items():
        say(f"{ratio}: {value:.4f}")


if __name__ == "__main__":
    run_script(main)
