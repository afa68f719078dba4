"""MTrainS (Kassa et al.): a DLRM with its rows on an SSD; the tables that read most get the memory.

    python recipes/mtrains.py [RUN_FOLDER]

A sample of the data tells what each table would read. Batches are known ahead: rows are read in the background.
"""

import json
import sys
from pathlib import Path
from typing import Any

import colonnade
from colonnade import Feature, Table
from colonnade.data import open_source
from colonnade.models import DLRM


def train(folder: Path) -> dict[str, Any]:
    data = open_source("synthetic", num_train=10_000, num_test=2_000)
    columns = data.train.schema.categorical
    model = DLRM(
        [Table(column.table, 8, rows=column.cardinality) for column in columns],
        [Feature(column.name, column.table) for column in columns],
        num_dense=len(data.train.schema.dense), bottom=(32,), top=(32,),
    )  # fmt: skip
    memory = {"dram": "1MiB", "ssd": f"{folder}-rows:1GiB"}
    colonnade.fit(
        model, data, run=folder, batch_size=500, epochs=1, memory=memory, lookahead="auto", quiet=True,
    )  # fmt: skip
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


if __name__ == "__main__":
    summary = train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/mtrains"))
    print("  ".join(f"{name} {value:.4f}" for name, value in summary["metrics"].items()))
    for name in ("resident", "born", "read", "copied"):  # copied: evicted, not written yet
        print(f"rows {name}: {summary['row_sources'][name]:,}")
