"""SASRec by default settings beside SASRec in plain torch, of the same size, on the same split, masks and metrics.

The plain one is what a user writes: padded sequences, learned positions, torch's transformer layer, Adam for all
weights, cross entropy over all items (`softmax`) or of the item against one drawn item (`pairs`, as published).

Legend: B sequences, L positions, I items, D dim.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import BenchError, Measured, say
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade import Mesh
from colonnade.batch import Ids
from colonnade.config.run import RunConfig, override_settings
from colonnade.data import Splits, open_source
from colonnade.data.interactions.samples import concat_bags
from colonnade.run.defaults import get_preset
from colonnade.run.run import open_run
from workers.own_ranking import measure_scores

CASE = "ml-1m sequences"
METRIC = "hit_rate@10"
EPOCHS = 10
"""Number of epochs whose time is taken, without evaluation."""
UNTIL = 30
"""Number of epochs of the plain model, of which the best one in validation counts."""


class PlainSASRec(nn.Module):
    """SASRec of torch's layers. Item 0 pads; item i of the catalogue is i + 1."""

    def __init__(self, num_items: int, config: RunConfig) -> None:
        super().__init__()
        model = config.model
        dim, self.length = model.dim or 64, model.max_length or 50
        self.items = nn.Embedding(num_items + 1, dim, padding_idx=0)
        nn.init.normal_(self.items.weight, std=0.05)
        self.places = nn.Embedding(self.length, dim)
        nn.init.normal_(self.places.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            dim, 1, 4 * dim, model.dropout or 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, model.blocks or 1, nn.LayerNorm(dim), enable_nested_tensor=False
        )

    def forward(self, history: Tensor) -> Tensor:
        """Predict the next item's vector at each position: (B, L) -> (B, L, D)."""
        positions = torch.arange(history.shape[1])
        later = nn.Transformer.generate_square_subsequent_mask(len(positions))
        x = self.items(history) + self.places(positions)
        return self.layers(x, mask=later, is_causal=True)


def pad_newest(bags: Ids, users: Tensor, length: int) -> Tensor:
    """Return the last `length` items of each user's bag (B, length), with 0 after them."""
    assert bags.offsets is not None
    ends = bags.offsets[users + 1]
    starts = torch.maximum(bags.offsets[users], ends - length)
    places = starts[:, None] + torch.arange(length)
    is_item = places < ends[:, None]
    items = bags.values[places.clamp(max=len(bags.values) - 1)].long()
    return torch.where(is_item, items + 1, 0)


def train_epoch(
    model: PlainSASRec, optimizer: torch.optim.Optimizer, train: Ids, loss: str, batch_size: int
) -> None:
    """Train on all users in a new order."""
    users = (train.counts >= 2).nonzero()[:, 0]
    model.train()
    for chosen in users[torch.randperm(len(users))].split(batch_size):
        sequence = pad_newest(train, chosen, model.length + 1)
        target = sequence[:, 1:]
        is_target = target > 0
        vectors = model(sequence[:, :-1])[is_target]
        target = target[is_target]
        if loss == "softmax":
            value = F.cross_entropy(vectors @ model.items.weight[1:].T, target - 1)
        else:
            drawn = torch.randint(1, model.items.num_embeddings, target.shape)
            right, wrong = ((vectors * model.items(one)).sum(1) for one in (target, drawn))
            value = F.softplus(-right).mean() + F.softplus(wrong).mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


def score_next(model: PlainSASRec, bags: Ids, users: Tensor) -> np.ndarray:
    """Score all items as the next one of each user (B, I)."""
    model.eval()
    with torch.no_grad():
        history = pad_newest(bags, users, model.length)
        last = (history > 0).sum(1).clamp(min=1) - 1
        vectors = model(history)[torch.arange(len(users)), last]
        return (vectors @ model.items.weight[1:].T).numpy()


def open_config(path: Path, seed: int) -> RunConfig:
    settings: dict[str, object] = {"data.path": str(path), "data.options.order": "file"}
    settings |= {"train.threads": 1, "train.seed": seed}
    return override_settings(get_preset("interactions", "sasrec"), settings)


