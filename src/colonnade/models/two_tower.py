"""Two towers: a query's columns and an item's columns, each through a network to one vector (Yi et al. 2019).

Legend: B samples, D dim, n dense columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, cat
from torch.nn.functional import normalize

from colonnade.batch import Batch
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError, DataError
from colonnade.interaction import Concat
from colonnade.models.fields import dims_of
from colonnade.models.layers import mlp
from colonnade.models.retriever import Contrast, Retriever
from colonnade.table import Feature, Table


class TwoTower(Retriever):
    """Learns from pairs: the other samples' items, of all ranks, are a sample's negatives, but for those in the query
    itself (columns that share the item's table: what was taken before).

    Vectors have length one: scores are cosine / temperature, and the log of how often an item occurs.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        item_columns: Sequence[str] = ("item",),
        query_columns: Sequence[str] | None = None,
        num_dense: int = 0,
        log_q: int | None = None,
        top: Sequence[int] = (),
        temperature: float = 0.1,
        seed: int = 0,
    ) -> None:
        """`item_columns`: features that say which item it is, its id first. `query_columns`: those of the query;
        default: all others. The dense columns but `log_q` are the query's too. Features of neither are not used."""
        super().__init__()
        names = [feature.name for feature in features]
        if query_columns is None:
            query_columns = [name for name in names if name not in item_columns]
        for what, given in (("item_columns", item_columns), ("query_columns", query_columns)):
            if unknown := [name for name in given if name not in names]:
                raise ConfigError(
                    f"{what} names {unknown[0]!r}; the columns are {', '.join(names)}"
                )
            if not given:
                raise ConfigError(f"two_tower: got no {what}, wanted one at least of {names}")
        if both := [name for name in query_columns if name in item_columns]:
            raise ConfigError(
                f"query_columns names {both[0]!r}, which item_columns does too; leave it out of one"
            )
        features = [f for f in features if f.name in item_columns or f.name in query_columns]
        used = {feature.table for feature in features}
        tables = [table for table in tables if table.name in used]
        dims = dims_of(tables, features)
        dim = max(dims.values())
        self.embeddings = EmbeddingCollection(
            tables,
            features,
            consumers={
                "query fields": (Concat(), list(query_columns)),
                "item fields": (Concat(), list(item_columns)),
            },
            seed=seed,
        )
        self.item_id, self.log_q, self.temperature = item_columns[0], log_q, temperature
        of_items = next(feature.table for feature in features if feature.name == self.item_id)
        self.taken = [f.name for f in features if f.table == of_items and f.name in query_columns]
        self.dense_columns = [column for column in range(num_dense) if column != log_q]
        query_width = sum(dims[name] for name in query_columns) + len(self.dense_columns)
        self.query_tower = mlp([query_width, *top, dim])
        self.item_tower = mlp([sum(dims[name] for name in item_columns), *top, dim])

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query_tower(cat([dense, fields["query fields"]], dim=1))
        item = self.item_tower(fields["item fields"])
        return normalize(query, dim=1), normalize(item, dim=1)

    def forward(self, batch: Batch) -> Contrast:
        if batch.ids[self.item_id].offsets is not None:
            raise DataError(
                f"two_tower: got bags in {self.item_id!r}, wanted the one item of each sample; "
                "name its column first in item_columns"
            )
        queries, items = self._vectors(batch)
        taken = [batch.ids[name] for name in self.taken]
        return self.contrast_pairs(batch, queries, items, batch.ids[self.item_id].values, taken)

    def queries(self, batch: Batch) -> Tensor:
        return self.asking(self._vectors(self.filled(batch))[0])

    def items(self, batch: Batch) -> Tensor:
        """The batch has the column `log_q`, where the model has, and may have no other dense one."""
        filled, log_q = self.filled(batch), self.log_share(batch)
        filled.dense = torch.zeros(batch.size, len(self.dense_columns) + 1)  # nothing of the item's
        return self.offering(self._vectors(filled)[1], log_q)

    def _vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        fields = self.embeddings(batch)
        like = fields["item fields"]
        dense = batch.dense[:, self.dense_columns].to(like)
        return self.run(like, fields, dense)
