"""Settings that suit each data set that `--data` names. Where a figure was reached with them, it is in the README."""

from __future__ import annotations

from typing import Any

from colonnade.config import RunConfig, build_config, override
from colonnade.errors import ConfigError

TABLES = {
    "model": {"name": "dlrm", "dim": 16, "keep_fields": True},
    "rows": {"lr": 0.05, "init_scale": 0.01},
    "dense": {"lr": 2e-3},
    "train": {"batch_size": 4096, "epochs": 1},
}
"""For files of which nothing is known but their schema."""

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
            "train": {"batch_size": 4096, "epochs": 5},
        }
    ),
    "movielens_retrieval": build_config(
        {
            "data": {"name": "movielens_retrieval"},
            "model": {
                "name": "two_tower",
                "dim": 32,
                "item_columns": ["item", "year", "genres"],
            },
            "rows": {"lr": 0.05, "initial_accumulator": 1e-6, "init_scale": 0.05},
            "dense": {"lr": 1e-3},
            "train": {"batch_size": 2048, "epochs": 10},
        }
    ),
    "gowalla": build_config(
        {
            "data": {"name": "gowalla"},
            "model": {"name": "two_tower", "dim": 64},
            "rows": {"lr": 0.05, "initial_accumulator": 1e-6, "init_scale": 0.05},
            "dense": {"lr": 1e-3},
            "train": {"batch_size": 2048, "epochs": 10},
        }
    ),
    "criteo": build_config(
        {
            "data": {"name": "criteo"},
            "model": {"name": "dlrm", "dim": 16, "bottom": [64], "top": [64, 32]},
            "rows": {"lr": 0.02, "init_scale": 0.01},
            "dense": {"lr": 2e-3},
            "train": {"batch_size": 64, "epochs": 1},
        }
    ),
    "csv": build_config({"data": {"name": "csv"}, **TABLES}),
    "parquet": build_config({"data": {"name": "parquet"}, **TABLES}),
}

MODEL_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "movielens": {},
    "movielens_retrieval": {
        "sasrec": {
            "data.options.samples": "sequences",
            "data.options.negatives": 8,
            "model.dim": 32,
            "model.max_length": 100,
            "model.positions": False,
            "train.batch_size": 128,
            "train.epochs": 100,
        },
    },
    "gowalla": {
        "sasrec": {
            "data.options.samples": "sequences",
            "model.dim": 64,
            "model.positions": False,
            "train.batch_size": 256,
            "train.epochs": 50,
        },
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
