"""Colonnade trains recommendation models whose embedding tables outgrow memory."""

from __future__ import annotations

from importlib import import_module

from colonnade.processors import limit_openmp_spinning

limit_openmp_spinning()  # before torch is loaded: OpenMP reads the settings then

TYPE_CHECKING = False  # typing's own would be the slowest import here
if TYPE_CHECKING:
    from typing import Any

    from colonnade.batch import Batch, Ids
    from colonnade.comm.mesh import Mesh
    from colonnade.comm.process_groups import close_mesh, open_mesh
    from colonnade.config.plan import PlanConfig
    from colonnade.embedding import EmbeddingCollection
    from colonnade.errors import (
        BudgetExceeded,
        CheckpointError,
        ColonnadeError,
        ConfigError,
        DataError,
        NonFiniteError,
        StorageError,
        WorldError,
    )
    from colonnade.interaction import (
        FM,
        BiInteraction,
        Concat,
        FieldsLinear,
        Interaction,
        LowRankCross,
        NormalizedLinear,
        Sum,
        TargetAttention,
        TowerModule,
    )
    from colonnade.lookup.stacking import stacked_rows
    from colonnade.models.ranking import average_metrics, evaluation_mode
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
    from colonnade.plan.build import build_plan
    from colonnade.plan.constraints import shard_in_towers
    from colonnade.plan.plan import Plan
    from colonnade.predict import Predictor
    from colonnade.processors import count_usable_processors
    from colonnade.publish.mirror import fetch_run
    from colonnade.publish.model_writer import export_run
    from colonnade.publish.transfer import load_export, load_rows, to_embedding, trained_ids
    from colonnade.retention import (
        AgeEviction,
        CountMinAdmission,
        MaxRowsEviction,
        RandomAdmission,
    )
    from colonnade.row_optimizer import RowOptimizer
    from colonnade.row_state import dense_state_dict, load_dense_state_dict
    from colonnade.run.fit import FitResult, fit, load_checkpoint
    from colonnade.serve.recommend import Recommender
    from colonnade.serve.records import build_encoder
    from colonnade.staleness import RowClock, TableCache
    from colonnade.table import Feature, Table, Uniform
    from colonnade.topology.sharding import (
        HotRows,
        Sharding,
        column_wise,
        grid,
        host_wise,
        replicated,
        row_wise,
        table_wise,
    )
    from colonnade.topology.towers import Partition
    from colonnade.topology.world import World
    from colonnade.train.metrics import best_possible_metrics
    from colonnade.train.objective import Objective, weighted_loss

_NAMES_BY_MODULE = {
    "batch": ("Batch", "Ids"),
    "comm.mesh": ("Mesh",),
    "comm.process_groups": ("close_mesh", "open_mesh"),
    "config.plan": ("PlanConfig",),
    "embedding": ("EmbeddingCollection",),
    "errors": (
        "BudgetExceeded", "CheckpointError", "ColonnadeError", "ConfigError", "DataError", "NonFiniteError",
        "StorageError", "WorldError",
    ),
    "interaction": (
        "BiInteraction", "Concat", "FM", "FieldsLinear", "Interaction", "LowRankCross", "NormalizedLinear",
        "Sum", "TargetAttention", "TowerModule",
    ),
    "lookup.stacking": ("stacked_rows",),
    "models.ranking": ("average_metrics", "evaluation_mode"),
    "optimizers": (
        "Adagrad", "Adam", "AdamW", "FTRL", "LAMB", "RowWiseAdagrad", "RowWiseAdam", "SGD", "SparseOptimizer",
    ),
    "plan.constraints": ("shard_in_towers",),
    "plan.build": ("build_plan",),
    "plan.plan": ("Plan",),
    "predict": ("Predictor",),
    "processors": ("count_usable_processors",),
    "publish.model_writer": ("export_run",),
    "publish.mirror": ("fetch_run",),
    "publish.transfer": ("load_export", "load_rows", "to_embedding", "trained_ids"),
    "retention": ("AgeEviction", "CountMinAdmission", "MaxRowsEviction", "RandomAdmission"),
    "row_optimizer": ("RowOptimizer",),
    "row_state": ("dense_state_dict", "load_dense_state_dict"),
    "run.fit": ("FitResult", "fit", "load_checkpoint"),
    "serve.recommend": ("Recommender",),
    "serve.records": ("build_encoder",),
    "staleness": ("RowClock", "TableCache"),
    "table": ("Feature", "Table", "Uniform"),
    "topology.sharding": (
        "HotRows", "Sharding", "column_wise", "grid", "host_wise", "replicated", "row_wise", "table_wise",
    ),
    "topology.towers": ("Partition",),
    "topology.world": ("World",),
    "train.metrics": ("best_possible_metrics",),
    "train.objective": ("Objective", "weighted_loss"),
}  # fmt: skip
"""Public names by module. A name is imported when it is first used, so that `colonnade --help` does not load torch."""

_MODULE_OF_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "FM",
    "FTRL",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AgeEviction",
    "Batch",
    "BiInteraction",
    "BudgetExceeded",
    "CheckpointError",
    "ColonnadeError",
    "Concat",
    "ConfigError",
    "CountMinAdmission",
    "DataError",
    "EmbeddingCollection",
    "Feature",
    "FieldsLinear",
    "FitResult",
    "HotRows",
    "Ids",
    "Interaction",
    "LowRankCross",
    "MaxRowsEviction",
    "Mesh",
    "NonFiniteError",
    "NormalizedLinear",
    "Objective",
    "Partition",
    "Plan",
    "PlanConfig",
    "Predictor",
    "RandomAdmission",
    "Recommender",
    "RowClock",
    "RowOptimizer",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "Sharding",
    "SparseOptimizer",
    "StorageError",
    "Sum",
    "Table",
    "TableCache",
    "TargetAttention",
    "TowerModule",
    "Uniform",
    "World",
    "WorldError",
    "average_metrics",
    "best_possible_metrics",
    "build_encoder",
    "build_plan",
    "close_mesh",
    "column_wise",
    "count_usable_processors",
    "dense_state_dict",
    "evaluation_mode",
    "export_run",
    "fetch_run",
    "fit",
    "grid",
    "host_wise",
    "load_checkpoint",
    "load_dense_state_dict",
    "load_export",
    "load_rows",
    "open_mesh",
    "replicated",
    "row_wise",
    "shard_in_towers",
    "stacked_rows",
    "table_wise",
    "to_embedding",
    "trained_ids",
    "weighted_loss",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("colonnade")
    if name not in _MODULE_OF_NAME:
        try:
            return import_module(
                f"colonnade.{name}"
            )  # a submodule, such as colonnade.errors, without `import colonnade.errors`
        except ModuleNotFoundError as error:
            if name.startswith("_") or error.name == f"colonnade.{name}":
                raise AttributeError(f"module 'colonnade' has no attribute {name!r}") from None
            raise
    value = getattr(import_module(f"colonnade.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
