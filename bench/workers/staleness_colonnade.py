"""A click model between hosts, trained as in a loop of one's own: rows, an MLP, dense gradients summed over all ranks.

As `colonnade train` has them, dense gradients leave while backward runs, and rows' gradients beside them. A choice is
one of `exchange_colonnade`'s. Samples are ids as the case has them; dense columns and labels are the same
in every step, for nobody asks here what is learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

from colonnade import SGD, Batch, EmbeddingCollection, Feature, Mesh, Table
from colonnade.data.graph import ROLES
from colonnade.models.dcn import DCN
from colonnade.models.graphsage import GraphSAGE
from colonnade.models.linear import DeepFM, WideDeep
from colonnade.train.dense import DenseGradients
from workers import exchange_colonnade
from workers.exchange_colonnade import NO_CHOICE
from workers.exchange_loop import Built, Case, serve

NUM_DENSE, TOP = 13, (64, 32)
LR = 0.1
MODELS = {"wide_deep": WideDeep, "deepfm": DeepFM, "dcn": DCN}
GRAPH = "graphsage"
FAN_OUT = (4, 4)
HOPS = list(accumulate((1, *FAN_OUT), mul))
"""Nodes at each hop of a node, itself included."""
GRAPH_LOOKUPS = len(ROLES) * sum(HOPS)


@dataclass(frozen=True)
class ClickCase(Case):
    """Rows have D elements for the MLP or the graph's layers, and of Wide & Deep and DeepFM one for the sum of
    first-order weights; both are trained by SGD."""

    model: str = "wide_deep"

    @property
    def width(self) -> int:
        return self.dim + (self.model in ("wide_deep", "deepfm"))

    def build_model(self) -> tuple[list[Table], list[Feature], Any]:
        """Build the model, and return its tables and features, too."""
        dims = self.dim if self.width == self.dim else {"deep": self.dim, "wide": 1}
        tables = [
            Table(name, dims, rows=rows, optimizer=SGD(lr=LR))
            for name, rows in zip(self.names, self.rows, strict=True)
        ]
        if self.model == GRAPH:
            features = [Feature(name, name, pooling="sequence") for name in self.names]
            return tables, features, Links(tables, features)
        features = [Feature(name, name) for name in self.names]
        settings: dict[str, Any] = {"num_dense": NUM_DENSE, "top": TOP}
        if self.model == "deepfm":
            settings["bags"] = ()
        return tables, features, MODELS[self.model](tables, features, **settings)


class Links(nn.Module):
    """GraphSAGE that scores a link: the product of its two nodes' vectors, each from its neighbours' rows, too."""

    def __init__(self, tables: list[Table], features: list[Feature]) -> None:
        super().__init__()
        hops = [f"{role}_hop{hop + 1}" for role in ROLES for hop in range(len(FAN_OUT))]
        nodes = [Feature(name, tables[0].name, pooling="sequence") for name in (*ROLES, *hops)]
        self.graph = GraphSAGE(tables, nodes)
        self.embeddings = EmbeddingCollection(tables, features)

    def network(self, result: dict[str, Tensor], columns: Tensor) -> Tensor:
        """result: rows of a link's two nodes, each before its neighbours, hop after hop -> logits (B, 1)."""
        (rows,) = result.values()
        nodes = rows.view(len(ROLES) * len(columns), -1, rows.shape[1])
        levels = [level.flatten(0, 1) for level in nodes.split(HOPS, dim=1)]
        ends = self.graph.network(*levels).view(len(columns), len(ROLES), -1)
        return ends.prod(1).sum(1, keepdim=True)


class Trained(exchange_colonnade.Opened):
    def __init__(
        self, case: ClickCase, choice: Mapping[str, Any], stored: list[Batch], mesh: Mesh
    ) -> None:
        torch.manual_seed(case.seed)
        super().__init__(case, choice, stored, mesh)
        _, _, self.model = case.build_model()
        self.model.embeddings = self.collection
        generator = torch.Generator().manual_seed(case.seed + mesh.rank)
        self.columns = torch.randn(case.batch_size, NUM_DENSE, generator=generator)
        self.label = torch.randint(2, (case.batch_size, 1), generator=generator).float()
        weights = list(self.model.parameters())
        self.late = self.collection.exchange.pushed_parameters
        codec = choice.get("dense", "exact")
        self.dense = DenseGradients(weights, mesh, late=self.late, codec=codec)
        self.dense.build_buckets()
        self.optimizer = torch.optim.SGD(weights, lr=LR)

    @staticmethod
    def declared(
        case: Case, choice: Mapping[str, Any] = NO_CHOICE
    ) -> tuple[list[Table], list[Feature], dict[str, Any] | None]:
        assert isinstance(case, ClickCase)
        tables, features, model = case.build_model()
        embeddings = model.embeddings
        consumers = {
            name: (embeddings.interactions[name], consumer.features)
            for name, consumer in embeddings.declaration.consumers.items()
        }
        return tables, features, consumers or None

    def outputs(self, result: dict[str, Tensor]) -> list[Tensor]:
        return [self.model.network(result, self.columns)]

    def before_backward(self) -> None:
        self.dense.begin_last_backward()

    def gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return gradients of the cross entropy, the mean over all ranks' samples."""
        samples = len(self.label) * self.mesh.num_ranks
        return [(outputs[0].detach().sigmoid() - self.label) / samples]

    def update(self) -> None:
        if self.late:  # whose gradients come with the rows'
            self.collection.pipeline.send_gradients()
        self.dense.send_remaining_buckets(finite=True, stop=False)
        self.collection.pipeline.send_gradients()
        self.dense.wait_for_sums()
        self.rows.step(agreed=True)
        self.optimizer.step()
        self.dense.zero_gradients()


def build(case: ClickCase, choices: Mapping[str, Any]) -> Built:
    return exchange_colonnade.build(case, choices, Trained)


if __name__ == "__main__":
    serve(build, ClickCase)
