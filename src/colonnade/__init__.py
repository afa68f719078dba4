"""Colonnade trains recommendation models whose embedding tables outgrow memory."""

from __future__ import annotations

from importlib.metadata import version

import torch as _torch  # noqa: F401  the native core shares torch's OpenMP threads: torch loads first

__version__ = version("colonnade")

from colonnade.batch import Batch, Ids
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ColonnadeError
from colonnade.interaction import FM, Concat, Interaction
from colonnade.optimizers import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RowWiseAdagrad,
    RowWiseAdam,
    SparseOptimizer,
)
from colonnade.plan.plan import Plan, build_plan
from colonnade.row_optimizer import RowOptimizer
from colonnade.table import Feature, Table, Uniform
from colonnade.topology.mesh import Mesh, close_mesh, open_mesh
from colonnade.topology.world import World
from colonnade.train.export import export_run
from colonnade.train.fit import Fitted, fit, load_run
from colonnade.train.mirror import fetch_run
from colonnade.train.transfer import load_export, load_rows, to_embedding, trained_ids

__all__ = [
    "FM",
    "FTRL",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Batch",
    "ColonnadeError",
    "Concat",
    "EmbeddingCollection",
    "Feature",
    "Fitted",
    "Ids",
    "Interaction",
    "Mesh",
    "Plan",
    "RowOptimizer",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "SparseOptimizer",
    "Table",
    "Uniform",
    "World",
    "build_plan",
    "close_mesh",
    "export_run",
    "fetch_run",
    "fit",
    "load_export",
    "load_rows",
    "load_run",
    "open_mesh",
    "to_embedding",
    "trained_ids",
]
