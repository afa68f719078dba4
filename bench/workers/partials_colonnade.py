"""Colonnade with a model's first operators as consumers: where they are evaluated is the exchange's choice.

A choice is one of `exchange_colonnade`'s, or the exchange `partials`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from colonnade import FM, SGD, Feature, FieldsLinear, Sum, Table, Uniform
from workers import exchange_colonnade
from workers.exchange_colonnade import NO_CHOICE
from workers.exchange_loop import serve
from workers.partials_loop import LR, ModelCase


class Opened(exchange_colonnade.Opened):
    def __init__(self, case: ModelCase, *inputs: Any) -> None:
        super().__init__(case, *inputs)
        self.output_gradients = case.output_gradients()
        if "deep" in case.operators:
            with torch.no_grad():
                self.collection.interactions["deep"].weight.copy_(case.weight().T)

    @staticmethod
    def declared(  # type: ignore[override]
        case: ModelCase, choice: Mapping[str, Any] = NO_CHOICE
    ) -> tuple[list[Table], list[Feature], dict[str, Any]]:
        dims = {"deep": case.dim, "wide": 1}
        tables = [
            Table(name, dims, rows=rows, optimizer=SGD(lr=LR), initializer=Uniform(scale=0.0))
            for name, rows in zip(case.names, case.rows, strict=True)
        ]
        deep, wide = ([f"{name}.{part}" for name in case.names] for part in dims)
        results = {
            "fm": (FM(over=case.over), deep),
            "deep": (FieldsLinear([case.dim] * len(deep), case.hidden), deep),
            "linear": (Sum(), wide),
        }
        features = [Feature(name, name) for name in case.names]
        return tables, features, {name: results[name] for name in case.operators}

    def outputs(self, result: dict[str, Tensor]) -> list[Tensor]:
        return [result[name] for name in self.case.operators]  # type: ignore[attr-defined]

    def gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        return self.output_gradients


def build(case: ModelCase, choices: Mapping[str, Any]) -> Any:
    return exchange_colonnade.build(case, choices, Opened)


if __name__ == "__main__":
    serve(build, ModelCase)
