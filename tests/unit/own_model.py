"""A model and data of a user's own, small: an EmbeddingCollection among other modules, samples with known structure."""

from __future__ import annotations

import torch
from torch import nn

from colonnade import SGD, Adam, EmbeddingCollection, Feature, RowWiseAdagrad, Table
from colonnade.data import Splits, open_tensors

USERS, FILMS = 60, 40


class Net(nn.Module):
    """Logits (B, 1). Two tables, one of them open; a dense network beside."""

    def __init__(self, dtype="float32", optimizer=None, seed=0, extra=()):
        super().__init__()
        torch.manual_seed(seed)
        optimizer = optimizer or RowWiseAdagrad(lr=0.1)
        tables = [
            Table("user", 4, rows=USERS, optimizer=optimizer, dtype=dtype),
            Table("film", 4, optimizer=optimizer, dtype=dtype),
            *(Table(name, 4, rows=USERS, optimizer=optimizer, dtype=dtype) for name in extra),
        ]
        features = [Feature("user", "user"), Feature("film", "film")]
        features += [Feature(name, name) for name in extra]
        self.inner = nn.ModuleDict({"rows": EmbeddingCollection(tables, features, seed=seed)})
        to = torch.float64 if dtype == "float64" else torch.float32
        self.bias = nn.Linear(2, 1, dtype=to)
        self.names = [feature.name for feature in features]

    @property
    def collection(self):
        return self.inner["rows"]

    def forward(self, batch):
        result = self.collection(batch)
        product = torch.stack([result[name] for name in self.names]).prod(dim=0)
        return product.sum(dim=1, keepdim=True) + self.bias(batch.dense.to(product))


def columns(num_samples, seed=0, extra=()):
    """A user likes a film where a hidden product of theirs is positive."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.Generator().manual_seed(99)
    likes = torch.randn(USERS, 3, generator=hidden) @ torch.randn(3, FILMS, generator=hidden)
    user = torch.randint(0, USERS, (num_samples,), generator=random)
    film = torch.randint(0, FILMS, (num_samples,), generator=random)
    chance = torch.sigmoid(3 * likes[user, film])
    label = (torch.rand(num_samples, generator=random) < chance).float()
    ids = {"user": user, "film": film * 7919 - 5}
    ids |= {name: user for name in extra}
    return {
        "ids": ids,
        "dense": torch.rand(num_samples, 2, generator=random),
        "label": label,
        "cardinalities": {"user": USERS, **dict.fromkeys(extra, USERS)},
        "group": user,
    }


def source(num_samples, seed=0, shuffle=True, extra=()):
    return open_tensors(
        **columns(num_samples, seed, extra), shuffle_seed=seed if shuffle else None, name="own"
    )


def splits(num_train=600, num_test=200, days=0, extra=()):
    return Splits(
        train=source(num_train, 1, extra=extra),
        validation=source(num_test, 2, extra=extra),
        test=source(num_test, 3, extra=extra),
        days=tuple(source(num_train // 3 + 7 * d, 10 + d, extra=extra) for d in range(days)),
    )


OPTIMIZERS = {"sgd": SGD(lr=0.5), "adagrad": RowWiseAdagrad(lr=0.1), "adam": Adam(lr=0.01)}


def rows_of(model):
    """Every row that can be asked for, by table."""
    ids = {table.name: torch.arange(USERS) for table in model.collection.tables}
    ids["film"] = torch.arange(FILMS) * 7919 - 5
    return {name: model.collection.rows(name, which) for name, which in ids.items()}


def assert_same(one, other, **tolerance):
    """Two models hold the same weights: to the bit, or within a tolerance."""
    for name, value in one.bias.state_dict().items():
        torch.testing.assert_close(
            value, other.bias.state_dict()[name], **(tolerance or {"rtol": 0, "atol": 0})
        )
    actual, expected = rows_of(one), rows_of(other)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], **(tolerance or {"rtol": 0, "atol": 0}))
