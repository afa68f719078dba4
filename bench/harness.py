"""Parts that all benches share: peers in environments of their own, workers measured in turns, the report.

A worker is a process that holds one system and runs a block of steps when told to (`workers/loop.py`).
Blocks are interleaved, A B C A B C ..., so that what else the machine does hits all systems alike.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from colonnade import __version__
from colonnade.processors import WAIT_SETTINGS

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
STDERR_TAIL_LINES = 15
MAX_OTHERS_SHARE = 0.05
PEER_INSTALLS = (
    ("torch==2.13.0", "fbgemm-gpu-cpu==1.8.0"),
    ("--no-deps", "torchrec==1.8.0"),  # it would bring the CUDA build of fbgemm, for another torch
    ("torchmetrics==1.0.3", "tensordict", "tqdm", "pyre-extensions"),
)
"""`pip install` arguments of the environment that every bench's peers share."""


class BenchError(RuntimeError):
    """A system could not be installed, started or run; the message says which and why."""


@dataclass(frozen=True)
class Measured:
    """One row of the report: `values` are raw, one per block."""

    case: str
    system: str
    unit: str
    values: list[float]

    @property
    def median(self) -> float:
        return median(self.values)


def read_measured(path: Path | None, bench: str, **extent: Any) -> list[Measured]:
    """Read the rows that an earlier call wrote. extent: what its `machine` has to say. Raises BenchError for another
    bench's file, or one of other extent."""
    if path is None or not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["bench"] != bench or any(result["machine"][key] != extent[key] for key in extent):
        raise BenchError(f"{path} holds {result['bench']} of other extent; give another file")
    return [Measured(c["case"], c["system"], c["unit"], c["values"]) for c in result["cases"]]


def replace_measured(measured: Sequence[Measured], new: Sequence[Measured]) -> list[Measured]:
    """Return the rows with new ones, which replace those of the same case, system and unit."""
    names = {(m.case, m.system, m.unit) for m in new}
    return [m for m in measured if (m.case, m.system, m.unit) not in names] + list(new)


class PieceFile:
    """Result file that grows by pieces, so that a long bench runs in several short calls at one commit.

    A piece is measured again where other processes used too much of the machine meanwhile.
    """

    def __init__(self, path: Path | None, bench: str, **extent: Any) -> None:
        """Read what earlier calls wrote. extent: what the file's `machine` must agree with.

        Raises BenchError for the file of another bench, commit or extent.
        """
        self.path = path
        self.measured: list[Measured] = []
        self.shares: dict[str, float] = {}
        """Share of the machine that others used, by piece."""
        self.versions: dict[str, str] = {}
        self.more: dict[str, Any] = {}
        """Whole file as the last call wrote it."""
        if path is None or not path.exists():
            return
        self.measured = read_measured(path, bench, **extent)
        self.more = json.loads(path.read_text())
        if (commit := self.more["commit"]) != find_commit():
            raise BenchError(
                f"{path} is of commit {commit}, not {find_commit()}; give another file"
            )
        self.shares = self.more["machine"]["shares"]
        self.versions = self.more["machine"]["versions"]

    @property
    def others_share(self) -> float:
        return max(self.shares.values(), default=0.0)

    def has_piece(self, name: str) -> bool:
        """Return whether a piece was measured on a quiet machine."""
        return self.shares.get(name, 1.0) <= MAX_OTHERS_SHARE

    def add_piece(self, name: str, measured: Sequence[Measured], share: float) -> None:
        """Add a piece's rows; those of an earlier try are replaced."""
        self.measured = replace_measured(self.measured, measured)
        self.shares[name] = round(share, 2)


class ArmFile:
    """Result file that grows by arms of a comparison: each is written when it ends, and later calls add the others.

    The figures do not depend on the machine, so that a file may be continued at another commit.
    """

    def __init__(
        self,
        path: Path | None,
        bench: str,
        compute_ratios: Callable[[Sequence[Measured]], Mapping[str, float]],
        versions: Mapping[str, str],
        former_names: Sequence[str] = (),
    ) -> None:
        """Read what earlier calls wrote. path: None: nothing is written. former_names: of benches that this one
        replaces, whose files it reads.

        Raises BenchError for the file of another bench.
        """
        self.path, self.bench = path, bench
        self.compute_ratios, self.versions = compute_ratios, versions
        self.measured: list[Measured] = []
        if path is not None and path.exists():
            name = json.loads(path.read_text())["bench"]
            self.measured = read_measured(path, name if name in former_names else bench)
        self.start = read_cpu_seconds()

    def add(self, measured: Sequence[Measured]) -> None:
        """Add rows, and write the file. Rows of an earlier try are replaced."""
        self.measured = replace_measured(self.measured, measured)
        if self.path is not None:
            write_report(self.path, self.build_report())

    def build_report(self) -> dict[str, Any]:
        """Build the report of all rows."""
        machine = describe_machine(
            threads=1, others_share=round(others_share(self.start), 2), versions=self.versions
        )  # fmt: skip
        return report(
            self.bench, version=__version__, machine=machine,
            measured=self.measured, ratios=self.compute_ratios(self.measured),
        )  # fmt: skip


