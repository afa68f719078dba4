"""Ports that `colonnade train --ranks` opens to other processes and users of the machine: gloo's ports on 127.0.0.1
only."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import forked_run
import pytest
from forked_command import run_command, start_command
from hosts_here import call_on_host, need_hosts, open_hosts
from ranks import Child, start_child
from small_run import CONFIG, digest

NOBODY = 65534
LISTENING, LOOPBACK = "0A", "0100007F"
MEMORY_FILES = ("store", "heartbeats", "config", "summary")
SMALL = {"train.epochs": 2, "train.timeout": 20}
LONG = {"data.options.num_train": 9_000_000}
"""A run that does not end while a test looks at it."""


def command(folder: Path, settings: dict) -> list[str]:
    """Write a configuration into `folder`; return the words that train it on two ranks, in `folder`/run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    return [
        "train", str(folder / "config.yaml"), "--ranks", "2", "--run", str(folder / "run"),
        *(f"--set={name}={value}" for name, value in settings.items()),
    ]  # fmt: skip


def environment_in(folder: Path) -> dict[str, str]:
    (folder / "temporary").mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "temporary"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # torch leaves it behind
    }


WAYS = ["forked", pytest.param("started", marks=pytest.mark.slow)]
"""Ways in which processes start: forked with all imports made, or as a user starts them."""


def start(folder: Path, settings: dict, way: str = "forked") -> Child:
    words, environment = command(folder, settings), environment_in(folder)
    return start_command(folder / "output", environment, words, is_forked=way == "forked")


def process_tree(pid: int) -> list[int]:
    """`pid` and its descendants."""
    pids = [pid]
    for parent in pids:
        for thread in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                pids.extend(int(child) for child in thread.read_text().split())
            except OSError:
                continue  # it has ended
    return pids


def open_files(pid: int) -> dict[str, str]:
    """Return the open files of a process, by path."""
    files = {}
    with suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                files[f"/proc/{pid}/fd/{name}"] = os.readlink(f"/proc/{pid}/fd/{name}")
    return files


def listeners(pid: int) -> set[tuple[str, int]]:
    """Address (in hex) and port of every socket that other processes can send to, of a process and its descendants."""
    sockets = set()
    for item in process_tree(pid):
        inodes = set(open_files(item).values())
        for kind in ("tcp", "tcp6", "udp", "udp6"):
            try:
                table = Path(f"/proc/{item}/net/{kind}").read_text().splitlines()[1:]
            except OSError:
                continue
            for words in map(str.split, table):
                if f"socket:[{words[9]}]" in inodes and (
                    kind.startswith("udp") or words[3] == LISTENING
                ):
                    address, _, port = words[1].partition(":")
                    sockets.add((address, int(port, 16)))
    return sockets


def wait_until(condition: Callable[[], object], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def num_steps(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def look_until(is_over: Callable[[], bool], pid: int) -> set[tuple[str, int]]:
    sockets: set[tuple[str, int]] = set()

    def look() -> bool:
        sockets.update(listeners(pid))
        return is_over()

    wait_until(look)
    return sockets


@pytest.fixture(scope="module", params=WAYS)
def run(tmp_path_factory, request):
    """A run of two ranks that trains, and every listening socket that it has had since it was started."""
    folder = tmp_path_factory.mktemp("ports")
    launcher = start(folder, LONG, request.param)
    try:
        sockets = look_until(lambda: num_steps(folder) > 3, launcher.process.pid)
        yield folder, launcher, sockets
    finally:
        launcher.kill()  # its ranks end with it
        launcher.wait()


def test_nothing_listens_but_gloo_on_loopback(run):
    _, launcher, sockets = run
    sockets |= listeners(launcher.process.pid)
    assert len(sockets) >= 2 and {address for address, _ in sockets} == {LOOPBACK}
    assert not listeners(launcher.process.pid) - sockets


OPEN = """
import os, sys
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_CREAT):
        try:
            os.open(path, flags)
            print(0)
        except OSError as error:
            print(error.errno)
"""


def test_another_user_can_neither_read_nor_write_what_ranks_share(run):
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    _, launcher, _ = run
    paths = [
        path
        for pid in process_tree(launcher.process.pid)
        for path, file in open_files(pid).items()
        if re.match(rf"/memfd:colonnade-({'|'.join(MEMORY_FILES)})\b", file)
    ]
    assert len(paths) >= 3 * len(MEMORY_FILES)
    for user, wanted in ((0, {0}), (NOBODY, {errno.EACCES})):
        ended = subprocess.run(
            [sys.executable, "-S", "-E", "-c", OPEN, str(user), *paths],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        assert set(map(int, ended.stdout.split())) == wanted


def test_a_killed_launcher_leaves_no_rank_and_no_file(run):
    folder, launcher, _ = run
    ranks = process_tree(launcher.process.pid)[1:]
    assert len(ranks) == 2
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert list((folder / "temporary").iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_killed_ends_all_with_status_2(tmp_path, way):
    launcher = start(tmp_path, LONG, way)
    try:
        wait_until(lambda: num_steps(tmp_path) > 0)
        ranks = process_tree(launcher.process.pid)[1:]
        os.kill(ranks[1], signal.SIGKILL)
        assert launcher.wait(60) == 2
    finally:
        launcher.kill()
    output = launcher.read_output()
    assert "error: a rank failed (" in output and "rank 1 with status -9" in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_on_a_host_whose_name_is_no_loopback_address(tmp_path):
    """Host has another interface, and another address on the loopback interface."""
    need_hosts()
    with open_hosts(1) as hosts:
        namespace = hosts.hosts[0].namespace
        subprocess.run(
            ["ip", "-n", namespace, "addr", "add", "10.9.9.9/32", "dev", "lo"], check=True
        )
        launcher = start_child(
            tmp_path / "output", environment_in(tmp_path), call_on_host, namespace, "host1",
            run_command, command(tmp_path, SMALL),
        )  # fmt: skip
        sockets = look_until(lambda: launcher.code is not None, launcher.process.pid)
    assert launcher.code == 0, launcher.read_output()
    assert len(sockets) >= 2 and {address for address, _ in sockets} == {LOOPBACK}


def send_garbage(port: int, size: int) -> socket.socket | None:
    try:
        stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
        stranger.sendall(os.urandom(size))
        return stranger
    except OSError:
        return None


def test_garbage_on_every_port_changes_no_bit_or_ends_the_run(tmp_path):
    """Garbage is sent from the moment a port opens, also while ranks connect; every other connection stays open."""
    ranks = forked_run.start(tmp_path / "run", SMALL, num_ranks=2)
    sizes, strangers, reached = [0, 1, 8, 64, 5000], [], set()

    def pester() -> bool:
        for _, port in {listener for rank in ranks for listener in listeners(rank.process.pid)}:
            stranger = send_garbage(port, sizes[len(strangers) % len(sizes)])
            if stranger is not None:
                reached.add(port)
                strangers.append(stranger)
                if len(strangers) % 2:
                    stranger.close()
        return all(rank.code is not None for rank in ranks)

    try:
        wait_until(pester)
    finally:
        for stranger in strangers:
            stranger.close()
        for rank in ranks:
            rank.kill()
    assert len(reached) >= 2
    if any(rank.code for rank in ranks):
        assert all("Error" in rank.read_output() for rank in ranks if rank.code)
        return
    forked_run.run_to_end(tmp_path / "undisturbed", SMALL, 2)
    assert digest(tmp_path / "run") == digest(tmp_path / "undisturbed")
