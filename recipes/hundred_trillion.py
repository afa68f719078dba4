"""100 trillion parameters on one machine: 781 billion ids of 128 floats; only trained rows are stored.

    python recipes/hundred_trillion.py [FOLDER]

Trains a few steps within a memory budget, saves a checkpoint, continues from it, and prints the memory and disk used.
"""

import sys
from pathlib import Path

import colonnade
import torch
from colonnade.data import open_tensors
from colonnade.models import DLRM

NUM_IDS, DIM, SAMPLES = 781_250_000_000, 128, 16_384


def build() -> DLRM:
    table = colonnade.Table("all", DIM, optimizer=colonnade.RowWiseAdagrad(lr=0.05))
    features = [colonnade.Feature(name, "all") for name in ("user", "item")]
    return DLRM([table], features, num_dense=1, bottom=(DIM,), top=(16,))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/hundred_trillion")
    draw = torch.Generator().manual_seed(0)
    ids = {name: torch.randint(NUM_IDS, (SAMPLES,), generator=draw) for name in ("user", "item")}
    data = open_tensors(ids, dense=torch.ones(SAMPLES, 1), label=(ids["item"] % 2).float())
    for epochs in (1, 2):
        model = build()
        result = colonnade.fit(
            model, data, run=folder, epochs=epochs, batch_size=1024, dram="8MiB", quiet=True
        )
        table, store = model.embeddings.tables[0], model.embeddings.store
        rows, files = len(store.backings[0]), sum(p.stat().st_size for p in folder.rglob("*.rows"))
        print(f"{NUM_IDS * DIM:,} parameters, step {model.embeddings.step}, from {result.resumed_at}: "
              f"{rows:,} rows exist; {store.resident_bytes():,} bytes of memory for rows, {files:,} of files, "
              f"{files / rows:.0f} a row of {table.record_bytes}")  # fmt: skip
