"""MRMN (Zhou et al. 2019): views, carts and purchases as relations of users and items in one metric space.

    torchrun --nproc-per-node 2 recipes/mrmn.py

Users of eight tastes view items, and buy some of their taste. The model learns from all, and ranks purchases."""

import random

import colonnade
import pyarrow as pa
import torch
from colonnade import Adam, Feature, Table, Uniform
from colonnade.data import open_interactions
from colonnade.models import MRMN


def draw_events(num_users: int = 400, num_items: int = 240) -> pa.Table:
    rows, draw = [], random.Random(0)
    for user, own in ((n, range(n % 8, num_items, 8)) for n in range(num_users)):
        for item in {*draw.sample(own, 12), *draw.sample(range(num_items), 20)}:
            steps = 1 + (item in own) * (draw.random() < 0.7) * (1 + (draw.random() < 0.6))
            rows += [(user, item, event) for event in ("view", "cart", "buy")[:steps]]
    return pa.table([*zip(*rows, strict=True)], ["user", "item", "event"])


if __name__ == "__main__":
    mesh, types = colonnade.open_mesh(), ["buy", "cart", "view"]
    data = open_interactions(draw_events(), split="rows", max_history=0, types=types)
    torch.manual_seed(0)
    adam, start = Adam(lr=0.01), Uniform(scale=0.1)
    widths = {"user": 16, "item": 17}  # the last number of an item is its bias
    tables = [Table(n, d, optimizer=adam, initializer=start) for n, d in widths.items()]
    features = [Feature(name, name) for name in widths]
    model = MRMN(tables, features, log_q=0, types=types, type_column=1)
    colonnade.fit(model, data, mesh=mesh, epochs=99, max_steps=200, batch_size=256, quiet=True)
    metrics = MRMN.objective.evaluate(model, data.test, 256, mesh)  # type: ignore[arg-type]
    if mesh.rank == 0:
        print(*(f"{name} {metrics[name]:.4f}" for name in ("ndcg@10", "popularity_ndcg@10")))
        print(*(f"strength of {name} {x['strength']:.2f}" for name, x in metrics.by_type.items()))
    colonnade.close_mesh(mesh)
