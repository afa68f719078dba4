"""PERSIA (Lian et al. 2021): open tables on a server with reads exactly four steps stale; synchronous dense weights.

    torchrun --nproc-per-node 3 recipes/persia.py [FOLDER]

Two ranks train, and one rank only serves rows. Tables accept any id and retain the 400 most recently updated rows. A
predictor in the same process loads the published updates.
"""

import sys
from pathlib import Path

import colonnade
from colonnade.data import Schema, open_source
from colonnade.models import DLRM


def build(schema: Schema) -> DLRM:
    eviction = colonnade.MaxRowsEviction(rows=400)
    adagrad, names = colonnade.Adagrad(lr=0.05), [c.name for c in schema.categorical]
    tables = [colonnade.Table(name, 8, optimizer=adagrad, eviction=eviction) for name in names]
    features = [colonnade.Feature(name, name) for name in names]
    return DLRM(tables, features, num_dense=len(schema.dense), bottom=(16, 8), top=(32,))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/persia")
    mesh = colonnade.open_mesh()
    data = open_source("synthetic", num_train=16_000, num_test=2_000, cardinalities=[600] * 6)
    model = build(data.train.schema)
    result = colonnade.fit(
        model, data, run=folder, mesh=mesh, servers=1, batch_size=256, epochs=1,
        publish=str(folder / "published"), checkpoint_seconds=1.0, quiet=True,
        staleness_steps=4, lookahead=8, dense_lr=0.01,
    )  # fmt: skip
    if mesh.rank == 0 and data.test is not None:
        print("  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items()))
        with colonnade.Predictor.open(folder / "published", model=build(data.train.schema)) as now:
            print(f"published step {now.step}: {now(next(data.test.batches(4)))[:, 0].tolist()}")
    colonnade.close_mesh(mesh)
