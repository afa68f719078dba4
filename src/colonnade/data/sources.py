"""Registry of data sets by name, and the function that opens any of them."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from colonnade.data.contract import Splits
from colonnade.data.sets.criteo import open_criteo
from colonnade.data.sets.fb15k237 import open_fb15k237
from colonnade.data.sets.gowalla import open_gowalla
from colonnade.data.sets.movielens import open_movielens
from colonnade.data.sets.movielens_retrieval import open_movielens_retrieval
from colonnade.data.sets.power_law import open_power_law
from colonnade.data.sets.synthetic import open_synthetic
from colonnade.data.tabular.csv import open_csv
from colonnade.data.tabular.libsvm import open_libsvm
from colonnade.data.tabular.parquet import open_parquet
from colonnade.data.tabular.tfrecord import open_tfrecord
from colonnade.errors import ColonnadeError, ConfigError

SOURCES: dict[str, Callable[..., Splits]] = {
    "criteo": open_criteo,
    "csv": open_csv,
    "fb15k237": open_fb15k237,
    "gowalla": open_gowalla,
    "libsvm": open_libsvm,
    "movielens": open_movielens,
    "movielens_retrieval": open_movielens_retrieval,
    "parquet": open_parquet,
    "power_law": open_power_law,
    "synthetic": open_synthetic,
    "tfrecord": open_tfrecord,
}


def open_source(name: str, path: str | Path | None = None, **options: Any) -> Splits:
    """Open the data set `name` of SOURCES. The options are the keyword arguments of its opener.

    Raises ConfigError for an unknown name or option, DataError for missing or damaged files.
    """
    if name not in SOURCES:
        raise ConfigError(f"unknown source {name!r}; choose from {', '.join(sorted(SOURCES))}")
    opener = SOURCES[name]
    parameters = signature(opener).parameters
    known = set(parameters)
    if path is not None:
        options = {"path": path, **options}
    for option in options.keys() - known:
        nearest = get_close_matches(option, known, n=1)
        hint = f"did you mean {nearest[0]!r}? Else " if nearest else ""
        raise ConfigError(
            f"source {name!r} has no option {option!r}; {hint}it takes {', '.join(sorted(known))}"
        )
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
    except (TypeError, ValueError) as error:
        if isinstance(error, ColonnadeError):
            raise
        text = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(f"source {name!r} cannot use its options ({text}): {error}") from None
