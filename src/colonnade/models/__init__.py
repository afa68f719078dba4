"""Models, written as single-device code without shards, tiers or staleness."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from colonnade.models.dcn import DCN
    from colonnade.models.dcnv2 import DCNv2
    from colonnade.models.deepfm import DeepFM
    from colonnade.models.dlrm import DLRM
    from colonnade.models.graphsage import GraphSAGE
    from colonnade.models.knowledge import ComplEx, DistMult, RotatE, TransE
    from colonnade.models.linear import LR, FactorizationMachine
    from colonnade.models.nfm import NFM
    from colonnade.models.retriever import RetrievalObjective, Retriever
    from colonnade.models.sasrec import SASRec
    from colonnade.models.split import Scorer, SplitModel
    from colonnade.models.tower_modules import describe_tower_modules
    from colonnade.models.two_tower import TwoTower
    from colonnade.models.wide_deep import WideDeep

_NAMES_BY_MODULE = {
    "dcn": ("DCN",),
    "dcnv2": ("DCNv2",),
    "deepfm": ("DeepFM",),
    "dlrm": ("DLRM",),
    "graphsage": ("GraphSAGE",),
    "knowledge": ("ComplEx", "DistMult", "RotatE", "TransE"),
    "linear": ("LR", "FactorizationMachine"),
    "nfm": ("NFM",),
    "retriever": ("RetrievalObjective", "Retriever"),
    "sasrec": ("SASRec",),
    "split": ("Scorer", "SplitModel"),
    "tower_modules": ("describe_tower_modules",),
    "two_tower": ("TwoTower",),
    "wide_deep": ("WideDeep",),
}  # fmt: skip
"""Public names by module. Each is imported at its first use."""

_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "DCN",
    "DLRM",
    "LR",
    "NFM",
    "ComplEx",
    "DCNv2",
    "DeepFM",
    "DistMult",
    "FactorizationMachine",
    "GraphSAGE",
    "RetrievalObjective",
    "Retriever",
    "RotatE",
    "SASRec",
    "Scorer",
    "SplitModel",
    "TransE",
    "TwoTower",
    "WideDeep",
    "describe_tower_modules",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colonnade.models' has no attribute {name!r}")
    value = getattr(import_module(f"colonnade.models.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
