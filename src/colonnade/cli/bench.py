"""`colonnade bench`: run one of the project's benches, from a source checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ConfigError

SCRIPTS = Path(__file__).resolve().parents[3] / "bench"


EXAMPLES = "[bold]Examples[/bold]\n\n  colonnade bench train --quick\n\n  colonnade bench kernels --json kernels.json"


def bench(
    name: Annotated[str, typer.Argument(help="Which question, e.g. train.")],
    json: Annotated[
        Path | None, typer.Option(help="Write cases, raw values and ratios here.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Fewer rounds: to try the bench, not to quote.")
    ] = False,
) -> None:
    """Measure Colonnade beside its peers, interleaved in one run, and print a table."""
    name = name.replace("-", "_")
    known = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "harness")
    if name not in known:
        where = (
            ""
            if known
            else f"; no benches at {SCRIPTS}: they come with a source checkout, not the wheel"
        )
        raise ConfigError(f"unknown bench {name!r}; choose from {', '.join(known)}{where}")
    command = [sys.executable, str(SCRIPTS / f"{name}.py")]
    command += ["--json", str(json)] if json else []
    command += ["--quick"] if quick else []
    raise typer.Exit(subprocess.run(command, check=False).returncode)