def json_path(text: str) -> Path:
    """Return the path of a result file: the type of `--json`. Raises ArgumentTypeError if its folder is missing."""
    path = Path(text)
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{path}: there is no folder {path.parent}; make it first")
    return path


def open_parser(description: str, quick_help: str) -> ArgumentParser:
    """Make the parser of a bench's command line, with --json and --quick."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--json", type=json_path, help="write cases, raw values and ratios here")
    parser.add_argument("--quick", action="store_true", help=quick_help)
    return parser


def run_script(main: Callable[[], object]) -> None:
    """Run a bench; end this process with its message if it cannot be measured."""
    try:
        main()
    except BenchError as error:
        sys.exit(f"error: {error}")


def say(text: str) -> None:
    """Print `text` and the time to stderr."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


class Worker:
    """One system in its own process. `open_worker` starts it; `close` ends it and waits."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Any) -> None:
        assert process.stdin and process.stdout, "open_worker makes both pipes"
        self.name, self.process, self.log = name, process, log
        self.stdin, self.stdout = process.stdin, process.stdout

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            print(json.dumps(message), file=self.stdin, flush=True)
        except BrokenPipeError:
            raise self._died() from None

    def answer(self) -> dict[str, Any]:
        """Waits for it. Raises BenchError with the end of the worker's own words if it died."""
        line = self.stdout.readline()
        if not line:
            raise self._died()
        return json.loads(line)

    def close(self) -> None:
        with suppress(BrokenPipeError):  # it died before it read what is still in the pipe
            self.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stdout.close()
        self.log.close()

    def _died(self) -> BenchError:
        status = self.process.wait()
        self.log.seek(0)
        tail = "\n".join(self.log.read().splitlines()[-STDERR_TAIL_LINES:])
        return BenchError(f"worker {self.name} ended with status {status}; its last words:\n{tail}")


class Measurable(Protocol):
    """System that `interleave` can measure: a worker, or one of several systems that share a worker."""

    @property
    def name(self) -> str: ...
    def send(self, message: Mapping[str, Any]) -> None: ...
    def answer(self) -> dict[str, Any]: ...


