"""Settings that suit each data set that `--data` names; docs/decisions/earlier_figures.md has what they reached."""

from __future__ import annotations

from typing import Any

from colonnade.config import RunConfig, build_config, override
from colonnade.errors import ConfigError

TABLES = {
    "model": {"name": "deepfm", "dim": 16},
    "rows": {"lr": 0.05, "init_scale": 0.01},
}
"""For files of which nothing is known but their schema: train/defaults.py chooses the rest by their size."""

PRESETS: dict[str, RunConfig] = {
    "synthetic": build_config(
        {
            "data": {"name": "synthetic"},
            "model": {"name": "dlrm", "dim": 16, "keep_fields": True},
            "rows": {"lr": 0.1, "initial_accumulator": 1e-6, "init_scale": 0.01},
            "dense": {"lr": 2e-3},
            "train": {"batch_size": 4096, "epochs": 1},
        }
    ),
    "movielens": build_config(
        {
            "data": {"name": "movielens"},
            "model": {"name": "dlrm", "dim": 16, "top": [128, 64], "keep_fields": True},
            "rows": {"lr": 0.1, "initial_accumulator": 1e-6, "init_scale": 0.01},
            "dense": {"lr": 2e-3},
            "train": {"batch_size": 4096, "epochs": 5, "patience": 2},
        }
    ),
    "movielens_retrieval": build_config(
        {
            "data": {
                "name": "movielens_retrieval",
                "options": {"max_history": 200, "max_pairs": 20},
            },
            "model": {
                "name": "two_tower",
                "dim": 64,
                "query_columns": ["history", "sex", "age", "occupation"],
                "item_columns": ["item", "year", "genres"],
                "temperature": 0.15,
            },
            "rows": {"optimizer": "adam", "lr": 0.003, "init_scale": 0.05},
            "dense": {"lr": 1e-3},
            "train": {"batch_size": 1024, "epochs": 20, "patience": 3},
        }
    ),
    "gowalla": build_config(
        {
            "data": {"name": "gowalla", "options": {"max_history": 100, "max_pairs": 20}},
            "model": {"name": "two_tower", "dim": 64, "temperature": 0.1},
            "rows": {"optimizer": "adam", "lr": 0.005, "init_scale": 0.05},
            "dense": {"lr": 1e-3},
            "train": {"batch_size": 2048, "epochs": 15, "patience": 3},
        }
    ),
    "power_law": build_config(
        {
            "data": {"name": "power_law"},
            "model": {"name": "graphsage", "dim": 32, "temperature": 0.1},
            "rows": {"optimizer": "adam", "lr": 0.005, "init_scale": 0.1},
            "dense": {"lr": 2e-3},
            "train": {"batch_size": 1024, "epochs": 10, "patience": 3},
        }
    ),
    "fb15k237": build_config(
        {
            "data": {"name": "fb15k237", "options": {"max_validation": 1000}},
            "model": {
                "name": "transe",
                "dim": 256,
                "norm": 2,
                "squared": True,
                "loss": "softmax",
                "reciprocal": True,
            },
            "rows": {
                "optimizer": "adam",
                "lr": 0.005,
                "init_scale": 0.05,
                "schedule": {"name": "linear"},
            },
            "train": {"batch_size": 1024, "epochs": 10, "patience": 3},
        }
    ),
    "criteo": build_config({"data": {"name": "criteo"}, **TABLES}),
    "csv": build_config({"data": {"name": "csv"}, **TABLES}),
    "libsvm": build_config({"data": {"name": "libsvm"}, **TABLES}),
    "parquet": build_config({"data": {"name": "parquet"}, **TABLES}),
    "tfrecord": build_config({"data": {"name": "tfrecord"}, **TABLES}),
}

SEQUENCES: dict[str, Any] = {
    "data.options": {"samples": "sequences", "max_history": 50, "negatives": 16},
    "model.dim": 64,
    "rows.lr": 0.005,
    "model.blocks": 1,
    "model.max_length": 50,
    "model.positions": False,
    "model.dropout": 0.1,
    "model.temperature": 0.2,
    "train.batch_size": 64,
    "train.epochs": 30,
}

LINKS: dict[str, Any] = {
    "model.dim": 256,
    "model.loss": "softmax",
    "train.batch_size": 512,
    "train.epochs": 30,
}

TURNS: dict[str, Any] = {
    "model.dim": 1024,
    "model.norm": 2,
    "model.squared": True,
    "model.loss": "softmax",
    "model.reciprocal": True,
    "model.center": 0.3,
    "model.penalty": 0.3,
    "rows.lr": 0.015,
    "train.batch_size": 512,
    "train.epochs": 16,
}

MODEL_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fb15k237": {"distmult": LINKS, "complex": LINKS, "rotate": TURNS},
    "movielens_retrieval": {"sasrec": SEQUENCES},
    "gowalla": {
        "graphsage": {
            "data.options": {"samples": "neighbours"},
            "model.dim": 64,
            "model.temperature": 0.1,
            "rows.lr": 0.005,
            "rows.init_scale": 0.1,
            "dense.lr": 2e-3,
            "train.batch_size": 2048,
            "train.epochs": 10,
        },
        "sasrec": {**SEQUENCES, "model.temperature": 0.1, "train.batch_size": 256},
    },
}
"""By data set and model: what differs from the data set's own preset beyond the model's own defaults."""


def preset(data: str, model: str | None = None) -> RunConfig:
    """Settings for `data` and, where it is not the one that the data set's preset names, for `model`.

    Raises ConfigError for a data set that has none.
    """
    if data not in PRESETS:
        raise ConfigError(f"unknown data set {data!r}; choose from {', '.join(sorted(PRESETS))}")
    chosen = PRESETS[data]
    if model is None or model == chosen.model.name:
        return chosen
    values = chosen.model_dump()
    values["model"] = {"name": model}
    return override(build_config(values), MODEL_PRESETS.get(data, {}).get(model, {}))
