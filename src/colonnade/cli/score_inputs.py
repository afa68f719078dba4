"""Sources of samples to score: files read in their own order, with or without labels."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from colonnade.cli.settings import check_part
from colonnade.data import SOURCES, open_source
from colonnade.data.contract import Source
from colonnade.data.lines import locate_data_file, open_line_file
from colonnade.data.sets.criteo import (
    FILE,
    FOLDER,
    NAMES,
    CriteoSource,
    add_zero_labels,
    check_line,
)
from colonnade.data.tabular.declaration import load_file_schema
from colonnade.data.tabular.formats import FORMATS, find_format
from colonnade.errors import ConfigError


def open_inputs(
    name: str, path: str | Path | None, options: Mapping[str, Any], *, part: str | None = None
) -> Source:
    """Open all samples of the files at `path`, in their order, or only `part` of the data set.

    name, options: reader (colonnade.data.SOURCES) and its options in training. Raises ConfigError for a reader that
    always splits its samples into parts, DataError for bad files.
    """
    if part is not None:
        check_part(part)
        source = getattr(open_source(name, path, **options), part)
        if source is None:
            raise ConfigError(f"this data set has no {part} part; choose another with --part")
        return source
    if name not in SOURCES:
        raise ConfigError(f"unknown source {name!r}; choose from {', '.join(sorted(SOURCES))}")
    if name in FORMATS:
        if path is not None and (format := find_format(Path(path).suffix)) is not None:
            name = format.name  # a model trained on one file format can score another
        return open_table_file(name, path, options)
    if name != "criteo":
        raise ConfigError(
            f"the {name} reader has no files of samples by themselves; score a part of it with --part test"
        )
    return open_criteo_file(path, options)


def open_criteo_file(path: str | Path | None, options: Mapping[str, Any]) -> Source:
    """Open all lines of a Criteo file; the label may be missing from all of them (39 fields instead of 40)."""
    file = open_line_file(locate_data_file(path, data_set_folder=FOLDER, file_name=FILE))
    first = file.read_lines(0, 1)
    has_label = first.rstrip(b"\r\n").count(b"\t") != len(NAMES) - 2
    check_line(first if has_label else add_zero_labels(first), file.path, 1)
    rows = options.get("hash_rows")
    return CriteoSource(file, 0, file.num_lines, hash_rows=rows, has_label=has_label)


def open_table_file(name: str, path: str | Path | None, options: Mapping[str, Any]) -> Source:
    """Open all rows of a table file with the schema of training; columns of labels and weights may be missing."""
    if path is None or "schema" not in options:
        raise ConfigError(
            "got no schema for these files, wanted the schema of training: score with the reader that the model was "
            "trained with (leave --data out)"
        )
    # Options of reading files, not of splitting them into parts.
    read_options = {"threads", "join", *signature(FORMATS[name].open_file).parameters}
    values = {option: value for option, value in options.items() if option in read_options}
    schema = load_file_schema(options["schema"]).inputs()
    return open_source(name, path, **{**values, "schema": schema}).train
