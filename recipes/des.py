"""DES (Rong et al. 2020): a DeepFM for ads whose owners of rows evaluate its first operators; sums travel, not rows.

    torchrun --nproc-per-node 2 recipes/des.py

FM, first-order weights and the first layer of the deep part are partial results of one message from each rank to each.
"""

import torch

import colonnade
from colonnade.data import open_source
from colonnade.models.deepfm import DeepFM

OPTIMIZERS = {"deep": colonnade.Adagrad(lr=0.05), "wide": colonnade.FTRL(lr=0.1, l1=1e-4)}


def train(mesh: colonnade.Mesh) -> colonnade.Fitted:
    bags = [20_000] * 12  # rows of columns with 0 to 8 ids a sample
    data = open_source("synthetic", num_train=9_000, num_test=2_000, cardinalities=[5], bags=bags)
    schema = data.train.schema
    kind = {"dim": {"deep": 16, "wide": 1}, "optimizer": OPTIMIZERS}
    tables = [colonnade.Table(c.name, rows=c.cardinality, **kind) for c in schema.categorical]
    features = [colonnade.Feature(c.name, c.name, pooling="mean") for c in schema.categorical]
    torch.manual_seed(0)
    model = DeepFM(tables, features, num_dense=len(schema.dense), top=(32, 16))
    ranks = {table.name: t % mesh.num_ranks for t, table in enumerate(tables)}
    whole = {name: {"sharding": "table_wise", "ranks": [rank]} for name, rank in ranks.items()}
    config = colonnade.PlanConfig(exchange="partials", tables=whole)
    model.embeddings.open(colonnade.build_plan(tables, mesh.world, config), mesh)
    return colonnade.fit(model, data, mesh=mesh, epochs=1, batch_size=500, quiet=True)


if __name__ == "__main__":
    mesh = colonnade.open_mesh()
    found = train(mesh)
    sent = [mesh.traffic.bytes_of(each) // found.outcome.steps for each in ("fetch", "push")]
    if mesh.rank == 0:
        print(f"test_auc {found.metrics['test_auc']:.4f}")
        print("bytes a step: {:,} of partials, {:,} of their gradients".format(*sent))
    colonnade.close_mesh(mesh)
