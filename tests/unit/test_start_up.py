"""Verbs that only look at files start without torch: it takes two seconds of processor time to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_records import write_run

FORMATS = Path(__file__).parents[1] / "fixtures/formats"
RUN_VERB = """
import resource, sys
from colonnade.cli.app import run_command as run
status = run(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, file=sys.stderr)
sys.exit(1 if status else 2 if "torch" in sys.modules else 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("start") / "run")


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("report", ["RUN"]),
        ("compare", ["RUN", "RUN"]),
        ("inspect", ["RUN"]),
        ("settings", []),
        ("doctor", []),
        ("verify", [str(FORMATS / "run")]),
        ("verify", [str(FORMATS / "export")]),
    ],
)
def test_a_verb_that_reads_files_does_not_import_torch(verb, arguments, folder):
    arguments = [argument.replace("RUN", str(folder)) for argument in arguments]
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


def test_reading_a_plan_does_not_import_torch():
    program = """
import sys
from pathlib import Path
from colonnade.plan.plan import Plan
plan = Plan.from_json(Path(sys.argv[1]).read_text())
print([str(table.sharding) for table in plan.tables], "torch" in sys.modules)
"""
    path = FORMATS / "run" / "plan.json"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert "rank" in done.stdout and done.stdout.endswith(" False\n")


def test_predicting_does_not_import_the_trainer_or_the_planner():
    modules = [
        f"colonnade.{name}"
        for name in (
            "run.run",
            "planning.choices",
            "planning.planner",
            "planning.timing",
            "train.trainer",
        )
    ]
    program = f"import colonnade.predict, sys; print(*(set({modules!r}) & sys.modules.keys()))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []
