"""The demo's DLRM in plain torch, with the weights of an export: what a peer serves.

Imports torch and safetensors only. Legend: B samples, n dense columns, F fields, D dim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from workers.network import DenseNetwork, _layers


class FieldsNetwork(DenseNetwork):
    """DLRM's network whose top MLP has the vectors of all fields, in addition to their dots (keep_fields)."""

    def __init__(
        self,
        num_fields: int,
        dim: int,
        *,
        num_dense: int,
        bottom: Sequence[int],
        top: Sequence[int],
    ) -> None:
        super().__init__(num_fields, dim, num_dense=num_dense, bottom=bottom, top=top)
        self.top = nn.Sequential(*_layers([(num_fields + 1) * dim + len(self.pairs), *top, 1]))

    def interact(self, bottom: Tensor, fields: Tensor) -> Tensor:
        """bottom (B, D), fields (B, F * D) -> (B, F * D + D + pairs)."""
        return torch.cat([fields, super().interact(bottom, fields)], dim=1)


class PlainModel(nn.Module):
    """nn.EmbeddingBag of each field, or one of all (`is_stacked`), and the network after them."""

    def __init__(
        self, weights: Sequence[Tensor], network: nn.Module, *, is_stacked: bool = False
    ) -> None:
        super().__init__()
        self.network = network
        self.is_stacked = is_stacked
        first_rows = [0]
        for weight in weights:
            first_rows.append(first_rows[-1] + len(weight))
        self.first_rows = torch.tensor(first_rows[:-1])
        tables = [torch.cat(list(weights))] if is_stacked else weights
        self.bags = nn.ModuleList(nn.EmbeddingBag(*w.shape, mode="sum", _weight=w) for w in tables)

    def forward(self, dense: Tensor, ids: Sequence[Tensor]) -> Tensor:
        """dense (B, n), ids (B,) of each field -> probabilities (B,) float64."""
        size = max(len(dense), *map(len, ids))
        columns = [values.expand(size) for values in ids]
        if self.is_stacked:
            rows = torch.stack(columns, dim=1) + self.first_rows
            offsets = torch.arange(rows.numel())
            fields = self.bags[0](rows.reshape(-1), offsets).view(size, -1)
        else:
            offsets = torch.arange(size)
            pairs = zip(self.bags, columns, strict=True)
            fields = torch.cat([bag(values, offsets) for bag, values in pairs], dim=1)
        logits = self.network(dense.expand(size, -1), fields)
        return torch.sigmoid(logits[:, 0].double())


def load_model(export: Path, *, is_stacked: bool = False) -> PlainModel:
    """Return the model with the weights of an export in which each row was trained."""
    content: Mapping[str, Any] = json.loads((export / "model.json").read_bytes())
    dense = load_file(export / "dense.safetensors")
    weights = [load_file(export / table["file"])["weights"] for table in content["tables"]]
    widths = {
        part: [len(dense[name]) for name in dense if name.startswith(part) and name.endswith("bias")]
        for part in ("bottom.", "top.")
    }  # fmt: skip
    network = FieldsNetwork(
        len(weights),
        weights[0].shape[1],
        num_dense=len(content["schema"]["dense"]),
        bottom=widths["bottom."][:-1],
        top=widths["top."][:-1],
    )
    network.load_state_dict(dense)
    model = PlainModel(weights, network, is_stacked=is_stacked)
    return model.eval().requires_grad_(False)
