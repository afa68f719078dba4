"""Default settings: by data set, and for files by the number of training samples.

PRESET          sections of the configuration; DEFAULT_SECTIONS if the file has none
MODEL_PRESETS   by model: settings that differ from PRESET beyond the model's own defaults

docs/decisions/training.md ("Defaults by size") has the experiments behind the numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from rich.console import Console

from colonnade.checkpoint.header import list_checkpoints
from colonnade.config.run import RunConfig, build_config, load_config, override_settings
from colonnade.data import SOURCES, Source, Splits, load_file_schema, open_source
from colonnade.data.contract import has_samples
from colonnade.data.sources import resolve_preset
from colonnade.data.tabular.declaration import fill_scales
from colonnade.data.tabular.formats import FORMATS
from colonnade.errors import ConfigError
from colonnade.models.build import MODEL_SPECS
from colonnade.models.split import Scorer
from colonnade.plan.names import Thresholding
from colonnade.publish.mirror import open_url
from colonnade.train.best import check_monitor_metric
from colonnade.train.objective import Objective
from colonnade.wire.thresholded import MESSAGES_OF_AN_ELEMENT

DEFAULT_SECTIONS = {
    "model": {"name": "deepfm", "dim": 16},
    "embedding": {"init_scale": 0.01},
}
"""Default sections for files with a known schema only; the other settings depend on their size."""

FILE_MODEL_PRESETS = {
    "gplvmf": {
        "data.options": {"group_by": "user", "shuffle_window": 0},
        "model.dim": 3,
        "embedding.optimizer": "adam",
        "embedding.lr": 0.02,
        "embedding.init_scale": 0.87,
        "dense.lr": 0.02,
        "dense.weight_decay": 0.0,
        "train.batch_size": 64,
        "train.epochs": 100,
    },
}
"""Settings of models of files that do not depend on their size. The initial scale of latent vectors is a standard
deviation of 0.5."""


def _read_constant(data: str, name: str, default: Any) -> Any:
    """Return the constant `name` of the module that opens `data`."""
    return getattr(sys.modules[SOURCES[data].__module__], name, default)


def _build_preset(data: str) -> RunConfig:
    sections = _read_constant(data, "PRESET", DEFAULT_SECTIONS)
    return build_config({**sections, "data": {"name": data, **sections.get("data", {})}})


PRESETS: dict[str, RunConfig] = {data: _build_preset(data) for data in SOURCES}

MODEL_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    data: _read_constant(data, "MODEL_PRESETS", FILE_MODEL_PRESETS if data in FORMATS else {})
    for data in SOURCES
}


def get_preset(data: str, model: str | None = None) -> RunConfig:
    """Return the preset of a data set, with the settings of `model` if it is not the preset's own model.

    Raises ConfigError for an unknown data set.
    """
    if data not in PRESETS:
        raise ConfigError(f"unknown data set {data!r}; choose from {', '.join(sorted(PRESETS))}")
    chosen = PRESETS[data]
    if model is None or model == chosen.model.name:
        return chosen
    values = chosen.model_dump()
    values["model"] = {"name": model}
    return override_settings(build_config(values), MODEL_PRESETS[data].get(model, {}))


INTERACTIONS = "interactions"
"""Data of users' interactions in files."""
PATIENCE = 3
"""Default patience in evaluations, one after each epoch."""
UNWATCHED_EPOCHS = 3
"""Maximum default epochs if the data could have a validation part and has none."""
LARGE_FRACTION = 0.05
"""Fraction of samples to hold out of large data."""
SHUFFLE_WINDOW = 1 << 17
"""Default number of samples that are shuffled together."""
ACCUMULATORS = ("adagrad", "rowwise_adagrad")
"""Optimizers with an initial accumulator."""
GRAPHS = ("edges", "fb15k237", "triples")
"""Data sets of user files that have a preset, which is for larger files than most."""
TRIPLES_PER_ENTITY = 18
"""Number of training triples for each entity to which the learning rate of a preset belongs: that of FB15k-237."""
BAG_POOLING = "sum"
"""Default pooling of bags of files."""
FEW_SAMPLES = 200_000
SMALL_NETWORK = {"top": [32], "keep_fields": True}
"""Settings of models without first-order weights for fewer than FEW_SAMPLES samples. A larger last network learns the
samples by heart before the vectors of ids have grown; without the fields' vectors it sees ids in products only."""
SMALL_SAMPLES = 20_000
DEFAULT_ROW_LR = 0.05
"""Learning rate of rows where it does not follow the ids of a sample."""
MAX_ROW_LR = 0.25
"""Largest learning rate of rows that is chosen: 1 / ids of a sample, because the steps of their rows add up. Without
first-order weights, it is DEFAULT_ROW_LR."""
MAX_CROSS_LR = 0.025
"""Largest one for DCN, whose cross layers multiply these steps by each other."""
COUNTED_SAMPLES = 1024
LINEAR_MODELS = ("lr", "fm")
"""Models without hidden layers."""
LINEAR_FACTOR = 4.0
"""Factor of their dense learning rate: their dense weights start at 0, and no other layer moves with them."""
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
    """Pseudo-samples in the initial accumulator of an embedding. A larger prior moves rare ids less."""
    wide_prior: float
    """Prior of first-order weights."""
    is_small: bool
    """True below FEW_SAMPLES samples."""


