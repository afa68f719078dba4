"""DCT (Gupta et al. 2021): dense gradients of which each message has the largest elements, beside int8.

    torchrun --nproc-per-node 2 recipes/dct.py

What a message leaves out is added to the next step's gradients. One of 10 elements is sent here, since the run is short.
"""

import colonnade
import torch
from colonnade.data import open_source
from colonnade.models import DLRM

CODECS = ({"dense": "int8"}, {"dense": "thresholded", "dense_keep": 0.1})


def train(mesh: colonnade.Mesh, codec: dict[str, str | float]) -> colonnade.FitResult:
    data = open_source("synthetic", num_train=32_000, num_test=4_000, cardinalities=[100] * 2)
    init = colonnade.Uniform(scale=0.1)
    tables = [
        colonnade.Table(column.name, 8, rows=column.cardinality, initializer=init)
        for column in data.train.schema.categorical
    ]
    features = [colonnade.Feature(table.name, table.name) for table in tables]
    torch.manual_seed(0)
    model = DLRM(tables, features, num_dense=13, bottom=(64, 8), top=(128, 64))
    config = colonnade.PlanConfig(codec=codec)
    model.embeddings.open(colonnade.build_plan(tables, mesh.world, config), mesh)
    return colonnade.fit(model, data, mesh=mesh, epochs=1, batch_size=64, quiet=True)


if __name__ == "__main__":
    mesh = colonnade.open_mesh()
    for codec in CODECS:
        before = mesh.traffic.bytes_of("dense")
        result = train(mesh, codec)
        sent = (mesh.traffic.bytes_of("dense") - before) // result.outcome.steps
        if mesh.rank == 0:
            print(f"{codec['dense']}: test_auc {result.metrics['test_auc']:.4f}, {sent:,} bytes a step")
    colonnade.close_mesh(mesh)
