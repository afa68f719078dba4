"""SASRec (Kang and McAuley 2018): what comes next in a sequence of items, by causal self-attention.

Legend: B samples, E items in all sequences, L longest sequence, M negatives, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention

from colonnade.batch import Batch, Ids
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError, DataError
from colonnade.models.fields import dims_of
from colonnade.models.retriever import Contrast, Retriever
from colonnade.table import Feature, Table

SEQUENCES = ("history", "target", "negative")


class Block(nn.Module):
    """Causal attention, then a network on each place; the input of each is normalised, and added to what it gives.

    It starts as the mean of what a place sees (values and output are the identity, the network gives zero): a useful
    model of sequences from the first step, which the rest refines.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_hidden = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
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
        """(B, L, D) -> (B, L, D). A place sees itself and those before it."""
        qkv = self.qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, L, D / heads) each
        dropped = self.dropout if self.training else 0.0
        seen = scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.hidden(self.before_hidden(x)))


class SASRec(Retriever):
    """Features history, target and negative are sequences of one table: at each place of `history`, the item of
    `target` there is learned against the sample's, and all other samples', `negative`.

    Vectors of what comes next and of items have length one, as two towers' do: scores of a bounded size learn
    faster. Rows enter as they are, not times sqrt(D), so that a place is made of what attention finds
    more than of its own item. Only the newest `max_length` items of a sequence are looked at. Sequences begin at
    place 0, so padding stands where causal attention does not look.
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
        dim = next(iter(dims_of(tables, features).values()))
        if dim % heads:
            raise ConfigError(f"sasrec: got dim={dim} for {heads} heads, wanted a multiple")
        self.embeddings = EmbeddingCollection(tables, features, seed=seed)
        self.max_length, self.temperature = max_length, temperature
        self.places = nn.Parameter(torch.randn(max_length, dim) * 0.02) if positions else None
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(blocks))
        self.last = nn.LayerNorm(dim)

    def network(self, x: Tensor) -> Tensor:
        """Items' vectors (B, L, D), padded -> what comes after each place (B, L, D)."""
        if self.places is not None:
            x = x + self.places[: x.shape[1]]
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return normalize(self.last(x), dim=2)

    def forward(self, batch: Batch) -> Contrast:
        history, target, negative = (batch.ids[name] for name in SEQUENCES)
        offsets = _offsets(history)
        if not torch.equal(offsets, _offsets(target)):
            raise DataError(
                "sasrec: got histories and targets of different lengths, wanted a target at each place of a history"
            )
        rows = self.embeddings(batch)
        sample, place = self._newest(offsets)
        kept = offsets[sample] + place
        queries = self._run(rows["history"], kept, sample, place)
        weight = torch.ones(batch.size) if batch.sample_weight is None else batch.sample_weight
        return Contrast(
            queries,
            normalize(rows["target"].index_select(0, kept.to(queries.device)), dim=1),
            weight[sample],
            sample,
            (torch.cat([sample, sample]), torch.cat([history.values[kept], target.values[kept]])),
            normalize(rows["negative"], dim=1),
            negative.values,
            torch.zeros(len(kept)),
            torch.zeros(len(negative.values)),
        )

    def queries(self, batch: Batch) -> Tensor:
        """What comes after the end of each history; zeros after none."""
        batch = self.filled(batch)
        offsets = _offsets(batch.ids["history"])
        rows = self.embeddings(batch)["history"]
        sample, place = self._newest(offsets)
        found = self._run(rows, offsets[sample] + place, sample, place)
        is_last = torch.ones(len(sample), dtype=torch.bool)
        is_last[:-1] = sample[1:] != sample[:-1]
        queries = found.new_zeros(batch.size, found.shape[1])
        return queries.index_copy(
            0, sample[is_last].to(found.device), found[is_last.to(found.device)]
        )

    def items(self, batch: Batch) -> Tensor:
        return normalize(self.embeddings(self.filled(batch))["target"], dim=1)

    def _newest(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """sample (K,), place (K,) in its sequence: the places looked at, sample by sample."""
        lengths = offsets.diff()
        sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        place = torch.arange(len(sample)) - offsets[sample]
        kept = place >= (lengths - self.max_length)[sample]
        return sample[kept], place[kept]

    def _run(self, rows_ED: Tensor, kept: Tensor, sample: Tensor, place: Tensor) -> Tensor:
        """What comes after each of the places looked at (K, D). They are padded for the network to (B, L, D): a
        sequence's first one to place 0."""
        if not len(kept):
            return rows_ED[:0]
        counts = torch.bincount(sample)
        starts = counts.cumsum(0) - counts
        num_samples, longest = len(counts), int(counts.max())
        at = sample * longest + torch.arange(len(sample)) - starts[sample]
        at, kept = at.to(rows_ED.device), kept.to(rows_ED.device)
        padded = rows_ED.new_zeros(num_samples * longest, rows_ED.shape[1])
        padded = padded.index_copy(0, at, rows_ED.index_select(0, kept))
        found = self.run(rows_ED, padded.view(num_samples, longest, -1))
        return found.flatten(0, 1).index_select(0, at)


def _offsets(ids: Ids) -> Tensor:
    return torch.arange(len(ids.values) + 1) if ids.offsets is None else ids.offsets
