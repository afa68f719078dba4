"""Speed of tables larger than memory as a part of all-in-memory speed, what bounds it, and what would be best.

Minutes: 90 (quick 5).

A DLRM's embeddings over Criteo-shaped ids (the 26 real cardinalities, 33.8 million rows, skew 1.1 and a heavy tail
0.95), row-wise Adagrad, batch 4096. Memory for rows is 1/2 .. 1/16 of what all take, the others are on disk; every
system runs in a memory cgroup of its own (budget and `ALLOWANCE_BYTES`).

    colonnade    all in memory, and at each budget; with its dense network and without
    rocksdict    RocksDB under the same loop of lookup, Adagrad and write-back; no network. Also in 8 shards
                 that read a batch ahead, each a process, because threads would wait for Python's lock
    mapped       the table as one memory-mapped file under that loop; no network
    colonnade mapped  as much memory again between memory and the disk, for evicted rows: without a delay, and with an
                 emulated one of 300 ns and 1 us for each cache line that moves (workers/tier_delay.py)
    tier_device  the device alone; tier_policies: how many rows LRU, LFU, lookahead and Belady would read
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from harness import (
    ROOT,
    BenchError,
    Measured,
    PieceFile,
    Worker,
    describe_machine,
    open_environment,
    open_parser,
    open_worker,
    others_share,
    read_cpu_seconds,
    report,
    run_module,
    run_script,
    say,
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
"""Steps of a block that holds a commit: one commit about every five seconds."""
ALLOWANCE_BYTES = 3 << 29
"""Memory beside the budget: code, dense network, batches ahead, write buffers, the index of rows at rest."""
SHARD_BYTES = 640 << 20
"""Allowance of each further process of a peer in shards: Python, and what filling takes."""
MAPPED_SLACK_BYTES = 128 << 20
"""Slack in the mapped table's memory limit, beside the budget and what its process has already taken: the rest of the
limit is page cache."""
PLACEMENTS = ("even", "profiled")
"""Values of plan.placement."""
PEER_INSTALLS = (("rocksdict==0.3.29",),)
NUM_SHARDS = 8
PEER_SYSTEMS = (
    "colonnade 1/8", "colonnade hints 1/8", "rocksdict 1/8", "rocksdict 8 shards 1/8", "mapped 1/8",
)  # fmt: skip
LEVEL_SYSTEMS = (
    tables.ALL, "colonnade 1/8", "colonnade mapped 0ns 1/8", "colonnade mapped 300ns 1/8",
    "colonnade mapped 1000ns 1/8", "colonnade 1/4",
)  # fmt: skip
"""Systems of the piece `levels`: the delay of mapped memory, if there is any, by cache line."""
MAPPED_FOLDER = "/dev/shm"
"""Folder of files in memory, where evicted rows are."""
WIDTH = 150
"""Columns: the widest table."""
READER_ROUNDS, READER_STEPS, DEVICE_SECONDS, DEVICE_DEPTH = 5, 40, 2.0, 64


@dataclass(frozen=True)
class Extent:
    """Models, budgets and numbers of steps that a call measures."""

    cardinalities: tuple[int, ...]
    dims: tuple[int, ...]
    skews: tuple[float, ...]
    fractions: tuple[int, ...]
    """Denominators of the budgets, as parts of all rows in memory."""
    tail_fractions: tuple[int, ...]
    """Denominators for the skews after the first."""
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
        """Number of batches: enough for the system that takes most blocks, and for what it looks ahead."""
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


Misses = Mapping[tuple[str, int], list[int]]
"""Rows missed in each batch, by policy and denominator of the budget."""


@dataclass(frozen=True)
class Setup:
    """State that the pieces of one skew and dim share."""

    name: str
    stream: Stream
    dim: int
    filled: Path
    misses: Misses


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

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("colonnade")

    def close(self) -> None:
        self.worker.close()
        if self.group is not None:
            self.group.close()


class Bench:
    """Pieces of a run, in one folder whose streams and filled stores later calls find again."""

    def __init__(self, folder: Path, extent: Extent, file: PieceFile, console: Console) -> None:
        self.folder, self.extent, self.file, self.console = folder, extent, file, console
        self.limits: dict[str, str] = {}
        self.left_out: list[str] = []
        self.programs = build(folder)
        self.model_bytes = {
            f"D={dim} skew {skew}": tables.model_bytes(self.shape_of(skew), dim)
            for skew, dim in product(extent.skews, extent.dims)
        }
        try:
            self.site = site_of(open_environment(ROOT / "build" / "bench-env-tiers", PEER_INSTALLS))
        except BenchError as error:
            self.site = ""
            self.leave_out(f"rocksdict: {error}")

    def shape_of(self, skew: float) -> Shape:
        extent = self.extent
        return Shape(extent.cardinalities, skew, BATCH_SIZE, extent.num_batches, HISTORY)

    def leave_out(self, what: str) -> None:
        """Note what is left out. Results get its first line: the rest are logs, which name folders of this machine."""
        self.left_out.append(what.split("\n", 1)[0])
        self.console.print(f"left out: {what}", style="yellow", markup=False)

    def run(self, only: str, write: Callable[[], object], *, only_prepare: bool) -> None:
        """Measure the pieces that `only` finds and the file lacks; `write` is called after each. only_prepare: make
        their streams and stores, and measure nothing."""
        for skew, dim in product(self.extent.skews, self.extent.dims):
            name, is_main = f"D={dim} skew {skew}", skew == self.extent.skews[0]
            methods = self.list_pieces(dim, is_main)
            pieces = [
                piece for piece in methods
                if re.search(only, f"{name} {piece}") and not self.file.has_piece(f"{name} {piece}")
            ]  # fmt: skip
            if not pieces:
                continue
            stream, misses = self.prepare_stream(skew)
            setup = Setup(name, stream, dim, self.prepare_store(stream, dim), misses)
            for piece in () if only_prepare else pieces:
                before, start = read_cpu_seconds(), perf_counter()
                measured = methods[piece](setup)
                self.file.add_piece(f"{name} {piece}", measured, others_share(before))
                write()
                share = self.file.shares[f"{name} {piece}"]
                say(f"{name} {piece}: {perf_counter() - start:.0f} s, others {share}")

    def list_pieces(self, dim: int, is_main: bool) -> dict[str, Callable[[Setup], list[Measured]]]:
        """List what measures each piece. `memory`: all in memory and at each budget."""
        pieces = {"memory": self.measure_memory if is_main else self.measure_tail}
        for n in self.extent.tail_fractions or self.extent.fractions:
            pieces[f"placement 1/{n}"] = partial(self.measure_placement, fraction=n)
        if is_main:
            pieces |= {"peers": self.measure_peers, "reader": self.measure_reader}
            if dim == self.extent.dims[0]:
                pieces |= {
                    "writes": self.measure_writes, "two tables": self.measure_two_tables,
                    "levels": self.measure_levels,
                }  # fmt: skip
            pieces |= {"commits": self.measure_commits, "first epoch": self.measure_first_epoch}
        return pieces

    def prepare_stream(self, skew: float) -> tuple[Stream, Misses]:
        folder, shape = self.folder / f"stream-{skew}", self.shape_of(skew)
        fractions = self.extent.fractions  # of all, so that one simulation serves every skew
        ready = folder / "misses.json"
        if ready.exists():
            by_name = json.loads(ready.read_text())
            return Stream(folder), {(p, int(n)): m for (p, n), m in by_name}
        self.say(f"stream: skew {skew}, {shape.num_rows:,} rows, {shape.num_batches} batches")
        stream = write_stream(folder, shape)
        write_hints(self.programs, stream)
        misses = simulate(self.programs, stream, fractions, self.extent.lookahead, self.folder)
        ready.write_text(json.dumps(list(misses.items())))
        return stream, misses

    def prepare_store(self, stream: Stream, dim: int) -> Path:
        """Fill a store that later calls find again: see `fill`."""
        folder = self.folder / f"filled-{stream.shape.skew}-{dim}"
        ready = folder.with_name(f"{folder.name}.ready")
        if not ready.exists():
            self.say(f"D={dim}: filled in {fill(folder, stream, dim):.0f} s")
            ready.touch()
        return folder

    def open_systems(
        self, setup: Setup, systems: Sequence[str], stack: ExitStack, **start: bool
    ) -> list[Running]:
        """Start the systems that can run here. The stack closes them."""
        opened = []
        for system in systems:
            running = self.start(system, setup.name, setup.stream, setup.dim, setup.filled, **start)
            if running is not None:
                stack.callback(running.close)
                opened.append(running)
        return opened

    def measure_memory(self, setup: Setup) -> list[Measured]:
        return self.measure_budgets(setup, self.extent.fractions)

    def measure_tail(self, setup: Setup) -> list[Measured]:
        return self.measure_budgets(setup, self.extent.tail_fractions)

    def measure_budgets(self, setup: Setup, fractions: Sequence[int]) -> list[Measured]:
        # The largest budget last: it is left out where it does not fit beside the others.
        systems = ["colonnade all", *(f"colonnade 1/{n}" for n in sorted(fractions, reverse=True))]
        return self.measure_in_turns(setup, systems)

    def measure_placement(self, setup: Setup, fraction: int) -> list[Measured]:
        """Measure an even division of memory beside one by a profile."""
        systems = [f"colonnade {kind} 1/{fraction}" for kind in PLACEMENTS]
        return self.measure_in_turns(
            setup, systems, replace(setup, misses={}), kinds=[tables.SPARSE],
            rounds=2 * self.extent.rounds,
        )  # fmt: skip

    def measure_levels(self, setup: Setup) -> list[Measured]:
        """Measure evicted rows in mapped memory of the budget's size, with emulated latencies."""
        results = replace(setup, name=setup.name + tables.LEVELS, misses={})
        return self.measure_in_turns(setup, LEVEL_SYSTEMS, results)

    def measure_first_epoch(self, setup: Setup) -> list[Measured]:
        extent = self.extent
        return self.measure_in_turns(
            setup, ["colonnade all", "colonnade 1/8"],
            replace(setup, name=setup.name + tables.FIRST_EPOCH, misses={}),
            warm_up=extent.warm_up // 4, rounds=max(2, extent.rounds // 2), starts_empty=True,
        )  # fmt: skip

    def measure_in_turns(
        self,
        setup: Setup,
        systems: Sequence[str],
        results: Setup | None = None,
        *,
        kinds: Sequence[str] = (tables.SPARSE, tables.NETWORK),
        warm_up: int | None = None,
        rounds: int | None = None,
        **start: bool,
    ) -> list[Measured]:
        """Measure blocks of each kind of every system, round after round.

        results: name and misses of the results; None: those of `setup`. warm_up, rounds: None: those of the extent.
        """
        extent = self.extent
        with ExitStack() as stack:
            opened = self.open_systems(setup, systems, stack, **start)
            for running in opened:
                running.block(None, extent.warm_up if warm_up is None else warm_up, network=False)
            for _ in range(extent.rounds if rounds is None else rounds):
                for running, kind in product(opened, kinds):
                    running.block(kind, extent.steps, network=kind == tables.NETWORK)
            return self.cases_of(results or setup, opened)

    def measure_two_tables(self, setup: Setup) -> list[Measured]:
        """One hot and one cold table of the same size, at 1/8: an even division beside one by a profile."""
        store = self.folder / "two-tables"
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir()
        rounds = 2 * self.extent.rounds
        largest = max(setup.stream.shape.cardinalities)
        words = ["workers.tiers_two_tables", store, setup.dim, largest, rounds, self.extent.steps]
        printed = run_module(sys.executable, words)
        shutil.rmtree(store)
        return [
            Measured(f"D={setup.dim}{tables.TWO_TABLES}", f"colonnade {kind} 1/8", unit, values)
            for kind, by_unit in json.loads(printed).items()
            for unit, values in by_unit.items()
        ]

    def measure_commits(self, setup: Setup) -> list[Measured]:
        """Measure blocks that hold a commit beside blocks that do not, with the network, at 1/8."""
        with ExitStack() as stack:
            opened = self.open_systems(setup, ["colonnade 1/8"], stack)
            for running in opened:
                running.block(None, self.extent.warm_up, network=True)
                # The first one writes every row that memory holds, later ones what changed.
                running.block(None, COMMIT_STEPS, network=True, commit=True)
                for _ in range(self.extent.commit_rounds):
                    for kind, has_commit in ((tables.PLAIN, False), (tables.COMMITS, True)):
                        running.block(kind, COMMIT_STEPS, network=True, commit=has_commit)
            return self.cases_of(setup, opened)

    def measure_peers(self, setup: Setup) -> list[Measured]:
        """Measure peers at 1/8, without a network, and Colonnade once more with hints of each row's next use."""
        extent = self.extent
        with ExitStack() as stack:
            opened = self.open_systems(setup, PEER_SYSTEMS, stack)
            for running in opened:
                warm_up = extent.warm_up if running.is_ours else extent.peer_warm_up
                running.block(None, warm_up, network=False)
            for _ in range(extent.peer_rounds):
                for running in opened:
                    beside = running.name == "colonnade 1/8"
                    is_long = running.is_ours and not beside
                    running.block(
                        tables.BESIDE if beside else tables.SPARSE,
                        extent.steps if is_long else extent.peer_steps,
                        network=False,
                    )
            # Policies are counted over the batches of the longer piece, where there is one.
            has_policies = self.file.has_piece(f"{setup.name} memory")
            return self.cases_of(replace(setup, misses={}) if has_policies else setup, opened)

    def measure_reader(self, setup: Setup) -> list[Measured]:
        """The store's reader beside the bare device, on the same files."""
        store = self.folder / "reader"
        shutil.rmtree(store, ignore_errors=True)
        case = self.case_of(setup.stream, setup.dim, link_of(setup.filled, store), None)
        worker = open_worker("reader", sys.executable, "workers.tiers_reader")
        reader = Running("reader", worker, None, {})
        try:
            worker.send(asdict(case))
            worker.answer()
            reader.block(None, 4, network=False)
            files = sorted(
                (p for p in setup.filled.rglob("*") if p.is_file() and p.stat().st_size >= 4096),
                key=lambda p: -p.stat().st_size,
            )[:64]
            device = []
            for _ in range(READER_ROUNDS):
                device.append(measure_device(self.programs, files, DEVICE_SECONDS, DEVICE_DEPTH))
                reader.block("reads", READER_STEPS, network=False)
        finally:
            reader.close()
            shutil.rmtree(store, ignore_errors=True)
        return tables.reader_cases_of(
            setup.name, device, reader.seconds["reads"], reader.counts["reads"]
        )

    def measure_writes(self, setup: Setup) -> list[Measured]:
        store = self.folder / "writes"
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir()
        words = ["workers.tiers_writes", store, setup.stream.folder, setup.dim]
        printed = run_module(sys.executable, words)
        shutil.rmtree(store)
        case = setup.name + tables.WRITES
        return [
            Measured(case, "colonnade", name, [value])
            for name, value in json.loads(printed).items()
        ]

    def cases_of(self, setup: Setup, opened: Sequence[Running]) -> list[Measured]:
        measured = []
        for running in opened:
            measured += tables.cases_of(
                setup.name, running.name, running.seconds, running.counts, BATCH_SIZE
            )
        span = slice(self.extent.warm_up, max((r.used for r in opened), default=0))
        return measured + tables.policies_of(setup.name, setup.misses, span, BATCH_SIZE)

    def start(
        self,
        system: str,
        name: str,
        stream: Stream,
        dim: int,
        filled: Path,
        *,
        starts_empty: bool = False,
    ) -> Running | None:
        """Start a system; return None, and print a line why, where it cannot run here."""
        kind = system.split()[0]
        fraction = int(system.split("/")[1]) if "/" in system else None
        hints = " hints " in system
        placement = next((word for word in PLACEMENTS if word in system.split()), "history")
        if kind == "rocksdict" and not self.site:
            return None
        budget = tables.model_bytes(stream.shape, dim) // fraction if fraction else None
        line_ns = re.search(r" mapped (\d+)ns ", system)
        mapped_bytes = budget if line_ns and budget else 0
        needed = (budget or tables.model_bytes(stream.shape, dim)) + ALLOWANCE_BYTES + mapped_bytes
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
        shards = NUM_SHARDS if " shards " in system else 1
        if budget is not None:
            try:
                group = open_group(
                    store.name,
                    budget + mapped_bytes + ALLOWANCE_BYTES + (shards - 1) * SHARD_BYTES,
                )
            except NoMemoryGroup as error:
                self.limits[system] = str(error)
        case = replace(
            self.case_of(stream, dim, store, budget, hints=hints, starts_empty=starts_empty),
            shards=shards, placement=placement,
            delay=str(self.programs.delay), mapped=MAPPED_FOLDER if mapped_bytes else "",
            mapped_bytes=mapped_bytes, line_ns=int(line_ns[1]) if line_ns else 0,
        )  # fmt: skip
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
        self.file.versions |= {k: v for k, v in facts.items() if isinstance(v, str)}
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

    def say(self, words: str) -> None:
        self.console.print(words, style="dim", markup=False)


