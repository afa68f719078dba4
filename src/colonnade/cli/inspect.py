"""`colonnade inspect`: what a run folder, an export, a commit or a data file holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.terminal import say

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade inspect runs/mine\n\n  colonnade inspect served\n\n"
    "  colonnade inspect runs/mine/commits/000000002000.json\n\n  colonnade inspect clicks.parquet"
)
MAX_LINES = 30
DELIMITERS = {".tsv": "\t", ".csv": ",", ".txt": "\t"}


def inspect(
    path: Annotated[
        Path, typer.Argument(help="Run folder, exported folder, commit (.json) or data file.")
    ],
) -> None:
    """Say what is in there: steps, tables, rows, bytes, identity; or columns and types. Changes nothing."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a run folder, an export or a file")
    if path.is_dir():
        if (path / "model.json").is_file():
            _export(path)
        elif (path / "config.yaml").is_file() or (path / "commits").is_dir():
            _run(path)
        else:
            raise CheckpointError(
                f"{path} is neither a run folder (config.yaml) nor an export (model.json); "
                "give one of these, or a file"
            )
    elif path.suffix == ".json":
        _commit(path)
    elif path.suffix == ".safetensors":
        _safetensors(path)
    else:
        _data(path)


def _run(path: Path) -> None:
    from colonnade.report.reading import read_run, tables_of
    from colonnade.report.words import bytes_words, count_words, seconds_words

    run = read_run(path)
    model, data = run.config.get("model", {}), run.config.get("data", {})
    _facts(
        {
            "run": str(path),
            "model": f"{model.get('name', '-')}, dim {model.get('dim', '-')}",
            "data": data.get("name", "-"),
            "status": f"{run.status}, step {run.step:,}, {seconds_words(run.seconds or None)}",
            "commits": ", ".join(f"{step:,}" for step in run.commits) or "none",
            "on disk": bytes_words(_size(path)),
        }
    )
    rows = [
        (
            t.name, count_words(t.rows_in_memory), count_words(t.rows_in_files),
            bytes_words(t.bytes_in_memory), bytes_words(t.bytes_in_files),
        )
        for t in tables_of(run)
    ]  # fmt: skip
    _table(("table (rank 0)", "rows in memory", "rows in files", "memory", "files"), rows)
    if run.commits:
        newest = path / "commits" / f"{run.commits[-1]:012d}.json"
        say(f"newest commit: colonnade inspect {newest}")


def _commit(path: Path) -> None:
    from colonnade.train.commit_header import read_header
    from colonnade.train.stores import shardings_of

    if not path.stem.isdecimal() or path.parent.name != "commits":
        raise ConfigError(
            f"{path} is no commit of a run (RUN/commits/STEP.json); give the run folder"
        )
    header = read_header(path.parent.parent, int(path.stem))
    model = header["model"]
    _facts(
        {
            "commit of step": f"{header['step']:,}",
            "ranks": header["num_ranks"],
            "written by": f"colonnade {header.get('colonnade', '-')}",
            "dense weights": f"{sum(_product(s) for s in model['dense'].values()):,} in {len(model['dense'])} tensors",
            "features": len(model["features"]),
        }
    )
    rows = [
        (name, str(t["dim"]), "any id" if t["rows"] is None else f"{t['rows']:,}", t["dtype"], t["optimizer"],
         str(sharding))
        for (name, t), sharding in zip(model["tables"].items(), shardings_of(header), strict=True)
    ]  # fmt: skip
    _table(("table", "dim", "ids", "dtype", "optimizer", "rows on"), rows)
    towers = []
    for name, tower in model.get("towers", {}).items():
        shapes = [s for n, s in model["dense"].items() if f".interactions.{name}." in f".{n}"]
        enter, leave = tower["floats"]
        towers.append(
            (name, ", ".join(tower["features"]), tower["module"], f"{enter:,}", f"{leave:,}", f"{enter / leave:.2f}",
             f"{sum(map(_product, shapes)):,}")
        )  # fmt: skip
    _table(("tower", "fields", "module", "floats in", "out", "ratio", "parameters"), towers)


def _export(path: Path) -> None:
    from colonnade.report.words import bytes_words, count_words
    from colonnade.train.exported import read_export

    export = read_export(path)
    rows = [
        (t.name, str(t.dim), "any id" if t.rows is None else f"{t.rows:,}", t.dtype, count_words(t.count),
         bytes_words(export.files[t.file].bytes))
        for t in export.tables
    ]  # fmt: skip
    facts = {
        "exported model": str(path),
        "step": f"{export.step:,}",
        "written by": f"colonnade {export.colonnade}",
        "on disk": bytes_words(_size(path)),
    }
    _facts(facts)
    _table(("table", "dim", "ids", "dtype", "trained rows", "file"), rows)


def _safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            parts = [(name, file.get_slice(name)) for name in file.keys()]
            rows = [(n, p.get_dtype(), " x ".join(map(str, p.get_shape()))) for n, p in parts]
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path}: not a safetensors file: {error}; fetch or export it again"
        ) from None
    _table(("tensor", "dtype", "shape"), rows)


def _data(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    from colonnade.data.location import check_regular
    from colonnade.report.words import bytes_words

    check_regular(path)
    try:
        if path.suffix == ".parquet":
            file = pa.parquet.ParquetFile(path)
            schema, num_rows = file.schema_arrow, f"{file.metadata.num_rows:,}"
        else:
            delimiter = DELIMITERS.get(path.suffix, ",")
            options = pa.csv.ParseOptions(delimiter=delimiter)
            with pa.csv.open_csv(path, parse_options=options) as reader:
                schema, num_rows = reader.schema, "not counted; the first line was taken as names"
    except (pa.ArrowException, OSError, ValueError) as error:
        detail = " ".join(str(error).split())
        raise DataError(
            f"{path}: cannot be read as {path.suffix or 'text'}: {detail}. Wanted Parquet (.parquet), .csv or .tsv"
        ) from None
    _facts({"file": str(path), "rows": num_rows, "on disk": bytes_words(path.stat().st_size)})
    _table(("column", "type"), [(field.name, str(field.type)) for field in schema])
    _suggest(path, schema.names)


def _suggest(path: Path, columns: Sequence[str]) -> None:
    """The schema that training would infer; why there is none, where it would refuse."""
    from colonnade.data import infer_schema

    try:
        suggested = infer_schema(path)
    except (ConfigError, DataError) as error:
        say(f"no schema suggested: {error}")
        return
    say("suggested schema (save, correct and give it with --set data.options.schema=FILE):\n")
    say(suggested.to_yaml())
    left_out = [name for name in columns if name not in suggested.columns]
    if left_out:
        say(f"left out, because no field reads their type: {', '.join(left_out)}")


def _facts(values: dict[str, Any]) -> None:
    width = max(map(len, values))
    for name, value in values.items():
        say(f"{name:>{width}}  {value}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table as Grid

    from colonnade.terminal import Terminal

    if not rows:
        return
    grid, console = Grid(), Terminal()
    for number, name in enumerate(columns):
        grid.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows[:MAX_LINES]:
        grid.add_row(*row)
    console.print(grid)
    if len(rows) > MAX_LINES:
        console.print(f"  and {len(rows) - MAX_LINES:,} more")


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def _product(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
