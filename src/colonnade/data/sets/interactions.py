"""Implicit feedback: who took which items. Samples to train retrieval on, and queries that rank a whole catalogue.

Legend: U users, I items, n interactions, B samples of a batch, H items of a history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.contract import START, Column, Position, Schema, Splits, rank_blocks
from colonnade.data.counter import permutation, stream_key, words
from colonnade.data.tensors import Columns, gather_ids

LOG_Q = "log_q"
"""Dense column of a pair: log of its item's share of the training interactions."""
SPLIT_KEY = stream_key(0, 20)


SEQUENCE_SETTINGS = {
    "data.options": {"samples": "sequences", "max_history": 50, "negatives": 16},
    "model.dim": 64,
    "embedding.lr": 0.005,
    "model.blocks": 1,
    "model.max_length": 50,
    "model.positions": False,
    "model.dropout": 0.1,
    "model.temperature": 0.2,
    "train.batch_size": 64,
    "train.epochs": 30,
}
"""Settings that suit a model of sequences."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """`Batch.key` of a query: what its user took and a model should rank first, and what is not ranked at all."""

    truth: Ids  # (B,) bags of items
    seen: Ids  # (B,) bags of items


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """A data set of implicit feedback, split. `user` and `item` are columns too; items of a bag differ."""

    train: Ids  # (U,) bags of items, in the order of the file
    validation: Ids  # (U,)
    test: Ids  # (U,)
    users: Mapping[str, Ids]  # by column, (U,)
    items: Mapping[str, Ids]  # by column, (I,)
    columns: tuple[Column, ...]  # of users and items; the item's own is named "item"

    @property
    def num_items(self) -> int:
        return len(next(iter(self.items.values())).counts)

    def log_shares(self) -> Tensor:
        """(I,) float32: log of each item's share of `train`; of an item without any, as if it had half of one."""
        counts = torch.bincount(self.train.values, minlength=self.num_items).double()
        return (counts.clamp(min=0.5) / max(len(self.train.values), 1)).log().float()


