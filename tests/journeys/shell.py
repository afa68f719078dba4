"""Shell of a user: a folder, commands in it, processes that are killed and interrupted, and files that are compared.

Journeys use nothing else: no fixture of other tests and no module of Colonnade, only the installed command, `torchrun`,
and scripts that they write to the folder. A command is one line, as a user types it.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
"""The module behind `torchrun`: the command of another environment on PATH would start that environment's Python."""
WAIT_SECONDS = 240.0
"""Longest wait for a command or for one of its effects on a busy machine."""
POLL_SECONDS = 0.02


class Shell:
    """Folder with commands that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []

    def write(self, name: str, text: str) -> Path:
        """Write a file of the folder, such as a script or a configuration."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def write_table(self, name: str, header: str, rows: Iterable[Iterable[object]]) -> Path:
        """Write a CSV file of the folder. header: names with commas between them."""
        lines = [header, *(",".join(map(str, row)) for row in rows)]
        return self.write(name, "\n".join(lines) + "\n")

    def start(self, command: str, **environment: str) -> Process:
        """Start a command in the background, in a session of its own as in a terminal of its own."""
        words = shlex.split(command)
        if words[0] == "torchrun":
            words[:1] = TORCHRUN
        elif words[0] in ("colonnade", "python"):
            words[0] = str(BIN / words[0])
        process = Process(command, words, self.folder, self._environment(environment))
        self.processes.append(process)
        return process

    def run(self, command: str, *, status: int = 0, **environment: str) -> str:
        """Run a command to its end and return what it printed. Fails unless it ends with `status`."""
        return self.start(command, **environment).wait(status)

    def run_python(self, script: str, name: str = "script.py", **environment: str) -> str:
        """Write a script to the folder, run it and return what it printed."""
        self.write(name, script)
        return self.run(f"python {name}", **environment)

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.kill()

    @staticmethod
    def _environment(added: Mapping[str, str]) -> dict[str, str]:
        removed = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTEST_CURRENT_TEST", "COLUMNS")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in removed and not name.startswith("COLONNADE_")
        }
        path = f"{BIN}{os.pathsep}{environment.get('PATH', os.defpath)}"
        # Wide lines are not broken, and threads that wait leave the processor to others.
        return {
            **environment,
            "PATH": path,
            "COLUMNS": "200",
            "OMP_WAIT_POLICY": "passive",
            **added,
        }

    def start_training(self, command: str, run: str, steps: int = 75) -> Process:
        """Start a command, and return it when its run has a checkpoint at least `steps` beyond those that it had."""
        step = max(self.list_checkpoints(run), default=0) + steps
        process = self.start(command)
        self.wait_for_checkpoint(run, step, process)
        return process

    def stop_training(
        self, command: str, run: str, stop: Callable[[Process], None] | None = None, steps: int = 75
    ) -> int:
        """Start a command, stop it some steps later and return the newest checkpoint's step.

        stop: a method of `Process` after which the command ends in order; None: it is killed.
        """
        process = self.start_training(command, run, steps)
        if stop is None:
            process.kill()
        else:
            stop(process)
            assert "Traceback" not in process.wait()
        return self.list_checkpoints(run)[-1]

    def resume(self, command: str, run: str) -> str:
        """Run a command to its end, and check that it goes on at the newest checkpoint; return what it printed."""
        newest = self.list_checkpoints(run)[-1]
        output = self.run(command)
        assert f"resuming {run} at step {newest}" in output, output
        return output

    def predict(self, model: str, path: str = "test.csv") -> str:
        """Score a file with a run or an export; return the name of the file of scores."""
        self.run(f"colonnade predict {model} --path {path} --output {model}.csv")
        return f"{model}.csv"

    def check_same_scores(self, model: str, other: str) -> None:
        """Check that two models score the test file to the same bits."""
        one, two = self.predict(model), self.predict(other)
        difference = self.largest_difference(one, two)
        assert self.are_same_files(one, two), f"scores differ by up to {difference}"

    def check_same_metrics(self, run: str, other: str) -> None:
        """Check that two finished runs measured the same to the last bit, as models of the same bits do."""
        one, two = (self.read_summary(name)["metrics"] for name in (run, other))
        # Texts, because a metric may be NaN, which equals nothing.
        assert json.dumps(one) == json.dumps(two) and "test_" in json.dumps(one), f"{one} and {two}"

    def check_equal_losses(self, run: str, other: str, tolerance: float = 1e-5) -> None:
        """Check that two finished runs have the same log loss on the test part, to rounding."""
        one, two = (self.read_summary(name)["metrics"]["test_log_loss"] for name in (run, other))
        assert abs(one - two) < tolerance, f"{one} and {two}"

    def read_scores(self, name: str) -> list[tuple[str, ...]]:
        """Return the rows of a CSV file of scores, without its header."""
        with (self.folder / name).open() as file:
            return [tuple(row) for row in list(csv.reader(file))[1:]]

    def are_same_files(self, one: str, other: str) -> bool:
        """Compare the bytes of two files of the folder."""
        return (self.folder / one).read_bytes() == (self.folder / other).read_bytes()

    def largest_difference(self, one: str, other: str) -> float:
        """Return the largest difference of two score files, each with one row per sample."""
        rows, others = self.read_scores(one), self.read_scores(other)
        assert len(rows) == len(others) > 0, f"{one}: {len(rows)} rows, {other}: {len(others)} rows"
        pairs = [
            (float(a), float(b))
            for row, other_row in zip(rows, others, strict=True)
            for a, b in zip(row, other_row, strict=True)
        ]
        assert all(math.isfinite(value) for pair in pairs for value in pair)
        return max(abs(a - b) for a, b in pairs)

    def read_weights(self, exported: str) -> dict[str, tuple[object, bytes]]:
        """Return the type, shape and bytes of every tensor in the safetensors files of an export."""
        weights = {}
        for path in sorted((self.folder / exported).rglob("*.safetensors")):
            content = path.read_bytes()
            end = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(content[8:end])
            header.pop("__metadata__", None)  # names the run
            for name, tensor in header.items():
                first, last = tensor["data_offsets"]
                facts = tensor["dtype"], tensor["shape"]
                weights[f"{path.name}:{name}"] = (facts, content[end + first : end + last])
        return weights

    def list_checkpoints(self, run: str) -> list[int]:
        """Return the steps of the checkpoints in a run folder, in order."""
        paths = (self.folder / run / "checkpoints").glob("*.json")
        return sorted(int(path.stem) for path in paths if path.stem.isdecimal())

    def read_summary(self, run: str) -> dict[str, Any]:
        """Return the summary of a finished run."""
        return json.loads((self.folder / run / "summary.json").read_text())

    def wait_for_checkpoint(self, run: str, step: int, process: Process) -> int:
        """Wait until a run has a checkpoint at `step` or later, and return the newest one's step."""
        process.wait_until(
            lambda: any(saved >= step for saved in self.list_checkpoints(run)),
            f"a checkpoint of {run} at step {step} or later",
        )
        return self.list_checkpoints(run)[-1]