def fill(folder: Path, stream: Stream, dim: int) -> float:
    """Fill a store in a process of its own, so that its memory goes with it; return the seconds that it took."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    words = ["workers.tiers_colonnade", "fill", folder, stream.folder, dim]
    return float(run_module(sys.executable, words))


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
    """Return the folder of an interpreter's packages."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def available_bytes() -> int:
    path = Path("/proc/meminfo")
    if not path.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":") for line in path.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "a small model: to try, not to quote")
    parser.add_argument(
        "--only",
        default="",
        help='pieces that this finds, e.g. "D=16 skew 1.1 peers"; default: all',
    )
    parser.add_argument(
        "--folder", type=Path, help="where stores are, and stay for later calls; default: temporary"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="only write the stores of the pieces into --folder"
    )
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=max(WIDTH, Console().width))
    cores = os.cpu_count() or 1
    extent = QUICK if options.quick else FULL
    file = PieceFile(options.json, "tiers", lookahead=extent.lookahead)
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="colonnade-bench-")
            folder = Path(stack.enter_context(temporary))
        folder.mkdir(exist_ok=True)
        bench = Bench(folder, extent, file, console)

        def compute_other_figures() -> tables.OtherFigures:
            return tables.OtherFigures.of_measured(file.measured, bench.model_bytes)

        def write() -> dict[str, Any]:
            return report(
                "tiers",
                version=colonnade.__version__,
                machine=describe_machine(
                    threads=os.cpu_count(), others_share=file.others_share, shares=file.shares,
                    versions=file.versions, limits=bench.limits, left_out=bench.left_out,
                    lookahead=extent.lookahead, allowance_bytes=ALLOWANCE_BYTES,
                ),
                measured=file.measured,
                ratios=tables.ratios_of(file.measured, compute_other_figures(), cores, extent.skews[0]),
                path=options.json,
            )  # fmt: skip

        bench.run(options.only, write, only_prepare=options.prepare)
        if not options.prepare:
            tables.print_result(console, file.measured, compute_other_figures(), write(), cores)


if __name__ == "__main__":
    run_script(main)
