"""Systems on hosts of this machine taking turns, block by block: what benches between hosts have in common.

Hosts are network namespaces whose uplinks are shaped (`hosts`), ranks are torchrun's (`fleet`). All systems of one kind
live in the same processes. Every system does the same work first, which is checked; then each rate has its rounds.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    PEER_INSTALLS,
    ROOT,
    BenchError,
    Measured,
    PieceFile,
    describe_machine,
    open_environment,
    open_parser,
    others_share,
    read_cpu_seconds,
    report,
)
from rich.console import Console
from tables import exchange as tables
from workers.tier_stream import Law

import colonnade
from cluster.fleet import Fleet, open_fleet
from cluster.hosts import Hosts, open_hosts

NUM_BATCHES = 8
"""Number of batches of each rank, used in a cycle."""
WARM_SESSION = 100
"""Steps before memory is looked at for the first time."""
WARM_UP_STEPS = 2
"""Steps of every block before its clock starts, so that batches ahead are on their way."""
MAX_DIGEST_GAP = 1e-3
"""Exact systems whose outputs differ by more, relatively, have not done the same work."""
LONGEST = 32
"""Steps of a block before anything is timed: ranks have `TIMEOUT` for an answer."""
HOPELESS = 3.0
"""A choice this many times slower than the fastest of its kind is measured by one short block."""
TIMEOUT = 120.0
WIDTH = 150
AUTO = tables.AUTO
"""System whose plan Colonnade chooses for the links as it measures them."""


@dataclass(frozen=True)
class Steps:
    """Numbers of steps of one system: `history` once, when it is opened; `block` timed ones in each block."""

    history: int
    block: int


@dataclass(frozen=True)
class Question:
    """Description of one bench: its systems, its cases, and what is made of its measurements."""

    name: str
    """Name of the bench. Its workers are `workers.<name>_<kind>`."""
    choices: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Settings of each system, by kind (torchrec or colonnade) and name."""
    write_case: Callable[[Path, Any, int, int], Any]
    """Function that writes a case's files: (folder, workload, ranks, most rows of a table) -> the workers' case."""
    ratios_of: Callable[[Sequence[Measured]], Mapping[str, float]]
    print_result: Callable[[Console, Sequence[Measured], Mapping[str, Any]], None]
    facts: Mapping[str, Any]
    """Settings that the results' machine entry states."""
    counted: Callable[[str, Any], list[Measured]] = lambda name, case: []
    """Function that computes what follows from a case's batches alone: (its name, the workers' case) -> rows."""
    steps_of: Callable[[str], Steps] | None = None
    """Function from a system to its numbers of steps, where the cost of a step has a history or a period. None: a block
    has as many as `block_seconds` hold, and a choice that is hopeless one short block."""


