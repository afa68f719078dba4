"""From a configuration and a data set's schema to a model."""

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
    override,
)
from colonnade.data.contract import Column, Schema
from colonnade.data.sets.interactions import LOG_Q
from colonnade.errors import ConfigError
from colonnade.models.dcn import DCN
from colonnade.models.dcnv2 import DCNv2
from colonnade.models.deepfm import DeepFM
from colonnade.models.dlrm import DLRM
from colonnade.models.fields import DEEP, WIDE
from colonnade.models.graphsage import GraphSAGE
from colonnade.models.knowledge import ComplEx, DistMult, RotatE, TransE
from colonnade.models.linear import FM, LR
from colonnade.models.nfm import NFM
from colonnade.models.sasrec import SASRec
from colonnade.models.split import SplitModel
from colonnade.models.two_tower import TwoTower
from colonnade.models.wide_deep import WideDeep
from colonnade.optimizers import SPARSE_OPTIMIZERS, SparseOptimizer
from colonnade.retention import (
    Admission,
    AgeEviction,
    CountMinAdmission,
    Eviction,
    MaxRowsEviction,
    RandomAdmission,
)
from colonnade.store.untrusted import read_regular
from colonnade.table import Feature, Pooling, Table, Uniform
from colonnade.topology.towers import Partition, striped

DEFAULT_DIM = 16
TOWER_SETTINGS = {"tower_vectors", "tower_summaries", "tower_layers"}
AUTOCAST = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Kind:
    """A model that a configuration may name. Its settings are the arguments of its constructor."""

    model: type[SplitModel]
    rows: Literal["vector", "vector and weights", "weights"] = "vector"
    sequence: Pooling = "mean"
    """How a column that is a sequence is pooled."""

    @property
    def parameters(self) -> set[str]:
        """Names that its constructor takes, those that it passes on to its base classes included."""
        return {name for base in self.model.__mro__ for name in signature(base).parameters}

    @property
    def settings(self) -> set[str]:
        """Fields of ModelConfig that it has."""
        return (self.parameters & set(ModelConfig.model_fields)) | (
            {"dim"} if self.rows != "weights" else set()
        )


KINDS: dict[str, Kind] = {
    "lr": Kind(LR, "weights"),
    "fm": Kind(FM, "vector and weights"),
    "nfm": Kind(NFM, "vector and weights"),
    "wide_deep": Kind(WideDeep, "vector and weights"),
    "deepfm": Kind(DeepFM, "vector and weights"),
    "dlrm": Kind(DLRM),
    "dcn": Kind(DCN),
    "dcnv2": Kind(DCNv2),
    "two_tower": Kind(TwoTower),
    "sasrec": Kind(SASRec, sequence="sequence"),
    "graphsage": Kind(GraphSAGE, sequence="sequence"),
    "transe": Kind(TransE, sequence="sequence"),
    "distmult": Kind(DistMult, sequence="sequence"),
    "complex": Kind(ComplEx, sequence="sequence"),
    "rotate": Kind(RotatE, sequence="sequence"),
}


def build_model(schema: Schema, config: RunConfig) -> SplitModel:
    """Dense weights from torch's generator, seeded with train.seed. Raises ConfigError for settings that the model
    does not have, and for data that it cannot take."""
    given = model_settings(config)
    given.pop("dim", None)
    tables, features = build_tables(schema, config)
    torch.manual_seed(config.train.seed)
    kind = KINDS[config.model.name]
    known, log_q = kind.parameters, None
    if LOG_Q in schema.dense:
        log_q = schema.dense.index(LOG_Q)
    of_data = {"num_dense": len(schema.dense), "tasks": len(schema.labels), "log_q": log_q}
    if "tasks" in known and not schema.labels:
        rankers = [name for name, other in KINDS.items() if other.model.objective is not None]
        raise ConfigError(
            f"{config.model.name} learns labels and this data has none; choose a model that ranks "
            f"({', '.join(rankers)}), or other data"
        )
    given |= {name: value for name, value in of_data.items() if name in known}
    if (idle := TOWER_SETTINGS & set(given)) and "tower_dim" not in given:
        raise ConfigError(
            f"model.{min(idle)}: it is of tower modules, and there are none without model.tower_dim; set that, or "
            f"leave {min(idle)} out"
        )
    if "towers" in given:
        given["towers"] = partition_of(given["towers"], [each.name for each in schema.categorical])
    model = kind.model(tables, features, seed=config.train.seed, **given)  # type: ignore[call-arg]
    model.autocast = AUTOCAST[config.train.autocast]
    if config.model.compile:
        model.compile()
    return model


