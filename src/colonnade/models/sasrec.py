"""SASRec (Kang and McAuley 2018): next-item prediction from a sequence of items by causal self-attention.

Legend: B samples, E items in all sequences, K positions used, L longest sequence, M negatives, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention

from colonnade.batch import Batch, Ids
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError, DataError
from colonnade.models.fields import find_field_dims
from colonnade.models.retriever import ContrastiveBatch, Retriever
from colonnade.table import Feature, Table

SEQUENCES = ("history", "target", "negative")


class AttentionBlock(nn.Module):
    """Transformer block: causal attention, then an MLP per position, each with layer norm before and a residual.

    It is initialised to the mean of the positions that attention sees (values and output are the identity, the MLP
    returns zero): a useful model of sequences from the first step, which training refines.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(dim)
        self.before_hidden = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.hidden = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(dropout)
        with torch.no_grad():
            for weight in (self.qkv.weight[2 * dim :], self.out.weight):
                weight.copy_(torch.eye(dim))
            for layer in (self.qkv, self.out):
                layer.bias.zero_()
            for parameter in self.hidden[2].parameters():
                parameter.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate the block: (B, L, D) -> (B, L, D). A position attends to itself and to those before it."""
        qkv = self.qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, L, D / heads) each
        dropout = self.dropout if self.training else 0.0
        attended = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.hidden(self.before_hidden(x)))


class SASRec(Retriever):
    """SASRec over the features history, target and negative, which are sequences of one table.

    At each position of `history`, the item at that position of `target` is the positive; the `negative` items of all
    samples are the negatives. Query and item vectors have length one, as in two towers: bounded scores learn faster.
    Rows are not multiplied by sqrt(D), so that a position's vector depends more on what it attends to than on its own
    item. Only the newest `max_length` items of a sequence are used. Sequences begin at position 0, so causal attention
    never sees padding.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        blocks: int = 2,
        heads: int = 1,
        max_length: int = 50,
        positions: bool = True,
        dropout: float = 0.0,
        temperature: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        got = [(f.name, f.pooling, f.table) for f in features]
        if got != [(name, "sequence", tables[0].name) for name in SEQUENCES]:
            raise ConfigError(
                f"sasrec: got features {got}, wanted the sequences {', '.join(SEQUENCES)} of one table; "
                "a source of sequences has them (data.options.samples=sequences)"
            )
        dim = next(iter(find_field_dims(tables, features).values()))
        if dim % heads:
            raise ConfigError(f"sasrec: got dim={dim} for {heads} heads, wanted a multiple")
        self.embeddings = EmbeddingCollection(tables, features, seed=seed)
        self.query_features = ("history",)
        self.item_features = ("target",)
        self.max_length = max_length
        self.temperature = temperature
        self.places = nn.Parameter(torch.randn(max_length, dim) * 0.02) if positions else None
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(AttentionBlock(dim, heads, dropout) for _ in range(blocks))
        self.last = nn.LayerNorm(dim)

    def network(self, x: Tensor) -> Tensor:
        """Predict the vector of the next item at each position, from padded item vectors: (B, L, D) -> (B, L, D)."""
        if self.places is not None:
            x = x + self.places[: x.shape[1]]
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return normalize(self.last(x), dim=2)

    def forward(self, batch: Batch) -> ContrastiveBatch:
        history, target, negative = (batch.ids[name] for name in SEQUENCES)
        offsets = _sequence_offsets(history)
        if not torch.equal(offsets, _sequence_offsets(target)):
            raise DataError(
                "sasrec: got histories and targets of different lengths, wanted a target at each place of a history"
            )
        rows = self.embeddings(batch)
        sample, position = self._newest_positions(offsets)
        rows_used = offsets[sample] + position
        queries = self._predict_next(rows["history"], rows_used, sample)
        weight = torch.ones(batch.size) if batch.sample_weight is None else batch.sample_weight
        return ContrastiveBatch(
            queries,
            normalize(rows["target"].index_select(0, rows_used.to(queries.device)), dim=1),
            weight[sample],
            sample,
            (
                torch.cat([sample, sample]),
                torch.cat([history.values[rows_used], target.values[rows_used]]),
            ),
            normalize(rows["negative"], dim=1),
            negative.values,
        )

    def queries(self, batch: Batch) -> Tensor:
        """Predict the vector of the item after each history; zeros for an empty history."""
        batch = self.fill_missing_features(batch)
        offsets = _sequence_offsets(batch.ids["history"])
        rows = self.embeddings(batch)["history"]
        sample, position = self._newest_positions(offsets)
        predictions = self._predict_next(rows, offsets[sample] + position, sample)
        is_last = torch.ones(len(sample), dtype=torch.bool)
        is_last[:-1] = sample[1:] != sample[:-1]
        queries = predictions.new_zeros(batch.size, predictions.shape[1])
        return queries.index_copy(
            0, sample[is_last].to(predictions.device), predictions[is_last.to(predictions.device)]
        )

    def items(self, batch: Batch) -> Tensor:
        return normalize(self.embeddings(self.fill_missing_features(batch))["target"], dim=1)

    def _newest_positions(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sample (K,) and the position in its sequence (K,) of each item used, sample by sample."""
        lengths = offsets.diff()
        sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        position = torch.arange(len(sample)) - offsets[sample]
        is_used = position >= (lengths - self.max_length)[sample]
        return sample[is_used], position[is_used]

    def _predict_next(self, rows_ED: Tensor, rows_used: Tensor, sample: Tensor) -> Tensor:
        """Predict the next item's vector at each position used, (K, D). The network gets them padded to (B, L, D), with
        a sequence's first one at position 0."""
        if not len(rows_used):
            return rows_ED[:0]
        counts = torch.bincount(sample)
        is_used = (torch.arange(int(counts.max())) < counts[:, None]).to(rows_ED.device)
        padded = rows_ED.new_zeros(*is_used.shape, rows_ED.shape[1])
        padded[is_used] = rows_ED.index_select(0, rows_used.to(rows_ED.device))
        return self.evaluate_network(padded, out_like=rows_ED)[is_used]


def _sequence_offsets(ids: Ids) -> Tensor:
    """Return where each sample's sequence begins, and the end; without offsets each sample has one id."""
    return torch.arange(len(ids.values) + 1) if ids.offsets is None else ids.offsets
