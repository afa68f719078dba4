"""Sources of samples to score: files read in their own order, with or without labels."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, cast

from colonnade.cli.settings import check_part
from colonnade.config.run import DataConfig
from colonnade.data import SOURCES, open_source
from colonnade.data.contract import Source
from colonnade.data.ratings import HeldOutRatings, UserSource
from colonnade.data.sources import resolve_preset
from colonnade.data.tabular.declaration import load_file_schema
from colonnade.data.tabular.files import find_files
from colonnade.data.tabular.formats import FORMATS, find_format
from colonnade.errors import ConfigError


def open_inputs(
    name: str,
    path: str | Path | None,
    options: Mapping[str, Any],
    *,
    part: str | None = None,
    training: DataConfig | None = None,
) -> Source:
    """Open all samples of the files at `path`, in their order, or only `part` of the data set.

    name, options: reader (colonnade.data.SOURCES) and its options in training. training: data of training; where it
    groups ratings by user, those of the same users are read, too. Raises ConfigError for a reader that always splits
    its samples into parts, DataError for bad files.
    """
    if part is not None:
        check_part(part)
        source = getattr(open_source(name, path, **options), part)
        if isinstance(source, UserSource):
            raise ConfigError(
                "got --part train, whose ratings are what predictions are made from; wanted a part that holds ratings "
                "out (--part test), or --path FILE"
            )
        if source is None:
            raise ConfigError(f"this data set has no {part} part; choose another with --part")
        return source
    if name not in SOURCES:
        raise ConfigError(f"unknown source {name!r}; choose from {', '.join(sorted(SOURCES))}")
    name, path, options = resolve_preset(name, path, options)
    if name in FORMATS:
        if path is not None and (format := find_format(Path(path).suffix)) is not None:
            name = format.name  # a model trained on one file format can score another
        source = open_table_file(name, path, options)
        if training is None or training.options.get("group_by") is None:
            return source
        ratings = open_source(training.name, training.path, **training.options).train
        return HeldOutRatings(source, cast("UserSource", ratings))
    raise ConfigError(
        f"the {name} reader has no files of samples by themselves; score a part of it with --part test"
    )


def open_table_file(name: str, path: str | Path | None, options: Mapping[str, Any]) -> Source:
    """Open all rows of a table file with the schema of training; columns of labels and weights may be missing.

    Without a header they are missing if the first row has as many columns as `names` without them.
    """
    if path is None or "schema" not in options:
        raise ConfigError(
            "got no schema for these files, wanted the schema of training: score with the reader that the model was "
            "trained with (leave --data out)"
        )
    format = FORMATS[name]
    # Options of reading files, not of splitting them into parts.
    syntax = {o: options[o] for o in signature(format.open_file).parameters if o in options}
    others = {o: options[o] for o in ("threads", "join") if o in options}
    declared = load_file_schema(options["schema"])
    schema = declared.inputs()
    if names := syntax.get("names"):
        targets = {*declared.columns} - {*schema.columns}
        inputs = [column for column in names if column not in targets]
        first_row = {**syntax, "names": None}  # read as a header, for its number of columns
        file = format.open_file(find_files(path, format.endings)[0], **first_row)
        syntax["names"] = inputs if len(file.names) == len(inputs) else names
    return open_source(name, path, **syntax, **others, schema=schema).train
