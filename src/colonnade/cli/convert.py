"""`colonnade convert`: convert text files to Parquet."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colonnade.sizes import format_bytes
from colonnade.terminal import Terminal

if TYPE_CHECKING:
    from rich.progress import Progress

    from colonnade.data.tabular.convert import Conversion

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade convert csv clicks.csv clicks.parquet --null NA\n\n"
    "  colonnade convert csv u.data u.parquet --delimiter tab --names user,item,rating,time\n\n"
    "  colonnade train --data parquet --path clicks.parquet"
)
app = typer.Typer(
    help="Convert text to Parquet: typed, checked, about a quarter of the size, and several times faster to read.",
    no_args_is_help=True,
)

ROWS_PER_GROUP = 1 << 17  # as in colonnade.data.tabular.convert, which takes seconds to import
Target = Annotated[Path, typer.Argument(help="Parquet file to write.", metavar="DST")]
RowsPerGroup = Annotated[
    int,
    typer.Option(
        min=1, help="Rows in a group of the file; readers need memory for at least one group."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]
TAB = {"\\t": "\t", "tab": "\t"}
"""Spellings of a tab on the command line."""
GRAPHS = ("triples", "edges")
"""Kinds of data with the option `columns` for the names of columns."""
DelimiterOption = Annotated[
    str | None,
    typer.Option(
        help="Delimiter of text: one character, or tab. Default: what the first line has."
    ),
]
NamesOption = Annotated[
    str | None,
    typer.Option(help="Column names of text without a header: label,user,item."),
]


@app.command()
def csv(
    source: Annotated[Path, typer.Argument(help="Delimited text file.", metavar="SRC")],
    target: Target,
    delimiter: DelimiterOption = None,
    quote: Annotated[
        str, typer.Option(help="Character around fields with delimiters or newlines; '' for none.")
    ] = '"',
    names: NamesOption = None,
    null: Annotated[
        list[str] | None,
        typer.Option(help="Text that means a missing value, such as NA. Repeatable."),
    ] = None,
    rows_per_group: RowsPerGroup = ROWS_PER_GROUP,
    force: Force = False,
) -> None:
    """Convert CSV.

    A column becomes integers, numbers or text: the first type that keeps all its values unchanged; empty = null."""
    from colonnade.data.tabular.convert import check_conversion_target, open_csv_conversion

    check_conversion_target(source, target, overwrite=force)
    with create_row_progress_bar() as progress:
        task = progress.add_task("reading")
        conversion = open_csv_conversion(
            source,
            **build_text_options("csv", delimiter, names),
            quote=quote or None,
            null_values=null or (),
            on_rows=lambda rows, total: progress.update(task, advance=rows, total=total),
        )
    write_converted_file(conversion, target, rows_per_group, force)


def build_text_options(
    data_kind: str | None, delimiter: str | None, names: str | None
) -> dict[str, Any]:
    """Return the options of a reader that --delimiter and --names set; None: not given."""
    return {
        "delimiter": TAB.get(delimiter or "", delimiter),
        "columns" if data_kind in GRAPHS else "names": names and names.split(","),
    }


def create_row_progress_bar() -> Progress:
    """Create a progress bar of rows."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeRemainingColumn(),
        console=Terminal(),
        transient=True,
    )


def write_converted_file(
    conversion: Conversion, target: Path, rows_per_group: int, force: bool
) -> None:
    """Write the Parquet file with a progress bar, and print its size and time."""
    from colonnade.data.tabular.convert import write_parquet_file

    console = Terminal()
    started = time.perf_counter()
    with create_row_progress_bar() as progress:
        task = progress.add_task(target.name, total=conversion.num_rows)
        write_parquet_file(
            conversion,
            target,
            rows_per_group=rows_per_group,
            overwrite=force,
            on_rows=lambda rows: progress.advance(task, rows),
        )
    size = target.expanduser().stat().st_size
    console.print(
        f"wrote {target}: {conversion.num_rows:,} rows, {len(conversion.schema)} columns, {format_bytes(size)} "
        f"in {time.perf_counter() - started:.1f} s",
        soft_wrap=True,
    )