@dataclass(frozen=True)
class Extent:
    """Worlds, rates, workloads and numbers of steps that a bench measures."""

    worlds: tuple[tuple[int, int], ...]  # hosts, ranks on each
    gigabits: tuple[float, ...]
    workloads: tuple[Any, ...]  # each with a name
    scaling: tuple[tuple[int, int], ...]
    """Further worlds, for the first workload at the last rate alone."""
    max_cardinality: int
    rounds: int
    block_seconds: float
    max_steps: int
    session_steps: int
    """Steps of one long session in the first case between hosts, which shows whether memory grows; 0: no session."""
    rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Rates by workload, in Gbit/s, where they are not `gigabits`."""


class Broken(BenchError):
    """A system whose ranks ended, or said nothing."""

    def __init__(self, system: str, reason: str) -> None:
        super().__init__(f"{system}: {reason}")
        self.system = system


@dataclass
class Turn:
    """One system under one rate."""

    name: str
    fleet: Fleet
    steps: int = 1
    blocks: list[list[dict[str, Any]]] = field(default_factory=list)  # by block, by rank

    def block(self, steps: int, *, keep: bool) -> float:
        """Seconds per step."""
        try:
            self.fleet.send({"system": self.name, "warm_up": WARM_UP_STEPS, "steps": steps})
            answers = self.fleet.answers()
        except BenchError as error:
            raise Broken(self.name, str(error)) from None
        if keep:
            self.blocks.append(answers)
        return tables.step_seconds(answers)


class Bench:
    def __init__(
        self,
        question: Question,
        folder: Path,
        extent: Extent,
        only: str,
        console: Console,
        file: PieceFile,
    ) -> None:
        self.question, self.folder, self.extent = question, folder, extent
        self.only, self.console, self.file = only, console, file
        self.measured = list(file.measured)
        machine = file.more.get("machine", {})
        self.facts: dict[str, str] = machine.get("versions", {}) | machine.get("plans", {})
        self.left_out: list[str] = machine.get("left_out", [])
        self.pieces: list[str] = []
        """Worlds and workloads that this call measures."""
        self.broken: set[str] = set()
        """Systems that ended their ranks, and are not tried again."""
        self.pythons = {"colonnade": sys.executable}
        if "torchrec" not in question.choices:
            return
        try:
            self.pythons["torchrec"] = open_environment(ROOT / "build" / "bench-env", PEER_INSTALLS)
        except BenchError as error:
            self.leave_out(f"torchrec: {error}")

    def leave_out(self, what: str) -> None:
        """Note what is left out. Results get its first line: the rest are logs, which name folders of this machine."""
        first_line = what.split("\n", 1)[0]
        if first_line not in self.left_out:
            self.left_out.append(first_line)
            self.console.print(f"left out: {what}", style="yellow", markup=False)

    def say(self, words: str) -> None:
        self.console.print(words, style="dim", markup=False)

    def run(self, keep: Callable[[], object]) -> None:
        """`keep` is called when something is measured: a long run that is stopped leaves what it had."""
        extent = self.extent
        for world in (
            extent.scaling
        ):  # quick, and first: a run that is stopped has the figures of small worlds
            self.run_world(world, extent.workloads[:1], extent.gigabits[-1:], keep)
        for world in extent.worlds:
            self.run_world(world, extent.workloads, extent.gigabits, keep)

    def run_world(
        self,
        world: tuple[int, int],
        workloads: Sequence[Any],
        rates: Sequence[float],
        keep: Callable[[], object],
    ) -> None:
        num_hosts, ranks_per_host = world
        by_name = {
            f"{num_hosts}x{ranks_per_host} {workload.name}": workload for workload in workloads
        }
        remaining = [n for n in by_name if re.search(self.only, n) and not self.file.has_piece(n)]
        self.pieces += remaining
        for name in remaining:
            self.forget_case(name)
        while remaining:
            with open_hosts(num_hosts) as hosts, ExitStack() as stack:
                try:
                    fleets = self.open_fleets(hosts, ranks_per_host, stack)
                    while remaining:
                        name = remaining[0]
                        turns = self.open_case(name, by_name[name], fleets, rates[0], world)
                        own_rates = self.extent.rates.get(by_name[name].name, rates)
                        self.measure(name, turns, hosts, ranks_per_host, own_rates, keep)
                        remaining.pop(0)
                except Broken as error:  # the same once more, without it, with ranks of their own
                    self.broken.add(error.system)
                    self.leave_out(f"{name} {error}")
                    self.forget_case(name)
                except BenchError as error:
                    self.leave_out(f"{remaining.pop(0)}: {error}")

    def forget_case(self, name: str) -> None:
        """Drop the rows of a world and workload that is measured again."""
        self.measured = [m for m in self.measured if not m.case.startswith(f"{name} ")]

    def open_fleets(self, hosts: Hosts, ranks_per_host: int, stack: ExitStack) -> dict[str, Fleet]:
        fleets: dict[str, Fleet] = {}
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        for number, (system, python) in enumerate(self.pythons.items()):
            fleets[system] = open_fleet(
                system, hosts, ranks_per_host, f"workers.{self.question.name}_{system}", python=python,
                folder=folder / system, timeout=TIMEOUT, number=number,
            )  # fmt: skip
            stack.callback(fleets[system].close)
        return fleets

    def open_case(
        self,
        name: str,
        workload: Any,
        fleets: Mapping[str, Fleet],
        gigabits: float,
        world: tuple[int, int],
    ) -> list[Turn]:
        """Every system that can run, warm, and having done the same work."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        case = self.question.write_case(
            folder, workload, world[0] * world[1], self.extent.max_cardinality
        )
        self.measured += self.question.counted(name, case)
        link = {"link_bytes_per_second": gigabits * 1e9 / 8}
        choices = {
            kind: {n: {**choice, **link} for n, choice in systems.items() if n not in self.broken}
            for kind, systems in self.question.choices.items()
        }
        turns: list[Turn] = []
        for system, fleet in fleets.items():
            fleet.send({"case": asdict(case), "choices": choices[system]})
            answer = fleet.answers()[0]
            for excluded, reason in answer["left_out"].items():
                self.leave_out(f"{excluded}: {reason}")
            plans = {f"{name} {k}" if " " in k else k: v for k, v in answer["ready"].items()}
            self.facts |= plans
            turns += [Turn(n, fleet) for n in choices[system] if n not in answer["left_out"]]
        self.say(f"{name}: {len(turns)} systems of {world[0] * world[1]} ranks are ready")
        for turn in turns:
            turn.block(NUM_BATCHES, keep=True)
        check_same_work(turns, name)
        for turn in turns if self.question.steps_of is not None else ():
            history = min(self.question.steps_of(turn.name).history, self.extent.max_steps)
            for done in range(0, history, LONGEST):
                turn.block(min(LONGEST, history - done), keep=False)
        return turns

    def measure(
        self,
        name: str,
        turns: Sequence[Turn],
        hosts: Hosts,
        ranks_per_host: int,
        rates: Sequence[float],
        keep: Callable[[], object],
    ) -> None:
        """All rates of one world and workload: the ranks stay, the links change."""
        turns, free, same = list(turns), {}, None
        for gigabits in (None, *rates):
            hosts.shape(gigabits)
            turns = [turn for turn in turns if turn.name != AUTO]
            predicted, same = self.plan(name, turns, gigabits)
            for turn in turns:
                turn.blocks = []
            self.take_turns(turns, rounds=self.extent.rounds if gigabits else 1)
            turns += [replace(turn, name=AUTO) for turn in turns if turn.name == same]
            if gigabits is None:
                free = {turn.name: tables.median_seconds(turn.blocks) for turn in turns}
                continue
            case = f"{name} {gigabits:g} Gbit/s"
            for turn in turns:
                self.measured += tables.cases_of(
                    case, turn.name, turn.blocks, ranks_per_host, free.get(turn.name), predicted.get(turn.name)
                )  # fmt: skip
            keep()
            tables.print_case(self.console, self.measured, case)
        long = [turn for turn in turns if turn.name == (same or AUTO)]
        depends_on_hot_rows = not name.startswith("1x")
        if (
            long
            and depends_on_hot_rows
            and self.extent.session_steps
            and not tables.has_session(self.measured)
        ):
            long[0].block(WARM_SESSION, keep=True)
            long[0].block(self.extent.session_steps, keep=True)
            self.measured.append(tables.session_of(name, AUTO, *long[0].blocks[-2:]))
            keep()

    def plan(
        self, name: str, turns: list[Turn], gigabits: float | None
    ) -> tuple[Mapping[str, Any], str | None]:
        """Let Colonnade predict its systems' steps between these links, and choose a plan.

        Return the predictions by system, and the system whose plan it chooses; if that is none of `turns`, the choice
        joins them and the second value is None. Blocks of one plan vary: two names for it would be measured as two.
        """
        fleet = next(turn.fleet for turn in turns if not tables.is_peer(turn.name))
        fleet.send({"plan": True})
        answer = fleet.answers()[0]
        for system, reason in answer.get("left_out", {}).items():
            self.leave_out(f"{system}: {reason}")
        if "chosen" not in answer or AUTO in self.broken:
            return answer.get("predicted", {}), None
        rate = "not shaped" if gigabits is None else f"{gigabits:g} Gbit/s"
        for what in ("links", "measured", "chosen"):
            if not answer.get(what):
                continue
            self.facts[f"{name} {rate} {what}"] = answer[what]
            self.say(f"{name} {rate}, {what}: {answer[what]}")
        same = answer.get("same")
        if same is None:
            turns.append(Turn(AUTO, fleet))
        return answer["predicted"], same

    def take_turns(self, turns: Sequence[Turn], *, rounds: int) -> None:
        """Measure rounds of blocks. The first one decides how many steps the others have, unless the question does."""
        if self.question.steps_of is not None:
            for turn in turns:
                numbers = self.question.steps_of(turn.name)
                turn.steps = min(numbers.block, self.extent.max_steps)
            blocks_of(turns, rounds)
            return
        first = {}
        for turn in turns:
            first[turn.name] = turn.block(2, keep=True)
            wanted = self.extent.block_seconds / first[turn.name]
            turn.steps = int(min(self.extent.max_steps, max(2, wanted)))
        best = {
            kind: min(s for n, s in first.items() if tables.is_peer(n) == kind)
            for kind in set(map(tables.is_peer, first))
        }
        hopeful = [t for t in turns if first[t.name] <= HOPELESS * best[tables.is_peer(t.name)]]
        for turn in hopeful:
            turn.blocks = []
        blocks_of(hopeful, rounds)


