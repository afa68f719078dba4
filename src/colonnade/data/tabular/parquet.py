"""Parquet files, streamed by row groups: files, folders and patterns."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
from pyarrow.fs import LocalFileSystem

from colonnade.data.tabular.arrow_files import ArrowTableFile, open_fragment
from colonnade.data.tabular.opening import build_opener
from colonnade.errors import DataError


def open_parquet_file(path: Path) -> ArrowTableFile:
    """Read a file's footer. Raises DataError for a file that is not Parquet or is incomplete."""
    try:
        num_bytes = path.stat().st_size
        fragment = pa.dataset.ParquetFileFormat().make_fragment(str(path), LocalFileSystem())
        schema = fragment.physical_schema
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path}: cannot be read as Parquet ({reason}). Is it a Parquet file, and whole?"
        ) from None
    return open_fragment(fragment, schema, num_bytes)


open_parquet = build_opener(
    "parquet",
    open_parquet_file,
    """Open Parquet files under a declared schema, or one inferred from the first file.

    path                 a file, a folder (every file below it), a pattern, or a list of these; natural order of names
    schema               a FileSchema, its fields, plain values, or the path of a YAML file; None: inferred
    label                the label's column, if the schema is inferred; default: one named label, click, target or y
    validation, test     separate files, or Arrow tables
    validation_fraction, test_fraction
                         else, this share: the last samples in the order of the files (test after validation) or,
    split_by             a column: samples with equal values are in one part, by the value's hash. Read once at opening
    order_by             a column of times or numbers: the fractions are the last samples by it, whatever the order of
                         the files; samples with equal values are in one part, the later one. Read once at opening
    validation_after, test_after
                         with order_by: a time or number, instead of a fraction; samples at or after it are held out
    days                 True: Splits.days has a source for every file or folder directly below `path`, or that matches
    group_by             the category of users whose ratings a model learns from (gplvmf): a batch has all training
                         ratings of its users, read into memory once; held-out ratings come with those of their users
    shuffle_window       samples; 0: in the order of the files. Else a new order each epoch from `seed`: row groups are
                         shuffled and combined into windows of about this many samples, which are permuted
    threads              number of row groups read at a time
    join                 by key column: a table with one row per key, whose other columns become those of the samples:
                         files of any format, or an Arrow table, read into memory once. A sample with a key that it
                         does not have gets missing values

    At most two windows are in memory, each at least a row group. Raises DataError naming file, row (from 0) and
    column: here for faults in footers and in columns read at opening, for other values when they are read.
    """,
)
