"""Builders of models, tables and optimizers from a configuration and a data set's schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch

from colonnade.config.model import ModelConfig
from colonnade.config.retention import AdmissionConfig, EvictionConfig, OpenTableConfig
from colonnade.config.run import (
    OPTIMIZER_SETTINGS,
    EmbeddingConfig,
    RunConfig,
    TableEmbeddingConfig,
    WideConfig,
    override_settings,
)
from colonnade.data.contract import Column, Schema, multi_id_columns
from colonnade.data.interactions.samples import LOG_Q, TYPE
from colonnade.data.interactions.types import name_types
from colonnade.data.ratings import list_count_columns
from colonnade.errors import ConfigError
from colonnade.files.untrusted import read_regular
from colonnade.models.dcn import DCN, DCNv2
from colonnade.models.dlrm import DLRM
from colonnade.models.fields import DEEP, WIDE
from colonnade.models.gplvmf import BIAS, GPLVMF, LOG_VARIANCE, MEAN
from colonnade.models.graphsage import GraphSAGE
from colonnade.models.knowledge import ComplEx, DistMult, RotatE, TransE
from colonnade.models.linear import LR, NFM, DeepFM, FactorizationMachine, WideDeep
from colonnade.models.mrmn import MRMN
from colonnade.models.sasrec import SASRec
from colonnade.models.split import SplitModel
from colonnade.models.two_tower import TwoTower
from colonnade.optimizers import SPARSE_OPTIMIZERS, SparseOptimizer
from colonnade.retention import (
    Admission,
    AgeEviction,
    CountMinAdmission,
    Eviction,
    MaxRowsEviction,
    RandomAdmission,
)
from colonnade.table import Feature, Pooling, Table, Uniform
from colonnade.topology.towers import Partition, build_round_robin_partition

DEFAULT_DIM = 16
AUTO_TOWERS = "auto"
"""Value of `model.towers` that `train --towers-from` replaces."""
TOWER_SETTINGS = {"tower_vectors", "tower_summaries", "tower_layers"}
AUTOCAST = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Model that a configuration may name. Its settings are the arguments of its constructor."""

    model: type[SplitModel]
    rows: Literal["vector", "vector and weights", "weights", "gaussian"] = "vector"
    sequence_pooling: Pooling = "mean"
    """Pooling of columns that are sequences."""

    @property
    def parameters(self) -> set[str]:
        """Names of the constructor's arguments, including those that it passes to its base classes."""
        return {name for base in self.model.__mro__ for name in signature(base).parameters}

    @property
    def settings(self) -> set[str]:
        """Fields of ModelConfig that this model accepts."""
        return (self.parameters & set(ModelConfig.model_fields)) | (
            {"dim"} if self.rows != "weights" else set()
        )


MODEL_SPECS: dict[str, ModelSpec] = {
    "lr": ModelSpec(LR, "weights"),
    "fm": ModelSpec(FactorizationMachine, "vector and weights"),
    "nfm": ModelSpec(NFM, "vector and weights"),
    "wide_deep": ModelSpec(WideDeep, "vector and weights"),
    "deepfm": ModelSpec(DeepFM, "vector and weights"),
    "dlrm": ModelSpec(DLRM),
    "dcn": ModelSpec(DCN),
    "dcnv2": ModelSpec(DCNv2),
    "two_tower": ModelSpec(TwoTower),
    "sasrec": ModelSpec(SASRec, sequence_pooling="sequence"),
    "graphsage": ModelSpec(GraphSAGE, sequence_pooling="sequence"),
    "mrmn": ModelSpec(MRMN),
    "transe": ModelSpec(TransE, sequence_pooling="sequence"),
    "distmult": ModelSpec(DistMult, sequence_pooling="sequence"),
    "complex": ModelSpec(ComplEx, sequence_pooling="sequence"),
    "rotate": ModelSpec(RotatE, sequence_pooling="sequence"),
    "gplvmf": ModelSpec(GPLVMF, "gaussian"),
}