def partition_of(said: int | str | Sequence[Sequence[str]], features: Sequence[str]) -> Partition:
    """What `model.towers` says, for these features in this order. Raises ConfigError."""
    try:
        if isinstance(said, int):
            return striped(features, said)
        if not isinstance(said, str):
            return Partition(tuple(map(tuple, said)))
        return Partition.from_json(read_regular(Path(said)).decode())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(
            f"model.towers: {said}: {why}; give a partition, its file, or a number of towers"
        ) from None
    except ConfigError as error:
        where = f" {said}:" if isinstance(said, str) else ""
        raise ConfigError(f"model.towers:{where} {error}") from None


def lasting_towers(schema: Schema, config: RunConfig) -> RunConfig:
    """The partition itself where it has a number or a file, which may change. Raises ConfigError."""
    if config.model.towers is None:
        return config
    names = [each.name for each in schema.categorical]
    towers = partition_of(config.model.towers, names).towers
    return override(config, {"model.towers": [list(tower) for tower in towers]})


def model_settings(config: RunConfig) -> dict[str, Any]:
    """What the configuration says of the chosen model, by name. Raises ConfigError for what it does not have."""
    known = KINDS[config.model.name].settings
    every = config.model.model_dump(exclude={"name", "compile"})
    given = {name: value for name, value in every.items() if value is not None}
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"model.{unknown[0]}: {config.model.name} has no such setting; it takes "
            f"{', '.join(sorted(known)) or 'none'}; set it to none"
        )
    return given


def build_row_optimizer(config: RunConfig, table: str | None = None) -> SparseOptimizer:
    """Of all rows, or of a table's. Raises ConfigError for a setting that the chosen optimizer does not have."""
    rows = config.embedding
    if table in rows.by_table:
        return _own_optimizer(f"embedding.by_table.{table}", rows.by_table[table], rows)
    given = {name: getattr(rows, name) for name in OPTIMIZER_SETTINGS}
    return _optimizer("embedding", rows.optimizer, rows.lr, given)


def build_wide_optimizer(config: RunConfig) -> SparseOptimizer:
    """Of first-order weights. Raises ConfigError as `build_row_optimizer` does."""
    return _own_optimizer("embedding.wide", config.embedding.wide, config.embedding)


def _own_optimizer(
    section: str, own: WideConfig | TableEmbeddingConfig, rows: EmbeddingConfig
) -> SparseOptimizer:
    given = {name: getattr(own, name) for name in OPTIMIZER_SETTINGS}
    lr = rows.lr if own.lr is None else own.lr
    if own.optimizer is not None:
        return _optimizer(section, own.optimizer, lr, given)
    given = {name: getattr(rows, name) if value is None else value for name, value in given.items()}
    return _optimizer(section, rows.optimizer, lr, given)


def _optimizer(section: str, name: str, lr: float, settings: Mapping[str, Any]) -> SparseOptimizer:
    chosen = SPARSE_OPTIMIZERS[name]
    given = {setting: value for setting, value in settings.items() if value is not None}
    known = {setting.name for setting in fields(chosen)}
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"{section}.{unknown[0]}: {chosen.name} has no such setting; it takes "
            f"{', '.join(sorted(known))}; set it to none"
        )
    return chosen(lr=lr, **given)


def build_tables(schema: Schema, config: RunConfig) -> tuple[list[Table], list[Feature]]:
    """One feature per categorical column, bags mean-pooled; one table for the columns that name it."""
    kind = KINDS[config.model.name]
    if not schema.categorical:
        raise ConfigError(
            f"{config.model.name}: the data has no categorical column, and no model here goes without"
        )
    poolings: dict[str, Pooling] = {"one": "sum", "bag": "mean", "sequence": kind.sequence}
    first: dict[str, Column] = {}
    for column in schema.categorical:
        first.setdefault(column.table, column)
    if unknown := sorted(set(config.embedding.by_table) - set(first)):
        raise ConfigError(
            f"embedding.by_table.{unknown[0]}: this data has no table of that name; it has {', '.join(first)}"
        )
    retention = build_retention(first.values(), config)
    tables = [
        Table(
            column.table,
            dtype=config.embedding.dtype,
            master=config.embedding.master,
            **_bounds(column.table, config.embedding),
            **retention[column.table],
            **_row_kind(kind, column.table, len(schema.labels), config),
        )
        for column in first.values()
    ]
    features = [
        Feature(column.name, column.table, pooling=poolings[column.kind])
        for column in schema.categorical
    ]
    return tables, features


