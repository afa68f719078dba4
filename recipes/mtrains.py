"""MTrainS (Kassa et al.): a DLRM with its rows on an SSD; the tables that read most get the memory.

    python recipes/mtrains.py [RUN_FOLDER]

A sample of the data tells what each table would read. Batches are known ahead: rows are read in the background.
"""

import json
import sys
from pathlib import Path
from typing import Any

import colonnade
import torch
from colonnade import Feature, Table
from colonnade.data import open_source
from colonnade.models import DLRM

ROWS, DRAM, ADAGRAD = [20_000, 8_000, 4_000, 2_000], "256KiB", colonnade.Adagrad(lr=0.05)


def train(folder: Path) -> dict[str, Any]:
    data = open_source("synthetic", num_train=16_000, num_test=2_000, cardinalities=ROWS)
    columns = data.train.schema.categorical
    torch.manual_seed(0)
    model = DLRM(
        [Table(column.table, 8, rows=column.cardinality, optimizer=ADAGRAD) for column in columns],
        [Feature(column.name, column.table) for column in columns],
        num_dense=len(data.train.schema.dense), bottom=(32,), top=(32,),
    )  # fmt: skip
    colonnade.fit(model, data, run=folder, batch_size=250, epochs=1, lookahead="auto", quiet=True,
                  checkpoint_steps=32, memory={"dram": DRAM, "ssd": f"{folder}-rows:1GiB"})  # fmt: skip
    return dict(json.loads((folder / "summary.json").read_text()))


if __name__ == "__main__":
    summary = train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/mtrains"))
    print("  ".join(f"{name} {value:.4f}" for name, value in summary["metrics"].items()))
    for name in ("resident", "born", "read", "copied"):  # copied: evicted, not written yet
        print(f"rows {name}: {summary['row_sources'][name]:,}")