def build_model(schema: Schema, config: RunConfig) -> SplitModel:
    """Build the configured model. Its dense weights come from torch's generator, seeded with train.seed. Raises
    ConfigError for settings that the model does not have, and for data that it cannot use."""
    arguments = collect_model_settings(config)
    arguments.pop("dim", None)
    tables, features = build_tables(schema, config)
    torch.manual_seed(config.train.seed)
    spec = MODEL_SPECS[config.model.name]
    parameters = spec.parameters
    log_q = None
    if LOG_Q in schema.dense:
        log_q = schema.dense.index(LOG_Q)
    data_arguments = {
        "num_dense": len(schema.dense),
        "tasks": len(schema.labels),
        "log_q": log_q,
        "bags": multi_id_columns(schema),
    }
    if (type_setting := config.data.options.get("types")) is not None:
        if "types" not in parameters:
            raise ConfigError(
                f"{config.model.name} knows one type of feedback, and data.options.types has several; set "
                "model.name=mrmn, or data.options.events to those that count, all alike"
            )
        arguments["types"] = name_types(type_setting)
        arguments["type_column"] = schema.dense.index(TYPE)
    if "tasks" in parameters and not schema.labels:
        rankers = [name for name, other in MODEL_SPECS.items() if other.model.objective is not None]
        raise ConfigError(
            f"{config.model.name} learns labels and this data has none; choose a model that ranks "
            f"({', '.join(rankers)}), or other data"
        )
    is_grouped = schema.dense[-len(features) :] == list_count_columns(schema.categorical)
    if is_grouped != (spec.rows == "gaussian"):
        got, wanted = ("", "leave") if is_grouped else ("no ", "set")
        raise ConfigError(
            f"{config.model.name}: got {got}ratings grouped by user, wanted {'no' if is_grouped else 'files of'} such "
            f"ratings; {wanted} data.options.group_by{' out' * is_grouped}"
        )
    arguments |= {name: value for name, value in data_arguments.items() if name in parameters}
    if (unused := TOWER_SETTINGS & set(arguments)) and not config.model.has_tower_modules:
        raise ConfigError(
            f"model.{min(unused)}: it is a setting of tower modules, which need model.tower_dim or "
            f"model.tower_ratio; set one, or leave {min(unused)} out"
        )
    if "towers" in arguments:
        names = [column.name for column in schema.categorical]
        arguments["towers"] = read_tower_partition(arguments["towers"], names)
    model = spec.model(tables, features, seed=config.train.seed, **arguments)  # type: ignore[call-arg]
    model.autocast = AUTOCAST[config.train.autocast]
    if config.model.compile:
        model.compile()
    return model


