"""Colonnade trains recommendation models whose embedding tables outgrow memory."""

from __future__ import annotations

from importlib import import_module

from colonnade.processors import limit_spinning

limit_spinning()  # before torch is loaded: OpenMP reads the settings then

TYPE_CHECKING = False  # typing's own would be the slowest import here
if TYPE_CHECKING:
    from typing import Any

    from colonnade.batch import Batch, Ids
    from colonnade.comm.mesh import Mesh
    from colonnade.comm.process_groups import close_mesh, open_mesh
    from colonnade.config.plan import PlanConfig
    from colonnade.embedding import EmbeddingCollection
    from colonnade.errors import ColonnadeError
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
    from colonnade.plan.plan import Plan, build_plan
    from colonnade.predict import Predictor
    from colonnade.publish.export import export_run
    from colonnade.publish.mirror import fetch_run
    from colonnade.publish.transfer import load_export, load_rows, to_embedding, trained_ids
    from colonnade.retention import (
        AgeEviction,
        CountMinAdmission,
        MaxRowsEviction,
        RandomAdmission,
    )
    from colonnade.row_optimizer import RowOptimizer
    from colonnade.row_state import dense_state_dict, load_dense_state_dict
    from colonnade.run.fit import Fitted, fit, load_run
    from colonnade.table import Feature, Table, Uniform
    from colonnade.topology.world import World
    from colonnade.train.objective import Objective

_NAMES_BY_MODULE = {
    "batch": ("Batch", "Ids"),
    "comm.mesh": ("Mesh",),
    "comm.process_groups": ("close_mesh", "open_mesh"),
    "config.plan": ("PlanConfig",),
    "embedding": ("EmbeddingCollection",),
    "errors": ("ColonnadeError",),
    "interaction": (
        "FM", "BiInteraction", "Concat", "FieldsLinear", "Interaction", "LowRankCross",
        "NormalizedLinear", "Sum", "TargetAttention",
    ),
    "lookup.stacking": ("stacked_rows",),
    "models.ranking": ("average_metrics", "evaluation_mode"),
    "optimizers": (
        "FTRL", "LAMB", "SGD", "Adagrad", "Adam", "AdamW", "RowWiseAdagrad", "RowWiseAdam", "SparseOptimizer",
    ),
    "plan.plan": ("Plan", "build_plan"),
    "predict": ("Predictor",),
    "publish.export": ("export_run",),
    "publish.mirror": ("fetch_run",),
    "publish.transfer": ("load_export", "load_rows", "to_embedding", "trained_ids"),
    "retention": ("AgeEviction", "CountMinAdmission", "MaxRowsEviction", "RandomAdmission"),
    "row_optimizer": ("RowOptimizer",),
    "row_state": ("dense_state_dict", "load_dense_state_dict"),
    "run.fit": ("Fitted", "fit", "load_run"),
    "table": ("Feature", "Table", "Uniform"),
    "topology.world": ("World",),
    "train.objective": ("Objective",),
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
    "ColonnadeError",
    "Concat",
    "CountMinAdmission",
    "EmbeddingCollection",
    "Feature",
    "FieldsLinear",
    "Fitted",
    "Ids",
    "Interaction",
    "LowRankCross",
    "MaxRowsEviction",
    "Mesh",
    "NormalizedLinear",
    "Objective",
    "Plan",
    "PlanConfig",
    "Predictor",
    "RandomAdmission",
    "RowOptimizer",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "SparseOptimizer",
    "Sum",
    "Table",
    "TargetAttention",
    "Uniform",
    "World",
    "average_metrics",
    "build_plan",
    "close_mesh",
    "dense_state_dict",
    "evaluation_mode",
    "export_run",
    "fetch_run",
    "fit",
    "load_dense_state_dict",
    "load_export",
    "load_rows",
    "load_run",
    "open_mesh",
    "stacked_rows",
    "to_embedding",
    "trained_ids",
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