def open_worker(
    name: str,
    python: str,
    module: str,
    *,
    arguments: Sequence[str] = (),
    waiting: Mapping[str, str] | None = None,
    group: Path | None = None,
) -> Worker:
    """Run `python -m module` in the bench folder: so `workers` is found and its torch.py does not shadow torch.

    waiting: settings of how OpenMP's threads wait; by default none, so that every system spins as torch does by itself,
    however this process was started. group: the folder of the control group to run in.
    """
    environment = {k: v for k, v in os.environ.items() if k not in WAIT_SETTINGS} | (waiting or {})
    command = [python, "-m", module, *arguments]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    process = subprocess.Popen(
        command,
        cwd=BENCH,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    return Worker(name, process, log)


def run_ranks(python: str, num_ranks: int, words: Sequence[object]) -> str:
    """Run `python -m WORDS` in the bench folder on ranks of this machine, one thread each; return what they print.

    Raises BenchError with the end of what they say where one fails.
    """
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    return run_module(
        python, [*torchrun, *words], name=f"{num_ranks} ranks of {words[0]}", threads=1
    )


def run_module(
    python: str, words: Sequence[object], *, name: str = "", threads: int | None = None
) -> str:
    """Run `python -m WORDS` in the bench folder; return what it prints.

    name: for errors; default: the module's. threads: of OpenMP; None: as set. Raises BenchError with the end of what it
    says where it fails.
    """
    environment = os.environ if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [python, "-m", *map(str, words)],
        cwd=BENCH, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        reason = done.stderr.strip()[-2000:]
        raise BenchError(f"{name or words[0]}: status {done.returncode}; {reason}")
    return done.stdout


def train_run(run: Path, words: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run `colonnade train WORDS` into the folder `run`, one thread each rank; return the run's final metrics.

    settings: by name, as with --set. Raises BenchError as `run_module`."""
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = ["colonnade", "train", *words, "--run", run, *options]
    run_module(sys.executable, command, name="colonnade train", threads=1)
    return json.loads((run / "summary.json").read_text())["metrics"]


def close_workers(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.close()


@dataclass
class Blocks:
    """Measurements of one worker: one entry per block."""

    seconds: list[float] = field(default_factory=list)  # per step
    phases: dict[str, list[float]] = field(default_factory=dict)  # seconds per step
    losses: list[float] = field(default_factory=list)

    def add(self, answer: Mapping[str, Any]) -> None:
        # The mean inside a block, so that a stall every few steps counts; medians are over blocks.
        self.seconds.append(fmean(answer["seconds"]))
        for name, seconds in answer["phases"].items():
            self.phases.setdefault(name, []).append(fmean(seconds))
        if "loss" in answer:
            self.losses.append(answer["loss"])


def interleave(
    workers: Sequence[Measurable],
    *,
    rounds: int,
    steps: int,
    warm_up_steps: int,
    message: Mapping[str, Any] | None = None,
) -> dict[str, Blocks]:
    """Per worker, `rounds` blocks of `steps` steps, one worker at a time, after a warm-up that is not kept.

    `message`: what else each worker is told with every block.
    """
    message = message or {}
    blocks = {worker.name: Blocks() for worker in workers}
    for worker in workers:
        worker.send({**message, "steps": warm_up_steps})
        worker.answer()
    for _ in range(rounds):
        for worker in workers:
            worker.send({**message, "steps": steps})
            blocks[worker.name].add(worker.answer())
    return blocks


def open_environment(folder: Path, installs: Sequence[Sequence[str]]) -> str:
    """A virtual environment's interpreter, with `pip install` run once for each of `installs`, in order.

    Reused if it was made for the same installs. Raises BenchError with pip's own reason.
    """
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps([list(arguments) for arguments in installs])
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    print(f"installing peers into {folder}", file=sys.stderr)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    for arguments in installs:
        _run([str(python), "-m", "pip", "install", "--quiet", *arguments])
    stamp.write_text(wanted)
    return str(python)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else done.stderr.strip()[-500:]
        raise BenchError(f"`{' '.join(command[1:])}` failed: {reason}")


def read_cpu_seconds() -> tuple[float, float]:
    """Read (seconds that others than this process and its ended children used, seconds of all cores) since boot.

    (0, 0) where /proc is missing.
    """
    if not (stat := Path("/proc/stat")).exists():
        return 0.0, 0.0
    ticks = [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
    total, idle = sum(ticks), ticks[3] + ticks[4]  # idle, or waiting for disks
    per_second = os.sysconf("SC_CLK_TCK")
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return (total - idle) / per_second - own, total / per_second


def others_share(since: tuple[float, float]) -> float:
    """Share of all cores' time that others used since `read_cpu_seconds`, 0 to 1. Close the workers first."""
    others, total = read_cpu_seconds()
    return max(0.0, (others - since[0]) / max(1e-9, total - since[1]))


def describe_machine(**facts: Any) -> dict[str, Any]:
    """The machine, and `facts` (versions, threads, other load) that explain the numbers."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **facts,
    }


def find_commit() -> str:
    """Return this checkout's commit, "-dirty" if it has changes, "unknown" outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def report(
    bench: str,
    *,
    version: str,
    machine: Mapping[str, Any],
    measured: Iterable[Measured],
    ratios: Mapping[str, float],
    path: Path | None = None,
) -> dict[str, Any]:
    """The value that `colonnade bench NAME --json FILE` writes: see DESIGN.md. path: the file, where it is written."""
    cases = [
        {"case": m.case, "system": m.system, "unit": m.unit, "median": m.median, "values": m.values}
        for m in measured
    ]
    result = {
        "bench": bench,
        "version": version,
        "commit": find_commit(),
        "machine": dict(machine),
        "cases": cases,
        "ratios": dict(ratios),
    }
    if path is not None:
        write_report(path, result)
    return result


def write_report(path: Path, result: Mapping[str, Any]) -> None:
    """JSON with one case per line, so that a changed figure is a changed line. Whole or not at all, for runs go on with
    what it has."""
    cases = ",\n  ".join(json.dumps(case) for case in result["cases"])
    frame = json.dumps({**result, "cases": "CASES"}, indent=1)
    part = path.with_name(f"{path.name}.part")
    part.write_text(frame.replace('"CASES"', f"[\n  {cases}\n ]") + "\n")
    part.replace(path)


def open_grid(
    headings: Sequence[str], *, texts: int | Sequence[str] = 1, title: str | None = None
) -> Table:
    """Make an empty table for the terminal. texts: headings of texts, or the number of first columns that have texts;
    other columns have numbers."""
    grid = Table(box=None, title=title, title_justify="left", padding=(0, 1, 0, 0))
    names = headings[:texts] if isinstance(texts, int) else texts
    for heading in headings:
        grid.add_column(heading, justify="left" if heading in names else "right", no_wrap=True)
    return grid


def print_ratios(console: Console, result: Mapping[str, Any]) -> None:
    """Print the ratios over all cases: those of one case have a blank in their names."""
    for name, ratio in result["ratios"].items():
        if " " not in name:
            console.print(f"{name}: {ratio:.3f}")


def print_machine(console: Console, result: Mapping[str, Any]) -> None:
    """The line under a bench's table: what ran where, and whether the machine was quiet."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, others used "
        f"{machine['others_share']:.0%} of it; commit {result['commit']}; {versions}", soft_wrap=True
    )  # fmt: skip
    for what in machine.get("left_out", ()):
        console.print(f"left out: {what}", style="yellow", markup=False)
    if machine["others_share"] > MAX_OTHERS_SHARE:
        console.print(
            "The machine was busy with other things: do not quote these ratios. OpenMP's spinning threads "
            "then slow the systems down unequally.", style="yellow", soft_wrap=True,
        )  # fmt: skip
