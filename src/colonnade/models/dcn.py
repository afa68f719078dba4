"""Deep & cross network (Wang et al. 2017): cross layers with one weight vector each, in parallel with an MLP.

Legend: B samples, n dense columns, W width of x_0 = dense columns and fields concatenated, L cross layers, T tasks,
H width of the MLP's first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import FieldsLinear
from colonnade.models.fields import find_field_dims
from colonnade.models.layers import build_first_layer, mlp
from colonnade.models.split import Scorer
from colonnade.table import Feature, Table


class DCN(Scorer):
    """Deep & cross network evaluated with one linear map of x_0.

    x_{l+1} = x_0 <w_l, x_l> + b_l + x_l equals a_{l+1} x_0 + c_{l+1} with a number a and a sum of biases c:

        a_{l+1} = a_l + a_l <w_l, x_0> + <w_l, c_l>,    c_{l+1} = c_l + b_l,    a_0 = 1, c_0 = 0

    So the cross layers, the last layer's part for x_L and the MLP's first layer share one linear map of x_0 with
    L + T + H rows: `weights` for the dense columns, the consumer "first" for the fields. No x_l is ever computed.
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
        dims = find_field_dims(tables, features)
        widths = [*top, tasks]
        self.rows = [cross_layers, tasks, widths[0]]
        first = build_first_layer(num_dense, dims.values(), sum(self.rows))
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
        # The last layer's input is x_L and the MLP's output concatenated: scale its parts to that fan-in.
        last_width = width + (top[-1] if top else width)
        rows = slice(cross_layers, cross_layers + tasks if top else None)
        parts = [(weight, rows, width) for weight in (first.weight, self.weights)]
        mlp_parameters = self.top[-1].parameters() if top else [self.bias]
        parts += [(weight, slice(None), top[-1] if top else width) for weight in mlp_parameters]
        with torch.no_grad():
            for parameter, part_rows, fan_in in parts:
                parameter[part_rows] *= (fan_in / last_width) ** 0.5

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        num_layers, tasks, _ = self.rows
        products = fields["first"] + dense @ self.weights.T
        crossed, last, hidden = products.split(self.rows, dim=1)
        first = self.embeddings.interactions["first"]
        assert isinstance(first, FieldsLinear)
        rows = num_layers + tasks
        weights = torch.cat([self.weights[:rows], first.weight[:rows]], dim=1)  # (L + T, W)
        bias_sums = self.biases.cumsum(0)  # c_1 .. c_L
        scale = torch.ones_like(products[:, :1])  # a_l
        for layer in range(num_layers):
            product = scale * crossed[:, layer : layer + 1]
            if layer:
                product = product + (weights[layer] * bias_sums[layer - 1]).sum()
            scale = scale + product
        logits = scale * last
        if num_layers:
            logits = logits + (weights[num_layers:] * bias_sums[-1]).sum(1)
        hidden = hidden + self.bias
        return logits + self.top(hidden.relu() if len(self.top) else hidden)
