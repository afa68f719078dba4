"""Tests that send Ctrl-C work where the suite was started in the background, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = """
import signal, subprocess, sys
sys.path.insert(0, sys.argv[2])
from own_signals import restore_signals
if sys.argv[1] == "restored":
    restore_signals()
child = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"
print(subprocess.run([sys.executable, "-S", "-c", child], capture_output=True, text=True).stdout)
"""


@pytest.mark.parametrize(("words", "output"), [("ignored", "alive"), ("restored", "")])
def test_a_suite_in_the_background_sends_its_children_ctrl_c(words, output):
    command = "trap '' INT QUIT HUP; exec \"$@\""
    program = [sys.executable, "-c", PROGRAM, words, str(TESTS)]
    done = subprocess.run(
        ["sh", "-c", command, "sh", *program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == output
