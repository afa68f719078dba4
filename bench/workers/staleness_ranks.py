"""One system of `bench quality_staleness`, trained by Colonnade on a mesh: its own rows, exchange and consistency.

Under torchrun: a few steps of every kind of system in float64, left in a file, for comparison with what one process
makes of the same global batches.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
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
    close_mesh,
    open_mesh,
)
from colonnade.comm.mesh import Mesh
from colonnade.config.plan import CacheConfig
from colonnade.data.contract import rank_block
from colonnade.staleness import row_clock
from colonnade.train.dense import DenseGradients
from workers.staleness_model import (
    DIM,
    INIT_SCALE,
    PER_RANK,
    RANKS,
    Data,
    Learning,
    Samples,
    System,
    Trained,
    build_network,
    open_stream,
)

ROWS, POLICY = "rows", "lfu"
WORLD = (
    System("synchronous"),
    System("bounded(4)", late=4),
    System("row_clock(7)", clock=row_clock(7)),
    System("row_clock(60), all kept", clock=row_clock(60), cached_share=1.0),
)
"""Systems that are trained both ways: leases end, sums are sent when due and as rows are driven out."""
WORLD_STEPS = 60
WORLD_LEARNING = (
    Learning("adagrad", 0.1, dtype="float64"),
    Learning("sgd", 1.0, dtype="float64"),
)


def world_data() -> Data:
    return open_stream(WORLD_STEPS * RANKS * PER_RANK, 2_000, max_cardinality=300)


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
    test: Iterable[Samples],
    *,
    num_steps: int | None = None,
    keeps_logits: bool = False,
) -> Trained:
    """Train on global batches of RANKS x PER_RANK samples, whatever the number of ranks; each rank scores all of
    `test`."""
    began, (network, optimizer) = time.perf_counter(), build_network(data, learning)
    collection = open_rows(data, learning, system, mesh)
    rows, dense = RowOptimizer(collection), DenseGradients(list(network.parameters()), mesh)
    dense.build_buckets()
    dtype = getattr(torch, learning.dtype)

    def batches() -> Iterator[Batch]:
        for samples in data.training(learning, RANKS * PER_RANK, num_steps):
            begin, end = rank_block(len(samples), mesh.rank, mesh.num_ranks)
            yield as_batch(samples[begin:end])

    def logits_of(batch: Batch) -> Tensor:
        read = collection(batch)["ids"].view(batch.size, -1, DIM + 1)
        return network(read, batch.dense.to(dtype))

    retained, steps = [], 0
    for batch in collection.lookahead(batches()):
        dense.zero_gradients()
        logits = logits_of(batch)
        assert batch.label is not None
        loss = cross_entropy(logits, batch.label.to(dtype), reduction="sum") / batch.world_weight
        loss.backward()
        collection.pipeline.send_gradients()
        dense.reduce(finite=True, stop=False)
        rows.step(agreed=True)
        optimizer.step()
        steps += 1
        if keeps_logits:
            text = mesh.all_gather_bytes("gather", logits.detach().numpy().tobytes())
            retained.append(torch.frombuffer(bytearray(b"".join(text)), dtype=dtype))
    collection.eval()
    with rows.synchronized_view(), torch.no_grad():
        scores = torch.cat([logits_of(as_batch(samples)).flatten() for samples in test])
    seconds = time.perf_counter() - began
    facts = {
        "updates missed": fmean(collection.pipeline.missed.elements()),
        "samples/s": steps * RANKS * PER_RANK / seconds,
    }
    return Trained(scores, retained, facts)


def as_batch(samples: Samples) -> Batch:
    size, num_fields = samples.ids.shape
    offsets = torch.arange(0, (size + 1) * num_fields, num_fields)
    return Batch(
        size=size,
        dense=samples.dense,
        ids={"ids": Ids(samples.ids.flatten(), offsets)},
        label=samples.label,
    )


def main(path: Path) -> None:
    torch.set_num_threads(1)
    mesh, data = open_mesh(), world_data()
    assert data.splits.test is not None
    test, results = list(data.scored(data.splits.test)), {}
    for learning in WORLD_LEARNING:
        for system in WORLD:
            done = train(data, learning, system, mesh, test, keeps_logits=True)
            results[f"{learning.optimizer} {system.name}"] = torch.cat([*done.logits, done.scores])
    if mesh.rank == 0:
        torch.save(results, path)
        print(json.dumps({"ranks": mesh.num_ranks}), flush=True)
    close_mesh(mesh)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
