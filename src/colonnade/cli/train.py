"""`colonnade train`: train a model on a data set, on one process or several."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colonnade.data import SOURCES
from colonnade.data.tabular.formats import find_format
from colonnade.errors import ConfigError
from colonnade.terminal import Terminal

if TYPE_CHECKING:
    from colonnade.config.run import RunConfig

SHORT = "Settings with an option of their own"
EXAMPLES = (
    "[bold]Settings[/bold] have a section and a name, as in [bold]train.epochs[/bold]. Give them in a YAML "
    "file (CONFIG), or one by one with --set, which overrides the file. Without a file they start from the preset of "
    "--data, or else from the settings of the run that --run continues. Sizes take units (512MiB, 2GiB); lists are "
    "written \\[64,32]; none means the default. "
    "[bold]colonnade settings[/bold] lists all of them.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  colonnade train --data movielens --path ml-1m --run runs/films\n\n"
    "  colonnade train --data csv --path clicks.csv --dram 2GiB --epochs 2\n\n"
    "  colonnade train mine.yaml --ranks 2\n\n"
    "  colonnade train --run runs/films --epochs 8   (resumes)\n\n"
    "  torchrun --nproc-per-node 2 --max-restarts 3 -m -- colonnade train mine.yaml --run runs/films"
)


DataOption = Annotated[
    str | None,
    typer.Option(help=f"Data set, with its preset of settings: {', '.join(SOURCES)}."),
]
RunOption = Annotated[
    Path | None,
    typer.Option(
        help="Run folder. A run with checkpoints is resumed, without --data with its own settings. "
        "Default: runs/<data>-<time>."
    ),
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="Label column of files without a schema: data.options.label."
    ),
]
DelimiterOption = Annotated[
    str | None,
    typer.Option(
        help="Delimiter of text: one character, or tab. Default: what the first line has."
    ),
]
TAB = {"\\t": "\t", "tab": "\t"}
"""Spellings of a tab on the command line."""
NamesOption = Annotated[
    str | None,
    typer.Option(help="Column names of text without a header: label,user,item."),
]
GRAPHS = ("triples", "edges")
"""Kinds of data with the option `columns` for the names of columns."""
DramOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for rows on each rank, e.g. 2GiB: plan.memory.dram.",
        rich_help_panel=SHORT,
    ),
]
SeedsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of runs, with seeds from --seed on, each in a folder of its own under --run; prints the mean and "
        "standard deviation of their metrics.",
    ),
]


def train(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file with sections data, model, embedding, dense, plan, train."),
    ] = None,
    data: DataOption = None,
    path: Annotated[
        str | None,
        typer.Option(help="File or folder of the data; default: its folder in $COLONNADE_DATA."),
    ] = None,
    run: RunOption = None,
    label: LabelOption = None,
    delimiter: DelimiterOption = None,
    names: NamesOption = None,
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
        int | None, typer.Option(help="Seed of initial values: train.seed.", rich_help_panel=SHORT)
    ] = None,
    seeds: SeedsOption = 1,
    ranks: Annotated[
        int,
        typer.Option(min=1, help="Processes on this machine; no port is open to other machines."),
    ] = 1,
    at: Annotated[
        int | None, typer.Option(help="Saved step of the run folder to go back to before training.")
    ] = None,
    dram: DramOption = None,
    towers_from: Annotated[
        Path | None,
        typer.Option(
            help="Run folder whose features colonnade towers has grouped: its partition is that of model.towers=auto."
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
    """Train a model, validate it after every epoch, save checkpoints and test the best; Ctrl-C saves and ends."""
    text_options = build_text_options(data, delimiter, names)
    short = {
        "data.options.label": get_single_label(label),
        **{f"data.options.{name}": value for name, value in text_options.items()},
        "model.name": model,
        "train.epochs": epochs,
        "train.batch_size": batch_size,
        "embedding.lr": lr,
        "dense.lr": lr,
        "train.seed": seed,
        "plan.memory.dram": dram,
    }
    settings = build_config(config, data, path, short, set_, run)
    if towers_from is not None:
        settings = take_towers(settings, towers_from)
    train_seeds(settings, choose_run_folder(run, settings.data.name), ranks, seeds, at)


def take_towers(config: RunConfig, run_folder: Path) -> RunConfig:
    """Replace `model.towers: auto` by the partition of a run folder's towers.json. Raises ConfigError."""
    from colonnade.config.run import override_settings
    from colonnade.models.build import AUTO_TOWERS
    from colonnade.report.tower_map import FILE_NAME, read_tower_map

    if config.model.towers != AUTO_TOWERS:
        raise ConfigError(
            f"got --towers-from {run_folder} with model.towers={config.model.towers}, wanted auto, which takes that "
            "run's partition; set model.towers=auto, or leave the option out"
        )
    towers = read_tower_map(run_folder)
    if towers is None:
        raise ConfigError(
            f"--towers-from: {run_folder} has no {FILE_NAME}; write it with colonnade towers {run_folder} --towers N"
        )
    return override_settings(
        config, {"model.towers": [list(tower) for tower in towers.partition.towers]}
    )


