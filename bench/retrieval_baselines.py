"""Baselines of retrieval models: popularity, and matrix factorisation by BPR and by least squares.

Minutes: 60 (quick 60).

    python bench/retrieval_baselines.py movielens_retrieval /path/to/ml-1m

prints recall@20 and NDCG@20 on validation and test, by the project's own metrics and over the same splits.
`implicit_als` is Hu, Koren and Volinsky (2008) in plain torch, solved exactly for a user (an item) at a time;
`bpr` is Rendle et al. (2009) with Adam. Settings are chosen by validation, among those that are printed.

Legend: U users, I items, D dim.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from colonnade.batch import Ids
from colonnade.data import open_source
from colonnade.data.contract import Source
from colonnade.models.retriever import mask_items, recall_and_ndcg, top_items

BLOCK = 512  # users, or items, solved at a time


def implicit_als(
    train: Ids,
    num_items: int,
    *,
    dim: int,
    confidence: float,
    regularisation: float,
    sweeps: int,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Vectors of users (U, dim) and items (I, dim) that minimise the sum over all (user, item) of
    c (1 or 0 - <u, i>)^2 + regularisation (|u|^2 + |i|^2), c = 1 + `confidence` for what was taken, 1 otherwise."""
    generator = torch.Generator().manual_seed(seed)
    num_users = len(train.offsets) - 1
    users = torch.repeat_interleave(torch.arange(num_users), train.offsets.diff())
    order = train.values.argsort(stable=True)
    counts = torch.bincount(train.values, minlength=num_items)
    item_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    by_item = (item_offsets, users[order])
    item_vectors = torch.randn(num_items, dim, generator=generator) * 0.1
    user_vectors = torch.zeros(num_users, dim)
    for _ in range(sweeps):
        user_vectors = _solve(
            (train.offsets, train.values), item_vectors, confidence, regularisation
        )
        item_vectors = _solve(by_item, user_vectors, confidence, regularisation)
    return user_vectors, item_vectors


def _solve(bags: tuple[Tensor, Tensor], other: Tensor, confidence: float, ridge: float) -> Tensor:
    """Return for each bag of rows of `other` the vector that minimises its share of the loss."""
    offsets, values = bags
    dim = other.shape[1]
    gram = other.T @ other + ridge * torch.eye(dim)
    result = torch.zeros(len(offsets) - 1, dim)
    for begin in range(0, len(result), BLOCK):
        remaining, right = torch.zeros(BLOCK, dim, dim), torch.zeros(BLOCK, dim)
        end = min(begin + BLOCK, len(result))
        for row in range(begin, end):
            taken = other[values[offsets[row] : offsets[row + 1]]]
            remaining[row - begin] = gram + confidence * taken.T @ taken
            right[row - begin] = (1 + confidence) * taken.sum(0)
        result[begin:end] = torch.linalg.solve(remaining[: end - begin], right[: end - begin])
    return result


def bpr(
    train: Ids, num_items: int, *, dim: int, lr: float, decay: float, epochs: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Vectors of users (U, dim) and items (I, dim) that minimise, over (user, taken item, item drawn from all),
    -log sigmoid(<u, i> - <u, j>) + decay (|u|^2 + |i|^2 + |j|^2)."""
    generator = torch.Generator().manual_seed(seed)
    users = torch.repeat_interleave(torch.arange(len(train.offsets) - 1), train.offsets.diff())
    tables = [
        (torch.randn(rows, dim, generator=generator) * 0.1).requires_grad_(True)
        for rows in (len(train.offsets) - 1, num_items)
    ]
    optimizer = torch.optim.Adam(tables, lr=lr)
    for _ in range(epochs):
        for chosen in torch.randperm(len(users), generator=generator).split(8192):
            drawn = torch.randint(num_items, (len(chosen),), generator=generator)
            u, i, j = tables[0][users[chosen]], tables[1][train.values[chosen]], tables[1][drawn]
            loss = -torch.nn.functional.logsigmoid((u * (i - j)).sum(1)).mean()
            loss = loss + decay * (u.square() + i.square() + j.square()).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return tables[0].detach(), tables[1].detach()


def score(source: Source, scores_of, k: int = 20) -> tuple[float, float]:
    """Return (recall@k, NDCG@k); `scores_of(users (B,)) -> (B, I)`."""
    recalls, gains = [], []
    for batch in source.batches(512):
        top = top_items(mask_items(scores_of(batch.group).clone(), batch.key.excluded), k)
        recall, gain = recall_and_ndcg(top, batch.key.truth, k)
        recalls.append(recall)
        gains.append(gain)
    return float(torch.cat(recalls).mean()), float(torch.cat(gains).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=["movielens_retrieval", "gowalla"])
    parser.add_argument("path")
    parser.add_argument("--dim", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--confidence", type=float, nargs="+", default=[2.0, 10.0])
    parser.add_argument("--regularisation", type=float, nargs="+", default=[10.0, 50.0])
    parser.add_argument("--sweeps", type=int, default=10)
    parser.add_argument("--decay", type=float, nargs="*", default=[1e-3, 3e-3])
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    splits = open_source(args.data, args.path)
    result = splits.train.found
    popularity = torch.bincount(result.train.values, minlength=result.num_items).double()
    _show(splits, "popularity", lambda users: popularity.expand(len(users), -1))
    for decay in args.decay:
        users, items = bpr(
            result.train, result.num_items, dim=64, lr=5e-3, decay=decay, epochs=args.epochs
        )
        name = f"BPR dim=64 lr=0.005 decay={decay:g} epochs={args.epochs}"
        _show(splits, name, lambda rows, u=users, i=items: u[rows] @ i.T)
    for dim in args.dim:
        for confidence in args.confidence:
            for ridge in args.regularisation:
                started = time.perf_counter()
                users, items = implicit_als(
                    result.train, result.num_items, dim=dim, confidence=confidence,
                    regularisation=ridge, sweeps=args.sweeps,
                )  # fmt: skip
                name = f"ALS dim={dim} confidence={confidence:g} regularisation={ridge:g}"
                name += f" ({time.perf_counter() - started:.0f} s)"
                _show(splits, name, lambda rows, u=users, i=items: u[rows] @ i.T)


def _show(splits, name: str, scores_of) -> None:
    parts = (("validation", splits.validation), ("test", splits.test))
    lines = []
    for part, source in parts:
        recall, gain = score(source, scores_of)
        lines.append(f"{part} recall@20 {recall:.4f} ndcg@20 {gain:.4f}")
    print(f"{name}: {', '.join(lines)}", flush=True)


if __name__ == "__main__":
    main()
