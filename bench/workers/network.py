"""The dense network of every peer: the same function as colonnade.models.dlrm after the embeddings, in plain torch.

Imports torch only, so that a peer's environment need not hold Colonnade. tests/bench/test_bench.py holds the
two together. Legend: B samples, n dense columns, F fields, D dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

LINEAR_SOURCE = Path(__file__).resolve().parents[2] / "src" / "colonnade" / "ops" / "linear.py"


class DenseNetwork(nn.Module):
    """Bottom MLP, dots of all pairs of vectors, top MLP. Parameters are named as in colonnade.models.dlrm.DLRM."""

    pairs: Tensor

    def __init__(
        self,
        num_fields: int,
        dim: int,
        *,
        num_dense: int,
        bottom: Sequence[int],
        top: Sequence[int],
    ) -> None:
        super().__init__()
        self.num_fields = num_fields
        num_vectors = num_fields + 1
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        # One index_select: the fastest of the plain forms tried (two index tensors: backward 1.4x slower).
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        self.bottom = nn.Sequential(*_layers([num_dense, *bottom, dim]), nn.ReLU())
        self.top = nn.Sequential(*_layers([dim + len(rows), *top, 1]))

    def forward(self, dense: Tensor, fields: Tensor) -> Tensor:
        """dense (B, n), fields (B, F * D) -> logits (B, 1)."""
        return self.top(self.interact(self.bottom(dense), fields))

    def interact(self, bottom: Tensor, fields: Tensor) -> Tensor:
        """bottom (B, D), fields (B, F * D) -> (B, D + pairs): the vector of the bottom MLP and all dots."""
        vectors = torch.cat([bottom[:, None], fields.unflatten(1, (self.num_fields, -1))], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([bottom, dots.index_select(1, self.pairs)], dim=1)


class DeepFMNetwork(nn.Module):
    """Factorization machine and MLP over the fields, first-order weights. The first layer is in one part."""

    def __init__(self, num_fields: int, dim: int, *, num_dense: int, top: Sequence[int]) -> None:
        super().__init__()
        self.num_fields = num_fields
        self.linear = nn.Linear(num_dense, 1)
        self.deep = nn.Sequential(*_layers([num_dense + num_fields * dim, *top, 1]))

    def forward(self, dense: Tensor, fields: Tensor, first_order: Tensor) -> Tensor:
        """dense (B, n), fields (B, F * D), first_order (B, F) -> logits (B, 1)."""
        vectors = fields.unflatten(1, (self.num_fields, -1))
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        linear = first_order.sum(1, keepdim=True) + self.linear(dense)
        return pairs + linear + self.deep(torch.cat([dense, fields], dim=1))


class DCNv2Network(nn.Module):
    """Cross layers beside an MLP, both feeding the last layer. Named as in colonnade.models.dcn."""

    def __init__(
        self, num_fields: int, dim: int, *, num_dense: int, cross_layers: int, top: Sequence[int]
    ) -> None:
        super().__init__()
        width = num_dense + num_fields * dim
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(cross_layers))
        self.top = nn.Sequential(*_layers([width, *top]), nn.ReLU())
        self.last = nn.Linear(top[-1] + width, 1)

    def forward(self, dense: Tensor, fields: Tensor) -> Tensor:
        """dense (B, n), fields (B, F * D) -> logits (B, 1)."""
        first = torch.cat([dense, fields], dim=1)
        x = first
        for layer in self.cross:
            x = first * layer(x) + x
        return self.last(torch.cat([x, self.top(first)], dim=1))


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def use_library_linear(network: nn.Module) -> nn.Module:
    """Make a peer's network use Colonnade's linear layer, fused with the ReLU after it as in colonnade's MLPs.

    Its source needs torch alone and is loaded by path, because a peer's environment does not have colonnade.
    """
    spec = spec_from_file_location("library_linear", LINEAR_SOURCE)
    assert spec is not None and spec.loader is not None, "a source file has a loader"
    source = module_from_spec(spec)
    spec.loader.exec_module(source)
    layers = {nn.Linear: LibraryLinear, nn.Sequential: LibrarySequential}
    for module in list(network.modules()):
        if type(module) in layers:
            module.__class__ = layers[type(module)]
            module.library_linear = source.linear
    return network


class LibraryLinear(nn.Linear):
    library_linear: Callable[..., Tensor]

    def forward(self, x: Tensor, *, relu: bool = False) -> Tensor:
        return self.library_linear(x, self.weight, self.bias, relu=relu)


class LibrarySequential(nn.Sequential):
    """Linear layers, each evaluated together with the ReLU after it."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        for layer, next_layer in zip(layers, [*layers[1:], None], strict=True):
            if isinstance(layer, LibraryLinear):
                x = layer(x, relu=isinstance(next_layer, nn.ReLU))
        return x
