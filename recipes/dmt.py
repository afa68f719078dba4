"""DMT (Luo et al. 2024): a DLRM on two towers, first flat, then with tower modules that halve the floats sent.
torchrun --nproc-per-node 2 recipes/dmt.py
"""

import colonnade
import torch
from colonnade import Partition, shard_in_towers
from colonnade.data import open_source
from colonnade.models import DLRM, describe_tower_modules

DIM, ROWS = 16, [40, 60, 90, 120, 50, 70, 80, 110]
TOWERS = Partition((("C1", "C3", "C5", "C7"), ("C2", "C4", "C6", "C8")))  # these interact


def train(mesh: colonnade.Mesh, towers: Partition | None = None, dim: int | None = None) -> None:
    tables = [colonnade.Table(f"C{c + 1}", DIM, rows=n) for c, n in enumerate(ROWS)]
    features = [colonnade.Feature(table.name, table.name) for table in tables]
    torch.manual_seed(0)
    model = DLRM(
        tables, features, num_dense=13, bottom=(32,), top=(64, 32), towers=towers, tower_dim=dim
    )
    own = {} if mesh.num_ranks == 1 else shard_in_towers(tables, features, TOWERS, mesh.world)
    config = colonnade.PlanConfig(exchange="towers", towers=2, tables=own)
    model.embeddings.open(colonnade.build_plan(tables, mesh.world, config), mesh)
    data = open_source("synthetic", num_train=20_000, num_test=4_000, label_model="pairs",
                       cardinalities=ROWS, groups=TOWERS.towers)  # fmt: skip
    before = mesh.traffic.sent_bytes.copy()
    result = colonnade.fit(model, data, mesh=mesh, batch_size=500, dense_lr=2e-3, quiet=True)
    sent, auc = mesh.traffic.sent_bytes - before, result.metrics["test_auc"]
    if mesh.rank == 0:
        print(f"test_auc {auc:.4f}", describe_tower_modules(model, model.embeddings))
        print("bytes of values: {:,} {:,}".format(sent["fetch", "local"], sent["fetch", "remote"]))


if __name__ == "__main__":
    mesh = colonnade.open_mesh()
    train(mesh)
    train(mesh, TOWERS, DIM // 2)
    colonnade.close_mesh(mesh)