def blocks_of(turns: Sequence[Turn], rounds: int) -> None:
    for _ in range(rounds):
        for turn in turns:
            turn.block(turn.steps, keep=True)


def check_same_work(turns: Sequence[Turn], name: str) -> None:
    """A speed of something else is worth nothing: after as many steps, the same outputs."""
    others = (tables.LOSSY, tables.LATE, tables.CLOCK)
    exact = [turn for turn in turns if not any(word in turn.name for word in others)]
    digests = {turn.name: turn.blocks[0][0]["digest"] for turn in exact}
    if max(digests.values()) - min(digests.values()) > MAX_DIGEST_GAP * max(digests.values()):
        raise BenchError(f"{name}: the systems' outputs differ: {digests}")


def write_ids(
    folder: Path,
    rows: Sequence[int],
    num_ranks: int,
    lookups: int,
    skew: float,
    num_batches: int = NUM_BATCHES,
) -> Path:
    """Write the ids of every rank as an .npy (batches, ranks, tables, lookups) of int64, and return its path.

    All are drawn by one Zipf law; which rows are frequent differs by table. rows: of each table; lookups: of a rank's
    batch in a table.
    """
    shape = num_batches, num_ranks, len(rows), lookups
    ids = np.lib.format.open_memmap(folder / "ids.npy", "w+", np.int64, shape)
    for f, count in enumerate(rows):
        generator = np.random.Generator(np.random.SFC64([f, count]))
        place = generator.permutation(count)
        drawn = Law(count, skew).draw(generator, ids[:, :, f].size)
        ids[:, :, f] = place[drawn].reshape(shape[0], shape[1], shape[3])
    ids.flush()
    return folder / "ids.npy"


