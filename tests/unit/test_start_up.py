"""Verbs that only look at files start without torch: it takes two seconds of processor time to import."""

from __future__ import annotations

import subprocess
import sys

import pytest
from run_records import write_run

RUN_VERB = """
import resource, sys
from colonnade.cli.app import run
status = run(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, file=sys.stderr)
sys.exit(1 if status else 2 if "torch" in sys.modules else 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("start") / "run")


@pytest.mark.parametrize("verb", ["report", "compare", "inspect", "settings", "doctor"])
def test_a_verb_that_reads_files_does_not_import_torch(verb, folder):
    arguments = {"compare": [str(folder)] * 2, "settings": [], "doctor": []}.get(
        verb, [str(folder)]
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN_VERB, verb, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 2, "torch was imported"
    assert done.returncode == 0, done.stderr
    seconds = float(done.stderr.splitlines()[-1])
    assert seconds < 1.5, "1.0 s on a quiet machine; processors that others share count for more"
