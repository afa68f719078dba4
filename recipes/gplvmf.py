"""GPLVMF (Huang and Xu 2019) and its parent GPFM (Nguyen et al. 2014): ratings of dishes at places.

    python recipes/gplvmf.py

Each user has a function of dish and place. The shelf changes nothing; the noise has a deviation of 0.3.
"""

import colonnade
import numpy as np
import pyarrow as pa
from colonnade import Adam, Feature, Table, Uniform
from colonnade.data import Splits, open_arrow
from colonnade.models import GPLVMF


def draw_ratings(users: int = 60, ratings: int = 40) -> Splits:
    draw, size = np.random.default_rng(0), users * ratings
    numbers = {"user": users, "dish": 12, "place": 3, "shelf": 3}
    ids = {name: draw.integers(0, n, size) for name, n in numbers.items()}
    angle = 0.9 * ids["dish"] + 2 * ids["place"] + draw.uniform(0, 6, users)[ids["user"]]
    table = pa.table({**ids, "rating": 3 + np.sin(angle) + 0.3 * draw.normal(size=size)})
    fields = {"rating": {"type": "label", "kind": "number"}}
    schema = {"fields": fields | {name: {"type": "category", "dtype": "integer"} for name in ids}}
    return open_arrow(table, schema=schema, group_by="user", test_fraction=0.2)


def train(data: Splits, prior: bool) -> dict[str, float]:
    parts = {"mean": 4, "log_variance": 4, "bias": 1}
    start = {part: Uniform(scale=0.87 if part == "mean" else 0.0) for part in parts}
    adam, names = Adam(lr=0.02), ("dish", "place", "shelf")
    tables = [Table("user", {"bias": 1}, optimizer=adam, initializer=Uniform(scale=0))]
    tables += [Table(name, parts, optimizer=adam, initializer=start) for name in names]
    model = GPLVMF(tables, [Feature(t.name, t.name) for t in tables], num_dense=4, prior=prior)
    return colonnade.fit(model, data, epochs=60, batch_size=20, dense_lr=0.02, quiet=True).metrics


if __name__ == "__main__":
    for name, prior in (("GPLVMF", True), ("GPFM", False)):
        metrics = train(draw_ratings(), prior).items()
        print(name, *(f"{metric.removeprefix('test_')} {value:.4f}" for metric, value in metrics))