def main(question: Question, description: str, full: Extent, quick: Extent) -> None:
    """The bench's command line."""
    parser = open_parser(description, "one world, two workloads: to try, not to quote")
    parser.add_argument(
        "--only", default="", help='of the cases, e.g. "2x2 D=64": those that this expression finds'
    )
    options = parser.parse_args(sys.argv[1:])
    console = Console(highlight=False, width=max(WIDTH, Console().width))
    before = read_cpu_seconds()
    extent = quick if options.quick else full
    file = PieceFile(options.json, question.name, max_cardinality=extent.max_cardinality)
    with tempfile.TemporaryDirectory(prefix="colonnade-bench-") as folder:
        bench = Bench(question, Path(folder), extent, options.only, console, file)

        def result_of() -> Mapping[str, Any]:
            file.shares |= dict.fromkeys(bench.pieces, round(others_share(before), 2))
            return report(
                question.name,
                version=colonnade.__version__,
                machine=describe_machine(
                    threads=1, others_share=file.others_share, shares=file.shares,
                    versions={k: v for k, v in bench.facts.items() if " " not in k},
                    plans={k: v for k, v in bench.facts.items() if " " in k}, left_out=bench.left_out,
                    max_cardinality=bench.extent.max_cardinality, **question.facts,
                ),
                measured=bench.measured,
                ratios=question.ratios_of(bench.measured),
                path=options.json,
            )  # fmt: skip

        bench.run(result_of)
        result = result_of()
    question.print_result(console, bench.measured, result)
