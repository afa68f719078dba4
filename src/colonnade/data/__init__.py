"""Readers of samples. Each reader yields `colonnade.batch.Batch` and obeys the contract of `data/contract.py`."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from colonnade.data.batches import open_batches
    from colonnade.data.contract import Column, Position, Schema, Source, Splits, num_steps
    from colonnade.data.graph import open_graph
    from colonnade.data.interactions import Interactions, group_items_by_user, hold_out
    from colonnade.data.processes import ProcessSource
    from colonnade.data.sets.criteo import open_criteo
    from colonnade.data.sets.fb15k237 import open_fb15k237
    from colonnade.data.sets.gowalla import open_gowalla
    from colonnade.data.sets.movielens import open_movielens
    from colonnade.data.sets.movielens_retrieval import open_movielens_retrieval
    from colonnade.data.sets.power_law import open_power_law
    from colonnade.data.sets.synthetic import open_synthetic
    from colonnade.data.sources import SOURCES, open_source
    from colonnade.data.tabular.csv import open_csv
    from colonnade.data.tabular.declaration import FileSchema, load_file_schema
    from colonnade.data.tabular.fields import (
        Bag,
        Bucket,
        Category,
        Cross,
        Group,
        Key,
        Label,
        Number,
        Sequence,
        Time,
        Weight,
    )
    from colonnade.data.tabular.libsvm import open_libsvm
    from colonnade.data.tabular.parquet import open_parquet
    from colonnade.data.tabular.tables import infer_schema
    from colonnade.data.tabular.tfrecord import masked_crc, open_tfrecord
    from colonnade.data.tensors import TensorSource, open_tensors
    from colonnade.data.triples import open_triples

_NAMES_BY_MODULE = {
    "interactions": ("Interactions", "group_items_by_user", "hold_out"),
    "batches": ("open_batches",),
    "contract": ("Column", "Position", "Schema", "Source", "Splits", "num_steps"),
    "processes": ("ProcessSource",),
    "sets.criteo": ("open_criteo",),
    "sets.fb15k237": ("open_fb15k237",),
    "sets.gowalla": ("open_gowalla",),
    "graph": ("open_graph",),
    "sets.movielens": ("open_movielens",),
    "sets.movielens_retrieval": ("open_movielens_retrieval",),
    "sets.power_law": ("open_power_law",),
    "sets.synthetic": ("open_synthetic",),
    "triples": ("open_triples",),
    "sources": ("SOURCES", "open_source"),
    "tabular.csv": ("open_csv",),
    "tabular.declaration": ("FileSchema", "load_file_schema"),
    "tabular.fields": (
        "Bag", "Bucket", "Category", "Cross", "Group", "Key", "Label", "Number", "Sequence", "Time", "Weight",
    ),
    "tabular.libsvm": ("open_libsvm",),
    "tabular.parquet": ("open_parquet",),
    "tabular.tfrecord": ("masked_crc", "open_tfrecord"),
    "tabular.tables": ("infer_schema",),
    "tensors": ("TensorSource", "open_tensors"),
}  # fmt: skip
"""Public names by module. Each is imported at its first use, so that `colonnade inspect` does not import torch."""

_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "SOURCES",
    "Bag",
    "Bucket",
    "Category",
    "Column",
    "Cross",
    "FileSchema",
    "Group",
    "Interactions",
    "Key",
    "Label",
    "Number",
    "Position",
    "ProcessSource",
    "Schema",
    "Sequence",
    "Source",
    "Splits",
    "TensorSource",
    "Time",
    "Weight",
    "group_items_by_user",
    "hold_out",
    "infer_schema",
    "load_file_schema",
    "masked_crc",
    "num_steps",
    "open_batches",
    "open_criteo",
    "open_csv",
    "open_fb15k237",
    "open_gowalla",
    "open_graph",
    "open_libsvm",
    "open_movielens",
    "open_movielens_retrieval",
    "open_parquet",
    "open_power_law",
    "open_source",
    "open_synthetic",
    "open_tensors",
    "open_tfrecord",
    "open_triples",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colonnade.data' has no attribute {name!r}")
    value = getattr(import_module(f"colonnade.data.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
