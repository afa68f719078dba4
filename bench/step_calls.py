"""Count the Python calls of a training step, and the files that they enter: what who reads the code has to follow.

Minutes: 1 (quick 1).

Two tables, one id a sample, a loop of one's own with a lookahead; all threads of rank 0 are counted, calls inside the
package alone. Nothing is timed: the same commit gives the same counts.

    step_calls_vs_BASE     the largest ratio of the worlds to the counts of another checkout (--base FOLDER)

--base: a checkout with an environment of its own (`make setup`), counted by this checkout's worker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import (
    BenchError,
    Measured,
    describe_machine,
    open_grid,
    open_parser,
    report,
    run_ranks,
    run_script,
)
from rich.console import Console
from workers.step_calls import WORLDS

import colonnade


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "changes nothing: this is quick")
    parser.add_argument("--base", type=Path, help="another checkout to compare with")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    checkouts = {"colonnade": Path(sys.executable)}
    if options.base is not None:
        checkouts["base"] = options.base / ".venv" / "bin" / "python"
        if not checkouts["base"].is_file():
            raise BenchError(f"--base {options.base}: it has no .venv; run `make setup` there")
    measured = [
        Measured(world, system, unit, [value])
        for world in WORLDS
        for system, python in checkouts.items()
        for unit, value in count(python, world).items()
    ]
    values = {(m.case, m.system, m.unit): m.median for m in measured}
    ratios = {}
    if options.base is not None:
        by_world = {
            f"step_calls_{world.replace(' ', '_')}": values[world, "colonnade", "calls/step"]
            / values[world, "base", "calls/step"]
            for world in WORLDS
        }
        ratios = {"step_calls": max(by_world.values()), **by_world}
    result = report(
        "step_calls",
        version=colonnade.__version__,
        machine=describe_machine(versions={"torch": torch.__version__}),
        measured=measured,
        ratios=ratios,
        path=options.json,
    )
    table = open_grid(("world", "system", "calls a step", "files"), texts=2)
    for world in WORLDS:
        for system in checkouts:
            calls, files = (values[world, system, unit] for unit in ("calls/step", "files"))
            table.add_row(world, system, f"{calls:,.0f}", f"{files:.0f}")
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name}: {ratio:.2f}")
    console.print(
        f"commit {result['commit']}; torch {torch.__version__}"
    )  # no machine: nothing is timed


def count(python: Path, world: str) -> dict[str, float]:
    """Run one world with an interpreter; return what its rank 0 counted, by unit. Raises BenchError."""
    printed = run_ranks(str(python), WORLDS[world]["ranks"], ["workers.step_calls", world])
    counted: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return {"calls/step": counted["calls"], "files": float(len(counted["files"]))}


if __name__ == "__main__":
    run_script(main)
