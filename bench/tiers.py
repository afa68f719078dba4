"""Tables larger than memory: how much of all-in-memory speed is left, what bounds it, and what would be best?

A DLRM's embeddings over Criteo-shaped ids (the 26 real cardinalities, 33.8 million rows, skew 1.1 and a heavy tail
0.95), row-wise Adagrad, batch 4096. Memory for rows is 1/2 .. 1/16 of what all take, the others are on disk; every
system runs in a memory cgroup of its own (budget and `ALLOWANCE_BYTES`).

    colonnade    all in memory, and at each budget; with its dense network and without
    rocksdict    RocksDB under the same loop of lookup, Adagrad and write-back; no network
    mapped       the table as one memory-mapped file under that loop; no network
    tier_device  the device alone; tier_policies: how many rows LRU, LFU, lookahead and Belady would read
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import (
    BENCH,
    ROOT,
    BenchError,
    Measured,
    Worker,
    describe_machine,
    open_environment,
    open_worker,
    others_share,
    read_cpu_seconds,
    report,
    write_report,
)
from rich.console import Console
from tables import tiers as tables
from tables.tier_programs import build, measure_device, simulate, write_hints
from workers.memory_group import MemoryGroup, NoMemoryGroup, open_group
from workers.tier_stream import Shape, Stream, scaled, write_stream
from workers.tiers_loop import Case

import colonnade
from colonnade.data.sets.synthetic import CRITEO_CARDINALITIES

BATCH_SIZE = 4096
HISTORY = 24.6e6
BOTTOM, TOP = [256, 128], [256, 128]
ROWS_LR = 0.02
COMMIT_STEPS = 80
"""Of a block that holds a commit: one about every five seconds."""
ALLOWANCE_BYTES = 3 << 29
"""Beside the budget: code, dense network, batches ahead, write buffers, the index of rows at rest."""
MAPPED_SLACK_BYTES = 128 << 20
"""Of the mapped table: beside what its process holds already; the rest of its limit is page cache."""
PEER_INSTALLS = (("rocksdict==0.3.29",),)
WIDTH = 150
"""Columns: the widest table."""
READER_ROUNDS, READER_STEPS, DEVICE_SECONDS, DEVICE_DEPTH = 5, 40, 2.0, 64


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    cardinalities: tuple[int, ...]
    dims: tuple[int, ...]
    skews: tuple[float, ...]
    fractions: tuple[int, ...]
    """Denominators."""
    tail_fractions: tuple[int, ...]
    """Of the skews after the first."""
    lookahead: int
    warm_up: int
    rounds: int
    steps: int
    peer_warm_up: int
    peer_steps: int
    peer_rounds: int
    commit_rounds: int

    @property
    def num_batches(self) -> int:
        """Enough for the system that takes most blocks, and what it looks ahead."""
        blocks = 2 * self.rounds * self.steps + 2 * self.commit_rounds * COMMIT_STEPS + COMMIT_STEPS
        peers = self.peer_warm_up + self.peer_rounds * self.peer_steps
        return self.warm_up + blocks + peers + self.lookahead + 8


FULL = Extent(
    CRITEO_CARDINALITIES, (16, 64), (1.1, 0.95), (2, 4, 8, 16), (8, 16), lookahead=64, warm_up=90, rounds=4,
    steps=25, peer_warm_up=10, peer_steps=3, peer_rounds=4, commit_rounds=3,
)  # fmt: skip
QUICK = Extent(
    scaled(CRITEO_CARDINALITIES, 0.03), (16,), (1.1,), (2, 4, 8, 16), (), lookahead=4, warm_up=10, rounds=2,
    steps=6, peer_warm_up=4, peer_steps=4, peer_rounds=2, commit_rounds=1,
)  # fmt: skip


@dataclass
class Running:
    """A system that has started, and what its blocks told."""

    name: str
    worker: Worker
    group: MemoryGroup | None
    facts: Mapping[str, float | str]
    seconds: dict[str, list[float]] = field(default_factory=dict)  # per step, by kind of block
    counts: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # per step, likewise
    used: int = 0
    """Batches."""

    def block(self, kind: str | None, steps: int, **message: object) -> None:
        """`kind` None: not kept."""
        self.worker.send({"steps": steps, **message})
        answer = self.worker.answer()
        self.used += steps
        if kind is not None:
            per_step = {name: value / steps for name, value in answer["counts"].items()}
            self.seconds.setdefault(kind, []).append(fmean(answer["seconds"]))
            self.counts.setdefault(kind, []).append(per_step)

    def close(self) -> None:
        self.worker.close()
        if self.group is not None:
            self.group.close()


class Bench:
    def __init__(self, folder: Path, extent: Extent, console: Console) -> None:
        self.folder, self.extent, self.console = folder, extent, console
        self.measured: list[Measured] = []
        self.versions: dict[str, str] = {}
        self.limits: dict[str, str] = {}
        self.left_out: list[str] = []
        self.programs = build(folder)
        self.found = tables.Found()
        try:
            self.site = site_of(open_environment(ROOT / "build" / "bench-env-tiers", PEER_INSTALLS))
        except BenchError as error:
            self.site = ""
            self.leave_out(f"rocksdict: {error}")

    def leave_out(self, what: str) -> None:
        self.left_out.append(what)
        self.console.print(f"left out: {what}", style="yellow", markup=False)

    def run(self, keep: Callable[[], object]) -> None:
        """`keep` is called when something is measured: a long run that is stopped leaves what it had."""
        for number, skew in enumerate(self.extent.skews):
            shape = Shape(
                self.extent.cardinalities, skew, BATCH_SIZE, self.extent.num_batches, HISTORY
            )
            self.say(f"stream: skew {skew}, {shape.num_rows:,} rows, {shape.num_batches} batches")
            stream = write_stream(self.folder / f"stream-{skew}", shape)
            write_hints(self.programs, stream)
            fractions = self.extent.fractions if not number else self.extent.tail_fractions
            misses = simulate(self.programs, stream, fractions, self.extent.lookahead, self.folder)
            for dim in self.extent.dims:
                name = f"D={dim} skew {skew}"
                self.measure(name, stream, dim, fractions, misses, is_main=not number)
                keep()
            shutil.rmtree(stream.folder)

    def measure(
        self,
        name: str,
        stream: Stream,
        dim: int,
        fractions: Sequence[int],
        misses: Mapping[tuple[str, int], list[int]],
        *,
        is_main: bool,
    ) -> None:
        extent, open_now = self.extent, []
        filled = self.folder / "filled"
        seconds = fill(filled, stream, dim)
        self.say(f"{name}: filled in {seconds:.0f} s")
        self.found.model_bytes[name] = tables.model_bytes(stream.shape, dim)
        try:
            if is_main:
                self.measure_reader(name, filled, stream, dim)
                if dim == extent.dims[0]:
                    self.measure_writes(name, stream, dim)
            kept: Running | None = None
            systems = [("colonnade all", None), *((f"colonnade 1/{n}", n) for n in fractions)]
            for system, fraction in systems:
                running = self.start(system, name, stream, dim, fraction, filled)
                if running is not None:
                    open_now.append(running)
            for running in open_now:
                running.block(None, extent.warm_up, network=False)
            for _ in range(extent.rounds):
                for running in open_now:
                    running.block(tables.SPARSE, extent.steps, network=False)
                    running.block(tables.NETWORK, extent.steps, network=True)
            kept = next((r for r in open_now if r.name == "colonnade 1/8"), None)
            self.keep(name, open_now, stream, misses)
            for running in [r for r in open_now if r is not kept]:
                running.close()
                open_now.remove(running)
            if is_main and kept is not None:
                # The first one writes every row that memory holds, later ones what changed.
                kept.block(None, COMMIT_STEPS, network=True, commit=True)
                for _ in range(extent.commit_rounds):
                    for kind, has_commit in ((tables.PLAIN, False), (tables.COMMITS, True)):
                        kept.block(kind, COMMIT_STEPS, network=True, commit=has_commit)
                self.found.add_commits(name, kept.seconds)
                self.measure_peers(name, stream, dim, filled, kept, open_now, misses)
                while open_now:
                    open_now.pop().close()
                self.measure_first_epoch(name, stream, dim, filled)
        finally:
            for running in open_now:
                running.close()
            shutil.rmtree(filled, ignore_errors=True)

    def measure_peers(
        self,
        name: str,
        stream: Stream,
        dim: int,
        filled: Path,
        kept: Running,
        open_now: list[Running],
        misses: Mapping[tuple[str, int], list[int]],
    ) -> None:
        """At 1/8, without a network, beside `kept`; and Colonnade once more, told each row's next use."""
        extent, others = self.extent, []
        for system in ("colonnade hints 1/8", "rocksdict 1/8", "mapped 1/8"):
            running = self.start(system, name, stream, dim, 8, filled)
            if running is not None:
                open_now.append(running)
                others.append(running)
        for running in others:
            is_ours = running.name.startswith("colonnade")
            running.block(None, extent.warm_up if is_ours else extent.peer_warm_up, network=False)
        for _ in range(extent.peer_rounds):
            for running in (kept, *others):
                is_ours = running.name.startswith("colonnade")
                steps = extent.steps if is_ours else extent.peer_steps
                if running is kept:
                    steps = extent.peer_steps
                running.block(
                    tables.BESIDE if running is kept else tables.SPARSE, steps, network=False
                )
        kinds = (tables.PLAIN, tables.COMMITS, tables.BESIDE)
        seconds = {kind: kept.seconds[kind] for kind in kinds}
        self.measured += tables.cases_of(name, kept.name, seconds, kept.counts, BATCH_SIZE)
        self.keep(name, others, stream, misses)

    def measure_first_epoch(self, name: str, stream: Stream, dim: int, filled: Path) -> None:
        extent, running = self.extent, []
        try:
            for system, fraction in (("colonnade all", None), ("colonnade 1/8", 8)):
                one = self.start(system, name, stream, dim, fraction, filled, starts_empty=True)
                if one is not None:
                    running.append(one)
            for one in running:
                one.block(None, extent.warm_up // 4, network=False)
            for _ in range(max(2, extent.rounds // 2)):
                for one in running:
                    one.block(tables.SPARSE, extent.steps, network=False)
                    one.block(tables.NETWORK, extent.steps, network=True)
            self.keep(name + tables.FIRST_EPOCH, running, stream, {})
        finally:
            for one in running:
                one.close()

    def measure_reader(self, name: str, filled: Path, stream: Stream, dim: int) -> None:
        """The store's reader beside the bare device, on the same files."""
        case = self.case_of(stream, dim, link_of(filled, self.folder / "reader"), None)
        worker = open_worker("reader", sys.executable, "workers.tiers_reader")
        reader = Running("reader", worker, None, {})
        try:
            worker.send(asdict(case))
            worker.answer()
            reader.block(None, 4, network=False)
            files = sorted(
                (p for p in filled.rglob("*") if p.is_file() and p.stat().st_size >= 4096),
                key=lambda p: -p.stat().st_size,
            )[:64]
            device = []
            for _ in range(READER_ROUNDS):
                device.append(measure_device(self.programs, files, DEVICE_SECONDS, DEVICE_DEPTH))
                reader.block("reads", READER_STEPS, network=False)
        finally:
            reader.close()
            shutil.rmtree(self.folder / "reader", ignore_errors=True)
        self.measured += self.found.add_reader(
            name, device, reader.seconds["reads"], reader.counts["reads"]
        )

    def measure_writes(self, name: str, stream: Stream, dim: int) -> None:
        store = self.folder / "writes"
        store.mkdir()
        words = worker_words("tiers_writes", store, stream.folder, dim)
        shutil.rmtree(store)
        self.found.writes.append(json.loads(words))
        self.say(f"{name}: write amplification {words.strip()}")

    def start(
        self,
        system: str,
        name: str,
        stream: Stream,
        dim: int,
        fraction: int | None,
        filled: Path,
        *,
        starts_empty: bool = False,
    ) -> Running | None:
        """None, and a line why, where it cannot run here."""
        kind = system.split()[0]
        hints = " hints " in system
        if kind == "rocksdict" and not self.site:
            return None
        budget = tables.model_bytes(stream.shape, dim) // fraction if fraction else None
        needed = (budget or tables.model_bytes(stream.shape, dim)) + ALLOWANCE_BYTES // 3
        if needed > (free := available_bytes()):
            self.leave_out(
                f"{name} {system}: needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
            )
            return None
        store = self.folder / f"store-{system.replace(' ', '-').replace('/', '-')}"
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir()
        if kind == "colonnade" and budget is not None and not starts_empty:
            link_of(filled, store)
        group = None
        if budget is not None:
            try:
                group = open_group(store.name, budget + ALLOWANCE_BYTES)
            except NoMemoryGroup as error:
                self.limits[system] = str(error)
        case = self.case_of(stream, dim, store, budget, hints=hints, starts_empty=starts_empty)
        worker = open_worker(system, sys.executable, f"workers.tiers_{kind}")
        try:
            if group is not None:
                group.add(worker.process.pid)
                self.limits[system] = "memory cgroup"
            worker.send(asdict(case))
            facts = worker.answer()["ready"]
            if group is not None and kind == "mapped":
                group.tighten(group.anonymous_bytes + budget + MAPPED_SLACK_BYTES)
        except BaseException as error:
            worker.close()
            if group is not None:
                group.close()
            if isinstance(error, BenchError):
                self.leave_out(f"{name} {system}: {error}")
                return None
            raise
        self.versions |= {k: v for k, v in facts.items() if isinstance(v, str)}
        times = ", ".join(
            f"{k.split('_')[0]} {v:.0f} s" for k, v in facts.items() if isinstance(v, float)
        )
        self.say(f"{name}: {system} is ready ({times})")
        return Running(system, worker, group, facts)

    def case_of(
        self,
        stream: Stream,
        dim: int,
        store: Path,
        budget: int | None,
        *,
        hints: bool = False,
        starts_empty: bool = False,
    ) -> Case:
        return Case(
            stream=str(stream.folder), store=str(store), dim=dim, dram_bytes=budget,
            lookahead=self.extent.lookahead, hints=hints, starts_empty=starts_empty, bottom=BOTTOM, top=TOP,
            embedding_lr=ROWS_LR, num_threads=os.cpu_count() or 1, site=self.site,
        )  # fmt: skip

    def keep(
        self,
        name: str,
        done: Sequence[Running],
        stream: Stream,
        misses: Mapping[tuple[str, int], list[int]],
    ) -> None:
        for running in done:
            self.measured += tables.cases_of(
                name, running.name, running.seconds, running.counts, BATCH_SIZE
            )
        span = slice(self.extent.warm_up, max((r.used for r in done), default=0))
        self.measured += tables.policies_of(name, misses, span, BATCH_SIZE)

    def say(self, words: str) -> None:
        self.console.print(words, style="dim", markup=False)


def fill(folder: Path, stream: Stream, dim: int) -> float:
    """In a process of its own: its memory goes with it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return float(worker_words("tiers_colonnade", "fill", folder, stream.folder, dim))


def worker_words(module: str, *arguments: object) -> str:
    """What `python -m workers.MODULE` prints."""
    command = [sys.executable, "-m", f"workers.{module}", *map(str, arguments)]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{module} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def link_of(source: Path, target: Path) -> Path:
    """The same store once more: files are shared until either replaces its own."""
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif path.name != "LOCK":
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, place)
    return target


def site_of(python: str) -> str:
    """Where that interpreter's packages lie."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def available_bytes() -> int:
    path = Path("/proc/meminfo")
    if not path.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":") for line in path.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write cases, raw values and ratios here")
    parser.add_argument("--quick", action="store_true", help="a small model: to try, not to quote")
    parser.add_argument("--folder", type=Path, help="where the stores lie; default: the temporary")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(
            f"--json {options.json}: there is no folder {options.json.parent}; make it first"
        )
    console = Console(highlight=False, width=max(WIDTH, Console().width))
    before = read_cpu_seconds()
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="colonnade-bench-", dir=options.folder) as folder:
        bench = Bench(Path(folder), QUICK if options.quick else FULL, console)

        def result_of() -> dict[str, Any]:
            result = report(
                "tiers",
                version=colonnade.__version__,
                machine=describe_machine(
                    threads=os.cpu_count(), others_share=round(others_share(before), 2),
                    versions=bench.versions, limits=bench.limits, left_out=bench.left_out,
                    lookahead=bench.extent.lookahead, allowance_bytes=ALLOWANCE_BYTES,
                ),
                measured=bench.measured,
                ratios=tables.ratios_of(bench.measured, bench.found, cores, bench.extent.skews[0]),
            )  # fmt: skip
            if options.json:
                write_report(options.json, result)
            return result

        bench.run(result_of)
        result = result_of()
    tables.print_result(console, bench.measured, bench.found, result, cores)


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"error: {error}")
