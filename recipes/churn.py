"""Churn: a click model trained twice with other seeds, and how much the two disagree on the same test samples.

    python recipes/churn.py

More epochs raise churn, so it is printed beside the log loss.
"""

import colonnade
import numpy as np
import torch
from colonnade.data import Splits, open_source
from colonnade.models import DeepFM


def train(data: Splits, seed: int, epochs: int, test: colonnade.Batch) -> np.ndarray:
    init = colonnade.Uniform(scale=0.01)
    tables = [
        colonnade.Table(c.name, {"deep": 8, "wide": 1}, rows=c.cardinality, initializer=init)
        for c in data.train.schema.categorical
    ]
    features = [colonnade.Feature(table.name, table.name) for table in tables]
    torch.manual_seed(seed)
    model = DeepFM(tables, features, num_dense=13, top=(32,), seed=seed)
    colonnade.fit(model, data, epochs=epochs, batch_size=500, quiet=True)
    with torch.no_grad():
        return torch.sigmoid(model(test)).double().numpy()[:, 0]


if __name__ == "__main__":
    data = open_source("synthetic", num_train=10_000, num_test=4_000, max_cardinality=1_000)
    assert data.test is not None
    test = next(iter(data.test.batches(4_000)))
    assert test.label is not None
    for epochs in (1, 4):
        first, second = (train(data, seed, epochs, test) for seed in (0, 1))
        measured = colonnade.measure_churn(first, second, test.label[:, 0].double().numpy())
        words = [f"{name} {x.value:.4f} ± {x.standard_error:.4f}" for name, x in measured.items()]
        print(f"epochs {epochs}:", ", ".join(words))
