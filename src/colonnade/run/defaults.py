"""Defaults of settings: by data set, and by the number of training samples where files are read.

PRESET          sections of the configuration; TABLES where the file has none
MODEL_PRESETS   by model: settings that differ from PRESET beyond the model's own defaults

docs/decisions/training.md ("Defaults by size") has the experiments behind the numbers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from rich.console import Console

from colonnade.checkpoint.header import list_checkpoints
from colonnade.config.run import RunConfig, build_config, load_config, override
from colonnade.data import SOURCES, Source, Splits, open_source
from colonnade.errors import ConfigError
from colonnade.models.build import KINDS
from colonnade.models.split import Scorer
from colonnade.train.objective import Objective

TABLES = {
    "model": {"name": "deepfm", "dim": 16},
    "embedding": {"lr": 0.05, "init_scale": 0.01},
}
"""For files of which nothing is known but their schema: run/defaults.py chooses the rest by their size."""


def _read_constant(data: str, name: str, default: Any) -> Any:
    """Return what the file that opens `data` states under `name`."""
    return getattr(sys.modules[SOURCES[data].__module__], name, default)


def _build_preset(data: str) -> RunConfig:
    sections = _read_constant(data, "PRESET", TABLES)
    return build_config({**sections, "data": {"name": data, **sections.get("data", {})}})


PRESETS: dict[str, RunConfig] = {data: _build_preset(data) for data in SOURCES}

MODEL_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    data: _read_constant(data, "MODEL_PRESETS", {}) for data in SOURCES
}


def preset(data: str, model: str | None = None) -> RunConfig:
    """Build the settings for `data` and, where it is not the one that the data set's preset names, for `model`.

    Raises ConfigError for a data set that has none.
    """
    if data not in PRESETS:
        raise ConfigError(f"unknown data set {data!r}; choose from {', '.join(sorted(PRESETS))}")
    chosen = PRESETS[data]
    if model is None or model == chosen.model.name:
        return chosen
    values = chosen.model_dump()
    values["model"] = {"name": model}
    return override(build_config(values), MODEL_PRESETS[data].get(model, {}))


FILES = ("csv", "parquet", "libsvm", "tfrecord", "criteo")
"""Data sets of which only the user knows how large they are."""
PATIENCE = 3
"""Evaluations, one after each epoch."""
UNWATCHED_EPOCHS = 3
"""Passes over data of which no part validates, where some could."""
LARGE_FRACTION = 0.05
"""Share of the samples that is held out of large data."""
SHUFFLE_WINDOW = 1 << 17
"""Samples of csv and parquet that are shuffled together."""
ACCUMULATORS = ("adagrad", "rowwise_adagrad")
FEW_STEPS = 500
"""Steps below which a network has hardly begun to learn."""


@dataclass(frozen=True, slots=True)
class Training:
    """Settings that suit a number of samples."""

    batch_size: int
    epochs: int
    patience: int
    validation_fraction: float
    dense_lr: float
    dense_weight_decay: float
    prior: float
    """Samples that an embedding counts as seen with before its first one: the more, the less rare ids move."""
    wide_prior: float
    """The same of first-order weights."""


def choose_training(num_samples: int) -> Training:
    """Choose settings for `num_samples` training samples, those to be held out included.

    Below 2,000 samples nothing is held out: so few could not say where to stop. 3 to 16 epochs, of about 100 steps in
    all, in which a dense weight moves 0.2 at most, rare ids hardly move, and weight decay leaves little but first-order
    effects.

    From 2,000 samples on a tenth is held out (from 20,000 on, a twentieth), and training ends when 3 epochs in a row
    have not been better there. batch_size is a power of two from 64 to 4,096 that gives 160 to 320 steps an epoch;
    epochs, an upper bound, 20 or as many as make 8 million samples; dense_lr grows with the root of the batch size;
    weight decay and priors fade as samples grow.
    """
    if num_samples < 2000:
        num_samples = max(num_samples, 1)
        epochs = min(16, max(3, 6400 // num_samples))
        steps = epochs * -(-num_samples // 64)
        return Training(64, epochs, 0, 0.0, min(5e-3, 0.2 / steps), 1.6 / num_samples, 20.0, 20.0)
    batch_size = 64
    while batch_size < 4096 and batch_size * 320 <= num_samples:
        batch_size *= 2
    return Training(
        batch_size,
        epochs=min(20, max(1, 8_000_000 // num_samples)),
        patience=PATIENCE,
        validation_fraction=0.1 if num_samples < 20_000 else LARGE_FRACTION,
        dense_lr=min(2e-3, 5e-4 * math.sqrt(batch_size / 64)),
        dense_weight_decay=0.3 / num_samples,
        prior=min(20.0, max(5.0, 4e6 / num_samples)),
        wide_prior=min(20.0, max(1.0, 20_000 / num_samples)),
    )


def choose_accumulator(prior: float, batch_size: int) -> float:
    """Choose Adagrad's first accumulator: the square of the gradients of `prior` samples, of a batch's mean each."""
    return float(f"{(prior / batch_size) ** 2:.3g}")


def open_data(config: RunConfig, folder: Path | None) -> tuple[RunConfig, Splits, str]:
    """Open the data of `config`, with settings that suit its size wherever none was given.

    Returns the configuration with all of them, the data, and a line that says what was chosen ("": nothing was). A
    folder with checkpoints goes on with what it was trained with.
    """
    if config.data.name not in FILES:
        return config, open_source(config.data.name, config.data.path, **config.data.options), ""
    if folder is not None and list_checkpoints(folder):
        config = _with_recorded(config, load_config(folder / "config.yaml"))
        return config, _open(config), ""
    config, held_out = _with_default_order(config), 0.0
    if can_hold_out := _can_hold_out(config):
        held_out = (
            LARGE_FRACTION  # large files are read once to be counted, so they are not opened again
        )
    data = _open(_holding_out(config, held_out))
    num_samples = _count(data.train) + (_count(data.validation) if can_hold_out else 0)
    wanted = choose_training(num_samples)
    if can_hold_out and wanted.validation_fraction != held_out:
        held_out = wanted.validation_fraction
        data = _open(_holding_out(config, held_out))
    chosen = fill_in(config, wanted, data)
    if held_out:
        chosen["data.options.validation_fraction"] = held_out
    words = ", ".join(
        f"{name}={value:.3g}" for name, value in chosen.items() if name != "train.monitor"
    )
    line = f"chosen for {num_samples:,} training samples: {words}" if chosen else ""
    return override(config, chosen), data, line


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
            "dense.lr": config.dense.learning_rate,
            "dense.weight_decay": config.dense.weight_decay or 0.0,
        },
    )


def warn_of_few_steps(config: RunConfig, steps: int | None, console: Console) -> None:
    """Print a line for a run that is short although nobody limited its steps. steps: None where nobody knows."""
    if config.train.max_steps is None and steps and steps < FEW_STEPS:
        console.print(
            f"at most {steps} {'step' if steps == 1 else 'steps'}: below {FEW_STEPS} a network has hardly begun to "
            "learn. A smaller batch size or more epochs give more",
            highlight=False,
        )


def fill_in(config: RunConfig, wanted: Training, data: Splits) -> dict[str, Any]:
    """Choose the settings that `config` leaves open; returns them by name."""
    train, parts = config.train, config.train.accumulate
    is_watched = data.validation is not None and not _is_by_day(config)
    chosen: dict[str, Any] = {}
    if train.batch_size is None:
        chosen["train.batch_size"] = -(-wanted.batch_size // parts) * parts
    if train.epochs is None:
        is_bounded = is_watched or wanted.validation_fraction == 0
        epochs = wanted.epochs if is_bounded else min(wanted.epochs, UNWATCHED_EPOCHS)
        chosen["train.epochs"] = 1 if _is_by_day(config) else epochs
    if train.patience is None and is_watched:
        chosen["train.patience"] = PATIENCE
    if train.monitor is None and is_watched and _is_scorer(config):
        chosen["train.monitor"] = "log_loss"
    if config.dense.lr is None:
        chosen["dense.lr"] = wanted.dense_lr
    if config.dense.weight_decay is None:
        chosen["dense.weight_decay"] = wanted.dense_weight_decay
    batch_size = chosen.get("train.batch_size") or train.samples_per_step
    rows, has = config.embedding, KINDS[config.model.name].rows
    if rows.initial_accumulator is None and rows.optimizer in ACCUMULATORS:
        prior = wanted.wide_prior if has == "weights" else wanted.prior
        chosen["embedding.initial_accumulator"] = choose_accumulator(prior, batch_size)
    is_wide = (
        has == "vector and weights" and (rows.wide.optimizer or rows.optimizer) in ACCUMULATORS
    )
    if is_wide and rows.wide.initial_accumulator is None:
        chosen["embedding.wide.initial_accumulator"] = choose_accumulator(
            wanted.wide_prior, batch_size
        )
    return chosen


def _holding_out(config: RunConfig, fraction: float) -> RunConfig:
    return override(config, {"data.options.validation_fraction": fraction}) if fraction else config


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
    for name in (
        "dense.lr",
        "dense.weight_decay",
        "embedding.initial_accumulator",
        "embedding.wide.initial_accumulator",
    ):
        if _setting(config, name) is None:
            settings[name] = _setting(recorded, name)
    return override(config, settings)


def _setting(config: RunConfig, name: str) -> Any:
    return reduce(getattr, name.split("."), config)


def _is_by_day(config: RunConfig) -> bool:
    return config.train.progressive or bool(config.data.options.get("days"))


def _open(config: RunConfig) -> Splits:
    return open_source(config.data.name, config.data.path, **config.data.options)


def _count(source: Source | None) -> int:
    return 0 if source is None else source.num_samples or 0
