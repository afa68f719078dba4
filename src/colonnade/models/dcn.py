"""Deep & cross network (Wang et al. 2017): cross layers with one weight vector each, beside an MLP.

Legend: B samples, n dense columns, W width of x_0 = dense columns and fields side by side, L cross layers, T tasks,
H width of the MLP's first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import FieldsLinear
from colonnade.models.fields import dims_of
from colonnade.models.layers import first_layer, mlp
from colonnade.models.split import Scorer
from colonnade.table import Feature, Table


class DCN(Scorer):
    """x_{l+1} = x_0 <w_l, x_l> + b_l + x_l is a_{l+1} x_0 + c_{l+1} with a number a and a sum of biases c:

        a_{l+1} = a_l + a_l <w_l, x_0> + <w_l, c_l>,    c_{l+1} = c_l + b_l,    a_0 = 1, c_0 = 0

    so of x_0 the cross layers, the last layer's part of x_L and the MLP's first layer need one linear map of it, of
    L + T + H rows: `weights` of the dense columns, the consumer "first" of the fields. No x_l is ever made.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        cross_layers: int = 3,
        top: Sequence[int] = (128, 64),
        tasks: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        dims, widths = dims_of(tables, features), [*top, tasks]
        self.rows = [cross_layers, tasks, widths[0]]
        first = first_layer(num_dense, dims.values(), sum(self.rows))
        self.embeddings = EmbeddingCollection(
            tables, features, consumers={"first": (first, list(dims))}, seed=seed
        )
        width = num_dense + sum(dims.values())
        self.weights = nn.Parameter(torch.empty(sum(self.rows), num_dense))
        self.bias = nn.Parameter(torch.empty(widths[0]))
        for parameter in (self.weights, self.bias):
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)
        self.biases = nn.Parameter(torch.zeros(cross_layers, width))
        self.top = mlp(widths)
        # The last layer takes x_L and the MLP's output side by side: its parts start as parts of it.
        last_width = width + (top[-1] if top else width)
        rows = slice(cross_layers, cross_layers + tasks if top else None)
        parts = [(each, rows, width) for each in (first.weight, self.weights)]
        after = self.top[-1].parameters() if top else [self.bias]
        parts += [(each, slice(None), top[-1] if top else width) for each in after]
        with torch.no_grad():
            for parameter, chosen, fan_in in parts:
                parameter[chosen] *= (fan_in / last_width) ** 0.5

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        num_layers, tasks, _ = self.rows
        known = fields["first"] + dense @ self.weights.T
        crossed, last, hidden = known.split(self.rows, dim=1)
        first = self.embeddings.interactions["first"]
        assert isinstance(first, FieldsLinear)
        both = (self.weights[: num_layers + tasks], first.weight[: num_layers + tasks])
        weights = torch.cat(both, dim=1)  # (L + T, W)
        biases = self.biases.cumsum(0)  # c_1 .. c_L
        scale = torch.ones_like(known[:, :1])  # a_l
        for layer in range(num_layers):
            product = scale * crossed[:, layer : layer + 1]
            if layer:
                product = product + (weights[layer] * biases[layer - 1]).sum()
            scale = scale + product
        logits = scale * last
        if num_layers:
            logits = logits + (weights[num_layers:] * biases[-1]).sum(1)
        hidden = hidden + self.bias
        return logits + self.top(hidden.relu() if len(self.top) else hidden)
