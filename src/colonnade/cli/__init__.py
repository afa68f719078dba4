"""The command line: one file per verb. Errors are one line (got / wanted / do this) and exit status 2."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from colonnade.cli import bench, convert, demo, doctor, evaluate, ranks, train
from colonnade.errors import ColonnadeError

app = typer.Typer(
    help="Train recommendation models whose embedding tables outgrow memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.add_typer(convert.app, name="convert")
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("rank", hidden=True)(ranks.rank)


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        print("stopped before the first step; the newest commit is as it was", file=sys.stderr)
        sys.exit(130)
    except ColonnadeError as error:
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        console.print(f"error: {error}", style="red")
        sys.exit(2)
