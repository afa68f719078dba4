"""A steady step allocates nothing large: what it makes anew lies in memory that the step before has given back."""

from __future__ import annotations

import itertools
import resource
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from ranks import preloaded_context
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from colonnade import Adagrad, Batch, Feature, Ids, RowOptimizer, Table
from colonnade.models.dlrm import DLRM

SAMPLES, FIELDS, ROWS, NUM_DENSE = 2048, 26, 1000, 13
WARM_UP, STEPS = 12, 16
PAGE_BYTES = resource.getpagesize()


def batches(bags: bool):
    random = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = {}
        for f in range(FIELDS):
            count = SAMPLES * (3 if bags else 1)
            values = torch.randint(0, ROWS, (count,), generator=random)
            ids[f"f{f}"] = Ids(values, torch.arange(0, count + 1, 3) if bags else None)
        dense = torch.randn(SAMPLES, NUM_DENSE, generator=random)
        label = (torch.rand(SAMPLES, 1, generator=random) < 0.3).float()
        yield Batch(SAMPLES, dense, ids, label)


def fresh_pages(dim: int, bags: bool, rows: int | None) -> int:
    """The median over steady steps of the pages that a step was given anew."""
    tables = [Table(f"f{f}", dim, rows=rows, optimizer=Adagrad(lr=0.1)) for f in range(FIELDS)]
    model = DLRM(tables, [Feature(t.name, t.name) for t in tables], num_dense=NUM_DENSE)
    sparse, dense = RowOptimizer(model.embeddings), torch.optim.Adam(model.parameters(), fused=True)
    ready = model.embeddings.lookahead(itertools.cycle(list(batches(bags))))
    faults = []
    for step in range(WARM_UP + STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        batch = next(ready)
        dense.zero_grad()
        bce(model(batch), batch.label).backward()
        sparse.step()
        dense.step()
        if step >= WARM_UP:
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    ready.close()
    return sorted(faults)[len(faults) // 2]


CASES = [(dim, bags, rows) for dim in (16, 64) for bags in (False, True) for rows in (ROWS, None)]
TYPICAL = {(16, False, None), (64, True, ROWS)}
"""Every value of the three settings; the other cases are slow."""


@pytest.mark.parametrize(
    ("dim", "bags", "rows"),
    [pytest.param(*case, marks=() if case in TYPICAL else pytest.mark.slow) for case in CASES],
)
def test_no_fresh_pages(dim, bags, rows):
    """Fresh pages are what a large allocation costs.

    Counted in a process of its own, as training is: a heap that a thousand tests have left in pieces gives
    a megabyte a step back and takes it again.
    """
    with ProcessPoolExecutor(1, preloaded_context()) as alone:
        steady = alone.submit(fresh_pages, dim, bags, rows).result()
    outputs = SAMPLES * FIELDS * dim * 4 // PAGE_BYTES
    assert steady * 20 < outputs, f"{steady} fresh pages a step, the outputs are {outputs}"
