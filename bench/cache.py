"""Bytes that caches of rows save, compared with the best possible cache, and their speed.

Minutes: 20 (quick 1).

8 ranks, simulated in one process by the order of their batches: who has which row is decided by that order alone, so
bytes are counted, not measured. workers/cache_traffic.py says how; fp32, payload of ids, rows and gradients.

    row_clock   staleness s = 10 and 100, by policy, caches of 3, 10, 15 and 100 % of the rows on each rank
    optimum     Belady's choice with the whole future, under the same bounds: what a cache of that size can save
    HET         its protocol with light LFU, as published

Streams: 26 lookups a sample, 128 and 2048 samples a batch, Zipf 1.05 and shaped like Criteo. The first half of each
fills the caches and is not counted. `lookahead` sees as many batches as use `WINDOW_TURNS` times the rows of the cache,
which is what `plan.cache.window` is to be.

Then how fast one rank's cache is: workers/cache_rate.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from statistics import fmean

import torch
from harness import (
    describe_machine,
    open_parser,
    others_share,
    print_machine,
    read_cpu_seconds,
    report,
)
from rich.console import Console
from tables.cache import (
    DIMS,
    HET,
    HET_POLICY,
    OPTIMUM,
    OURS,
    PREDICTED,
    Figures,
    Point,
    print_figures,
    print_ratios,
    ratios_of,
)
from workers.cache_rate import measure
from workers.cache_streams import FIELDS, Shape, Stream, open_stream
from workers.cache_traffic import (
    NextUses,
    Policy,
    Traffic,
    foreseen,
    het,
    open_directory,
    predict_payload,
    row_clock,
)

import colonnade
from colonnade.cache.directory import HIT, UNBOUNDED

SHAPES = (
    Shape("zipf", 128, 100_000, warm=300, measured=180, tail=120),
    Shape("criteo", 128, 20_000, warm=300, measured=180, tail=120),
    Shape("zipf", 2048, 400_000, warm=60, measured=36, tail=40),
    Shape("criteo", 2048, 60_000, warm=60, measured=36, tail=40),
)
QUICK_SHAPES = (
    Shape("zipf", 32, 20_000, warm=60, measured=36, tail=24),
    Shape("criteo", 32, 2_000, warm=60, measured=36, tail=24),
)
SHARES = (0.03, 0.1, 0.15, 1.0)
WINDOW_TURNS = 12
CHANGES = (Shape("zipf", 128, 100_000, 150, 50, 0), Shape("zipf", 2048, 400_000, 60, 40, 0))
QUICK_CHANGES = (Shape("zipf", 32, 20_000, 100, 40, 0),)
RECOVERED = 0.95
"""Part of the earlier hit rate."""
KEYS = (128 * FIELDS, 2048 * FIELDS)
RATE_POLICY = "lfu"
ROUNDS, QUICK_ROUNDS = 15, 3
BLOCK_KEYS = 400_000
WIDTH = 168


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "small streams: to try")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=max(WIDTH, Console().width))
    before = read_cpu_seconds()
    torch.set_num_threads(os.cpu_count() or 1)

    figures = Figures()
    for dim in DIMS:
        for keys in KEYS:
            steps = max(2, BLOCK_KEYS // keys) if not options.quick else 2
            rounds = QUICK_ROUNDS if options.quick else ROUNDS
            figures.seconds[dim, keys] = measure(dim, keys, RATE_POLICY, rounds=rounds, steps=steps)
    for shape in QUICK_CHANGES if options.quick else CHANGES:
        count_recovery(shape, figures)
    for shape in QUICK_SHAPES if options.quick else SHAPES:
        stream = open_stream(shape)
        count_traffic(stream, stream.next_uses(), figures)

    ratios = ratios_of(figures)
    result = report(
        "cache",
        version=colonnade.__version__,
        machine=describe_machine(
            threads=torch.get_num_threads(), others_share=round(others_share(before), 2),
            versions={"colonnade": colonnade.__version__, "torch": torch.__version__},
        ),
        measured=figures.measured(),
        ratios=ratios,
        path=options.json,
    )  # fmt: skip
    print_figures(console, figures)
    print_ratios(console, ratios)
    print_machine(console, result)


def count_traffic(stream: Stream, next_uses: NextUses, to: Figures) -> None:
    shape = stream.shape

    def add(share: float, staleness: int, system: str, traffic: Traffic) -> Point:
        point = Point(shape.name, f"{shape.batch_size}x{FIELDS}", share, staleness)
        for dim in DIMS:
            to.saved[point, dim, system] = traffic.saved(dim)
        return point

    used = fmean(len(ids) for batches in stream.batches for ids in batches)
    for share in SHARES:
        capacity = int(share * stream.num_rows)
        window = math.ceil(WINDOW_TURNS * capacity / used)
        policies = {
            "lru": Policy("lru"),
            "lfu": Policy("lfu"),
            HET_POLICY: Policy(HET_POLICY),
            OURS: Policy("lookahead", window),
            OPTIMUM: Policy("lookahead"),
        }
        for staleness in (10, 100):
            for system, policy in policies.items():
                if share < 1 or system == "lru":  # who leaves where nobody has to?
                    counted = row_clock(stream, next_uses, policy, capacity, staleness)
                    point = add(share, staleness, system, counted)
                    if system in PREDICTED:
                        for dim in DIMS:
                            size = predict_payload(stream, policy, capacity, staleness, dim)
                            to.predicted[point, dim, system] = size / counted.payload(dim)
            add(share, staleness, HET, het(stream, policies[HET_POLICY], capacity, staleness))
            if share < 1:
                to.windows[point] = window


def count_recovery(shape: Shape, to: Figures) -> None:
    """One rank; after `shape.warm` batches other rows are popular."""
    stream = open_stream(shape, shift_at=shape.warm, num_ranks=1)
    batches = [ids for [ids] in stream.batches]
    capacity = shape.rows // 10
    window = math.ceil(WINDOW_TURNS * capacity / fmean(map(len, batches)))
    for name in ("lru", "lfu", HET_POLICY, OURS):
        directory = open_directory(name, capacity, UNBOUNDED, UNBOUNDED, stream.num_rows)
        hits = []
        for ids, text in zip(batches, foreseen(batches, window), strict=True):
            if name == OURS:
                decision = directory.decide_batch(ids, text.next_uses, text.coming, window)
            else:
                decision = directory.decide_batch(ids)
            hits.append(float((decision.outcomes == HIT).mean()))
        enough = RECOVERED * fmean(hits[shape.warm - 10 : shape.warm])
        after = (n for n, share in enumerate(hits[shape.warm :]) if share >= enough)
        to.recovery[f"{shape.batch_size}x{FIELDS}", name] = next(after, None)


if __name__ == "__main__":
    main()
