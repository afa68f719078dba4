"""Knowledge graphs: triples (head, relation, tail) to train link prediction on, and queries that rank all entities.

Legend: n triples, B samples of a batch, m candidates that a sample brings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.contract import START, Column, Position, Schema, Splits, rank_blocks
from colonnade.data.counter import permutation, stream_key, words
from colonnade.errors import ConfigError

ENTITY = "entity"
RELATION = "relation"


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """`Batch.key` of triples: the true answers to both questions of each, its own among them. No other candidate is
    wrong, so training does not push them away, and evaluation does not count them."""

    tails: Ids  # (B,) bags of entities t with (head, relation, t)
    heads: Ids  # (B,) bags of entities h with (h, relation, tail)


@dataclass(frozen=True, eq=False)
class Facts:
    """All true answers that somebody knows, looked up by question."""

    triples: Tensor  # (n, 3) int64: head, relation, tail
    num_entities: int

    def known(self, triples_B3: Tensor) -> Known:
        """Questions that nobody has an answer to get empty bags."""
        h, r, t = triples_B3.T
        return Known(self._tails.find(self._key(r, h)), self._heads.find(self._key(r, t)))

    def counts(self, triples_B3: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) each: how many tails, and heads, are known."""
        h, r, t = triples_B3.T
        return self._tails.count(self._key(r, h)), self._heads.count(self._key(r, t))

    def _key(self, relation: Tensor, entity: Tensor) -> Tensor:
        return relation * self.num_entities + entity

    @cached_property
    def _tails(self) -> Answers:
        h, r, t = self.triples.T
        return answers(self._key(r, h), t)

    @cached_property
    def _heads(self) -> Answers:
        h, r, t = self.triples.T
        return answers(self._key(r, t), h)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    keys: Tensor  # (n,) ascending
    values: Tensor  # (n,)

    def count(self, keys_B: Tensor) -> Tensor:
        last = torch.searchsorted(self.keys, keys_B, right=True)
        return last - torch.searchsorted(self.keys, keys_B)

    def find(self, keys_B: Tensor) -> Ids:
        counts_B = self.count(keys_B)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts_B.cumsum(0)])
        first_B = torch.searchsorted(self.keys, keys_B)
        ramp = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(counts_B)
        return Ids(self.values[first_B.repeat_interleave(counts_B) + ramp], offsets)


def answers(keys_n: Tensor, values_n: Tensor) -> Answers:
    """Of pairs in any order; one that is there twice counts once."""
    pairs = torch.unique(torch.stack([keys_n, values_n], 1), dim=0)
    return Answers(pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


def open_triples(
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
    """Parts (n, 3) int64: head, relation, tail.

    `candidates`: entities drawn at random, all alike, that each training sample brings; every sample of a batch, on
    all ranks, is set against all of them. `subsample`: a triple weighs 1 / sqrt of how many share its questions, as
    in word2vec (Mikolov et al. 2013), on the mean 1. `max_validation`: so many triples validate at most, drawn by the
    seed: ranking all entities for each takes longer than training on it. Raises ConfigError for no candidates, and for
    numbers that are none.
    """
    numbers = (("candidates", candidates, 1), ("max_validation", max_validation, 0))
    for name, count, least in numbers:
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= least
        if not is_count and (name, count) != ("max_validation", None):
            raise ConfigError(
                f"triples: got {name}={count!r}, wanted a whole number, {least} or more; set data.options.{name}"
            )
    columns = [
        Column("head", num_entities, table=ENTITY),
        Column(RELATION, num_relations),
        Column("tail", num_entities, table=ENTITY),
        Column("candidate", num_entities, "sequence", table=ENTITY),
    ]
    schema = Schema((), tuple(columns), labels=())
    learned = Facts(train, num_entities)
    every = Facts(torch.cat([train, validation, test]), num_entities)
    chosen = permutation(len(validation), stream_key(seed, 2))[:max_validation]
    validation = validation[np.sort(chosen)]
    weight = None
    if subsample and len(train):
        weight = sum(learned.counts(train)).double().rsqrt()  # type: ignore[union-attr]
        weight = (weight / weight.mean()).float()
    return Splits(
        train=TripleSource(schema, train, weight, learned, candidates, seed, True),
        validation=TripleSource(schema, validation, None, every, 0, seed, False),
        test=TripleSource(schema, test, None, every, 0, seed, False),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TripleSource:
    """A sample per triple: ids `head`, `relation`, `tail`, and `candidate`, a sequence of drawn entities; `key` is what
    is `Known`. In an order per epoch where it is shuffled, else as given."""

    schema: Schema
    triples: Tensor  # (n, 3)
    weight: Tensor | None  # (n,)
    facts: Facts
    num_candidates: int
    shuffle_key: int
    is_shuffled: bool

    @property
    def num_samples(self) -> int:
        return len(self.triples)

    @property
    def num_entities(self) -> int:
        """What a model of links ranks."""
        return self.facts.num_entities

    def batches(
        self, batch_size: int, *, rank: int = 0, num_ranks: int = 1, start: Position = START
    ) -> Iterator[Batch]:
        size = len(self.triples)
        blocks = rank_blocks(size, batch_size, rank=rank, num_ranks=num_ranks, start=start)
        order = torch.arange(size)
        if self.is_shuffled:
            order = torch.from_numpy(permutation(size, stream_key(self.shuffle_key, start.epoch)))
        return (self._take(order, begin, end, start.epoch) for begin, end in blocks)

    def _take(self, order: Tensor, begin: int, end: int, epoch: int) -> Batch:
        chosen, m = order[begin:end], self.num_candidates
        triples = self.triples[chosen]
        # By place in the epoch, so that any number of ranks draws the same.
        drawn = words(stream_key(self.shuffle_key, epoch, 1), begin * m, end * m)
        entities = (drawn % np.uint64(max(self.num_entities, 1))).astype(np.int64)
        ids = {name: Ids(triples[:, c].contiguous()) for c, name in enumerate(("head", RELATION, "tail"))}  # fmt: skip
        ids["candidate"] = Ids(torch.from_numpy(entities), torch.arange(len(chosen) + 1) * m)
        return Batch(
            len(chosen),
            torch.empty(len(chosen), 0),
            ids,
            sample_weight=None if self.weight is None else self.weight[chosen],
            key=self.facts.known(triples),
        )