def open_interactions(
    found: Interactions,
    *,
    samples: Literal["pairs", "sequences"],
    seed: int,
    max_history: int,
    max_pairs: int | None,
    negatives: int,
    order: Literal["shuffled", "file"],
) -> Splits:
    """Both kinds of samples have queries for validation (training items are not ranked) and test (nor those of
    validation)."""
    if samples == "pairs":
        history = Column("history", found.num_items, "bag", table="item")
        schema = Schema((LOG_Q,), (*found.columns, history), labels=())
        train: PairSource | SequenceSource = PairSource(
            schema, found, max_history, max_pairs, order, seed
        )
        catalogue = Columns(dense=found.log_shares()[:, None], ids=dict(found.items))
    else:
        names = ("history", "target", "negative")
        columns = tuple(Column(name, found.num_items, "sequence", table="item") for name in names)
        schema = Schema((), columns, labels=())
        train = SequenceSource(schema, found, max_history, negatives, order, seed)
        items = {"target": Ids(torch.arange(found.num_items))}
        catalogue = Columns(dense=torch.empty(found.num_items, 0), ids=items)
    users = {} if samples == "sequences" else found.users

    def queries(truth: Ids, seen: Ids) -> QuerySource:
        return QuerySource(schema, users, found.train, truth, seen, catalogue, max_history)

    return Splits(
        train=train,
        validation=queries(found.validation, found.train),
        test=queries(found.test, join(found.train, found.validation)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PairSource:
    """A sample per training interaction, at most `max_pairs` of a user, in an order per epoch: its user, its item, and
    as history up to `max_history` others of the user's: those that follow it in their list, round to its beginning.

    order "file": lists are as they stand in the file; "shuffled": in an order per epoch, for data whose files say
    nothing of time, so that a history is any part of the user's other items.
    """

    schema: Schema
    found: Interactions
    max_history: int
    max_pairs: int | None
    order: Literal["shuffled", "file"]
    shuffle_key: int

    @property
    def num_samples(self) -> int:
        return len(self._pairs())

    def _pairs(self) -> Tensor:
        """Places in the lists: the first `max_pairs` of each."""
        place = _ramps(self.found.train.counts)[1]
        return (place < (self.max_pairs or len(place) + 1)).nonzero()[:, 0]

    def batches(
        self, batch_size: int, *, rank: int = 0, num_ranks: int = 1, start: Position = START
    ) -> Iterator[Batch]:
        pairs = self._pairs()
        blocks = rank_blocks(len(pairs), batch_size, rank=rank, num_ranks=num_ranks, start=start)
        order = pairs[_order(len(pairs), self.shuffle_key, start.epoch)]
        lists, log_shares = self.found.train, self.found.log_shares()
        if self.order == "shuffled":
            lists = _shuffled(lists, stream_key(self.shuffle_key, start.epoch, 1))
        return (self._take(lists, order[begin:end], log_shares) for begin, end in blocks)

    def _take(self, bags: Ids, pairs_B: Tensor, log_shares_I: Tensor) -> Batch:
        assert bags.offsets is not None
        users_B = torch.searchsorted(bags.offsets, pairs_B, right=True) - 1
        items_B = bags.values[pairs_B]
        ids = {name: gather_ids(column, users_B) for name, column in self.found.users.items()}
        ids |= {name: gather_ids(column, items_B) for name, column in self.found.items.items()}
        begins_B = bags.offsets[users_B]
        sizes_B = bags.offsets[users_B + 1] - begins_B
        lengths_B = (sizes_B - 1).clamp(max=self.max_history)
        offsets, place_E = _ramps(lengths_B)
        sample_E = torch.repeat_interleave(torch.arange(len(pairs_B)), lengths_B)
        after_E = (pairs_B - begins_B + 1)[sample_E] + place_E
        values = bags.values[begins_B[sample_E] + after_E % sizes_B[sample_E]]
        ids["history"] = Ids(values, offsets)
        return Batch(len(pairs_B), log_shares_I[items_B][:, None], ids, group=users_B)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSource:
    """A sample per user with two training items or more: their items but the last (`history`), the same shifted by one
    (`target`), and `negatives` items drawn from all, alike (`negative`). Users come in an order per epoch.

    order "file": the newest `max_history` + 1 as they stand in the file; "shuffled": in an order per epoch, for data
    whose files say nothing of time.
    """

    schema: Schema
    found: Interactions
    max_history: int
    negatives: int
    order: Literal["shuffled", "file"]
    shuffle_key: int

    @property
    def num_samples(self) -> int:
        return len(self._users())

    def _users(self) -> Tensor:
        return (self.found.train.counts >= 2).nonzero()[:, 0]

    def batches(
        self, batch_size: int, *, rank: int = 0, num_ranks: int = 1, start: Position = START
    ) -> Iterator[Batch]:
        users = self._users()
        blocks = rank_blocks(len(users), batch_size, rank=rank, num_ranks=num_ranks, start=start)
        users = users[_order(len(users), self.shuffle_key, start.epoch)]
        lists = self.found.train
        if self.order == "shuffled":
            lists = _shuffled(lists, stream_key(self.shuffle_key, start.epoch, 1))
        return (self._take(lists, users[begin:end], start.epoch) for begin, end in blocks)

    def _take(self, lists: Ids, users_B: Tensor, epoch: int) -> Batch:
        chosen = newest(gather_ids(lists, users_B), self.max_history + 1)
        assert chosen.offsets is not None
        lengths_B = chosen.offsets.diff() - 1
        offsets, place_E = _ramps(lengths_B)
        at_E = torch.repeat_interleave(chosen.offsets[:-1], lengths_B) + place_E
        key = stream_key(self.shuffle_key, epoch, 2)
        drawn = [words(key, u * self.negatives, (u + 1) * self.negatives) for u in users_B.tolist()]
        flat = np.concatenate([np.empty(0, np.uint64), *drawn]) % np.uint64(self.found.num_items)
        ids = {
            "history": Ids(chosen.values[at_E], offsets),
            "target": Ids(chosen.values[at_E + 1], offsets),
            "negative": Ids(
                torch.from_numpy(flat.astype(np.int64)),
                torch.arange(len(users_B) + 1) * self.negatives,
            ),
        }
        return Batch(len(users_B), torch.empty(len(users_B), 0), ids, group=users_B)


@dataclass(frozen=True, slots=True, eq=False)
class QuerySource:
    """A sample per user with something held out, in the order of users: the user's columns, their newest training items
    as `history`, where there is one, and as `key` what is `Held`. `catalogue`: all items."""

    schema: Schema
    users: Mapping[str, Ids]
    history: Ids | None
    truth: Ids
    seen: Ids
    catalogue: Columns
    max_history: int

    @property
    def num_samples(self) -> int:
        return len(self._users())

    def _users(self) -> Tensor:
        return (self.truth.counts > 0).nonzero()[:, 0]

    def batches(
        self, batch_size: int, *, rank: int = 0, num_ranks: int = 1, start: Position = START
    ) -> Iterator[Batch]:
        users = self._users()
        blocks = rank_blocks(len(users), batch_size, rank=rank, num_ranks=num_ranks, start=start)
        return (self._take(users[begin:end]) for begin, end in blocks)

    def _take(self, users_B: Tensor) -> Batch:
        ids = {name: gather_ids(column, users_B) for name, column in self.users.items()}
        if self.history is not None:
            ids["history"] = newest(gather_ids(self.history, users_B), self.max_history)
        key = Held(gather_ids(self.truth, users_B), gather_ids(self.seen, users_B))
        dense = torch.zeros(len(users_B), len(self.schema.dense))
        return Batch(len(users_B), dense, ids, group=users_B, key=key)


def hold_out(bags: Ids, fraction: float, key: int) -> tuple[Ids, Ids]:
    """(kept, held out): of each bag of m items, floor(`fraction` * m) drawn at random by `key`; order stays."""
    sizes_U, bag_n = bags.counts, bags.samples
    drawn = words(key, 0, len(bag_n))
    order = np.lexsort((drawn, bag_n.numpy()))
    place_n = torch.empty(len(bag_n), dtype=torch.int64)
    place_n[torch.from_numpy(order)] = _ramps(sizes_U)[1]
    is_held = place_n < torch.floor(sizes_U * fraction + 1e-9).long()[bag_n]
    return _chosen(bags, bag_n, ~is_held), _chosen(bags, bag_n, is_held)


def bags_of(users_n: Tensor, items_n: Tensor, num_users: int) -> Ids:
    """(n,) each -> (U,) bags in the order given, an item once per user: the first time."""
    pairs_n = users_n * (int(items_n.max()) + 1 if len(items_n) else 1) + items_n
    first = np.sort(np.unique(pairs_n.numpy(), return_index=True)[1])
    users_n, items_n = users_n[first], items_n[first]
    by_user = users_n.argsort(stable=True)
    sizes = torch.bincount(users_n, minlength=num_users)
    return Ids(items_n[by_user], _ramps(sizes)[0])


def join(one: Ids, other: Ids) -> Ids:
    """The bags of both, side by side."""
    owner = torch.cat([one.samples, other.samples])
    values = torch.cat([one.values, other.values])[owner.argsort(stable=True)]
    return Ids(values, _ramps(one.counts + other.counts)[0])


def newest(bags: Ids, most: int) -> Ids:
    """The last `most` of each."""
    assert bags.offsets is not None
    lengths = bags.offsets.diff().clamp(max=most)
    offsets, place = _ramps(lengths)
    return Ids(
        bags.values[torch.repeat_interleave(bags.offsets[1:] - lengths, lengths) + place], offsets
    )


def _shuffled(bags: Ids, key: int) -> Ids:
    """The items of each bag in an order drawn by `key`."""
    bag_n = bags.samples
    order = np.lexsort((words(key, 0, len(bag_n)), bag_n.numpy()))
    return Ids(bags.values[torch.from_numpy(order)], bags.offsets)


def _chosen(bags: Ids, bag_n: Tensor, is_chosen_n: Tensor) -> Ids:
    sizes = torch.bincount(bag_n[is_chosen_n], minlength=len(bags.counts))
    return Ids(bags.values[is_chosen_n], _ramps(sizes)[0])


def _order(num_samples: int, key: int, epoch: int) -> Tensor:
    return torch.from_numpy(permutation(num_samples, stream_key(key, epoch)))


def _ramps(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) -> offsets (B + 1,), and 0 .. length - 1 of each, one after the other."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    ramp = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], lengths)
    return offsets, ramp