class Process:
    """Command in the background. Its output goes to a file that no other command writes."""

    def __init__(
        self, command: str, words: list[str], folder: Path, environment: dict[str, str]
    ) -> None:
        self.command = command
        self.began = time.monotonic()
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        self.log = logs / f"{len(list(logs.iterdir())):03d}.txt"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_reset_signals,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def status(self) -> int | None:
        """Exit status; None: still running."""
        return self._process.poll()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, status: int | None = 0, seconds: float = WAIT_SECONDS) -> str:
        """Wait until it ends and return its output. Fails unless its exit status is `status`; None: any."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self}: still running after {seconds:g} s") from None
        assert status is None or code == status, f"{self}: got status {code}, wanted {status}"
        return self.output

    def wait_until(
        self, is_true: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS
    ) -> None:
        """Wait until something is true while the command runs. what: its name, for the message."""
        deadline = time.monotonic() + seconds
        while not is_true():
            assert self.is_running, f"{self}: ended before {what}"
            assert time.monotonic() < deadline, f"{self}: {seconds:g} s without {what}"
            time.sleep(POLL_SECONDS)

    def wait_for_text(self, text: str) -> None:
        """Wait until the output contains `text`."""
        self.wait_until(lambda: text in self.output, f"the text {text!r}")

    def press_ctrl_c(self) -> None:
        """Send SIGINT to all processes of the command's terminal, as Ctrl-C does."""
        os.killpg(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM to the command itself, as schedulers and `kill` do."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the command and all processes that it has started, at once and without a warning (SIGKILL)."""
        members = [self._process.pid, *_list_descendants(self._process.pid)]
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):  # stopped ones start no others
            for pid in members:
                _send(pid, signal_number)
        self._process.wait()
        deadline = time.monotonic() + 30
        while any(_is_alive(pid) for pid in members):
            assert time.monotonic() < deadline, f"{self}: survived SIGKILL"
            time.sleep(POLL_SECONDS)

    def list_workers(self) -> list[int]:
        """Return the process numbers of all processes that the command has started, the oldest first."""
        return sorted(_list_descendants(self._process.pid))

    def __str__(self) -> str:
        return f"$ {self.command}\n{self.output[-4000:]}"


def _reset_signals() -> None:
    """Obey Ctrl-C, which a command started in the background of a script would inherit as ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _list_descendants(pid: int) -> list[int]:
    """List the processes that a process has started, directly or not, by their parents in /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    descendants, waiting = [], [pid]
    while waiting:
        members = children.get(waiting.pop(), [])
        descendants += members
        waiting += members
    return descendants


def pick_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def fetch(url: str, body: object = None, token: str | None = None) -> Any:
    """Return what a server answers, as JSON where it is; None where it does not answer, or is not ready (503).

    body: sent as JSON. token: that of administrative calls.
    """
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    content = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, content, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        assert error.code == 503, f"{url}: {error.code}: {error.read().decode()}"
        return None
    except OSError:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
