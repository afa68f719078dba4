"""MTrainS (Kassa et al.): a DLRM with rows on an SSD; the tables that are read most get the memory.

    python recipes/mtrains.py [RUN_FOLDER]

A sample of the data predicts the reads of each table. A lookahead reads the rows of later batches in the background.
"""

import sys
from pathlib import Path

import colonnade
from colonnade.config.run import build_config
from colonnade.run.interrupt import stop_on_signals
from colonnade.run.run import open_run


def train(folder: Path) -> dict:
    config = build_config({
        "data": {"name": "synthetic", "options": {"num_train": 10_000, "num_test": 2_000}},
        "model": {"name": "dlrm", "dim": 8, "bottom": [32], "top": [32]},
        "train": {"batch_size": 500},
        "plan": {
            "memory": {"dram": "1MiB", "ssd": f"{folder}-rows:1GiB"},
            "placement": "profiled",
            "lookahead": "auto",
        },
    })  # fmt: skip
    run = open_run(config, colonnade.Mesh(), folder)
    try:
        with stop_on_signals(run.trainer):
            return run.summary(run.train())
    finally:
        run.close()


if __name__ == "__main__":
    summary = train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/mtrains"))
    print("  ".join(f"{name} {value:.4f}" for name, value in summary["metrics"].items()))
    for name in ("resident", "born", "read", "copied"):  # copied: evicted, not yet written
        print(f"rows {name}: {summary['row_sources'][name]:,}")
