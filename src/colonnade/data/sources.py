"""Registry of data sets by name, and the function that opens any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from glob import has_magic
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.data.tabular.formats import FORMATS
from colonnade.errors import ColonnadeError, ConfigError, DataError

if TYPE_CHECKING:
    from colonnade.data.contract import Splits

DATA_SETS = (
    "criteo",
    "edges",
    "fb15k237",
    "gowalla",
    "interactions",
    "movielens",
    "movielens_retrieval",
    "power_law",
    "synthetic",
    "triples",
)
"""Data sets other than files of a format in FORMATS. The module `data/sets/NAME.py` has `open_NAME`."""

FILE_OPTIONS = ("validation", "test", "users", "items")
"""Options that name files or folders, besides the tables of `join`."""

CSV_PRESETS = ("criteo",)
"""Data sets that are CSV files: the module has `CSV_OPTIONS` and `locate_file`, and runs record them as csv."""


class SourceRegistry(Mapping[str, "Callable[..., Splits]"]):
    """Mapping of the name of each data set to the function that opens it, which is imported at its first use."""

    def __getitem__(self, name: str) -> Callable[..., Splits]:
        if name in FORMATS:
            return FORMATS[name].open
        if name not in DATA_SETS:
            raise KeyError(name)
        return getattr(import_module(f"colonnade.data.sets.{name}"), f"open_{name}")

    def __iter__(self) -> Iterator[str]:
        return iter((*FORMATS, *DATA_SETS))

    def __len__(self) -> int:
        return len(FORMATS) + len(DATA_SETS)


SOURCES = SourceRegistry()


def resolve_preset(
    name: str, path: str | Path | None, options: Mapping[str, Any]
) -> tuple[str, str | Path | None, Mapping[str, Any]]:
    """Return name, path and options by which one of CSV_PRESETS is opened as CSV; others unchanged.

    Raises DataError for missing files.
    """
    if name not in CSV_PRESETS:
        return name, path, options
    module = import_module(f"colonnade.data.sets.{name}")
    return "csv", str(module.locate_file(path)), {**module.CSV_OPTIONS, **options}


def open_source(name: str, path: str | Path | None = None, **options: Any) -> Splits:
    """Open the data set `name` of SOURCES. The options are the keyword arguments of its opener.

    Raises ConfigError for an unknown name or option, DataError for missing or damaged files.
    """
    if name not in SOURCES:
        raise ConfigError(f"unknown source {name!r}; choose from {', '.join(sorted(SOURCES))}")
    opener = SOURCES[name]
    parameters = signature(opener).parameters
    option_names = set(parameters)
    if path is not None:
        options = {"path": path, **options}
    for option in options.keys() - option_names:
        nearest = get_close_matches(option, option_names, n=1)
        hint = f"did you mean {nearest[0]!r}? Else " if nearest else ""
        raise ConfigError(
            f"source {name!r} has no option {option!r}; {hint}it takes {', '.join(sorted(option_names))}"
        )
    from colonnade.data.contract import check_choices  # loads the configuration

    check_choices(opener, options)
    path_parameter = parameters.get("path")
    if (
        path_parameter is not None
        and "path" not in options
        and path_parameter.default is Parameter.empty
    ):
        raise ConfigError(
            f"source {name!r} reads files and got no path; give --path FILE (in Python path=, in YAML data.path)"
        )
    try:
        return opener(**options)
    except DataError:
        _check_named_files(options)
        raise
    except (TypeError, ValueError) as error:
        if isinstance(error, ColonnadeError):
            raise
        text = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(f"source {name!r} cannot use its options ({text}): {error}") from None


def _check_named_files(options: Mapping[str, Any]) -> None:
    """Raise DataError for a file, beside that of the samples, that is not there: it names the option."""
    join = options.get("join")
    joined = join.items() if isinstance(join, Mapping) else ()
    named_files = {name: options.get(name) for name in FILE_OPTIONS}
    named_files |= {f"join.{key}": file for key, file in joined}
    for name, file in named_files.items():
        if isinstance(file, str | Path) and not (
            has_magic(str(file)) or Path(file).expanduser().exists()
        ):
            raise DataError(
                f"{file}: no such file or folder, which data.options.{name} names. Check its name and its folder"
            )