def choose_training_settings(num_samples: int) -> Training:
    """Choose settings for `num_samples` training samples, including those to hold out.

    Below 2,000 samples nothing is held out, because so few cannot decide when to stop. 3 to 16 epochs give about 100
    steps in total. In these a dense weight moves by 0.2 at most, rare ids hardly move, and weight decay suppresses all
    but first-order effects.

    From 2,000 samples on a tenth is held out (from 20,000 on, a twentieth). Training ends after 3 epochs without a
    better validation score. batch_size is a power of two from 64 to 4,096 that gives 160 to 320 steps per epoch.
    epochs, an upper bound, is 20 or the number that trains 8 million samples. dense_lr grows with the square root of
    the batch size. Weight decay and priors decrease with the number of samples.
    """
    if num_samples < 2000:
        num_samples = max(num_samples, 1)
        epochs = min(16, max(3, 6400 // num_samples))
        steps = epochs * -(-num_samples // 64)
        dense_lr, weight_decay = map(_round_digits, (min(5e-3, 0.2 / steps), 1.6 / num_samples))
        return Training(64, epochs, 0, 0.0, dense_lr, weight_decay, 20.0, 20.0, True)
    batch_size = 64
    while batch_size < 4096 and batch_size * 320 <= num_samples:
        batch_size *= 2
    return Training(
        batch_size,
        epochs=min(20, max(1, 8_000_000 // num_samples)),
        patience=PATIENCE,
        validation_fraction=0.1 if num_samples < SMALL_SAMPLES else LARGE_FRACTION,
        dense_lr=_round_digits(min(2e-3, 5e-4 * math.sqrt(batch_size / 64))),
        dense_weight_decay=_round_digits(0.3 / num_samples),
        prior=min(20.0, max(5.0, 4e6 / num_samples)),
        wide_prior=min(20.0, max(1.0, 20_000 / num_samples)),
        is_small=num_samples < FEW_SAMPLES,
    )


def choose_initial_accumulator(prior: float, batch_size: int) -> float:
    """Compute Adagrad's initial accumulator as `prior` pseudo-samples: (prior / batch_size) squared."""
    return _round_digits((prior / batch_size) ** 2)


def _round_digits(value: float) -> float:
    """Round a chosen setting to three significant digits, as people write it."""
    return float(f"{value:.3g}")


def open_data(config: RunConfig, folder: Path | None) -> tuple[RunConfig, Splits, str]:
    """Open the data of `config`, and choose the settings that it leaves open by the size of the data.

    Returns the complete configuration, the data, and a line that lists the chosen settings ("" if none). A folder with
    checkpoints is resumed with its recorded settings.
    """
    config = _resolve_preset(config)
    if config.data.name not in FORMATS:
        data = _open_data_source(config)
        chosen = choose_tower_columns(config, data) | _fit_preset_to_size(config, data)
        return (
            override_settings(config, chosen),
            data,
            _describe_chosen(chosen, _count_samples(data.train)),
        )
    if folder is not None and list_checkpoints(folder):
        config = _fill_from_recorded(config, load_config(folder / "config.yaml"))
        return config, _open_data_source(config), ""
    config = _with_default_shuffling(config)
    held_out = 0.0
    if can_hold_out := _can_hold_out(config):
        # Right for large files, so that they are not opened and counted twice.
        held_out = LARGE_FRACTION
    data = _open_data_source(_with_held_out_fraction(config, held_out))
    num_samples = _count_samples(data.train) + (
        _count_samples(data.validation) if can_hold_out else 0
    )
    suggested = choose_training_settings(num_samples)
    if can_hold_out and suggested.validation_fraction != held_out:
        held_out = suggested.validation_fraction
        data = _open_data_source(_with_held_out_fraction(config, held_out))
    chosen = choose_open_settings(config, suggested, data)
    if held_out:
        chosen["data.options.validation_fraction"] = held_out
    return override_settings(config, chosen), data, _describe_chosen(chosen, num_samples)


def _resolve_preset(config: RunConfig) -> RunConfig:
    """Name the CSV files of a data set that is nothing else, so that what follows knows them as such."""
    name, path, options = resolve_preset(config.data.name, config.data.path, config.data.options)
    if name == config.data.name:
        return config
    settings = {"data.name": name, "data.path": path, "data.options": options}
    return override_settings(config, settings)


def _describe_chosen(chosen: Mapping[str, Any], num_samples: int) -> str:
    values = ", ".join(f"{name}={value}" for name, value in chosen.items())
    return f"chosen for {num_samples:,} training samples: {values}" if chosen else ""


def _fit_preset_to_size(config: RunConfig, data: Splits) -> dict[str, Any]:
    """Choose settings of a preset for the size of the data, where `config` has the preset's value of them.

    Data of your own may be much smaller than that of the preset: a batch has at most a 50th of its samples. The
    fewer triples an entity has, the fewer steps its row makes: where an entity has fewer than in the preset's graph,
    TransE's and RotatE's rows make steps that are longer by as much, up to 0.06. Patience spans FEW_STEPS steps at
    least: a score that is worse than the first one may be so because the model has not begun to learn.
    """
    preset = get_preset(config.data.name, config.model.name)
    num_samples = _count_samples(data.train)
    suggested: dict[str, Any] = {}
    if config.data.name in (*GRAPHS, INTERACTIONS):
        batch_size = preset.train.samples_per_step
        while batch_size > 64 and batch_size * 50 > num_samples:
            batch_size //= 2
        num_micro_batches = config.train.accumulate
        suggested["train.batch_size"] = -(-batch_size // num_micro_batches) * num_micro_batches
    num_entities = getattr(data.train, "num_entities", 0)
    if num_entities and config.model.name in ("transe", "rotate"):
        factor = TRIPLES_PER_ENTITY * num_entities / max(num_samples, 1)
        rate = preset.embedding.learning_rate
        lr = max(rate, min(rate * factor, 0.06))
        suggested["embedding.lr"] = _round_digits(lr)
    chosen = {
        name: value
        for name, value in suggested.items()
        if _get_setting(preset, name) == _get_setting(config, name) != value
    }
    batch_size = chosen.get("train.batch_size", config.train.samples_per_step)
    patience = preset.train.patience or 0
    if has_samples(data.validation) and config.train.patience == patience > 0:
        steps = config.train.evaluate_steps or -(-num_samples // batch_size)
        if patience * steps < FEW_STEPS:
            chosen["train.patience"] = -(-FEW_STEPS // max(steps, 1))
    return chosen


def choose_tower_columns(config: RunConfig, data: Splits) -> dict[str, Any]:
    """Choose the columns of the two towers for interactions in files, where they are open: those of items, and a user's
    history with what its file says of it.

    A query without the user's id learns from all users, also for new ones.
    """
    split = getattr(data.train, "interactions", None)
    settings = MODEL_SPECS[config.model.name].parameters
    if config.data.name != INTERACTIONS or split is None or "query_columns" not in settings:
        return {}
    chosen: dict[str, list[str]] = {}
    if config.model.query_columns is None:
        chosen["model.query_columns"] = ["history", *(c for c in split.users if c != "user")]
    if config.model.item_columns is None:
        chosen["model.item_columns"] = list(split.items)
    return chosen


def resolve_settings(config: RunConfig, objective: Objective) -> RunConfig:
    """Replace open settings by the effective defaults, so that the run folder records them."""
    train = config.train
    return override_settings(
        config,
        {
            "train.batch_size": train.samples_per_step,
            "train.epochs": train.num_epochs,
            "train.patience": train.patience or 0,
            "train.monitor": train.monitor or objective.monitor,
            "dense.lr": config.dense.learning_rate,
            "embedding.lr": config.embedding.learning_rate,
            "dense.weight_decay": config.dense.weight_decay or 0.0,
        },
    )


def describe_settings(config: RunConfig, labels: Sequence[str]) -> str:
    """Describe the main settings of a run, chosen or not, in one line. labels: those of its samples."""
    model = config.model
    rows = config.embedding
    dense = config.dense
    train = config.train
    is_first = len(labels) > 1 and not str(train.monitor).endswith(
        tuple(f"_{x}" for x in labels[1:])
    )
    label = f" of {labels[0]}" if is_first else ""
    days_or_epochs = "one day after another" if train.progressive else f"epochs {train.num_epochs}"
    return (
        f"model {model.name}, dim {model.dim}; rows: {rows.optimizer}, lr {rows.learning_rate:g}; "
        f"dense: {dense.optimizer}, lr {dense.learning_rate:g}; batch size {train.samples_per_step:,}, "
        f"{days_or_epochs}; monitor {train.monitor}{label}"
    )


def warn_of_few_steps(config: RunConfig, num_steps: int | None, console: Console) -> None:
    """Print a warning if a run has few steps although train.max_steps is not set. num_steps: None if unknown."""
    if config.train.max_steps is None and num_steps and num_steps < FEW_STEPS:
        console.print(
            f"at most {num_steps} {'step' if num_steps == 1 else 'steps'}: below {FEW_STEPS} a network has "
            "hardly begun to "
            "learn. A smaller batch size or more epochs give more",
            highlight=False,
        )


def choose_open_settings(
    config: RunConfig, suggested_training: Training, data: Splits
) -> dict[str, Any]:
    """Choose the settings that `config` leaves open; return them by name."""
    train = config.train
    num_micro_batches = config.train.accumulate
    is_watched = has_samples(data.validation) and not _is_by_day(config)
    chosen: dict[str, Any] = {}
    if train.batch_size is None:
        chosen["train.batch_size"] = (
            -(-suggested_training.batch_size // num_micro_batches) * num_micro_batches
        )
    if train.epochs is None:
        is_bounded = is_watched or suggested_training.validation_fraction == 0
        epochs = (
            suggested_training.epochs
            if is_bounded
            else min(suggested_training.epochs, UNWATCHED_EPOCHS)
        )
        chosen["train.epochs"] = 1 if _is_by_day(config) else epochs
    if train.patience is None and is_watched:
        batch = train.batch_size or suggested_training.batch_size
        steps = train.evaluate_steps or -(-_count_samples(data.train) // batch)
        chosen["train.patience"] = max(PATIENCE, -(-FEW_STEPS // max(steps, 1)))
    if train.monitor is None and is_watched and _is_scorer(config):
        chosen["train.monitor"] = "log_loss"
    if config.dense.lr is None:
        factor = LINEAR_FACTOR if config.model.name in LINEAR_MODELS else 1.0
        chosen["dense.lr"] = _round_digits(factor * suggested_training.dense_lr)
    if config.dense.weight_decay is None:
        chosen["dense.weight_decay"] = suggested_training.dense_weight_decay
    if config.embedding.pooling is None and any(
        column.kind == "bag" for column in data.train.schema.categorical
    ):
        chosen["embedding.pooling"] = BAG_POOLING
    chosen |= _choose_small_network(config, suggested_training)
    if config.embedding.lr is None:
        chosen["embedding.lr"] = _choose_row_lr(config, suggested_training, data)
    batch_size = chosen.get("train.batch_size") or train.samples_per_step
    return chosen | _choose_accumulators(config, suggested_training, batch_size)


def _choose_small_network(config: RunConfig, suggested_training: Training) -> dict[str, Any]:
    if not (suggested_training.is_small and _is_deep(config)):
        return {}
    known = MODEL_SPECS[config.model.name].parameters
    return {
        f"model.{name}": value
        for name, value in SMALL_NETWORK.items()
        if name in known and getattr(config.model, name) is None
    }


def _choose_row_lr(config: RunConfig, suggested_training: Training, data: Splits) -> float:
    """Choose the learning rate of rows by the number of ids of a sample: of the first ones to evaluate, if there are.

    The training part would be read until a window is full that is shuffled.
    """
    if config.embedding.optimizer not in ACCUMULATORS or suggested_training.patience == 0:
        return DEFAULT_ROW_LR
    parts = (data.validation, data.test, data.train)
    first = (next(iter(part.batches(COUNTED_SAMPLES)), None) for part in filter(has_samples, parts))
    batch = next(filter(None, first), None)
    num_ids = 0 if batch is None else sum(len(ids.values) for ids in batch.ids.values())
    if batch is None or num_ids == 0:
        return DEFAULT_ROW_LR
    largest = DEFAULT_ROW_LR if _is_deep(config) else MAX_ROW_LR
    largest = MAX_CROSS_LR if config.model.name == "dcn" else largest
    return _round_digits(min(largest, batch.size / num_ids))


def _choose_accumulators(
    config: RunConfig, suggested_training: Training, batch_size: int
) -> dict[str, Any]:
    """Choose the initial accumulators that `config` leaves open; return them by name."""
    chosen: dict[str, Any] = {}
    embedding = config.embedding
    row_kind = MODEL_SPECS[config.model.name].rows
    if embedding.initial_accumulator is None and embedding.optimizer in ACCUMULATORS:
        prior = suggested_training.wide_prior if row_kind == "weights" else suggested_training.prior
        chosen["embedding.initial_accumulator"] = choose_initial_accumulator(prior, batch_size)
    is_wide = (
        row_kind == "vector and weights"
        and (embedding.wide.optimizer or embedding.optimizer) in ACCUMULATORS
    )
    if is_wide and embedding.wide.initial_accumulator is None:
        chosen["embedding.wide.initial_accumulator"] = choose_initial_accumulator(
            suggested_training.wide_prior, batch_size
        )
    return chosen


def _with_held_out_fraction(config: RunConfig, fraction: float) -> RunConfig:
    return (
        override_settings(config, {"data.options.validation_fraction": fraction})
        if fraction
        else config
    )


def _can_hold_out(config: RunConfig) -> bool:
    """Return whether a validation part may be held out: no setting decides it, and the model is a scorer."""
    options = config.data.options
    is_given = "validation_fraction" in options or any(
        options.get(name) is not None for name in ("validation", "validation_after")
    )
    return not is_given and not _is_by_day(config) and _is_scorer(config)


def _is_deep(config: RunConfig) -> bool:
    """Return whether a click model has no first-order weights: all goes through its networks."""
    return _is_scorer(config) and MODEL_SPECS[config.model.name].rows == "vector"


def _is_scorer(config: RunConfig) -> bool:
    return issubclass(MODEL_SPECS[config.model.name].model, Scorer)


def _with_default_shuffling(config: RunConfig) -> RunConfig:
    """Add the default shuffle window, unless the data set or a setting decides the order."""
    if _is_by_day(config) or "shuffle_window" in config.data.options:
        return config
    return override_settings(config, {"data.options.shuffle_window": SHUFFLE_WINDOW})


def _fill_from_recorded(config: RunConfig, recorded_config: RunConfig) -> RunConfig:
    """Take the settings that `config` leaves open from a run's recorded configuration."""
    settings: dict[str, Any] = {}
    if "schema" in recorded_config.data.options:
        options = config.data.options
        schema = recorded_config.data.options["schema"]
        settings["data.options"] = _fill_schema_from_recorded(options, schema)
    for name in ("group_by", "shuffle_window", "validation_fraction"):
        if name in recorded_config.data.options and name not in config.data.options:
            settings[f"data.options.{name}"] = recorded_config.data.options[name]
    for name in ("batch_size", "epochs", "patience", "monitor", "monitor_mode"):
        if getattr(config.train, name) is None:
            settings[f"train.{name}"] = getattr(recorded_config.train, name)
    for name in (
        "dense.lr",
        "dense.weight_decay",
        *(f"model.{name}" for name in SMALL_NETWORK),
        "embedding.lr",
        "embedding.pooling",
        "embedding.initial_accumulator",
        "embedding.wide.initial_accumulator",
    ):
        # Those of another optimizer, with which the run cannot resume, are not its settings.
        is_other = name.startswith("embedding.") and (
            config.embedding.optimizer != recorded_config.embedding.optimizer
        )
        if _get_setting(config, name) is None and not is_other:
            settings[name] = _get_setting(recorded_config, name)
    return override_settings(config, settings)


def _fill_schema_from_recorded(
    options: Mapping[str, Any], recorded_schema: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `options` with the recorded schema, or with their own and the recorded scales."""
    schema = load_file_schema(recorded_schema)
    if options.get("schema") is not None:
        declared = load_file_schema(options["schema"])
        return {**options, "schema": fill_scales(declared, schema).to_dict()}
    filled = {**options, "schema": recorded_schema}
    # Another label needs an inferred schema, which differs from the recorded one and is refused.
    is_same_label = filled.pop("label", None) in (None, *(label.column for label in schema.labels))
    return filled if is_same_label else dict(options)


def _get_setting(config: RunConfig, name: str) -> Any:
    return reduce(getattr, name.split("."), config)


def _is_by_day(config: RunConfig) -> bool:
    """Return whether training goes by days, which fixes the order of samples."""
    return config.train.progressive or bool(config.data.options.get("days"))


def _open_data_source(config: RunConfig) -> Splits:
    return open_source(config.data.name, config.data.path, **config.data.options)


def _count_samples(source: Source | None) -> int:
    return 0 if source is None else source.num_samples or 0


def check_data_for_settings(data: Splits, config: RunConfig, objective: Objective) -> None:
    """Raise ConfigError if the settings need a part or a metric that the data does not have."""
    for url in (config.train.mirror, config.train.publish):
        if url is not None:
            open_url(url)
    if config.train.progressive and not data.days:
        raise ConfigError(
            "train.progressive needs data with days (Splits.days); this data set has none"
        )
    check_source = getattr(objective, "check_source", None)
    for part, source in (("validation", data.validation), ("test", data.test)):
        try:
            if check_source is not None and source is not None:
                check_source(source)
        except ConfigError as error:
            raise ConfigError(f"the {part} part: {error}") from None
    monitor = config.train.monitor or objective.monitor
    metric_names = getattr(objective, "metrics", None)
    if metric_names is not None and monitor != objective.monitor:
        tasks = data.train.schema.labels[1:]
        check_monitor_metric(
            monitor,
            [*metric_names, *(f"{metric}_{task}" for task in tasks for metric in metric_names)],
        )
    if monitor in getattr(objective, "user_metrics", ()) and config.train.monitor_mode is None:
        raise ConfigError(
            f"got monitor={monitor} of your metrics, wanted monitor_mode, too: min if lower is better, else max"
        )
    if config.train.patience and data.validation is None:
        raise ConfigError(
            f"train.patience={config.train.patience} waits for a better {monitor} on the validation part, "
            "and this data set has none; give it one, or set patience to 0"
        )


def check_thresholded_sums(config: RunConfig, num_steps: int | None) -> None:
    """Raise ConfigError if a run is too short for `plan.codec.dense=thresholded`, or clips dense gradients.

    num_steps: None if unknown."""
    codec = config.plan.codec.choose_dense_codec()
    if not isinstance(codec, Thresholding):
        return
    if config.dense.clip_norm is not None:
        raise ConfigError(
            f"got dense.clip_norm={config.dense.clip_norm:g} with plan.codec.dense=thresholded, wanted one of them: "
            "what earlier steps owe is part of a sum, so clipping would drop it"
        )
    if num_steps is None:
        return
    min_steps = MESSAGES_OF_AN_ELEMENT / codec.keep
    if num_steps < min_steps:
        raise ConfigError(
            f"got a run of {num_steps:,} steps with plan.codec.dense=thresholded, wanted at least {min_steps:,.0f}: "
            f"with dense_keep={codec.keep:g} an element of a gradient is sent every {1 / codec.keep:,.0f} steps; train "
            f"for longer, set plan.codec.dense_keep={_round_up(MESSAGES_OF_AN_ELEMENT / max(num_steps, 1))}, or "
            "plan.codec.dense=int8"
        )


def _round_up(share: float) -> float:
    """Round a share up to two decimals, 1 at most."""
    return min(1.0, math.ceil(100 * share) / 100)
