"""Settings that suit each data set that `--data` names. Where a figure was reached with them, it is in the README."""

from __future__ import annotations

from colonnade.config import RunConfig, build_config

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
