"""From a configuration and a data set's schema to a model."""

from __future__ import annotations

from dataclasses import fields

import torch

from colonnade.config import OPTIMIZER_SETTINGS, RunConfig
from colonnade.data.contract import Column, Schema
from colonnade.errors import ConfigError
from colonnade.models.deepfm import DeepFM
from colonnade.models.dlrm import DLRM
from colonnade.optimizers import SPARSE_OPTIMIZERS, SparseOptimizer
from colonnade.table import Feature, Pooling, Table, Uniform

POOLINGS: dict[str, Pooling] = {"one": "sum", "bag": "mean", "sequence": "sequence"}
"""By kind of column."""


def build_row_optimizer(config: RunConfig) -> SparseOptimizer:
    """Raises ConfigError for a setting that the chosen optimizer does not have."""
    chosen = SPARSE_OPTIMIZERS[config.rows.optimizer]
    given = {name: getattr(config.rows, name) for name in OPTIMIZER_SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    known = {setting.name for setting in fields(chosen)}
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"rows.{unknown[0]}: {chosen.name} has no such setting; it takes "
            f"{', '.join(sorted(known))}; set it to none"
        )
    return chosen(lr=config.rows.lr, **given)


def build_tables(schema: Schema, config: RunConfig) -> tuple[list[Table], list[Feature]]:
    """One feature per categorical column, bags mean-pooled; one table for the columns that name it."""
    optimizer = build_row_optimizer(config)
    scale = config.rows.init_scale
    first: dict[str, Column] = {}
    for column in schema.categorical:
        first.setdefault(column.table, column)
    tables = [
        Table(
            column.table,
            config.model.dim,
            rows=column.cardinality,
            optimizer=optimizer,
            initializer=None if scale is None else Uniform(scale=scale),
            dtype=config.rows.dtype,
            master=config.rows.master,
            max_norm=config.rows.max_norm,
        )
        for column in first.values()
    ]
    features = [
        Feature(column.name, column.table, pooling=POOLINGS[column.kind])
        for column in schema.categorical
    ]
    return tables, features


def build_model(schema: Schema, config: RunConfig) -> DLRM | DeepFM:
    """Dense weights from torch's generator, seeded with train.seed."""
    tables, features = build_tables(schema, config)
    torch.manual_seed(config.train.seed)
    num_dense, top, seed = len(schema.dense), config.model.top, config.train.seed
    tasks = len(schema.labels)
    if config.model.name == "deepfm":
        return DeepFM(tables, features, num_dense=num_dense, top=top, tasks=tasks, seed=seed)
    return DLRM(
        tables,
        features,
        num_dense=num_dense,
        bottom=config.model.bottom,
        top=top,
        tasks=tasks,
        keep_fields=config.model.keep_fields,
        seed=seed,
    )
