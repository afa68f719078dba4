"""One plan of `bench quality`, suite cache, trained by Colonnade on a mesh: its own rows, exchange and consistency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from colonnade import (
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    PlanConfig,
    RowOptimizer,
    Table,
    Uniform,
    build_plan,
)
from colonnade.comm.mesh import Mesh
from colonnade.config.plan import CacheConfig
from colonnade.data.contract import rank_block
from colonnade.train.dense import DenseGradients
from workers.staleness_model import (
    DIM,
    INIT_SCALE,
    PER_RANK,
    RANKS,
    Curve,
    Data,
    Learning,
    Samples,
    System,
    Trained,
    build_network,
)

ROWS, POLICY = "rows", "lfu"


def open_rows(data: Data, learning: Learning, system: System, mesh: Mesh) -> EmbeddingCollection:
    """Open the table on the mesh, as the system reads it. Collective."""
    table = Table(
        ROWS, DIM + 1, rows=data.num_rows, optimizer=learning.rule,
        initializer=Uniform(scale=INIT_SCALE), dtype=learning.dtype,
    )  # fmt: skip
    looked_up = Feature("ids", ROWS, pooling="sequence")
    collection = EmbeddingCollection([table], [looked_up], seed=learning.seed)
    cache = None
    if system.clock is not None:
        cache = CacheConfig(
            size=capacity(data, system), policy=POLICY,
            read_bound=system.clock.read_bound, write_bound=system.clock.write_bound,
            write_share=system.clock.write_share, step_bound=system.clock.step_bound,
        )  # fmt: skip
    plan = build_plan(
        [table],
        mesh.num_ranks,
        PlanConfig(staleness_steps=system.late, cache=cache),
    )
    return collection.open(plan, mesh)


def capacity(data: Data, system: System) -> int:
    """Rows that each rank keeps copies of."""
    return int(system.cached_share * data.num_rows)


def train(
    data: Data,
    learning: Learning,
    system: System,
    mesh: Mesh,
    test: Sequence[Samples],
    *,
    num_scored: int = 1,
    keeps_logits: bool = False,
) -> Trained:
    """Train on global batches of RANKS x PER_RANK samples, whatever the number of ranks; each rank scores all of
    `test`, num_scored times."""
    network, optimizer = build_network(data, learning)
    collection = open_rows(data, learning, system, mesh)
    rows, dense = RowOptimizer(collection), DenseGradients(list(network.parameters()), mesh)
    dense.build_buckets()
    dtype = getattr(torch, learning.dtype)

    def batches() -> Iterator[Batch]:
        for samples in data.training(learning, RANKS * PER_RANK):
            begin, end = rank_block(len(samples), mesh.rank, mesh.num_ranks)
            yield as_batch(samples[begin:end])

    def logits_of(batch: Batch) -> Tensor:
        read = collection(batch)["ids"].view(batch.size, -1, DIM + 1)
        return network(read, batch.dense.to(dtype))

    def score() -> Tensor:
        collection.eval()
        with rows.synchronized_view(), torch.no_grad():
            scores = torch.cat([logits_of(as_batch(samples)).flatten() for samples in test])
        collection.train()
        return scores

    retained, curve = [], Curve(data, learning, test, num_scored)
    for step, batch in enumerate(collection.lookahead(batches()), 1):
        dense.zero_gradients()
        logits = logits_of(batch)
        assert batch.label is not None
        loss = cross_entropy(logits, batch.label.to(dtype), reduction="sum") / batch.world_weight
        loss.backward()
        collection.pipeline.send_gradients()
        dense.reduce(finite=True, stop=False)
        rows.step(agreed=True)
        optimizer.step()
        if keeps_logits:
            text = mesh.all_gather_bytes("gather", logits.detach().numpy().tobytes())
            retained.append(torch.frombuffer(bytearray(b"".join(text)), dtype=dtype))
        curve.score_if_due(step, score)
    facts = {"updates missed": fmean(collection.pipeline.missed.elements())}
    return Trained(score(), retained, facts, curve.aucs)


def as_batch(samples: Samples) -> Batch:
    size, num_fields = samples.ids.shape
    offsets = torch.arange(0, (size + 1) * num_fields, num_fields)
    return Batch(
        size=size,
        dense=samples.dense,
        ids={"ids": Ids(samples.ids.flatten(), offsets)},
        label=samples.label,
    )
