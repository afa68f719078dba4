"""`colonnade train`: train a model on a data set, on one process or several."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.config.run import RunConfig

SHORT = "Settings with an option of their own"
EXAMPLES = (
    "[bold]Settings[/bold] have a section and a name, as in [bold]train.epochs[/bold]. Give them in a YAML file "
    "(CONFIG), or one by one with --set, which wins. Without a file they start from what suits --data. Sizes take "
    "units (512MiB, 2GiB); lists are written \\[64,32]; none means the default. "
    "[bold]colonnade settings[/bold] lists all of them.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  colonnade train --data movielens --path ml-1m --run runs/films\n\n"
    "  colonnade train --data criteo --path train.txt --dram 2GiB --epochs 2\n\n"
    "  colonnade train mine.yaml --ranks 2\n\n"
    "  colonnade train --data movielens --run runs/films --set train.epochs=8   (goes on)\n\n"
    "  torchrun --nproc-per-node 2 --max-restarts 3 -m -- colonnade train mine.yaml --run runs/films"
)


def train(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file with sections data, model, rows, dense, plan, train."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set, with settings that suit it: csv, parquet, libsvm, tfrecord, criteo, "
            "movielens, movielens_retrieval, gowalla, fb15k237, power_law or synthetic."
        ),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(help="File or folder of the data; default: its folder in $COLONNADE_DATA."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Run folder. One that holds checkpoints is resumed. Default: runs/<data>-<time>."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Network, e.g. deepfm: model.name.", rich_help_panel=SHORT)
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the data: train.epochs.", rich_help_panel=SHORT),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples per step over all ranks: train.batch_size.", rich_help_panel=SHORT
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of rows and of the dense network: embedding.lr and dense.lr.",
            rich_help_panel=SHORT,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of first values: train.seed.", rich_help_panel=SHORT)
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(min=1, help="Processes on this machine; no port is open to other machines."),
    ] = 1,
    at: Annotated[
        int | None, typer.Option(help="Go back to this saved step of the run folder first.")
    ] = None,
    dram: Annotated[
        str | None,
        typer.Option(
            help="Memory for rows on each rank, e.g. 2GiB: plan.memory.dram.",
            rich_help_panel=SHORT,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any setting, e.g. --set train.epochs=3 --set plan.memory.dram=2GiB. Repeatable.",
        ),
    ] = None,
) -> None:
    """Train, evaluate after every epoch, checkpoint to the run folder; Ctrl-C checkpoints and ends cleanly."""
    short = {
        "model.name": model,
        "train.epochs": epochs,
        "train.batch_size": batch_size,
        "embedding.lr": lr,
        "dense.lr": lr,
        "train.seed": seed,
        "plan.memory.dram": dram,
    }
    chosen = choose_config(config, data, path, short, set_)
    train_run(chosen, run_folder(run, chosen.data.name), ranks, at)


def run_folder(said: Path | None, name: str) -> Path:
    """`said`, or a new one by name and time. Raises ConfigError under torchrun, whose ranks differ in it."""
    from colonnade.cli.ranks import is_under_torchrun

    if said is None and is_under_torchrun():
        raise ConfigError(
            "torchrun starts several ranks, and starts them again: say where their run is, with --run"
        )
    return said or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def choose_config(
    config: Path | None,
    data: str | None,
    path: str | None,
    short: Mapping[str, Any],
    set_: list[str] | None,
) -> RunConfig:
    """Build the configuration of a command line.

    short: settings that have an option of their own, None where it is left out; --set wins over them.
    Raises ConfigError.
    """
    from colonnade.config.run import OPTIMIZER_SETTINGS, load_config, override
    from colonnade.run.defaults import preset

    if config is not None and data is not None:
        raise ConfigError(
            "got both a config file and --data; the file's data section says what to read"
        )
    if config is None and data is None and path is not None:
        raise ConfigError(
            f"got --path without --data, which says how to read it; give --data {_guess_reader(path) or 'NAME'} too "
            "(colonnade train --help lists the names)"
        )
    if config is not None and config.suffix.lower() not in (".yaml", ".yml"):
        reader = _guess_reader(config)
        if reader:
            raise ConfigError(
                f"got {config} as the config, wanted a YAML file; data goes to --path: "
                f"colonnade train --data {reader} --path {config}"
            )
    settings = {name: value for name, value in short.items() if value is not None}
    settings |= parse_settings(set_ or [])
    if config is not None:
        chosen = load_config(config)
    else:
        chosen = preset(data or "synthetic", settings.get("model.name"))
    if config is None and "embedding.optimizer" in settings:
        # What suits the data set's own optimizer is not for another one.
        settings = {f"embedding.{name}": None for name in OPTIMIZER_SETTINGS} | settings
    if path is not None:
        settings["data.path"] = path
    chosen = override(chosen, settings)
    if chosen.data.path is not None:  # the folder is read from other places later
        chosen = override(
            chosen, {"data.path": os.path.realpath(Path(chosen.data.path).expanduser())}
        )
    return chosen


def _guess_reader(path: str | Path) -> str | None:
    """Return the reader of files whose names end like this one, None if there is none."""
    from colonnade.data.tabular.tables import KINDS

    return KINDS.get(Path(path).suffix.lower())


def train_run(config: RunConfig, folder: Path, ranks: int, at: int | None = None) -> dict[str, Any]:
    """Train to the end and show what came of it; returns the run's summary."""
    from colonnade.cli import ranks as launch
    from colonnade.cli.table import show_outcome
    from colonnade.terminal import Terminal

    console = Terminal()
    summary = launch.train(config, folder, ranks, console, at)
    if summary:
        show_outcome(console, summary, folder)
    return summary


WORDS = {"true": True, "false": False, "none": None, "null": None, "~": None, "": None}


def _as_yaml(text: str) -> Any:
    """`[user, item]` without quotes, as in a YAML file; text where it is no YAML."""
    from colonnade.formats import parse_yaml

    try:
        return parse_yaml(text)
    except ValueError:
        return text


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`["train.epochs=3"]` -> {"train.epochs": 3}. Values are Python literals, or lists and
    mappings as in YAML, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set got {pair!r}, wanted name=value, e.g. --set train.epochs=3")
        try:
            settings[name] = ast.literal_eval(text)
        except (
            ValueError,
            SyntaxError,
            RecursionError,
            MemoryError,
        ):  # the last two: nested too deeply
            settings[name] = _as_yaml(text) if text[:1] in "[{" else WORDS.get(text.lower(), text)
    return settings