def build_text_options(
    data_kind: str | None, delimiter: str | None, names: str | None
) -> dict[str, Any]:
    """Return the options of a reader that --delimiter and --names set; None: not given."""
    return {
        "delimiter": TAB.get(delimiter or "", delimiter),
        "columns" if data_kind in GRAPHS else "names": names and names.split(","),
    }


def get_single_label(labels: list[str] | None) -> str | None:
    """Return the column of `--label`. Raises ConfigError if the option was given twice."""
    if labels and len(labels) > 1:
        raise ConfigError(
            f"--label: got {', '.join(labels)}, wanted one column. For several labels, write a schema with a field of "
            "type label for each: --set data.options.schema=FILE"
        )
    return labels[0] if labels else None


def choose_run_folder(requested_folder: Path | None, run_name: str) -> Path:
    """Return `requested_folder`, or a new one by name and time. Raises ConfigError for None under torchrun, where each
    rank would choose another name."""
    from colonnade.cli.ranks import is_under_torchrun

    if requested_folder is None and is_under_torchrun():
        raise ConfigError(
            "torchrun starts several ranks, and may restart them: give their run folder with --run"
        )
    return requested_folder or Path("runs") / f"{run_name}-{datetime.now():%Y%m%d-%H%M%S}"


def build_config(
    config_path: Path | None,
    data_kind: str | None,
    data_path: str | None,
    short_options: Mapping[str, Any],
    set_options: list[str] | None,
    run_folder: Path | None,
) -> RunConfig:
    """Build the configuration of a command line.

    short_options: settings that have an option of their own; None: not given. --set overrides them. run_folder: a run
    folder, whose recorded settings are the base if neither `config_path` nor `data_kind` is given. Raises ConfigError.
    """
    from colonnade.config.run import OPTIMIZER_SETTINGS, override_settings

    settings = {name: value for name, value in short_options.items() if value is not None}
    settings |= parse_set_options(set_options or [])
    base = _choose_base_config(
        config_path, data_kind, data_path, settings.get("model.name"), run_folder
    )
    if config_path is None and data_kind is not None and "embedding.optimizer" in settings:
        # The preset's settings are for its own optimizer; reset them for another one.
        settings = {f"embedding.{name}": None for name in OPTIMIZER_SETTINGS} | settings
    if data_path is not None:
        settings["data.path"] = data_path
    result = override_settings(base, settings)
    if result.data.path is not None:  # later commands may run in another working directory
        result = override_settings(
            result, {"data.path": os.path.realpath(Path(result.data.path).expanduser())}
        )
    return result


def _choose_base_config(
    config_path: Path | None,
    data_kind: str | None,
    data_path: str | None,
    model_name: str | None,
    run_folder: Path | None,
) -> RunConfig:
    """Load the settings that the command line overrides: a file's, a preset's, both, or a run's. Raises ConfigError."""
    from colonnade.config.run import load_config, override_settings
    from colonnade.formats import flatten_to_dotted_names
    from colonnade.run.defaults import get_preset

    if config_path is not None:
        reader = _guess_reader(config_path)
        if reader and config_path.suffix.lower() not in (".yaml", ".yml"):
            raise ConfigError(
                f"got {config_path} as the config, wanted a YAML file; data goes to --path: "
                f"colonnade train --data {reader} --path {config_path}"
            )
        loaded = load_config(config_path)
        named_data = loaded.data.name if "name" in loaded.data.model_fields_set else None
        if named_data is None and data_kind is not None:
            own_settings = flatten_to_dotted_names(loaded.model_dump(exclude_unset=True))
            model_name = model_name or own_settings.get("model.name")
            return override_settings(get_preset(data_kind, model_name), own_settings)
        if named_data is None:
            raise ConfigError(
                f"{config_path} names no data, wanted data.name: NAME in it, or --data NAME beside it"
            )
        if data_kind not in (None, named_data):
            raise ConfigError(
                f"got --data {data_kind}, and {config_path} has data.name: {named_data}; leave one of them out"
            )
        return loaded
    if data_kind is not None:
        return get_preset(data_kind, model_name)
    if data_path is not None:
        raise ConfigError(
            f"got --path without --data, which names its reader; give --data {_guess_reader(data_path) or 'NAME'} too "
            "(colonnade train --help lists the names)"
        )
    if run_folder is not None and (run_folder / "config.yaml").is_file():
        return load_config(run_folder / "config.yaml")
    missing = "" if run_folder is None else f"; {run_folder} is no run folder yet"
    raise ConfigError(
        f"got no data{missing}. Wanted --data NAME --path FILE, e.g. --data csv --path clicks.csv, a YAML file that "
        "names data, or --run FOLDER of a run to continue. `--data synthetic` needs no files"
    )


