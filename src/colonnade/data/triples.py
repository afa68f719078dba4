"""Knowledge graphs: triples (head, relation, tail) that train link prediction, and queries that rank all entities.

Legend: n triples, B samples of a batch, m candidates (negatives) of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.contract import Block, BlockSource, Column, Schema, Splits
from colonnade.data.counter import random_permutation, random_words, stream_key
from colonnade.data.tensors import locate_bag_items
from colonnade.errors import ConfigError

ENTITY = "entity"
RELATION = "relation"


@dataclass(frozen=True, slots=True, eq=False)
class KnownAnswers:
    """True answers of triples in a `Batch.key`: all known tails and heads, including the triple's own.

    Training does not use them as negatives, and evaluation does not rank them.
    """

    tails: Ids  # (B,) bags of entities t with (head, relation, t)
    heads: Ids  # (B,) bags of entities h with (h, relation, tail)


@dataclass(frozen=True, eq=False)
class TripleIndex:
    """Index of known triples: tails by (relation, head), and heads by (relation, tail)."""

    triples: Tensor  # (n, 3) int64: head, relation, tail
    num_entities: int

    def find_answers(self, triples_B3: Tensor) -> KnownAnswers:
        """Find the known tails and heads of triples (B, 3); unknown keys get empty bags."""
        h, r, t = triples_B3.T
        return KnownAnswers(
            self._tails.find_entities(self._combine_key(r, h)),
            self._heads.find_entities(self._combine_key(r, t)),
        )

    def count_known_tails_and_heads(self, triples_B3: Tensor) -> tuple[Tensor, Tensor]:
        """Count the known tails (B,) and heads (B,) of triples (B, 3)."""
        h, r, t = triples_B3.T
        return (
            self._tails.count(self._combine_key(r, h)),
            self._heads.count(self._combine_key(r, t)),
        )

    def _combine_key(self, relation: Tensor, entity: Tensor) -> Tensor:
        return relation * self.num_entities + entity

    @cached_property
    def _tails(self) -> AnswerTable:
        h, r, t = self.triples.T
        return build_answer_table(self._combine_key(r, h), t)

    @cached_property
    def _heads(self) -> AnswerTable:
        h, r, t = self.triples.T
        return build_answer_table(self._combine_key(r, t), h)


@dataclass(frozen=True, slots=True, eq=False)
class AnswerTable:
    """Mapping from keys to any number of entities, as two arrays sorted by key."""

    keys: Tensor  # (n,) ascending
    values: Tensor  # (n,)

    def count(self, keys_B: Tensor) -> Tensor:
        """Count the entities (B,) of each key."""
        last = torch.searchsorted(self.keys, keys_B, right=True)
        return last - torch.searchsorted(self.keys, keys_B)

    def find_entities(self, keys_B: Tensor) -> Ids:
        """Find the entities of each key: (B,) bags."""
        counts_B = self.count(keys_B)
        offsets, indices = locate_bag_items(torch.searchsorted(self.keys, keys_B), counts_B)
        return Ids(self.values[indices], offsets)


def build_answer_table(keys_n: Tensor, values_n: Tensor) -> AnswerTable:
    """Build a table from pairs (n,), (n,) in any order; repeated pairs count once."""
    pairs = torch.unique(torch.stack([keys_n, values_n], 1), dim=0)
    return AnswerTable(pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


def open_triple_tensors(
    train: Tensor,
    validation: Tensor,
    test: Tensor,
    *,
    num_entities: int,
    num_relations: int,
    seed: int = 0,
    candidates: int = 1,
    subsample: bool = True,
    max_validation: int | None = None,
) -> Splits:
    """Open a knowledge graph from its parts (n, 3) int64: head, relation, tail.

    candidates      random entities (uniform) of each training sample; all samples of a batch, on all ranks, use the
                    candidates of all as negatives
    subsample       weigh a triple by 1 / sqrt of the number of answers to its two questions, as in word2vec (Mikolov
                    et al. 2013), scaled to mean 1
    max_validation  maximal number of triples that validate, drawn by the seed: ranking all entities for a triple takes
                    longer than training on it

    Raises ConfigError for candidates below 1, and for values that are not whole numbers.
    """
    limits = (("candidates", candidates, 1), ("max_validation", max_validation, 0))
    for name, count, minimum in limits:
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= minimum
        if not is_count and (name, count) != ("max_validation", None):
            raise ConfigError(
                f"triples: got {name}={count!r}, wanted a whole number, {minimum} or more; set data.options.{name}"
            )
    columns = [
        Column("head", num_entities, table=ENTITY),
        Column(RELATION, num_relations),
        Column("tail", num_entities, table=ENTITY),
        Column("candidate", num_entities, "sequence", table=ENTITY),
    ]
    schema = Schema((), tuple(columns), labels=())
    train_index = TripleIndex(train, num_entities)
    full_index = TripleIndex(torch.cat([train, validation, test]), num_entities)
    selected = random_permutation(len(validation), stream_key(seed, 2))[:max_validation]
    validation = validation[np.sort(selected)]
    weight = None
    if subsample and len(train):
        weight = sum(train_index.count_known_tails_and_heads(train)).double().rsqrt()  # type: ignore[union-attr]
        weight = (weight / weight.mean()).float()
    return Splits(
        train=TripleSource(schema, train, weight, train_index, candidates, seed, True),
        validation=TripleSource(schema, validation, None, full_index, 0, seed, False),
        test=TripleSource(schema, test, None, full_index, 0, seed, False),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TripleSource(BlockSource):
    """Source with one sample per triple: `head`, `relation`, `tail`, and `candidate`, a sequence of random entities.

    `Batch.key` is `KnownAnswers`. The order is new each epoch if `is_shuffled`, else that of `triples`.
    """

    schema: Schema
    triples: Tensor  # (n, 3)
    weight: Tensor | None  # (n,)
    index: TripleIndex
    num_candidates: int
    shuffle_key: int
    is_shuffled: bool

    @property
    def num_samples(self) -> int:
        return len(self.triples)

    @property
    def num_entities(self) -> int:
        """Number of entities, all of which a link prediction model ranks."""
        return self.index.num_entities

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        size = len(self.triples)
        order = torch.arange(size)
        if self.is_shuffled:
            order = torch.from_numpy(random_permutation(size, stream_key(self.shuffle_key, epoch)))
        return (self._build_triple_batch(order, begin, end, epoch) for begin, end in blocks)

    def _build_triple_batch(
        self, sample_order: Tensor, first_sample: int, end_sample: int, epoch: int
    ) -> Batch:
        rows = sample_order[first_sample:end_sample]
        m = self.num_candidates
        triples = self.triples[rows]
        # Drawn by position in the epoch, so that any number of ranks draws the same.
        drawn = random_words(
            stream_key(self.shuffle_key, epoch, 1), first_sample * m, end_sample * m
        )
        entities = (drawn % np.uint64(max(self.num_entities, 1))).astype(np.int64)
        ids = {
            name: Ids(triples[:, c].contiguous())
            for c, name in enumerate(("head", RELATION, "tail"))
        }
        ids["candidate"] = Ids(torch.from_numpy(entities), torch.arange(len(rows) + 1) * m)
        return Batch(
            len(rows),
            torch.empty(len(rows), 0),
            ids,
            sample_weight=None if self.weight is None else self.weight[rows],
            key=self.index.find_answers(triples),
        )
