"""MRMN (Zhou et al. 2019): several types of feedback as relations between users and items in one metric space.

A user's vector plus the relation of a type is near the items that the user took with it. The relation depends on the
user and the item: attention over slots of a memory that all share. CML (Hsieh et al. 2017) is the model of one type
with slots=0, LRML (Tay et al. 2018) that with negative_relation="positive"; both with item_bias=False, squared=True.

Legend: B samples, M samples of all ranks, N negatives of a sample, I items, T types, S slots, D dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.comm.collectives import concatenate_over_ranks
from colonnade.comm.mesh import Mesh
from colonnade.config.model import MemoryAttention, NegativeRelation
from colonnade.data.contract import Source
from colonnade.data.counter import random_permutation, stream_key
from colonnade.data.interactions.samples import draw_items
from colonnade.data.interactions.splits import SPLIT_KEY, InteractionSplit
from colonnade.data.tensors import gather_ids
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.models.ranking import BlockedMetrics, evaluation_mode, mark_matching_candidates
from colonnade.models.retriever import (
    CHUNK,
    ContrastiveBatch,
    RetrievalObjective,
    Retriever,
    embed_items,
)
from colonnade.table import Feature, Table

FEATURES = USER, ITEM = "user", "item"
MARGINS = (0.5, 0.2)
"""Default margins of the strongest and the weakest type."""
ROOT_OFFSET = 1e-3
"""Number added to squared distances before the root, whose gradient at 0 is infinite."""
MEASURED_PAIRS = 2048
"""Number of training pairs of each type, at most, by which the types are measured."""
RANDOM_ITEMS = 16
"""Number of random items to compare each of them with."""
BLOCK_FLOATS = 1 << 20
"""Number of floats of a block of relations: a few MiB, as a processor's cache has."""


class FeedbackObjective(RetrievalObjective):
    """Objective of `MRMN`: each positive is nearer than the nearest of its negatives, by its type's margin."""

    def loss(self, model: MRMN, batch: Batch, mesh: Mesh) -> Tensor:  # type: ignore[override]
        return compute_hinge_loss(model, model(batch), model.read_types(batch), mesh)

    def evaluate(  # type: ignore[override]
        self, model: MRMN, source: Source, batch_size: int, mesh: Mesh
    ) -> BlockedMetrics:
        """Do what the base class does, and measure each type of feedback by training pairs. Collective."""
        metrics = super().evaluate(model, source, batch_size, mesh)
        split = getattr(source, "interactions", None)
        if split is not None and split.types is not None and len(model.types) > 1:
            with evaluation_mode(model):
                items = embed_items(model, source.catalogue)  # type: ignore[attr-defined]
                metrics.by_type = {
                    name: measure_type(model, split, items, number)
                    for number, name in enumerate(model.types)
                }
        return metrics


