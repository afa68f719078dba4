"""Formats of tabular files: all that other modules know of each format is in `FORMATS`.

A format NAME is read by the module `data/tabular/NAME.py`, which has two functions:

    open_NAME_file(path, ...)          indexes one file; further arguments say how its bytes are read
    open_NAME(path, ..., **options)    opens files as splits, with the same arguments and those of
                                       `source.ReaderOptions`; `opening.build_opener` builds it

The module is imported at the first use of one of them, so that a list of the formats costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.data.contract import Splits
    from colonnade.data.tabular.files import TableFile

NUMBER = re.compile(
    r"\s*[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\s*|\s*[+-]?(nan|inf|infinity)\s*",
    re.IGNORECASE,
)
"""Pattern of a number in a CSV file, which may have any blanks around it."""


@dataclass(frozen=True, slots=True)
class ValueRules:
    """Rules by which a record's values that do not have the type of their column are read as a file's are."""

    null_texts: frozenset[str] = frozenset()
    """Texts that are missing values, besides the empty one: `null_values` of CSV files."""
    number_pattern: re.Pattern[str] | None = None
    """Pattern of a number written as text; None: what Arrow parses."""
    has_booleans: bool = False
    """True if true and false are the numbers 1 and 0, as in typed files. Other files have no such number."""
    has_float32: bool = False
    """True if fractions are stored as float32, as TFRecord files do."""


@dataclass(frozen=True, slots=True)
class TableFormat:
    """Format of tabular files."""

    name: str
    endings: tuple[str, ...]
    """Endings of the files that are read in a folder; a file given by its path may have any name."""
    value_rules: ValueRules
    """Rules by which a server reads a record that is sent instead of a row of a file."""
    extra: str = ""
    """Extra of the package (`pip install 'colonnade[EXTRA]'`) with what the module imports; "": it needs none."""

    @property
    def open(self) -> Callable[..., Splits]:
        """Function that opens files as splits."""
        return self._import_function(f"open_{self.name}")

    @property
    def open_file(self) -> Callable[..., TableFile]:
        """Function that indexes a file. It raises ConfigError for arguments that cannot work, DataError for files."""
        return self._import_function(f"open_{self.name}_file")

    def _import_function(self, function: str) -> Any:
        try:
            return getattr(import_module(f"colonnade.data.tabular.{self.name}"), function)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{self.name} files need the package {error.name}; install it: "
                f"pip install 'colonnade[{self.extra}]'"
            ) from None


FORMATS = {
    format.name: format
    for format in (
        TableFormat("csv", (".csv", ".tsv", ".tab", ".inter"), ValueRules(number_pattern=NUMBER)),
        TableFormat("arrow", (".arrow", ".feather", ".ipc"), ValueRules(has_booleans=True)),
        TableFormat("parquet", (".parquet", ".pq", ".parq"), ValueRules(has_booleans=True)),
        TableFormat(
            "libsvm",
            (".libsvm", ".svm", ".libfm", ".libffm", ".ffm"),
            ValueRules(),
        ),
        TableFormat(
            "tfrecord",
            (".tfrecord", ".tfrecords"),
            ValueRules(has_float32=True),
        ),
    )
}
"""Formats by name."""


def find_format(ending: str) -> TableFormat | None:
    """Return the format of files that end in `ending`, such as ".csv"; None if there is none."""
    return next((f for f in FORMATS.values() if ending.lower() in f.endings), None)


def list_endings() -> tuple[str, ...]:
    """Return the endings of all formats."""
    return tuple(ending for format in FORMATS.values() for ending in format.endings)
