"""Wall time of a `Predictor` call, which every answer of a server contains: lookups, dense network, objective."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from colonnade import Batch, Ids, Predictor, _native


def fixed_cost_ms(predictor: Predictor, batch: Batch, num_calls: int = 5000) -> dict[str, float]:
    """Time calls with the first sample of a batch, on one thread: best, median and 99th percentile in ms."""
    return time_calls(predictor, cut_batch(batch, 1), num_calls)


def time_calls(predictor: Predictor, batch: Batch, num_calls: int) -> dict[str, float]:
    """Time calls with a batch, on one thread: best, median and 99th percentile in ms. A tenth more calls come first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _native.set_num_threads(1)
    try:
        seconds = []
        for call in range(-max(20, num_calls // 10), num_calls):
            began = time.perf_counter()
            predictor(batch)
            if call >= 0:
                seconds.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
        _native.set_num_threads(0)
    ordered = sorted(1e3 * second for second in seconds)
    return {
        "best": ordered[0],
        "median": statistics.median(ordered),
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
    }


def cut_batch(batch: Batch, size: int) -> Batch:
    """Return the first samples of a batch whose features have one id per sample."""
    ids = {name: Ids(ids.values[:size].clone()) for name, ids in batch.ids.items()}
    return replace(batch, size=size, dense=batch.dense[:size].clone(), ids=ids, label=None)
