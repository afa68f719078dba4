"""A process ends with its own status, whatever its threads do meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

EXITS = """
import os, random, sys, threading, time
import torch
from colonnade import _native

values = torch.zeros(1 << 16)

def call_the_core():
    while True:
        _native.all_finite(values.data_ptr(), len(values), "float32")

def call_torch():
    while True:
        values.sum()

def run_child():
    for call in (call_the_core, call_torch):
        threading.Thread(target=call, daemon=True).start()
    globals()["readers"] = [_native.PageReader(kind, 64) for kind in ("auto", "threads")]
    time.sleep(random.random() * 0.02)
    sys.exit(7)

def wait_for_one():
    status = os.waitstatus_to_exitcode(os.wait()[1])
    assert status == 7, status

num_exits, num_beside = map(int, sys.argv[1:])
for number in range(num_exits):
    if number >= num_beside:
        wait_for_one()
    if os.fork() == 0:
        run_child()
for _ in range(min(num_exits, num_beside)):
    wait_for_one()
"""


def check_exits(num_exits: int, num_beside: int, seconds: float) -> None:
    """Exit children of fork one after the other, `num_beside` at a time: importing torch anew would take longer."""
    command = [sys.executable, "-c", EXITS, str(num_exits), str(num_beside)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, env=environment
    )
    assert done.returncode == 0 and "terminate" not in done.stderr, done.stderr


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(number)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@pytest.mark.slow
def test_a_process_exits_while_its_threads_call_native_code():
    """Python before 3.14 unwinds such threads, through destructors that must not throw: status -6."""
    check_exits(3, 3, 60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_200_exits_on_a_busy_machine():
    with busy_processes(6):
        check_exits(200, 2, 850)


READERS = """
import resource, sys
from pathlib import Path
import torch
from colonnade import _native

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (24 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(_native.PageReader("auto", 1024).kind)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="bounds a process's address space by /proc")
def test_a_reader_without_room_for_buffers_or_threads_takes_fewer():
    """24 MiB are less than the ring's buffers, and three threads' stacks."""
    done = subprocess.run(
        [sys.executable, "-c", READERS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["threads"]


FORKED = """
import os, sys, threading
from colonnade import _native

readers = [_native.PageReader(kind, 4) for kind in ("auto", "threads")]
if os.fork() == 0:
    del readers
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_child_of_fork_does_not_wait_for_threads_that_it_does_not_have():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["7"], done.stderr