class MRMN(Retriever):
    """Memory attention metric model of several types of feedback, with vectors of users and items in the unit ball.

    Score of an item v for a user u and a type t: b_v - ||q_v - p_u - r||, with r = attention((p_u * q_v) K_t) M; keys
    K_t are the type's, slots M are shared. A row of table "user" is p_u; a row of "item" is q_v, then b_v. Items are
    ranked by the strongest type, the first, and by their log frequency (`Retriever`) times `temperature`: negatives are
    items of other samples, so a popular one is often a negative.
    """

    objective = FeedbackObjective()
    query_features = (USER,)
    item_features = (ITEM,)

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        types: Sequence[str] = ("all",),
        type_column: int | None = None,
        log_q: int | None = None,
        slots: int = 20,
        attention: MemoryAttention = "softmax",
        negatives: int = 4,
        negative_relation: NegativeRelation = "own",
        margins: Sequence[float] | None = None,
        type_weights: Sequence[float] | None = None,
        item_bias: bool = True,
        squared: bool = False,
        temperature: float = 0.1,
        seed: int = 0,
    ) -> None:
        """Create the model. Features other than user and item are not used.

        types              names of the types of feedback, the strongest first
        type_column        index of the dense column with a sample's type, 0 to T - 1; None: all are of the first
        slots              slots of the memory; 0: relations are zero
        attention          weights of the slots: "softmax" (LRML) or "linear", the products themselves
        negatives          items of the samples that follow in the batch of all ranks; the nearest of them counts
        negative_relation  relation of a negative: its "own", or that of the "positive" pair; "primary" is the positive
                           pair's by the keys of the first type
        margins            by type; default: evenly from 0.5 to 0.2
        type_weights       factors of the loss by type; default: 1
        squared            squares distances, as CML and LRML do
        temperature        factor of the log frequency of items (column `log_q`) in the scores that rank

        Raises ConfigError.
        """
        super().__init__()
        num_types = len(types)
        widths = {table.name: table.width for table in tables}
        dim = widths.get(USER, 0)
        names = [feature.name for feature in features]
        if {*FEATURES} - {*names} or widths.get(ITEM) != dim + item_bias:
            raise ConfigError(
                f"mrmn: got features {names} and rows of {widths} floats, wanted user and item of tables of their "
                f"names, with rows of D and D + {int(item_bias)}; a source of interactions has them"
            )
        for name, value, kind in (
            ("attention", attention, MemoryAttention),
            ("negative_relation", negative_relation, NegativeRelation),
        ):
            if value not in (choices := get_args(kind)):
                raise ConfigError(f"mrmn: got {name}={value!r}, wanted one of {', '.join(choices)}")
        self.margins = _read_by_type("margins", margins, types, np.linspace(*MARGINS, num_types))
        self.type_weights = _read_by_type("type_weights", type_weights, types, np.ones(num_types))
        if num_types > 1 and type_column is None:
            raise ConfigError(
                f"mrmn: got {num_types} types and no column with a sample's type, wanted its index: type_column"
            )
        self.types = tuple(types)
        self.type_column = type_column
        self.log_q = log_q
        self.temperature = temperature
        self.negatives = negatives
        self.attention = attention
        self.negative_relation = negative_relation
        self.item_bias = item_bias
        self.squared = squared
        self.embeddings = EmbeddingCollection(
            [table for table in tables if table.name in FEATURES],
            [feature for feature in features if feature.name in FEATURES],
            seed=seed,
        )
        self.keys = self.memory = None
        if slots:
            self.keys = nn.Parameter(torch.randn(num_types, dim, slots) / math.sqrt(dim))
            self.memory = nn.Parameter(torch.randn(slots, dim) * 0.1)

    @classmethod
    def row_width(cls, table: str, dim: int, settings: Mapping[str, Any]) -> float:
        return dim + (table == ITEM and settings.get("item_bias") is not False)

    def read_types(self, batch: Batch) -> Tensor:
        """Return the type of each sample, (B,) int64. Raises ConfigError for a number that is none."""
        if self.type_column is None:
            return torch.zeros(batch.size, dtype=torch.int64)
        types = batch.dense[:, self.type_column].long()
        if len(types) and not 0 <= int(types.min()) <= int(types.max()) < len(self.types):
            raise ConfigError(
                f"mrmn: got types {int(types.min())} to {int(types.max())}, wanted 0 to {len(self.types) - 1}"
            )
        return types

    def queries(self, batch: Batch) -> Tensor:
        return _cut_norms(self.embeddings(self.fill_missing_features(batch))[USER])

    def items(self, batch: Batch) -> Tensor:
        """Return the vectors of items, then what is added to their scores, (B, D + 1)."""
        rows = self.embeddings(self.fill_missing_features(batch))[ITEM]
        vectors, bias = self._cut_items(rows).split([rows.shape[1] - self.item_bias, 1], dim=1)
        return torch.cat(
            [vectors, bias + self.temperature * self.log_frequency(batch).to(bias)[:, None]], dim=1
        )

    def forward(self, batch: Batch) -> ContrastiveBatch:
        rows = self.embeddings(batch)
        users, items = _cut_norms(rows[USER]), self._cut_items(rows[ITEM])
        return self.build_contrastive_batch(batch, users, items, batch.ids[ITEM].values, ())

    def network(
        self, users: Tensor, items: Tensor, negatives: Tensor, types: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score each sample's item and its negatives: users (B, D), items (B, D + 1), negatives (B, N, D + 1), types
        (B,) -> (B,), (B, N)."""
        users, items = users[:, None], items[:, None]
        relations = self.compute_relations(users, items, types)
        if self.negative_relation == "own":
            of_negatives = self.compute_relations(users, negatives, types)
        elif self.negative_relation == "positive":
            of_negatives = relations
        else:
            of_negatives = self.compute_relations(users, items, torch.zeros_like(types))
        right = self._score_with_relations(users, items, relations)
        return right[:, 0], self._score_with_relations(users, negatives, of_negatives)

    def compute_weights(self, users: Tensor, items: Tensor, types: Tensor) -> Tensor:
        """Compute the weights of the slots for pairs: (B, 1, D), (B or 1, M, D + 1), (B,) -> (B, M, S)."""
        assert self.keys is not None
        products = (users * items[..., :-1]) @ self.keys[types]
        return products.softmax(-1) if self.attention == "softmax" else products

    def compute_relations(self, users: Tensor, items: Tensor, types: Tensor) -> Tensor:
        """Compute the relations of pairs: (B, 1, D), (B or 1, M, D + 1), (B,) -> (B, M, D)."""
        if self.memory is None:
            return torch.zeros_like(users)
        return self.compute_weights(users, items, types) @ self.memory

    def _score_with_relations(self, users: Tensor, items: Tensor, relations: Tensor) -> Tensor:
        """Score pairs: (B, 1, D), (B or 1, M, D + 1), (B, M or 1, D) -> (B, M)."""
        vectors, bias = items[..., :-1], items[..., -1]
        distances = (vectors - users - relations).square().sum(-1)
        return bias - (distances if self.squared else (distances + ROOT_OFFSET).sqrt())

    def score(self, queries: Tensor, items: Tensor) -> Tensor:
        types = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
        return self.score_type(queries, items, types)

    def score_pairs(self, users: Tensor, items: Tensor, types: Tensor) -> Tensor:
        """Score items for each user and a type: (B, D), (B or 1, M, D + 1), (B,) -> (B, M)."""
        users = users[:, None]
        return self._score_with_relations(users, items, self.compute_relations(users, items, types))

    def score_type(self, users: Tensor, items: Tensor, types: Tensor) -> Tensor:
        """Score all items for each user and a type, without gradients: (B, D), (I, D + 1), (B,) -> (B, I)."""
        num_users = max(1, BLOCK_FLOATS // max(users.shape[1] * min(len(items), CHUNK), 1))
        with torch.no_grad():
            blocks = [
                torch.cat([self.score_pairs(u, part[None], t) for part in items.split(CHUNK)], 1)
                for u, t in zip(users.split(num_users), types.split(num_users), strict=True)
            ]
        return torch.cat(blocks)

    def _cut_items(self, rows: Tensor) -> Tensor:
        """Cut the vectors in the rows of items to length one; their biases follow, zeros without: (B, D + 1)."""
        if not self.item_bias:
            rows = torch.cat([rows, rows.new_zeros(len(rows), 1)], dim=1)
        return torch.cat([_cut_norms(rows[:, :-1]), rows[:, -1:]], dim=1)


def compute_hinge_loss(model: MRMN, pairs: ContrastiveBatch, types: Tensor, mesh: Mesh) -> Tensor:
    """Compute this rank's part of the weighted mean over all ranks' samples. Collective, and its backward too.

    A sample's loss is its type's weight times [margin + score of its nearest negative - its own score]_+. Negatives are
    the items of the next N samples in the order of all ranks, unless the user took them with any type; without one the
    loss is 0.
    """
    candidates = concatenate_over_ranks(mesh, pairs.candidates)
    ids = concatenate_over_ranks(mesh, pairs.candidate_ids)
    users, size = pairs.queries, len(pairs.queries)
    sizes = mesh.all_gather("gather", torch.tensor(size))
    total = mesh.all_reduce("dense", pairs.weight.sum(dtype=torch.float64))
    first = int(sum(sizes[: mesh.rank])) + 1
    num_negatives = min(model.negatives, max(len(ids) - 1, 1))
    window = first + torch.arange(size)[:, None] + torch.arange(num_negatives)
    window %= max(len(ids), 1)
    is_known = mark_matching_candidates(*pairs.known, size, ids).gather(1, window)
    types = types.to(users.device)
    negatives = candidates[window.to(users.device)]
    right, wrong = model.evaluate_network(users, pairs.positives, negatives, types, out_like=users)
    nearest = wrong.masked_fill(is_known.to(users.device), -math.inf).amax(1)
    losses = (users.new_tensor(model.margins)[types] + nearest - right).clamp(min=0)
    weight = pairs.weight.to(users) * users.new_tensor(model.type_weights)[types]
    return (losses * weight).sum() / max(float(total), 1e-12)


def measure_type(
    model: MRMN, split: InteractionSplit, items: Tensor, number: int
) -> dict[str, float]:
    """Measure a type of feedback by its training pairs, MEASURED_PAIRS at most. Collective: every rank measures alike.

    items (I, D + 1): vectors of all items, as `MRMN.items` returns them.

    samples        training pairs of the type
    margin         its margin
    active_hinges  share of pairs whose nearest negative is not farther by the margin, drawn as in training
    strength       mean score of pairs less that of random items, in standard deviations of the latter
    diversity      exp of the entropy of the mean weights of slots; linear: of the singular values of K_t M
    auc            share of pairs and random items that the user did not take, in which the pair scores higher
    """
    assert split.types is not None
    key = stream_key(SPLIT_KEY, 30)
    rows = (split.types == number).nonzero()[:, 0]
    order = torch.from_numpy(random_permutation(len(rows), stream_key(key, number)))
    pairs = rows[order[:MEASURED_PAIRS]]
    others = torch.from_numpy(random_permutation(len(split.types), key))
    of_pair, taken = split.train.samples, split.train.values.long()
    users = of_pair[pairs]
    window = torch.arange(len(pairs))[:, None] + torch.arange(model.negatives)
    negatives = taken[others[window % len(others)]]
    drawn = draw_items(key, torch.arange(len(pairs)), RANDOM_ITEMS, split.num_items)
    known = of_pair * split.num_items + taken
    wrong_items = torch.cat([negatives, drawn], dim=1)
    is_known = torch.isin(users[:, None] * split.num_items + wrong_items, known).to(items.device)
    batch = Batch(
        len(pairs), torch.zeros(len(pairs), 0), {USER: gather_ids(split.users[USER], users)}
    )
    vectors = model.queries(batch)
    types = torch.full((len(pairs),), number, device=items.device)
    positives = items[taken[pairs].to(items.device), None]
    right = model.score_pairs(vectors, positives, types)
    wrong = model.score_pairs(vectors, items[wrong_items.to(items.device)], types)
    # Training leaves the popularity of items out of their scores.
    shares = model.temperature * split.log_shares().to(items) * (model.log_q is not None)
    nearest = wrong[:, : model.negatives] - shares[negatives.to(items.device)]
    nearest = nearest.masked_fill(is_known[:, : model.negatives], -math.inf).amax(1)
    hinges = model.margins[number] + nearest - (right[:, 0] - shares[taken[pairs].to(items.device)])
    is_random = ~is_known[:, model.negatives :]
    random_scores = wrong[:, model.negatives :]
    scores = random_scores[is_random]
    wins = (right > random_scores).double() + (right == random_scores) / 2
    weights = None
    if model.memory is not None:
        weights = model.compute_weights(vectors[:, None], positives, types).mean((0, 1))
        if model.attention == "linear":
            weights = torch.linalg.svdvals(model.keys[number] @ model.memory)  # type: ignore[index]
    return {
        "samples": len(rows),
        "margin": model.margins[number],
        "active_hinges": float((hinges > 0).double().mean()),
        "strength": float((right.mean() - scores.mean()) / scores.std().clamp(min=1e-12)),
        "diversity": 0.0 if weights is None else _compute_diversity(weights),
        "auc": float(wins[is_random].mean()),
    }


def _compute_diversity(weights: Tensor) -> float:
    """Return exp of the entropy of weights (S,) of 0 or more: their number if all are equal, 1 if there is one."""
    return float(torch.special.entr(weights / weights.sum()).sum().exp())


def _cut_norms(vectors: Tensor) -> Tensor:
    """Cut vectors (n, D) that are longer than one to length one."""
    return vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp(min=1)


def _read_by_type(
    name: str, numbers: Sequence[float] | None, types: Sequence[str], default: Any
) -> tuple[float, ...]:
    """Return a number of each type. Raises ConfigError."""
    values = tuple(map(float, default if numbers is None else numbers))
    if len(values) != len(types) or not all(math.isfinite(x) and x >= 0 for x in values):
        raise ConfigError(
            f"mrmn: got {name}={list(values)}, wanted a number of 0 or more for each type: {', '.join(types)}"
        )
    return values
