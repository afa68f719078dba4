"""Configuration lemmas: closed forms against a slow twin and a simulation, and what they must never advise."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.plan.advice import (
    MIN_NOISE_STEPS,
    BatchCost,
    GradientNoise,
    ScalingPoint,
    ServerDemand,
    average_noise,
    choose_num_servers,
    choose_scaling_point,
    count_skewed_servers,
    fit_batch_cost,
    limit_speedup,
    predict_speedup,
    solve_num_ranks,
    solve_overhead,
)

OVERHEADS = st.floats(1e-4, 10)
DEMAND = ServerDemand(
    compute_seconds=1.0, requested_rows=1e9, link_bytes=0.0, processor_seconds=0.0,
    row_bytes=0.0, link_bytes_per_second=1e9, memory_bytes=None,
)  # fmt: skip


def build_point(num_ranks: int, efficiency: float) -> ScalingPoint:
    return ScalingPoint(
        num_ranks=num_ranks, step_seconds=1.0, speedup=efficiency * num_ranks, efficiency=efficiency, limit=""
    )  # fmt: skip


def compute_step(num_ranks: int, overhead: float) -> float:
    """Slow twin: one rank computes for a second, and `overhead` seconds are never divided."""
    return 1 / num_ranks + overhead


@given(OVERHEADS, st.integers(2, 64))
@settings(max_examples=examples(40, 500), deadline=None)
def test_the_forms_invert_each_other(overhead, num_ranks):
    efficiency = compute_step(1, overhead) / compute_step(num_ranks, overhead) / num_ranks
    assert solve_overhead(efficiency, num_ranks) == pytest.approx(overhead, rel=1e-9)
    assert solve_num_ranks(efficiency, overhead) == pytest.approx(num_ranks, rel=1e-9)
    assert predict_speedup(overhead, num_ranks) == pytest.approx(efficiency * num_ranks, rel=1e-9)
    assert efficiency * num_ranks < limit_speedup(overhead)
    far = compute_step(1, overhead) / compute_step(10**12, overhead)
    assert limit_speedup(overhead) == pytest.approx(far, rel=1e-6)


def test_values_of_the_paper():
    assert solve_num_ranks(0.8, 0.05) == pytest.approx(6.25) and limit_speedup(0.05) == 21
    for efficiency, num_ranks, percent in (
        (0.8, 4, 9.09), (0.75, 4, 12.5), (0.9, 8, 1.61), (0.8, 64, 0.398)
    ):  # fmt: skip
        assert 100 * solve_overhead(efficiency, num_ranks) == pytest.approx(percent, rel=3e-3)


def test_corners_divide_by_nothing():
    assert solve_overhead(1.0, 4) == solve_overhead(1.2, 4) == 0
    assert limit_speedup(0.0) == solve_num_ranks(0.8, 0.0) == math.inf
    assert solve_overhead(0.25, 4) == solve_overhead(0.1, 4) == math.inf  # no faster than one rank
    assert limit_speedup(math.inf) == 1 and solve_num_ranks(0.5, math.inf) == 2
    assert fit_batch_cost((1, 1), (2.0, 2.0)) == BatchCost(fixed_seconds=2.0, sample_seconds=0.0)
    assert BatchCost(fixed_seconds=1.0, sample_seconds=0.0).best_batch(100.0) > 1e6


@given(
    st.lists(st.floats(0.01, 1.1), min_size=1, max_size=6), st.floats(0.01, 1), st.floats(0.01, 1)
)
@settings(max_examples=examples(60, 500), deadline=None)
def test_a_lower_efficiency_never_advises_fewer_ranks(efficiencies, first, second):
    curve = [build_point(2**n, e) for n, e in enumerate([1.0, *efficiencies])]
    low, high = sorted((first, second))
    low_point, high_point = (choose_scaling_point(curve, wanted) for wanted in (low, high))
    assert low_point.num_ranks >= high_point.num_ranks
    assert high_point is curve[0] or high_point.efficiency >= high


def simulate_servers(
    num_servers: int, num_workers: int, size: float, rate: float, compute_seconds: float
) -> float:
    """Return the mean seconds of a step if each worker gets `size` bytes of equal shards, which servers send one after
    the other, while it computes."""
    steps = 60
    free = [0.0] * num_servers
    start = [worker * compute_seconds / num_workers for worker in range(num_workers)]
    end = [0.0] * num_workers
    events = [(now, worker, 0) for worker, now in enumerate(start)]
    while events:
        now, worker, step = heapq.heappop(events)
        end[worker] = now
        if step == steps:
            continue
        for server in range(num_servers):
            free[server] = max(free[server], now) + size / num_servers / rate
        heapq.heappush(events, (max(now + compute_seconds, *free), worker, step + 1))
    return float(np.mean([(e - s) / steps for s, e in zip(start, end, strict=True)]))


@pytest.mark.parametrize(
    ("size", "num_workers", "rate", "seconds"),
    [(480e6, 8, 1.25e9, 1.0), (20e6, 3, 1e8, 0.25), (100e6, 5, 1.25e9, 0.3)],
)
def test_servers_are_hidden_from_the_advised_number_on(size, num_workers, rate, seconds):
    demand = replace(
        DEMAND, compute_seconds=seconds, link_bytes=size * num_workers, link_bytes_per_second=rate
    )
    assert simulate_servers(demand.count, num_workers, size, rate, seconds) < 1.02 * seconds
    fewer = demand.count - 1
    if fewer:
        slower = simulate_servers(fewer, num_workers, size, rate, seconds)
        assert slower == pytest.approx(seconds * demand.link / fewer, rel=0.02) and slower > seconds


@given(*[st.floats(0.0, 40)] * 3, st.floats(1.0, 100))
@settings(max_examples=examples(60, 500), deadline=None)
def test_faster_links_or_more_memory_never_advise_more_servers(link, processor, room, factor):
    demand = replace(
        DEMAND, link_bytes=link * 1e9, processor_seconds=processor,
        row_bytes=room * 1e6, memory_bytes=1_000_000, requested_rows=5000,
    )  # fmt: skip
    assert demand.count >= max(demand.link, demand.processor, demand.room)
    assert demand.count >= replace(demand, link_bytes_per_second=factor * 1e9).count
    assert demand.count >= replace(demand, memory_bytes=int(factor * 1e6)).count
    assert demand.count >= replace(demand, memory_bytes=None).count


@given(st.floats(0.1, 60), st.integers(100, 10**6))
@settings(max_examples=examples(60, 500), deadline=None)
def test_the_skewed_number_is_the_smallest(mean_servers, num_rows):
    """Slow twin: count up until the busiest server keeps up."""
    count = 1
    while count < mean_servers * (1 + 3 * math.sqrt((count - 1) / num_rows)) - 1e-9:
        count += 1
    assert count_skewed_servers(mean_servers, num_rows) == count


def test_the_busiest_of_hashed_servers_is_within_the_skew():
    random = np.random.default_rng(0)
    for num_rows, servers in ((2000, 3), (20000, 16)):
        draws = random.multinomial(num_rows, [1 / servers] * servers, size=300).max(1)
        skew = 1 + 3 * math.sqrt((servers - 1) / num_rows)
        assert np.mean(draws <= skew * num_rows / servers) > 0.95


def test_auto_servers_are_the_fewest_that_are_about_as_fast():
    assert choose_num_servers([1.0, 0.96, 0.97]) == 0
    assert choose_num_servers([1.0, 0.9, 0.86, 0.85]) == 2
    assert choose_num_servers([2.0, math.inf, 1.0]) == 2


@given(st.floats(1e-4, 1), st.floats(1e-7, 1e-3), st.floats(10, 1e5), st.floats(0.2, 5))
@settings(max_examples=examples(40, 500), deadline=None)
def test_no_batch_reaches_a_loss_sooner_than_the_advised(fixed, per_sample, noise, factor):
    cost = fit_batch_cost((100, 400), (fixed + 100 * per_sample, fixed + 400 * per_sample))
    best = cost.best_batch(noise)
    assert best == pytest.approx(math.sqrt(fixed * noise / per_sample), rel=1e-6)
    shortest = cost.relative_time(best, noise)
    assert shortest == pytest.approx((math.sqrt(fixed) + math.sqrt(per_sample * noise)) ** 2)
    assert shortest <= cost.relative_time(factor * best, noise) * (1 + 1e-9)


@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_noise_of_gradients_is_their_variance_over_their_square(num_parts):
    """Slow twin: the gradients of all samples, drawn with a known mean and variance."""
    random = np.random.default_rng(num_parts)
    noise = GradientNoise()
    batch_size = 64
    for _ in range(3000):
        gradients = 0.5 + 2 * random.normal(size=(batch_size, 20))
        parts = gradients.reshape(num_parts, -1, 20).sum(1) / batch_size
        noise.add_step(float((parts**2).sum()), float((parts.sum(0) ** 2).sum()), num_parts)
    samples = batch_size * noise.variance / noise.square
    assert samples == pytest.approx(20 * 4 / (20 * 0.25), rel=0.05)


def build_line(step: int, steps: int, variance: float, square: float) -> dict[str, float]:
    return {"step": step, "steps": steps, "variance": variance, "square": square}


def test_noise_is_averaged_over_the_newest_window():
    lines = [
        build_line(100, 100, 9e9, 1.0),
        build_line(140, 40, 600.0, 2.0),
        build_line(200, 60, 200.0, 6.0),
    ]
    noise = average_noise(lines)
    assert (noise.samples, noise.first_step, noise.last_step) == (100.0, 101, 200)
    assert average_noise(lines[1:]) == noise
    assert average_noise(lines[2:]) is None and average_noise([]) is None
    assert average_noise([build_line(100, MIN_NOISE_STEPS, 5.0, -1.0)]).samples is None