def train_sasrec(config: RunConfig) -> float:
    """Return the test metric of Colonnade's model."""
    run = open_run(config, Mesh(), None, console=Console(quiet=True))
    try:
        return run.train().metrics[f"test_{METRIC}"]
    finally:
        run.close()


def time_sasrec(config: RunConfig) -> float:
    """Return the processor seconds of EPOCHS epochs, without evaluation, as of the plain model."""
    settings = {"train.epochs": EPOCHS, "train.patience": 0}
    run = open_run(override_settings(config, settings), Mesh(), None, console=Console(quiet=True))
    run.trainer.data = replace(run.trainer.data, validation=None, test=None)
    try:
        begin = time.process_time()
        run.train()
        return time.process_time() - begin
    finally:
        run.close()


def open_plain(
    path: Path, config: RunConfig, seed: int
) -> tuple[PlainSASRec, torch.optim.Optimizer, Splits]:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    splits = open_source("interactions", path, **config.data.options)
    model = PlainSASRec(splits.train.interactions.num_items, config)  # type: ignore[attr-defined]
    return model, torch.optim.Adam(model.parameters(), 1e-3), splits


def train_plain(path: Path, config: RunConfig, loss: str, seed: int) -> float:
    """Return the test metric of the epoch that is best in validation."""
    model, optimizer, splits = open_plain(path, config, seed)
    assert splits.validation is not None and splits.test is not None
    split = splits.train.interactions  # type: ignore[attr-defined]
    past = concat_bags(split.train, split.validation)
    best, result = -1.0, 0.0
    for _ in range(UNTIL):
        train_epoch(model, optimizer, split.train, loss, config.train.samples_per_step)
        scores = measure_scores(splits.validation, partial(score_next, model, split.train))
        if scores["ndcg@20"] > best:
            best = scores["ndcg@20"]
            result = measure_scores(splits.test, partial(score_next, model, past))[METRIC]
    return result


def time_plain(path: Path, config: RunConfig, loss: str, seed: int) -> float:
    """Return the processor seconds of EPOCHS epochs."""
    model, optimizer, splits = open_plain(path, config, seed)
    train = splits.train.interactions.train  # type: ignore[attr-defined]
    begin = time.process_time()
    for _ in range(EPOCHS):
        train_epoch(model, optimizer, train, loss, config.train.samples_per_step)
    return time.process_time() - begin


def measure_all(folder: Path, num_seeds: int, unit: str) -> list[Measured]:
    """Measure each model with each seed: METRIC, or seconds ("s"). Raises BenchError without MovieLens-1M."""
    path = folder / "ml-1m" / "ratings.parquet"
    if not path.exists():
        raise BenchError(f"{path} is absent; set COLONNADE_DATA to the folder that holds it")
    own, plain = (time_sasrec, time_plain) if unit == "s" else (train_sasrec, train_plain)
    results: dict[str, list[float]] = {}
    for seed in range(num_seeds):
        config = open_config(path, seed)
        runs = {"sasrec": partial(own, config)}
        for loss in ("softmax", "pairs"):
            runs[f"torch {loss}"] = partial(plain, path, config, loss, seed)
        for system, run in runs.items():
            results.setdefault(system, []).append(run())
            say(f"{CASE}, seed {seed}, {system}: {results[system][-1]:.4f} {unit}")
    return [Measured(CASE, system, unit, x) for system, x in results.items()]


def measure_sequences(folder: Path, num_seeds: int) -> list[Measured]:
    return measure_all(folder, num_seeds, METRIC)


def measure_sequence_seconds(folder: Path, num_seeds: int) -> list[Measured]:
    return measure_all(folder, num_seeds, "s")


def compute_sequence_ratios(measured: list[Measured]) -> dict[str, float]:
    """Compare with the plain model that ranks best."""
    means = {(m.system, m.unit): float(np.mean(m.values)) for m in measured if m.case == CASE}
    plain = [system for system, unit in means if system != "sasrec" and unit == METRIC]
    if not plain:
        return {}
    best = max(plain, key=lambda system: means[system, METRIC])
    ratios = {"sasrec_vs_torch_hr10": means["sasrec", METRIC] / means[best, METRIC]}
    if (best, "s") in means:
        ratios["sasrec_time_of_torch"] = means["sasrec", "s"] / means[best, "s"]
    return ratios
