"""Signals during oneDNN's products: its kernels use the stack pointer as a pointer into the heap."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from colonnade.ops.linear import MIN_ROWS, ONEDNN, SS_DISABLE, SignalStack, linear

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not ONEDNN, reason="oneDNN's products on Linux"
)

STORM = """
import os, signal, sys, threading, time
import colonnade
import torch
from colonnade.ops.linear import linear
from test_signal_stack import multiply, read_stack

def check_child():
    # The thread that forks is the child's main thread; it has no stack yet.
    pid = os.fork()
    if pid == 0:
        before = read_stack()
        multiply()
        os._exit(0 if before is None and read_stack() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def run_beside():
    multiply()
    results.append((read_stack(), check_child()))

results = []
assert read_stack() is None
thread = threading.Thread(target=run_beside)
thread.start()
thread.join()
assert results == [(None, 0)], results
assert read_stack() is None
multiply()
assert read_stack()

num_signals = 0

def count(number, frame):
    global num_signals
    num_signals += 1

signal.signal(signal.SIGALRM, count)
signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
deadline = time.monotonic() + 1
while time.monotonic() < deadline:
    multiply()
    blocks = [bytearray(num_bytes) for num_bytes in range(600, 9000, 700)]
signal.setitimer(signal.ITIMER_REAL, 0)
assert num_signals
print("alive")
"""


def read_stack() -> int | None:
    """Return the address of the calling thread's alternate signal stack, None without one."""
    stack = SignalStack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack)) == 0
    return None if stack.flags & SS_DISABLE else stack.address


def multiply() -> None:
    x = torch.ones(MIN_ROWS, 367, requires_grad=True)
    weight = torch.ones(256, 367, requires_grad=True)
    linear(x, weight, None).sum().backward()


def test_a_stack_that_the_thread_has_is_kept():
    multiply()
    address = read_stack()
    assert address is not None
    multiply()
    assert read_stack() == address


def test_signals_during_products_leave_the_heap_intact():
    """Without the stack, a processor with AVX-512 aborts within a second; here at least the stack is there."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
        ),
    }
    environment.pop("PYTHONFAULTHANDLER", None)
    done = subprocess.run(
        [sys.executable, "-c", STORM],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == "alive\n", (done.returncode, done.stderr)
