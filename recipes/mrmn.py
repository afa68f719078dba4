"""MRMN (Zhou et al. 2019): views, carts and purchases as relations of users and items in one metric space.

    torchrun --nproc-per-node 2 recipes/mrmn.py

Users of eight tastes view items, and buy some of their taste. One model learns all types, another purchases alone."""

import random

import colonnade
import pyarrow as pa
from colonnade.data import open_interactions
from colonnade.models import MRMN


def draw_events(num_users: int = 400, num_items: int = 240) -> pa.Table:
    rows, draw = [], random.Random(0)
    for user, own in ((n, range(n % 8, num_items, 8)) for n in range(num_users)):
        for item in {*draw.sample(own, 12), *draw.sample(range(num_items), 20)}:
            steps = 1 + (item in own) * (draw.random() < 0.7) * (1 + (draw.random() < 0.6))
            rows += [(user, item, event) for event in ("view", "cart", "buy")[:steps]]
    return pa.table([*zip(*rows, strict=True)], ["user", "item", "event"])


def train(mesh: colonnade.Mesh, **options: list[str]) -> dict[str, float]:
    data = open_interactions(draw_events(), split="rows", max_history=0, **options)
    rows = {"optimizer": colonnade.Adam(lr=0.01), "initializer": colonnade.Uniform(scale=0.1)}
    tables = [colonnade.Table(n, d, **rows) for n, d in (("user", 16), ("item", 17))]
    kinds = {"types": options["types"], "type_column": 1} if "types" in options else {}
    model = MRMN(tables, [colonnade.Feature(t.name, t.name) for t in tables], log_q=0, **kinds)
    steps = {"epochs": 99, "max_steps": 200, "batch_size": 256}
    return colonnade.fit(model, data, mesh=mesh, quiet=True, **steps).metrics


if __name__ == "__main__":
    mesh = colonnade.open_mesh()
    for options in ({"types": ["buy", "cart", "view"]}, {"events": ["buy"]}):
        metrics = train(mesh, **options)
        if mesh.rank == 0:
            print(f"{options}: ndcg@10 {metrics['test_ndcg@10']:.4f}")
    colonnade.close_mesh(mesh)
