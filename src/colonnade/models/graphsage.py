"""GraphSAGE (Hamilton et al. 2017) with learned node embeddings: a node's vector from its own and its neighbours' rows.

Legend: B samples, K hops, D dim; n_k nodes at hop k of all samples, n_0 = B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from colonnade.batch import Batch
from colonnade.data.graph import ROLES
from colonnade.data.interactions.samples import HeldOutItems
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError, DataError
from colonnade.models.fields import find_field_dims
from colonnade.models.retriever import ContrastiveBatch, Retriever
from colonnade.ops.linear import linear
from colonnade.table import Feature, Table


class GraphSAGE(Retriever):
    """GraphSAGE retrieval model over sampled neighbours of queries and items.

    Its features are query and item, and the sequences query_hop1 .. query_hopK and item_hop1 .. item_hopK, all of one
    table. All nodes of a hop have equally many neighbours in the next hop (`data.graph` draws them).

    Algorithm 1 of the paper with the mean aggregator: K times, each node's vector becomes W_k [own; mean of the
    neighbours'], then ReLU, then length one. The last layer has no ReLU, so that scores may be below 0. The vectors
    before the first layer are rows. Queries and items share all weights. The loss is that of two towers: a sample's
    negatives are the items of all other samples on all ranks, except items that `Batch.key` lists for its query.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        log_q: int | None = None,
        temperature: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        got = {f.name: f.pooling for f in features}
        self.hops = len(features) // 2 - 1
        hops = [f"{role}_hop{hop}" for role in ROLES for hop in range(1, self.hops + 1)]
        wanted = set(ROLES) | set(hops)
        is_right = set(got) == wanted and all(got[name] == "sequence" for name in hops)
        if self.hops < 1 or not is_right or len({f.table for f in features}) > 1:
            raise ConfigError(
                f"graphsage: got features {[(f.name, f.table, f.pooling) for f in features]}, wanted query, item and "
                "for each hop the sequences query_hop1, item_hop1, ... of one table; a source of graphs has them "
                "(data.name=edges, power_law, or gowalla with data.options.samples=neighbours)"
            )
        dim = next(iter(find_field_dims(tables, features).values()))
        self.embeddings = EmbeddingCollection(tables, features, seed=seed)
        self.query_features, self.item_features = (
            tuple(name for name in (role, *hops) if name.startswith(role)) for role in ROLES
        )
        self.log_q = log_q
        self.temperature = temperature
        self.layers = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(self.hops))

    def network(self, *levels: Tensor) -> Tensor:
        """Aggregate the hops' vectors, last hop first: (n_0, D) .. (n_K, D) -> (n_0, D)."""
        for layer in self.layers:
            is_last = len(levels) == 2
            levels = tuple(
                _aggregate(layer, own, neighbours, relu=not is_last)
                for own, neighbours in pairwise(levels)
            )
        return levels[0]

    def forward(self, batch: Batch) -> ContrastiveBatch:
        if not isinstance(batch.key, HeldOutItems):
            raise DataError(
                f"graphsage: got a training batch whose key is {type(batch.key).__name__}, wanted HeldOutItems, with "
                "the items of each query; a source of graphs has it"
            )
        rows = self.embeddings(batch)
        queries = self._embed_role(rows, "query")
        items = self._embed_role(rows, "item")
        return self.build_contrastive_batch(batch, queries, items, batch.key.truth.values, ())

    def queries(self, batch: Batch) -> Tensor:
        rows = self.embeddings(self.fill_missing_features(batch))
        return self.augment_queries(self._embed_role(rows, "query"))

    def items(self, batch: Batch) -> Tensor:
        rows = self.embeddings(self.fill_missing_features(batch))
        return self.augment_items(self._embed_role(rows, "item"), self.log_frequency(batch))

    def _embed_role(self, node_rows: Mapping[str, Tensor], role_name: str) -> Tensor:
        """Compute the vectors of all samples' queries, or items, from their nodes' rows."""
        levels = [
            node_rows[role_name],
            *(node_rows[f"{role_name}_hop{hop}"] for hop in range(1, self.hops + 1)),
        ]
        for hop, (own, below) in enumerate(pairwise(levels), 1):
            if len(below) % max(len(own), 1) or len(below) < len(own):
                raise DataError(
                    f"graphsage: got {len(below)} nodes in {role_name}_hop{hop} below {len(own)}, wanted "
                    "equally many, at least one, below each"
                )
        return self.evaluate_network(*levels, out_like=levels[0])


def _aggregate(layer: nn.Module, own: Tensor, neighbours: Tensor, *, relu: bool) -> Tensor:
    """Combine nodes' own vectors (n, D) with the mean of their neighbours' (n f, D) -> (n, D)."""
    assert isinstance(layer, nn.Linear)
    # Without samples any fan-out gives the right shape.
    fan_out = len(neighbours) // len(own) if len(own) else 1
    inputs = torch.cat(
        [own, neighbours.view(len(own), fan_out, neighbours.shape[1]).mean(1)], dim=1
    )
    return normalize(linear(inputs, layer.weight, layer.bias, relu=relu), dim=1)
