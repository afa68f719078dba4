"""MRMN (Zhou et al. 2019): views, carts and purchases as relations of users and items in one metric space.

    torchrun --nproc-per-node 2 recipes/mrmn.py

Users of eight tastes view items, and buy some of their taste. One model learns all types, another purchases alone."""

import random
from functools import partial

import colonnade
import pyarrow as pa
from colonnade import Adam, Feature, Uniform
from colonnade.data import open_interactions
from colonnade.models import MRMN


def draw_events(num_users: int = 400, num_items: int = 240) -> pa.Table:
    rows, draw = [], random.Random(0)
    for user, own in ((n, range(n % 8, num_items, 8)) for n in range(num_users)):
        for item in {*draw.sample(own, 12), *draw.sample(range(num_items), 20)}:
            steps = 1 + (item in own) * (draw.random() < 0.7) * (1 + (draw.random() < 0.6))
            rows += [(user, item, event) for event in ("view", "cart", "buy")[:steps]]
    return pa.table([*zip(*rows, strict=True)], ["user", "item", "event"])


def train(mesh: colonnade.Mesh, types: list[str] | None, events: list[str] | None) -> float:
    data = open_interactions(draw_events(), split="rows", max_history=0, types=types, events=events)
    table = partial(colonnade.Table, optimizer=Adam(lr=0.01), initializer=Uniform(scale=0.1))
    tables = [table("user", 16), table("item", 17)]  # the last number of an item is its bias
    features, column = [Feature(t.name, t.name) for t in tables], 1 if types else None
    model = MRMN(tables, features, log_q=0, types=types or ["all"], type_column=column)
    fit = partial(colonnade.fit, epochs=99, max_steps=200, batch_size=256, quiet=True)
    return fit(model, data, mesh=mesh).metrics["test_ndcg@10"]


if __name__ == "__main__":
    mesh = colonnade.open_mesh()
    for types, events in ((["buy", "cart", "view"], None), (None, ["buy"])):
        print(f"rank {mesh.rank}, {types or events}: ndcg@10 {train(mesh, types, events):.4f}")
    colonnade.close_mesh(mesh)
