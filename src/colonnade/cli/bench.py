"""`colonnade bench`: run one of the project's benches, from a source checkout."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ConfigError

SCRIPTS = Path(__file__).resolve().parents[3] / "bench"


EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade bench train --quick\n\n  colonnade bench kernels --json kernels.json\n\n"
    "  colonnade bench quality --suite towers --seeds 3 --json quality.json"
)


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the bench, e.g. train.")],
    json: Annotated[
        Path | None, typer.Option(help="File to write cases, raw values and ratios to.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Fewer rounds: to try the bench, not to quote its figures.")
    ] = False,
) -> None:
    """Compare the speed of Colonnade and other libraries, interleaved in one run.

    Options that only one bench has (quality: --suite, --arms, --seeds) are passed on to it."""
    name = name.replace("-", "_")
    bench_names = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "harness")
    if name not in bench_names:
        hint = (
            ""
            if bench_names
            else f"; no benches at {SCRIPTS}: they come with a source checkout, not the wheel"
        )
        raise ConfigError(f"unknown bench {name!r}; choose from {', '.join(bench_names)}{hint}")
    command = [sys.executable, str(SCRIPTS / f"{name}.py")]
    command += ["--json", str(json)] if json else []
    command += ["--quick"] if quick else []
    command += context.args
    minutes = read_minutes(SCRIPTS / f"{name}.py")[quick]
    typer.echo(f"bench {name}: about {minutes:g} min on two quiet cores", err=True)
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def read_minutes(script: Path) -> tuple[float, float]:
    """Read from a bench's docstring how many minutes it takes on two cores: whole, and with --quick."""
    text = script.read_text(encoding="utf-8")
    match = re.search(r"^Minutes: ([\d.]+) \(quick ([\d.]+)\)\.$", text, re.MULTILINE)
    if match is None:
        raise ConfigError(f"{script}: got no line 'Minutes: 12 (quick 1).' in its docstring")
    return float(match[1]), float(match[2])
