"""Two-tower model (Yi et al. 2019): one MLP from a query's columns to a vector, another from an item's columns.

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
from colonnade.models.fields import find_field_dims
from colonnade.models.layers import mlp
from colonnade.models.retriever import ContrastiveBatch, Retriever
from colonnade.table import Feature, Table


class TwoTower(Retriever):
    """Two-tower retrieval model trained on pairs, with in-batch negatives of all ranks.

    A sample's negatives are the other samples' items, except items in its own query: in columns that share the item's
    table, such as a history. Vectors have length one: scores are cosine / temperature, plus the log of the item's
    frequency.
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
        """Create the model. `item_columns`: features of the item, its id first. `query_columns`: features of the query;
        default: all others. All dense columns except `log_q` are the query's. Features in neither are not used."""
        super().__init__()
        names = [feature.name for feature in features]
        if query_columns is None:
            query_columns = [name for name in names if name not in item_columns]
        for setting, columns in (("item_columns", item_columns), ("query_columns", query_columns)):
            if unknown := [name for name in columns if name not in names]:
                raise ConfigError(
                    f"{setting} names {unknown[0]!r}; the columns are {', '.join(names)}"
                )
            if not columns:
                raise ConfigError(f"two_tower: got no {setting}, wanted one at least of {names}")
        if shared := [name for name in query_columns if name in item_columns]:
            raise ConfigError(
                f"query_columns names {shared[0]!r}, which item_columns does too; leave it out of one"
            )
        features = [f for f in features if f.name in item_columns or f.name in query_columns]
        used = {feature.table for feature in features}
        tables = [table for table in tables if table.name in used]
        dims = find_field_dims(tables, features)
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
        self.query_features = tuple(query_columns)
        self.item_features = tuple(item_columns)
        self.item_id = item_columns[0]
        self.log_q = log_q
        self.temperature = temperature
        item_table = next(feature.table for feature in features if feature.name == self.item_id)
        self.known_items = [
            f.name for f in features if f.table == item_table and f.name in query_columns
        ]
        self.dense_columns = [column for column in range(num_dense) if column != log_q]
        query_width = sum(dims[name] for name in query_columns) + len(self.dense_columns)
        self.query_tower = mlp([query_width, *top, dim])
        self.item_tower = mlp([sum(dims[name] for name in item_columns), *top, dim])

    def network(self, fields: Mapping[str, Tensor], dense: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query_tower(cat([dense, fields["query fields"]], dim=1))
        item = self.item_tower(fields["item fields"])
        return normalize(query, dim=1), normalize(item, dim=1)

    def forward(self, batch: Batch) -> ContrastiveBatch:
        if batch.ids[self.item_id].offsets is not None:
            raise DataError(
                f"two_tower: got bags in {self.item_id!r}, wanted the one item of each sample; "
                "name its column first in item_columns"
            )
        queries, items = self._embed(batch)
        known = [batch.ids[name] for name in self.known_items]
        return self.build_contrastive_batch(
            batch, queries, items, batch.ids[self.item_id].values, known
        )

    def queries(self, batch: Batch) -> Tensor:
        return self.augment_queries(self._embed(self.fill_missing_features(batch))[0])

    def items(self, batch: Batch) -> Tensor:
        """Return the vectors of items, (B, D). The batch needs the dense column `log_q` if the model has one, and no
        other dense column."""
        filled = self.fill_missing_features(batch)
        log_q = self.log_frequency(batch)
        # Items use no dense column.
        filled.dense = torch.zeros(batch.size, len(self.dense_columns) + 1)
        return self.augment_items(self._embed(filled)[1], log_q)

    def _embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the vectors of a batch's queries and items."""
        fields = self.embeddings(batch)
        like = fields["item fields"]
        dense = batch.dense[:, self.dense_columns].to(like)
        return self.evaluate_network(fields, dense, out_like=like)
