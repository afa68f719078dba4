"""AUC of pairs of ids and of pairs of fields. MovieLens-1M: FM, NFM and DeepFM, with `model.over` ids and fields.

The bags of a sample are the genres of the film (1 to 6) and, with --history N, at most N films that the user rated 4 or
more. These come from 30 % of the training samples, which train nothing, so that no sample sees a label of its own. All
bags are means, as runs have them. Settings are the preset's. The epoch that is scored is the best one by validation
samples. Both choices of a seed see the same samples in the same order.

Each run is written to the file when it ends. A call with the same file adds the missing runs; --seconds ends a call
early.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from harness import Measured, describe_machine, report, write_report
from rich.console import Console

import colonnade
from colonnade import Ids, fit
from colonnade.config.run import RunConfig, override_settings
from colonnade.data import Splits, open_source
from colonnade.data.contract import Column
from colonnade.data.tensors import TensorSource
from colonnade.errors import ColonnadeError
from colonnade.models.build import build_model
from colonnade.run.defaults import get_preset

DATA = "movielens"
MODELS = ("fm", "nfm", "deepfm")
HISTORY_PART = 0.3
"""Part of the training samples whose films make the histories."""


def add_histories(data: Splits, length: int) -> Splits:
    """Return the samples with a bag `history` of at most `length` films of the user; the training samples of which
    they are made are left out."""
    train, random = data.train, np.random.RandomState(0)
    assert isinstance(train, TensorSource) and train.rows is not None
    columns, is_history = (
        train.columns,
        torch.from_numpy(random.rand(len(train.rows)) < HISTORY_PART),
    )
    source, user = train.rows[is_history], columns.ids["user"].values
    source = source[columns.label[source, 0] > 0]
    films = columns.ids["movie"].values
    lists: dict[int, list[int]] = {}
    for reader, film in zip(user[source].tolist(), films[source].tolist(), strict=True):
        if len(own := lists.setdefault(reader, [])) < length:
            own.append(film)
    bags = [lists.get(reader, []) for reader in user.tolist()]
    offsets = torch.tensor([0, *map(len, bags)]).cumsum(0)
    history = Ids(torch.tensor([film for bag in bags for film in bag]), offsets)
    movie = next(column for column in train.schema.categorical if column.name == "movie")
    schema = replace(
        train.schema,
        categorical=(
            *train.schema.categorical, Column("history", movie.cardinality, "bag", "movie")
        ),
    )  # fmt: skip
    extended = replace(columns, ids={**columns.ids, "history": history})

    def extend(part: TensorSource, rows: torch.Tensor) -> TensorSource:
        return TensorSource(schema, extended, rows=rows, shuffle_key=part.shuffle_key)

    assert isinstance(data.validation, TensorSource) and isinstance(data.test, TensorSource)
    assert data.validation.rows is not None and data.test.rows is not None
    return Splits(
        train=extend(train, train.rows[~is_history]),
        validation=extend(data.validation, data.validation.rows),
        test=extend(data.test, data.test.rows),
    )


def config_of(model: str, over: str, seed: int, epochs: int) -> RunConfig:
    """Return the preset's settings for a model."""
    settings = {"model.name": model, "model.over": over, "train.seed": seed, "train.epochs": epochs}
    base = get_preset(DATA, "dlrm")
    settings |= {"model.keep_fields": None, "train.threads": 1, "train.patience": 1}
    if model == "fm":
        settings["model.top"] = None
    return override_settings(base, settings)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write runs here; go on with what it has")
    parser.add_argument("--quick", action="store_true", help="one epoch of one seed: to try it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--history", type=int, nargs="+", default=[0, 20])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.epochs = 1, 1
    console, start = Console(highlight=False), time.monotonic()
    runs: dict[tuple[str, str], list[float]] = {}
    settings = {"epochs": options.epochs}
    if options.json and options.json.exists():
        retained = json.loads(options.json.read_text())
        if retained["settings"] != settings:
            parser.error(f"--json {options.json}: has runs of {retained['settings']}; give another")
        runs = {(r["case"], r["system"]): r["values"] for r in retained["cases"]}
    opened: dict[tuple[int, int], Splits] = {}
    for seed, history, model, over in product(
        range(options.seeds), options.history, options.models, ("ids", "fields")
    ):
        case = f"{model}, genres" + (f" and {history} films" if history else "")
        if seed < len(runs.get((case, over), [])):
            continue
        if time.monotonic() - start > options.seconds:
            console.print("stopped early; call again to go on")
            return
        if (key := (seed, history)) not in opened:
            data = open_source(DATA, seed=seed)
            opened = {key: add_histories(data, history) if history else data}
        config = config_of(model, over, seed, options.epochs)
        data = opened[key]
        result = fit(build_model(data.train.schema, config), data, config=config, quiet=True)
        auc = result.metrics["test_auc"]
        runs.setdefault((case, over), []).append(auc)
        seconds = time.monotonic() - start
        console.print(f"{case}, over {over}, seed {seed}: {auc:.5f} ({seconds:.0f} s so far)")
        if options.json:
            measured = [Measured(c, o, "AUC", aucs) for (c, o), aucs in runs.items()]
            result = report(
                "ids_movielens", version=colonnade.__version__, machine=describe_machine(threads=1),
                measured=measured, ratios={},
            )  # fmt: skip
            write_report(options.json, {**result, "settings": settings})
    for case in dict.fromkeys(case for case, _ in runs):
        ids, fields = runs[case, "ids"], runs[case, "fields"]
        differences = [a - b for a, b in zip(ids, fields, strict=True)]
        console.print(
            f"{case}: ids {fmean(ids):.5f}, fields {fmean(fields):.5f}, "
            f"difference by seed {', '.join(f'{value:+.5f}' for value in differences)}"
        )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the run it was in is not kept")
    except (OSError, ColonnadeError) as error:
        sys.exit(f"error: {error}")
