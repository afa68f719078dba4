"""`colonnade inspect`: show the contents of a run folder, an export, a checkpoint or a data file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from colonnade.cli.train import (
    GRAPHS,
    DelimiterOption,
    LabelOption,
    NamesOption,
    build_text_options,
    get_single_label,
)
from colonnade.data.tabular.formats import FORMATS
from colonnade.errors import CheckpointError, ConfigError
from colonnade.report.formatting import format_bytes, format_count, format_seconds
from colonnade.terminal import PLAIN_GRID, Terminal, build_grid, print_text

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade inspect runs/mine\n\n  colonnade inspect served\n\n"
    "  colonnade inspect runs/mine/checkpoints/000000002000.json\n\n  colonnade inspect clicks.parquet\n\n"
    "  colonnade inspect ratings.csv --data interactions\n\n"
    "  colonnade inspect ratings.dat --data csv --delimiter : --names user,item,label"
)
COUNTED = (*GRAPHS, "interactions")
"""Kinds of files of which the counts are shown."""
MAX_LINES = 30
MAX_COLUMNS = 200
"""Number of columns shown of a data file."""
SAMPLES = 3
"""Number of rows shown of a data file."""


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="Run folder, exported folder, checkpoint (.json), or data file or folder, as in --path of train."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help=f"Kind of data file: {', '.join((*FORMATS, *COUNTED))}. Default: from its name.",
        ),
    ] = None,
    delimiter: DelimiterOption = None,
    names: NamesOption = None,
    label: LabelOption = None,
) -> None:
    """Show steps, tables, rows and bytes; or, of data, columns, first rows and a suggested schema. Changes nothing."""
    options = build_text_options(data, delimiter, names) | {"label": get_single_label(label)}
    options = {name: value for name, value in options.items() if value is not None}
    if data is not None or options:
        _inspect_data(path, data, options)
        return
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a run folder, an export or a file")
    if path.is_dir():
        if (path / "model.json").is_file():
            _inspect_export(path)
        elif (path / "config.yaml").is_file() or (path / "checkpoints").is_dir():
            _inspect_run(path)
        else:
            raise CheckpointError(
                f"{path} is neither a run folder (config.yaml) nor an export (model.json); "
                "give one of these, a file, or a folder of data files with --data"
            )
    elif path.suffix == ".json":
        _inspect_checkpoint(path)
    else:
        _inspect_data(path, None, {})


def _inspect_run(path: Path) -> None:
    from colonnade.report.reading import collect_table_figures, read_run_folder

    run = read_run_folder(path)
    model = run.config.get("model", {})
    data = run.config.get("data", {})
    _print_facts(
        {
            "run": str(path),
            "model": f"{model.get('name', '-')}, dim {model.get('dim', '-')}",
            "data": data.get("name", "-"),
            "status": f"{run.status}, step {run.step:,}, {format_seconds(run.seconds or None)}",
            "checkpoints": ", ".join(f"{step:,}" for step in run.checkpoints) or "none",
            "on disk": format_bytes(_folder_bytes(path)),
        }
    )
    rows = [
        (
            t.name,
            format_count(t.rows_in_memory),
            format_count(t.rows_in_files),
            format_bytes(t.bytes_in_memory),
            format_bytes(t.bytes_in_files),
        )
        for t in collect_table_figures(run)
    ]
    _print_table(("table (rank 0)", "rows in memory", "rows in files", "memory", "files"), rows)
    if run.checkpoints:
        newest = path / "checkpoints" / f"{run.checkpoints[-1]:012d}.json"
        print_text(f"newest checkpoint: colonnade inspect {newest}")


def _inspect_checkpoint(path: Path) -> None:
    from colonnade.checkpoint.header import read_header
    from colonnade.checkpoint.stores import read_table_shardings

    if not path.stem.isdecimal() or path.parent.name != "checkpoints":
        raise ConfigError(
            f"{path} is no checkpoint of a run (RUN/checkpoints/STEP.json); give the run folder"
        )
    header = read_header(path.parent.parent, int(path.stem))
    model = header["model"]
    _print_facts(
        {
            "checkpoint of step": f"{header['step']:,}",
            "ranks": header["num_ranks"],
            "written by": f"colonnade {header.get('colonnade', '-')}",
            "dense weights": f"{sum(map(_num_elements, model['dense'].values())):,} in {len(model['dense'])} tensors",
            "features": len(model["features"]),
        }
    )
    rows = [
        (
            name,
            str(t["dim"]),
            "any id" if t["rows"] is None else f"{t['rows']:,}",
            t["dtype"],
            t["optimizer"],
            str(sharding),
        )
        for (name, t), sharding in zip(
            model["tables"].items(), read_table_shardings(header), strict=True
        )
    ]
    _print_table(("table", "dim", "ids", "dtype", "optimizer", "rows on"), rows)
    towers = []
    for name, tower in model.get("towers", {}).items():
        shapes = [s for n, s in model["dense"].items() if f".interactions.{name}." in f".{n}"]
        inputs, outputs = tower["floats"]
        towers.append(
            (
                name,
                ", ".join(tower["features"]),
                tower["module"],
                f"{inputs:,}",
                f"{outputs:,}",
                f"{inputs / outputs:.2f}",
                f"{sum(map(_num_elements, shapes)):,}",
            )
        )
    _print_table(("tower", "fields", "module", "floats in", "out", "ratio", "parameters"), towers)


def _inspect_export(path: Path) -> None:
    from colonnade.publish.model_files import read_export

    export = read_export(path)
    rows = [
        (
            t.name,
            str(t.dim),
            "any id" if t.rows is None else f"{t.rows:,}",
            t.dtype,
            format_count(t.count),
            format_bytes(export.files[t.file].bytes),
        )
        for t in export.tables
    ]
    facts = {
        "exported model": str(path),
        "step": f"{export.step:,}",
        "written by": f"colonnade {export.colonnade}",
        "on disk": format_bytes(_folder_bytes(path)),
    }
    _print_facts(facts)
    _print_table(("table", "dim", "ids", "dtype", "trained rows", "file"), rows)


def _inspect_data(path: Path, kind: str | None, options: Mapping[str, Any]) -> None:
    from colonnade.data import open_source
    from colonnade.data.lines import check_regular_file
    from colonnade.data.tabular.fields import NULL_VALUES, Category
    from colonnade.data.tabular.narrow import count_missing_words, narrow_column
    from colonnade.data.tabular.tables import read_first_rows_and_schema

    if kind in COUNTED:
        for note in open_source(kind, path, **options).notes:
            print_text(note)
        return
    if kind is not None and kind not in FORMATS:
        kinds = ", ".join(sorted((*FORMATS, *COUNTED)))
        raise ConfigError(f"got --data {kind}, wanted a kind of file: {kinds}")
    if not path.is_dir():
        check_regular_file(path)
    head = read_first_rows_and_schema(path, kind, **options)
    columns = {name: (array, narrow_column(array)) for name, array in head.columns.items()}
    num_read = max((len(array) for array in head.columns.values()), default=0)
    facts = {
        "file": str(path),
        "rows": f"{head.num_rows:,}",
        "on disk": format_bytes(head.num_bytes),
    }
    if num_read < head.num_rows:
        facts["read"] = f"the first {num_read:,} rows"
    _print_facts(facts)
    lines = [
        (
            _format_value(name),
            _describe_field_type(narrowed.type),
            f"{narrowed.null_count:,}",
            _count_distinct(narrowed),
            *(_format_value(array[row], 11) for row in range(min(SAMPLES, num_read))),
        )
        for name, (array, narrowed) in columns.items()
    ]
    samples = [f"row {row + 1}" for row in range(min(SAMPLES, num_read))]
    _print_table(("column", "type", "missing", "distinct", *samples), lines, max_lines=MAX_COLUMNS)
    for name, reason in head.left_out.items():
        print_text(f"left out: {_format_value(name)} ({reason})")
    for note in head.notes:
        print_text(note)
    if head.file_schema is None:
        print_text(f"no schema suggested: {_format_value(head.problem, 2000)}")
        return
    print_text(
        "suggested schema (save, correct and give it with --set data.options.schema=FILE):\n"
    )
    print_text(head.file_schema.to_yaml())
    for field in head.file_schema.categorical:
        if not isinstance(field, Category):
            continue
        if words := count_missing_words(columns[field.column][1]):
            counts = ", ".join(f"{word} ({count:,} times)" for word, count in words.items())
            listed = ", ".join(f"'{word}'" for word in (*NULL_VALUES, *words))
            print_text(
                f"{_format_value(field.name)}: the texts {counts} are categories. If they are missing values, "
                f"add to its line: null_values: [{listed}]"
            )


def _describe_field_type(arrow_type: Any) -> str:
    names = {
        "int64": "integer",
        "double": "fraction",
        "string": "text",
        "bool": "true, false",
        "null": "empty",
    }
    return names.get(
        str(arrow_type), "time" if str(arrow_type).startswith("timestamp") else str(arrow_type)
    )


def _count_distinct(column_values: Any) -> str:
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return f"{pc.count_distinct(column_values).as_py():,}"
    except pa.ArrowException:  # lists
        return "-"


def _format_value(value: Any, max_length: int = 40) -> str:
    """Return a value as text on one line, without control characters."""
    if "date" in str(type_ := getattr(value, "type", "")) or "timestamp" in str(type_):
        value = value.cast("string")  # Python's datetime cannot hold them all
    value = value.as_py() if hasattr(value, "as_py") else value
    text = "" if value is None else str(value)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: max_length + 1])
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def _print_facts(values: dict[str, Any]) -> None:
    width = max(map(len, values))
    for name, value in values.items():
        print_text(f"{name:>{width}}  {value}")


def _print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], max_lines: int = MAX_LINES
) -> None:

    if not rows:
        return
    console = Terminal()
    console.print(build_grid(columns, rows[:max_lines], header_style="bold", **PLAIN_GRID))
    if len(rows) > max_lines:
        console.print(f"  and {len(rows) - max_lines:,} more")


def _folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _num_elements(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
