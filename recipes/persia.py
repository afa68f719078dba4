"""PERSIA (Lian et al. 2021): rows of open tables on a server, read exactly four steps late; dense weights in step.

    torchrun --nproc-per-node 3 recipes/persia.py [FOLDER]

Two ranks train, one has rows and nothing else. Tables take any id, keep 400 rows each, the newest, and a predictor in
the same process follows what is published while the run goes on.
"""

import sys
from pathlib import Path

import colonnade
from colonnade.data import Schema, open_source
from colonnade.models.dlrm import DLRM


def build(schema: Schema) -> DLRM:
    newest = colonnade.MaxRowsEviction(rows=400)
    kept = {"optimizer": colonnade.Adagrad(lr=0.05), "eviction": newest}
    tables = [colonnade.Table(c.name, 8, **kept) for c in schema.categorical]
    features = [colonnade.Feature(table.name, table.name) for table in tables]
    return DLRM(tables, features, num_dense=len(schema.dense), bottom=(16, 8), top=(32,))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/persia")
    mesh, late = colonnade.open_mesh(), {"staleness_steps": 4, "lookahead": 8, "dense_lr": 0.01}
    data = open_source("synthetic", num_train=16_000, num_test=2_000, cardinalities=[600] * 6)
    model = build(data.train.schema)
    found = colonnade.fit(
        model, data, run=folder, mesh=mesh, servers=1, batch_size=256, epochs=1,
        publish=str(folder / "published"), checkpoint_seconds=1.0, quiet=True, **late,
    )  # fmt: skip
    if mesh.rank == 0:
        print("  ".join(f"{name} {value:.4f}" for name, value in found.metrics.items()))
        with colonnade.Predictor.open(folder / "published", model=build(data.train.schema)) as now:
            print(f"published step {now.step}: {now(next(data.test.batches(4)))[:, 0].tolist()}")
    colonnade.close_mesh(mesh)