def read_tower_partition(
    setting: int | str | Sequence[Sequence[str]], features: Sequence[str]
) -> Partition:
    """Return the partition of these features that `model.towers` gives: itself, its file, or a number of towers.

    Raises ConfigError."""
    if setting == AUTO_TOWERS:
        raise ConfigError(
            "model.towers: got auto without the run whose towers are meant; group its features with colonnade towers, "
            "then train with --towers-from RUN"
        )
    try:
        if isinstance(setting, int):
            return build_round_robin_partition(features, setting)
        if not isinstance(setting, str):
            return Partition(tuple(map(tuple, setting)))
        return Partition.from_json(read_regular(Path(setting)).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(
            f"model.towers: {setting}: {reason}; give a partition, its file, or a number of towers"
        ) from None
    except ConfigError as error:
        prefix = f" {setting}:" if isinstance(setting, str) else ""
        raise ConfigError(f"model.towers:{prefix} {error}") from None


def resolve_tower_settings(schema: Schema, config: RunConfig) -> RunConfig:
    """Replace a number of towers or a partition file in `model.towers` by the partition itself, as the file may change.

    Raises ConfigError."""
    if config.model.towers is None:
        return config
    names = [column.name for column in schema.categorical]
    towers = read_tower_partition(config.model.towers, names).towers
    return override_settings(config, {"model.towers": [list(tower) for tower in towers]})


def collect_model_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings made for the configured model, by name. Raises ConfigError for one that it does not have."""
    setting_names = MODEL_SPECS[config.model.name].settings
    all_settings = config.model.model_dump(exclude={"name", "compile"})
    settings = {name: value for name, value in all_settings.items() if value is not None}
    if unknown := sorted(set(settings) - setting_names):
        raise ConfigError(
            f"model.{unknown[0]}: {config.model.name} has no such setting; it takes "
            f"{', '.join(sorted(setting_names)) or 'none'}; set it to none"
        )
    return settings


def build_row_optimizer(config: RunConfig, table_name: str | None = None) -> SparseOptimizer:
    """Build the optimizer of all rows, or of one table's rows. Raises ConfigError for a setting that the configured
    optimizer does not have."""
    rows = config.embedding
    if table_name in rows.by_table:
        return _build_overridden_optimizer(
            f"embedding.by_table.{table_name}", rows.by_table[table_name], rows
        )
    settings = {name: getattr(rows, name) for name in OPTIMIZER_SETTINGS}
    return _build_optimizer("embedding", rows.optimizer, rows.learning_rate, settings)


def build_wide_optimizer(config: RunConfig) -> SparseOptimizer:
    """Build the optimizer of first-order weights. Raises ConfigError as `build_row_optimizer` does."""
    return _build_overridden_optimizer("embedding.wide", config.embedding.wide, config.embedding)


def _build_overridden_optimizer(
    config_section: str,
    own_settings: WideConfig | TableEmbeddingConfig,
    row_settings: EmbeddingConfig,
) -> SparseOptimizer:
    """Build the optimizer that a section configures; settings it leaves out are those of all rows."""
    settings = {name: getattr(own_settings, name) for name in OPTIMIZER_SETTINGS}
    lr = row_settings.learning_rate if own_settings.lr is None else own_settings.lr
    if own_settings.optimizer is not None:
        return _build_optimizer(config_section, own_settings.optimizer, lr, settings)
    settings = {
        name: getattr(row_settings, name) if value is None else value
        for name, value in settings.items()
    }
    return _build_optimizer(config_section, row_settings.optimizer, lr, settings)


def _build_optimizer(
    config_section: str, optimizer_name: str, lr: float, settings: Mapping[str, Any]
) -> SparseOptimizer:
    optimizer = SPARSE_OPTIMIZERS[optimizer_name]
    arguments = {setting: value for setting, value in settings.items() if value is not None}
    setting_names = {setting.name for setting in fields(optimizer)}
    if unknown := sorted(set(arguments) - setting_names):
        raise ConfigError(
            f"{config_section}.{unknown[0]}: {optimizer.name} has no such setting; it takes "
            f"{', '.join(sorted(setting_names))}; set it to none"
        )
    return optimizer(lr=lr, **arguments)


def build_tables(schema: Schema, config: RunConfig) -> tuple[list[Table], list[Feature]]:
    """Build one feature per categorical column, with bags pooled, and one table per table name of the columns."""
    spec = MODEL_SPECS[config.model.name]
    if not schema.categorical:
        raise ConfigError(
            f"{config.model.name}: the data has no categorical column, and every model here needs one"
        )
    bag_pooling = config.embedding.pooling or "mean"
    poolings: dict[str, Pooling] = {
        "one": "sum",
        "bag": bag_pooling,
        "sequence": spec.sequence_pooling,
    }
    first_columns: dict[str, Column] = {}
    for column in schema.categorical:
        first_columns.setdefault(column.table, column)
    if unknown := sorted(set(config.embedding.by_table) - set(first_columns)):
        raise ConfigError(
            f"embedding.by_table.{unknown[0]}: this data has no table of that name; it has {', '.join(first_columns)}"
        )
    retention = build_retention_by_table(first_columns.values(), config)
    tables = [
        Table(
            column.table,
            dtype=config.embedding.dtype,
            master=config.embedding.master,
            **_choose_norm_and_weight_bounds(column.table, config.embedding),
            **retention[column.table],
            **(
                _choose_gaussian_rows(column is schema.categorical[0], column.table, config)
                if spec.rows == "gaussian"
                else _choose_row_settings(spec, column.table, len(schema.labels), config)
            ),
        )
        for column in first_columns.values()
    ]
    features = [
        Feature(column.name, column.table, pooling=poolings[column.kind])
        for column in schema.categorical
    ]
    return tables, features


def _choose_norm_and_weight_bounds(
    table_name: str, row_settings: EmbeddingConfig
) -> dict[str, Any]:
    """Return max_norm and weight_bound of `Table`: the table's own, or those of all rows."""
    own = row_settings.by_table.get(table_name, TableEmbeddingConfig())
    return {
        name: getattr(row_settings if getattr(own, name) is None else own, name)
        for name in ("max_norm", "weight_bound")
    }


def build_retention_by_table(
    columns: Iterable[Column], config: RunConfig
) -> dict[str, dict[str, Any]]:
    """Return, by table, admission and eviction of `Table`, or rows and hashes. Raises ConfigError if the settings name
    a table that is not an open table of this data."""
    rows = config.embedding
    open_tables = []
    arguments: dict[str, dict[str, Any]] = {}
    for column in columns:
        arguments[column.table] = {"rows": column.cardinality}
        if column.cardinality is None:
            open_tables.append(column.table)
            hashing = rows.tables.get(column.table, OpenTableConfig())
            if hashing.rows is not None:
                arguments[column.table] = {"rows": hashing.rows, "hashes": hashing.hashes or 2}
                continue
            settings = rows.tables.get(column.table, rows)
            arguments[column.table] = {
                "admission": _build_admission_policy(settings.admission),
                "eviction": _build_eviction_policy(settings.eviction),
            }
    if unknown := sorted(set(rows.tables) - set(open_tables)):
        raise ConfigError(
            f"embedding.tables.{unknown[0]}: this data has no open table of that name; it has "
            f"{', '.join(sorted(open_tables)) or 'none: each of its columns has a known number of ids'}"
        )
    for name, setting in (
        ("admission", _build_admission_policy(rows.admission)),
        ("eviction", _build_eviction_policy(rows.eviction)),
    ):
        if setting is not None and not open_tables:
            raise ConfigError(
                f"embedding.{name}: this data has no open table; each of its columns has a known number of ids, and "
                "all rows have room. Leave it out"
            )
    return arguments


def _build_admission_policy(config: AdmissionConfig) -> Admission | None:
    if config.probability is not None:
        return RandomAdmission(probability=config.probability)
    if config.updates is None or config.expected_ids is None:
        return None
    return CountMinAdmission(
        updates=config.updates,
        expected_ids=config.expected_ids,
        error=config.error,
        halve_steps=config.halve_steps,
    )


def _build_eviction_policy(config: EvictionConfig) -> Eviction | None:
    if config.max_rows is None:
        return None if config.age_steps is None else AgeEviction(steps=config.age_steps)
    return MaxRowsEviction(
        rows=config.max_rows,
        by=config.by,
        halve_steps=config.halve_steps,
        age_steps=config.age_steps,
    )


def _choose_gaussian_rows(is_user: bool, table_name: str, config: RunConfig) -> dict[str, Any]:
    """Return dim, optimizer and initializer of a `Table` of latent vectors and biases, or of users' biases alone."""
    dim = config.model.dim or DEFAULT_DIM
    scale = config.embedding.by_table.get(table_name, TableEmbeddingConfig()).init_scale
    scale = config.embedding.init_scale if scale is None else scale
    scales = {MEAN: dim**-0.5 if scale is None else scale, LOG_VARIANCE: 0.0, BIAS: 0.0}
    dims = {BIAS: 1} if is_user else {MEAN: dim, LOG_VARIANCE: dim, BIAS: 1}
    return {
        "dim": dims,
        "optimizer": build_row_optimizer(config, table_name),
        "initializer": {part: Uniform(scale=scales[part]) for part in dims},
    }


def _choose_row_settings(
    model_spec: ModelSpec, table_name: str, num_tasks: int, config: RunConfig
) -> dict[str, Any]:
    """Return dim, optimizer and initializer of a `Table`. Raises ConfigError."""
    scale = config.embedding.init_scale
    wide_initializer = Uniform(scale=config.embedding.wide.init_scale)
    table_scale = config.embedding.by_table.get(table_name, TableEmbeddingConfig()).init_scale
    dim = config.model.dim or DEFAULT_DIM
    optimizer = build_row_optimizer(config, table_name)
    if model_spec.rows == "weights":
        initializer = Uniform(scale=(scale or 0.0) if table_scale is None else table_scale)
        return {"dim": num_tasks, "optimizer": optimizer, "initializer": initializer}
    model_scale = model_spec.model.init_scales.get(
        table_name, dim**-0.5 if scale is None else scale
    )
    initializer = Uniform(scale=model_scale if table_scale is None else table_scale)
    width = model_spec.model.row_width(table_name, dim, config.model.model_dump())
    if width != int(width):
        raise ConfigError(
            f"model.dim: got {dim}; {config.model.name} uses {width / dim:g} of it for rows of {table_name}; "
            "wanted an even number"
        )
    dim = int(width)
    vector = {"dim": dim, "optimizer": optimizer, "initializer": initializer}
    if model_spec.rows == "vector":
        return vector
    return {
        "dim": {DEEP: dim, WIDE: num_tasks},
        "optimizer": {DEEP: vector["optimizer"], WIDE: build_wide_optimizer(config)},
        "initializer": {DEEP: initializer, WIDE: wide_initializer},
    }
