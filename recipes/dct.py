"""DCT (Gupta et al. 2021): of the dense network's gradients, each message has the largest elements alone.

    torchrun --nproc-per-node 2 recipes/dct.py

What a message leaves out is added to the next step's gradients. The run is short, so one of 10 elements is sent here.
"""

import colonnade
import torch
from colonnade.data import open_source
from colonnade.models import DLRM


def build_model(data: colonnade.data.Splits) -> DLRM:
    init = colonnade.Uniform(scale=0.1)
    tables = [
        colonnade.Table(column.name, 8, rows=column.cardinality, initializer=init)
        for column in data.train.schema.categorical
    ]
    features = [colonnade.Feature(table.name, table.name) for table in tables]
    torch.manual_seed(0)
    return DLRM(tables, features, num_dense=13, bottom=(64, 8), top=(128, 64))


if __name__ == "__main__":
    mesh = colonnade.open_mesh()
    data = open_source("synthetic", num_train=32_000, num_test=4_000, cardinalities=[100] * 2)
    model = build_model(data)
    config = colonnade.PlanConfig(codec={"dense": "thresholded", "dense_keep": 0.1})
    plan = colonnade.build_plan(model.embeddings.tables, mesh.world, config)
    model.embeddings.open(plan, mesh)
    result = colonnade.fit(model, data, mesh=mesh, epochs=1, batch_size=64, quiet=True)
    sent = mesh.traffic.bytes_of("dense") / result.outcome.steps
    exact = 4 * sum(weight.numel() for weight in model.parameters())  # two legs of half the sum
    if mesh.rank == 0:
        print(f"test_auc {result.metrics['test_auc']:.4f}")
        print(f"bytes a step: {sent:,.0f}, of {exact:,} of exact sums")
    colonnade.close_mesh(mesh)
