"""Arms of `bench quality`, suite workers: a model, trained on a stream of ads by steps in turn or by workers that race.

Every eighth block of 4,096 samples is never trained, but scored when as many samples have been trained as precede it
outside such blocks; the tail's blocks, after the last trained one, are scored at the end. Asynchronous workers of a
parameter server are simulated: each computes on rows and dense weights as they were when it began with its batch, and
takes log-normal time. So W - 1 updates are missed on the mean, in rows and dense weights.

Legend: W workers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from colonnade import Adagrad, Batch, Feature, PlanConfig, RowOptimizer, Table, Uniform, build_plan
from colonnade.comm.mesh import Mesh
from colonnade.embedding import EmbeddingCollection
from colonnade.models.linear import LR, DeepFM, WideDeep
from colonnade.models.split import Scorer
from colonnade.pipeline.prepared_batches import as_prepared
from colonnade.train.metrics import auc
from workers.ads import FIELDS, Ads, open_ads
from workers.quality_case import Run

DIM, TOP = 8, (64, 32)
DENSE_LR = 1e-3
BLOCK = 4096
"""Samples that are trained or scored together, whoever trains them in how many batches."""
SCORED_EVERY = 8
"""The last of so many blocks is never trained, and scored when as many samples as lie before it have been."""
SPREAD = 0.3
"""Standard deviation of the logarithm of the time that a worker takes for a batch."""


PILOT_SEED, PILOT_BLOCKS = 1000, 96


@dataclass(frozen=True)
class Order:
    """Order of updates and reads. workers: number of asynchronous workers, each with rows and dense weights as they
    were when it began; 0: steps in turn."""

    batch_size: int = BLOCK
    workers: int = 0


@dataclass
class Scores:
    """One number for each scored block; `missed`: how many updates so many batches did not see."""

    auc: list[float] = field(default_factory=list)
    log_loss: list[float] = field(default_factory=list)
    tail_auc: list[float] = field(default_factory=list)
    missed: Counter[int] = field(default_factory=Counter)


def build(kind: str, lr: float, dtype: str = "float32") -> Scorer:
    """Build LR, Wide & Deep or DeepFM over open tables, with the same weights at every call."""
    names = [f"A{f + 1}" for f in range(FIELDS)]
    features = [Feature(name, name) for name in names]
    optimizer, initializer = Adagrad(lr=lr), Uniform(scale=0.01)
    torch.manual_seed(0)
    if kind == "lr":
        tables = [
            Table(name, 1, optimizer=optimizer, initializer=initializer, dtype=dtype)
            for name in names
        ]
        return LR(tables, features, num_dense=0)
    optimizers = {"deep": optimizer, "wide": optimizer}
    tables = [
        Table(name, {"deep": DIM, "wide": 1}, optimizer=optimizers, initializer=initializer, dtype=dtype)
        for name in names
    ]  # fmt: skip
    model = {"wide_deep": WideDeep, "deepfm": DeepFM}[kind]
    return model(tables, features, num_dense=0, top=TOP)


def train(
    kind: str,
    order: Order,
    stream: Ads,
    num_blocks: int,
    *,
    lr: float,
    tail_blocks: int,
    seed: int = 0,
) -> Scores:
    """The first `num_blocks` blocks of the stream are trained or scored, and those behind them scored at the end."""
    model, scores = build(kind, lr), Scores()
    collection = model.embeddings
    # Workers that race fetch by hand; what they read must be copied, as under staleness.
    plan = build_plan(
        collection.tables, 1, PlanConfig(lookahead=0, staleness_steps=int(order.workers > 0))
    )
    collection.open(plan, Mesh())
    rows, dense = RowOptimizer(collection), torch.optim.Adam(model.parameters(), lr=DENSE_LR)
    batches = training_batches(stream, order.batch_size, num_blocks)
    done = 0

    def apply(batch: Batch) -> None:
        """Gradients at what the model reads now; the caller has seen to what that is."""
        dense.zero_grad()
        cross_entropy(model(batch), batch.label).backward()

    def step(size: int) -> None:
        nonlocal done
        rows.step()
        dense.step()
        before, done = done, done + size
        run = (SCORED_EVERY - 1) * BLOCK
        for number in range(before // run, done // run):
            block = number * SCORED_EVERY + SCORED_EVERY - 1
            if block < num_blocks:
                add_score(model, stream, block, scores.auc, scores.log_loss)

    if order.workers:
        _race(model, collection, batches, order.workers, seed, apply, step, scores.missed)
    else:
        for batch in collection.lookahead(batches):
            scores.missed[0] += 1
            apply(batch)
            step(batch.size)
    for block in range(num_blocks, num_blocks + tail_blocks):
        add_score(model, stream, block, scores.tail_auc)
    return scores


def train_order(kind: str, order: Order, run: Run) -> dict[str, list[float]]:
    """Train a model on run.samples samples of ads, scored blocks included, and score a tail of an eighth behind them.

    A pilot is on fewer samples of another stream; its AUC is that of the second half."""
    num_blocks = run.samples // BLOCK
    if run.is_pilot:
        num_blocks = min(num_blocks, PILOT_BLOCKS)
        stream = open_ads(num_blocks * BLOCK, seed=PILOT_SEED)
        aucs = train(kind, order, stream, num_blocks, lr=run.lr, tail_blocks=0).auc
        return {"AUC": aucs[len(aucs) // 2 :]}
    tail_blocks = num_blocks // 8
    stream = open_ads((num_blocks + tail_blocks) * BLOCK, seed=run.seed)
    scores = train(
        kind, order, stream, num_blocks, lr=run.lr, tail_blocks=tail_blocks, seed=run.seed
    )
    scored = range(SCORED_EVERY - 1, num_blocks, SCORED_EVERY)
    batches = (stream.read(block * BLOCK, (block + 1) * BLOCK) for block in scored)
    return {
        "AUC": scores.auc,
        "AUC, second half": scores.auc[len(scores.auc) // 2 :],
        "AUC of the tail": scores.tail_auc,
        "log loss": scores.log_loss,
        "updates missed": [fmean(scores.missed.elements())],
        "ceiling": [fmean(auc(batch.key, batch.label) for batch in batches)],
    }


def _race(
    model: Scorer,
    collection: EmbeddingCollection,
    batches: Iterator[Batch],
    num_workers: int,
    seed: int,
    gradients: Callable[[Batch], None],
    step: Callable[[int], None],
    missed: Counter[int],
) -> None:
    """W workers of a parameter server, one event after another: who finishes applies its gradients to what is there
    now, takes the next batch, and reads its rows and the dense weights as they then are."""
    random, parameters = np.random.default_rng(seed), list(model.parameters())
    at_work: list[tuple[float, int, Batch, list[Tensor], int]] = []
    started = applied = 0

    def begin(now: float) -> None:
        nonlocal started
        batch = next(batches, None)
        if batch is None:
            return
        batch = as_prepared(batch)
        batch.context = collection.pipeline.prepare_batch(batch)
        collection.pipeline.fetch_rows(batch.context)
        ends = now + float(np.exp(SPREAD * random.standard_normal()))
        stored = [p.data.clone() for p in parameters]
        heapq.heappush(at_work, (ends, started, batch, stored, applied))
        started += 1

    for _ in range(num_workers):
        begin(0.0)
    while at_work:
        now, _, batch, stored, output = heapq.heappop(at_work)
        newest = [p.data for p in parameters]
        for p, was in zip(parameters, stored, strict=True):
            p.data = was
        gradients(batch)
        for p, new in zip(parameters, newest, strict=True):
            p.data = new
        missed[applied - output] += 1
        applied += 1
        step(batch.size)
        begin(now)


def training_batches(stream: Ads, batch_size: int, num_blocks: int) -> Iterator[Batch]:
    """Yield the batches of all blocks that are not scored."""
    for block in range(num_blocks):
        if block % SCORED_EVERY != SCORED_EVERY - 1:
            for begin in range(block * BLOCK, (block + 1) * BLOCK, batch_size):
                yield stream.read(begin, begin + batch_size)


@torch.no_grad()
def add_score(
    model: Scorer, stream: Ads, block: int, aucs: list[float], losses: list[float] | None = None
) -> None:
    """Score with every update made so far."""
    batch = stream.read(block * BLOCK, (block + 1) * BLOCK)
    model.eval()
    result = torch.sigmoid(model(batch).double())
    model.train()
    aucs.append(auc(result, batch.label))
    if losses is not None:
        losses.append(float(binary_cross_entropy(result, batch.label.double())))
