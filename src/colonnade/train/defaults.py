"""Training settings that nobody gave: by the number of training samples where files are read, fixed elsewhere.

docs/decisions/training.md ("Defaults by size") has the experiments behind the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from colonnade.config import RunConfig, load_config, override
from colonnade.data import Source, Splits, open_source
from colonnade.models.build import KINDS
from colonnade.models.scorer import Scorer
from colonnade.train.commit_header import committed_steps
from colonnade.train.objective import Objective

FILES = ("csv", "parquet", "criteo")
"""Data sets whose size and content only the user knows."""
HELD_OUT = 0.1
LEAST_HELD_OUT = 2000
"""Samples below which none are held out: a tenth of fewer says nothing about where to stop."""
PATIENCE = 3
"""Evaluations, one after each epoch."""
UNWATCHED_EPOCHS = 3
"""Passes over data of which no part validates, from LEAST_HELD_OUT samples on."""
SHUFFLE_WINDOW = 1 << 17
"""Samples of csv and parquet that are shuffled together."""
PRIOR = 20.0
"""Samples that a row's accumulator starts with, as it were: a row seen a few times moves little."""
ACCUMULATORS = ("adagrad", "rowwise_adagrad")
FEW_STEPS = 500
"""Below which a network has hardly begun to learn."""


@dataclass(frozen=True, slots=True)
class Training:
    """Settings that suit a number of samples."""

    batch_size: int
    epochs: int
    patience: int
    validation_fraction: float


def choose_training(num_samples: int) -> Training:
    """Choose settings for `num_samples` training samples, those that are to be held out included.

    batch_size           about 100 steps an epoch: a power of two from 64 to 4,096
    epochs               30 below 2,000 samples, where nothing is held out and first values and small steps regularise;
                         above, at most 20, and no more than 8 million samples in all, but one epoch at least
    patience             3 epochs, where samples are held out
    validation_fraction  the last tenth, from 2,000 samples on
    """
    batch_size = 64
    while batch_size < 4096 and batch_size * 200 <= num_samples:
        batch_size *= 2
    if num_samples < LEAST_HELD_OUT:
        return Training(batch_size, 30, 0, 0.0)
    epochs = min(20, max(1, 8_000_000 // num_samples))
    return Training(batch_size, epochs, PATIENCE, HELD_OUT)


def choose_accumulator(batch_size: int) -> float:
    """Choose Adagrad's first accumulator: the square of PRIOR samples' gradients in a mean over a batch."""
    return (PRIOR / batch_size) ** 2


def open_data(config: RunConfig, folder: Path | None) -> tuple[RunConfig, Splits, str]:
    """Open the data of `config`, with settings that suit its size wherever none was given.

    Returns the configuration with all of them, the data, and a line that says what was chosen ("": nothing was). A
    folder with commits goes on with what it was trained with.
    """
    if config.data.name not in FILES:
        return config, open_source(config.data.name, config.data.path, **config.data.options), ""
    if folder is not None and committed_steps(folder):
        config = _with_recorded(config, load_config(folder / "config.yaml"))
        return config, _open(config), ""
    holds_out, config = _can_hold_out(config), _with_default_order(config)
    if holds_out:
        config = override(config, {"data.options.validation_fraction": HELD_OUT})
    data = _open(config)
    num_samples = _count(data.train) + (_count(data.validation) if holds_out else 0)
    wanted = choose_training(num_samples)
    if holds_out and not wanted.validation_fraction:
        config = override(config, {"data.options.validation_fraction": 0.0})
        data = _open(config)
    chosen = _fill(config, wanted, data)
    config = override(config, chosen)
    if holds_out and wanted.validation_fraction:
        chosen["data.options.validation_fraction"] = HELD_OUT
    words = ", ".join(
        f"{name.removeprefix('data.options.')} {value}" for name, value in chosen.items()
    )
    return config, data, f"chosen for {num_samples:,} samples: {words}" if chosen else ""


def settle(config: RunConfig, objective: Objective) -> RunConfig:
    """Write out what a run without such settings trains with, for its folder to record."""
    train = config.train
    return override(
        config,
        {
            "train.batch_size": train.samples_per_step,
            "train.epochs": train.num_epochs,
            "train.patience": train.patience or 0,
            "train.monitor": train.monitor or objective.monitor,
        },
    )


def warn_of_few_steps(config: RunConfig, steps: int | None, console: Console) -> None:
    """Print a line for a run that is short although nobody limited its steps. steps: None where nobody knows."""
    if config.train.max_steps is None and steps and steps < FEW_STEPS:
        console.print(
            f"at most {steps} steps: below {FEW_STEPS} a network has hardly begun to learn. A lower train.batch_size "
            "or more train.epochs give more",
            highlight=False,
        )


def _fill(config: RunConfig, wanted: Training, data: Splits) -> dict[str, Any]:
    """Settings that `config` leaves open, by name."""
    train, parts = config.train, config.train.accumulate
    is_watched = data.validation is not None and not _is_by_day(config)
    chosen: dict[str, Any] = {}
    if train.batch_size is None:
        chosen["train.batch_size"] = -(-wanted.batch_size // parts) * parts
    if train.epochs is None:
        is_open = is_watched or wanted.validation_fraction == 0
        epochs = wanted.epochs if is_open else min(wanted.epochs, UNWATCHED_EPOCHS)
        chosen["train.epochs"] = 1 if _is_by_day(config) else epochs
    if train.patience is None and is_watched:
        chosen["train.patience"] = PATIENCE
    if train.monitor is None and is_watched and _is_scorer(config):
        chosen["train.monitor"] = "log_loss"
    if config.rows.initial_accumulator is None and config.rows.optimizer in ACCUMULATORS:
        batch_size = chosen.get("train.batch_size") or train.samples_per_step
        chosen["rows.initial_accumulator"] = choose_accumulator(batch_size)
    return chosen


def _can_hold_out(config: RunConfig) -> bool:
    """Whether no setting says what validates, or that nothing is to. Only scorers are judged on parts of files."""
    options = config.data.options
    is_given = options.get("validation") is not None or "validation_fraction" in options
    is_free = not is_given and not _is_by_day(config) and config.train.patience != 0
    return is_free and _is_scorer(config)


def _is_scorer(config: RunConfig) -> bool:
    return issubclass(KINDS[config.model.name].model, Scorer)


def _with_default_order(config: RunConfig) -> RunConfig:
    if (
        config.data.name == "criteo"
        or _is_by_day(config)
        or "shuffle_window" in config.data.options
    ):
        return config
    return override(config, {"data.options.shuffle_window": SHUFFLE_WINDOW})


def _with_recorded(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """Take from a run's own configuration what `config` leaves open."""
    settings: dict[str, Any] = {}
    for name in ("shuffle_window", "validation_fraction"):
        if name in recorded.data.options and name not in config.data.options:
            settings[f"data.options.{name}"] = recorded.data.options[name]
    for name in ("batch_size", "epochs", "patience", "monitor"):
        if getattr(config.train, name) is None:
            settings[f"train.{name}"] = getattr(recorded.train, name)
    if config.rows.initial_accumulator is None:
        settings["rows.initial_accumulator"] = recorded.rows.initial_accumulator
    return override(config, settings)


def _is_by_day(config: RunConfig) -> bool:
    return config.train.progressive or bool(config.data.options.get("days"))


def _open(config: RunConfig) -> Splits:
    return open_source(config.data.name, config.data.path, **config.data.options)


def _count(source: Source | None) -> int:
    return 0 if source is None else source.num_samples or 0