def _guess_reader(path: str | Path) -> str | None:
    """Return the reader of files with this suffix, None if there is none."""
    format = find_format(Path(path).suffix)
    return None if format is None else format.name


def train_run(
    config: RunConfig, run_folder: Path, num_ranks: int, checkpoint_step: int | None = None
) -> dict[str, Any]:
    """Train to the end, print the outcome and return the run's summary."""
    from colonnade.cli import ranks as launch
    from colonnade.cli.table import show_outcome

    console = Terminal()
    summary = launch.train(config, run_folder, num_ranks, console, checkpoint_step)
    if summary:
        show_outcome(console, summary, run_folder)
    return summary


def train_seeds(
    config: RunConfig, run_folder: Path, num_ranks: int, num_seeds: int, checkpoint_step: int | None
) -> None:
    """Train a run, or one for each of several seeds; then print the mean and standard deviation of their metrics."""
    if num_seeds == 1:
        train_run(config, run_folder, num_ranks, checkpoint_step)
        return
    from statistics import stdev

    from colonnade.checkpoint.header import list_checkpoints
    from colonnade.cli.ranks import is_under_torchrun
    from colonnade.config.run import override_settings
    from colonnade.report.intervals import compute_confidence_interval
    from colonnade.train.best import select_judged

    if config.train.codistill.groups > 1:
        raise ConfigError(
            "got --seeds with train.codistill.groups, whose groups have seeds of their own; train each pair by itself "
            "with --seed"
        )
    if is_under_torchrun() or checkpoint_step is not None:
        raise ConfigError(
            "got --seeds with torchrun or --at, wanted neither; train each seed by itself with --seed"
        )
    if list_checkpoints(run_folder):
        raise ConfigError(
            f"{run_folder} is a run, wanted a folder for the runs of {num_seeds} seeds; give another --run"
        )
    console = Terminal()
    metrics = []
    for seed in range(config.train.seed, config.train.seed + num_seeds):
        console.print(f"seed {seed}", style="bold")
        summary = train_run(
            override_settings(config, {"train.seed": seed}), run_folder / f"seed-{seed}", num_ranks
        )
        if not summary or summary["stopped"]:
            return
        metrics.append(select_judged(summary["metrics"]))
    console.print(
        f"mean of {num_seeds} seeds ± standard deviation (95 % interval of the mean)", style="bold"
    )
    for name in metrics[0]:
        values = [by_name.get(name, float("nan")) for by_name in metrics]
        mean, half_width = compute_confidence_interval(values)
        console.print(
            f"{name.replace('_', ' ')}: {mean:.4f} ± {stdev(values):.4f} (± {half_width:.4f})"
        )
    console.print(f"compare them: colonnade compare {run_folder}/*", markup=False, soft_wrap=True)


LITERALS = {"true": True, "false": False, "none": None, "null": None, "~": None, "": None}


def _parse_yaml_value(text: str) -> Any:
    """Parse a value as YAML, such as `[user, item]` without quotes; return the text if it is not YAML."""
    from colonnade.formats import parse_yaml

    try:
        return parse_yaml(text)
    except ValueError:
        return text


def parse_set_options(assignments: list[str]) -> dict[str, Any]:
    """Parse `--set` options: `["train.epochs=3"]` -> {"train.epochs": 3}. Values are Python literals, YAML lists and
    mappings, or else text."""
    settings: dict[str, Any] = {}
    for pair in assignments:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set got {pair!r}, wanted name=value, e.g. --set train.epochs=3")
        try:
            settings[name] = ast.literal_eval(text)
        # RecursionError and MemoryError: nested too deeply.
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            settings[name] = (
                _parse_yaml_value(text) if text[:1] in "[{" else LITERALS.get(text.lower(), text)
            )
    return settings
