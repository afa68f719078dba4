"""DES (Rong et al. 2020): an ads DeepFM with its first operators evaluated on owner ranks, which send sums, not rows.

    torchrun --nproc-per-node 2 recipes/des.py

Each rank sends each other rank one message with partial results of FM, first-order weights and the first deep layer.
"""

import colonnade
import torch
from colonnade.data import open_source
from colonnade.models import DeepFM

DIMS = {"deep": 16, "wide": 1}
OPTIMIZERS = {"deep": colonnade.Adagrad(lr=0.05), "wide": colonnade.FTRL(lr=0.1, l1=1e-4)}


def train(mesh: colonnade.Mesh) -> colonnade.FitResult:
    bags = [20_000] * 12  # rows of each column, which has 0 to 8 ids per sample
    data = open_source("synthetic", num_train=9_000, num_test=2_000, cardinalities=[5], bags=bags)
    sizes = {c.name: c.cardinality for c in data.train.schema.categorical}
    tables = [colonnade.Table(c, DIMS, rows=n, optimizer=OPTIMIZERS) for c, n in sizes.items()]
    features = [colonnade.Feature(name, name, pooling="mean") for name in sizes]
    torch.manual_seed(0)
    model = DeepFM(tables, features, num_dense=len(data.train.schema.dense), top=(32, 16))
    config = colonnade.PlanConfig(exchange="partials")  # rows of a table are on all ranks, by hash
    model.embeddings.open(colonnade.build_plan(tables, mesh.world, config), mesh)
    return colonnade.fit(model, data, mesh=mesh, epochs=1, batch_size=500, quiet=True)


if __name__ == "__main__":
    mesh = colonnade.open_mesh()
    result = train(mesh)
    sent = [mesh.traffic.bytes_of(channel) // result.outcome.steps for channel in ("fetch", "push")]
    if mesh.rank == 0:
        print(f"test_auc {result.metrics['test_auc']:.4f}")
        print("bytes a step: {:,} of partials, {:,} of their gradients".format(*sent))
    colonnade.close_mesh(mesh)