def _bounds(table: str, rows: EmbeddingConfig) -> dict[str, Any]:
    """max_norm and weight_bound of `Table`: the table's own, or those of all rows."""
    own = rows.by_table.get(table, TableEmbeddingConfig())
    return {
        name: getattr(rows if getattr(own, name) is None else own, name)
        for name in ("max_norm", "weight_bound")
    }


def build_retention(columns: Iterable[Column], config: RunConfig) -> dict[str, dict[str, Any]]:
    """By table: admission and eviction of `Table`, or rows and hashes. Raises ConfigError where the settings name no
    open table."""
    rows, open_tables = config.embedding, []
    found: dict[str, dict[str, Any]] = {}
    for column in columns:
        found[column.table] = {"rows": column.cardinality}
        if column.cardinality is None:
            open_tables.append(column.table)
            own = rows.tables.get(column.table, OpenTableConfig())
            if own.rows is not None:
                found[column.table] = {"rows": own.rows, "hashes": own.hashes or 2}
                continue
            said = rows.tables.get(column.table, rows)
            found[column.table] = {
                "admission": _admission(said.admission),
                "eviction": _eviction(said.eviction),
            }
    if unknown := sorted(set(rows.tables) - set(open_tables)):
        raise ConfigError(
            f"embedding.tables.{unknown[0]}: this data has no open table of that name; it has "
            f"{', '.join(sorted(open_tables)) or 'none: each of its columns says how many ids there are'}"
        )
    for name, setting in (
        ("admission", _admission(rows.admission)),
        ("eviction", _eviction(rows.eviction)),
    ):
        if setting is not None and not open_tables:
            raise ConfigError(
                f"embedding.{name}: this data has no open table; each of its columns says how many ids there are, and all "
                "rows have room. Leave it out"
            )  # fmt: skip
    return found


def _admission(config: AdmissionConfig) -> Admission | None:
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


def _eviction(config: EvictionConfig) -> Eviction | None:
    if config.max_rows is None:
        return None if config.age_steps is None else AgeEviction(steps=config.age_steps)
    return MaxRowsEviction(
        rows=config.max_rows,
        by=config.by,
        halve_steps=config.halve_steps,
        age_steps=config.age_steps,
    )


def _row_kind(kind: Kind, table: str, tasks: int, config: RunConfig) -> dict[str, Any]:
    """What a table's rows are: dim, optimizer and initializer of `Table`. Raises ConfigError."""
    scale, wide_scale = config.embedding.init_scale, Uniform(scale=config.embedding.wide.init_scale)
    own = config.embedding.by_table.get(table, TableEmbeddingConfig()).init_scale
    dim, optimizer = config.model.dim or DEFAULT_DIM, build_row_optimizer(config, table)
    if kind.rows == "weights":
        initializer = Uniform(scale=(scale or 0.0) if own is None else own)
        return {"dim": tasks, "optimizer": optimizer, "initializer": initializer}
    every = kind.model.init_scales.get(table, dim**-0.5 if scale is None else scale)
    initializer = Uniform(scale=every if own is None else own)
    width = kind.model.row_width(table, dim, config.model.model_dump())
    if width != int(width):
        raise ConfigError(
            f"model.dim: got {dim}, of which {config.model.name} gives {width / dim:g} to rows of {table}; "
            "wanted an even number"
        )
    dim = int(width)
    vector = {"dim": dim, "optimizer": optimizer, "initializer": initializer}
    if kind.rows == "vector":
        return vector
    return {
        "dim": {DEEP: dim, WIDE: tasks},
        "optimizer": {DEEP: vector["optimizer"], WIDE: build_wide_optimizer(config)},
        "initializer": {DEEP: initializer, WIDE: wide_scale},
    }
