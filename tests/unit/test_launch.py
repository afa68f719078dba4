"""The launcher of `--ranks`, with small programs as ranks: signals, failures, and what ranks inherit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from colonnade import cli
from colonnade.cli import app
from colonnade.cli import ranks as launch
from colonnade.cli.ranks import create_memory_file, run_ranks

SLEEP = "import time; time.sleep(60)"
STOP_ON_SIGNAL = """
import os, signal, sys, time
def stop(number, _):
    print(number, file=open(sys.argv[1] + os.environ["RANK"], "a"))
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
open(sys.argv[1] + os.environ["RANK"], "w").close()
time.sleep(60)
"""
IGNORE_SIGNALS = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
open(sys.argv[1] + os.environ["RANK"], "w").close()
time.sleep(60)
"""
USE_FILES = """
import os, sys
rank = os.environ["RANK"]
assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2"
assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
for path in (os.environ["COLONNADE_STORE"], os.environ["COLONNADE_HEARTBEATS"], sys.argv[1]):
    assert oct(os.stat(path).st_mode)[-3:] == "600"
    with open(path, "a") as file:
        file.write(rank)
"""


def program(text: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", text, *arguments]


@pytest.fixture
def ranks_started(tmp_path, monkeypatch):
    """The processes that `run_ranks` starts, and a prefix of files that they create once they are ready."""
    started = []

    class Process(launch.subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(launch.subprocess, "Popen", Process)
    yield started, f"{tmp_path}/ready-"
    assert all(process.returncode is not None for process in started), "a rank still runs"


def send(prefix: str, *signals: tuple[float, int]) -> threading.Thread:
    """Send this process signals, each some seconds after the one before, once two ranks are ready."""

    def run():
        while not all(os.path.exists(f"{prefix}{rank}") for rank in range(2)):
            time.sleep(0.01)
        for pause, number in signals:
            time.sleep(pause)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_ranks_inherit_files_in_memory_and_nothing_is_left(ranks_started):
    with create_memory_file("test") as path:
        assert run_ranks(program(USE_FILES, path), 2, [path]) == {}
        with open(path) as file:
            assert sorted(file.read()) == ["0", "1"]
    with pytest.raises(OSError):
        open(path)


def test_one_rank_that_fails_ends_the_others_and_its_status_is_returned(ranks_started):
    text = f"import os, sys\nif os.environ['RANK'] == '1': sys.exit(3)\n{SLEEP}"
    began = time.monotonic()
    assert run_ranks(program(text), 3, []) == {1: 3}
    assert time.monotonic() - began < 10
    assert [process.returncode for process in ranks_started[0]] == [-15, 3, -15]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_ranks_end_in_their_own_way(number, ranks_started):
    started, prefix = ranks_started
    before = signal.getsignal(number)
    send(prefix, (0, number))
    assert run_ranks(program(STOP_ON_SIGNAL, prefix), 2, []) is None
    assert [process.returncode for process in started] == [0, 0]
    for rank in range(2):
        with open(f"{prefix}{rank}") as file:
            assert file.read() == f"{int(number)}\n"
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_ranks_that_ignore_the_first(ranks_started, monkeypatch):
    """Both come from one key press where the launcher's group and the launcher get it: that is one signal."""
    monkeypatch.setattr(launch, "REPEAT_SECONDS", 0.5)
    monkeypatch.setattr(launch, "END_SECONDS", 0.3)
    started, prefix = ranks_started
    began = time.monotonic()
    send(prefix, (0, signal.SIGINT), (0.2, signal.SIGINT), (0.8, signal.SIGINT))
    assert run_ranks(program(IGNORE_SIGNALS, prefix), 2, []) is None
    assert 1.0 < time.monotonic() - began < 15
    assert [process.returncode for process in started] == [-9, -9]


def test_a_third_signal_kills_at_once(ranks_started, monkeypatch):
    monkeypatch.setattr(launch, "REPEAT_SECONDS", 0.1)
    started, prefix = ranks_started
    began = time.monotonic()
    send(prefix, *[(0.4, signal.SIGTERM)] * 3)
    assert run_ranks(program(IGNORE_SIGNALS, prefix), 2, []) is None
    assert time.monotonic() - began < launch.END_SECONDS / 2
    assert [process.returncode for process in started] == [-9, -9]


@pytest.mark.parametrize("verb", ["train", "rank"])
def test_one_process_says_that_a_run_was_stopped(monkeypatch, capsys, verb):
    """The launcher does, and not each of its ranks."""

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run_command", interrupted)
    monkeypatch.setattr(sys, "argv", ["colonnade", verb])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.count(cli.STOPPED) == (verb == "train")
