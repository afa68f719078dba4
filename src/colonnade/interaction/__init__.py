"""Interaction operators: a model's first operators after the embeddings, which owner ranks can evaluate (DES)."""

from __future__ import annotations

from colonnade.interaction.attention import TargetAttention
from colonnade.interaction.contract import Interaction, SomeFields
from colonnade.interaction.linear import FieldsLinear, LowRankCross, NormalizedLinear
from colonnade.interaction.statistics import FM, BiInteraction, Concat, Sum
from colonnade.interaction.tower import TowerModule

__all__ = [
    "FM",
    "BiInteraction",
    "Concat",
    "FieldsLinear",
    "Interaction",
    "LowRankCross",
    "NormalizedLinear",
    "SomeFields",
    "Sum",
    "TargetAttention",
    "TowerModule",
]
