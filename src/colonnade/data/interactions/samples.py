"""Samples of split interactions: pairs or sequences that train retrieval, and queries that rank the catalogue.

Legend: U users, I items, n interactions, B samples of a batch, H items of a history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.contract import Block, BlockSource, Column, Schema, Splits
from colonnade.data.counter import random_permutation, random_words, stream_key
from colonnade.data.tensors import TensorColumns, gather_ids, locate_bag_items

SampleKind = Literal["pairs", "sequences"]
ItemOrder = Literal["shuffled", "file", "past"]
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
"""Default settings of sequence models."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutItems:
    """Items of queries in a `Batch.key`: `truth`, which a model should rank first, `excluded`, which are not ranked,
    and `candidates`, which alone are ranked; None: all others are."""

    truth: Ids  # (B,) bags of items
    excluded: Ids  # (B,) bags of items
    candidates: Ids | None = None  # (B,) bags of items


@dataclass(frozen=True, slots=True, eq=False)
class InteractionSplit:
    """Interactions of a data set, split. Bags have the positions of items, which are distinct in a bag.

    `user` and `item` are columns too: the ids of users and items.
    """

    train: Ids  # (U,) bags of items, in the order of the file or of their times
    validation: Ids  # (U,)
    test: Ids  # (U,)
    users: Mapping[str, Ids]  # by column, (U,)
    items: Mapping[str, Ids]  # by column, (I,)
    columns: tuple[Column, ...]  # of users and items
    past: Ids | None = None  # (U,) history of each user when it is validated; None: `train`
    test_past: Ids | None = None  # (U,) history when it is tested; None: `past`
    num_simultaneous: Tensor | None = None
    """Number of earlier items of `train` with the same time (n,): they are in no history of that item."""
    user_keys: NDArray | None = None
    """Ids of the users in files (U,), ascending; None: users are numbered."""
    item_keys: NDArray | None = None  # (I,)

    @property
    def num_items(self) -> int:
        return len(next(iter(self.items.values())).counts)

    def get_item_ids(self, positions: Ids) -> Ids:
        """Return bags of the ids of items, from bags of their positions."""
        return Ids(self.items["item"].values[positions.values], positions.offsets)

    def log_shares(self) -> Tensor:
        """Return the log of each item's share of `train`, (I,) float32; an item without interactions counts as 0.5."""
        counts = torch.bincount(self.train.values, minlength=self.num_items).double()
        return (counts.clamp(min=0.5) / max(len(self.train.values), 1)).log().float()


def open_interaction_splits(
    interactions: InteractionSplit,
    *,
    samples: SampleKind,
    seed: int,
    max_history: int,
    max_pairs: int | None,
    negatives: int,
    order: ItemOrder,
    ranked_negatives: int | None = None,
) -> Splits:
    """Open training samples (pairs or sequences), and queries that validate and test.

    Validation ranks no item of the user's history; the test ranks none of them and no validation item.
    ranked_negatives: number of other items, drawn at random, among which a query's held-out items are ranked; None: all
    items are ranked.
    """
    cardinality = next(c.cardinality for c in interactions.columns if c.name == "item")
    if samples == "pairs":
        history = Column("history", cardinality, "bag", table="item")
        schema = Schema((LOG_Q,), (*interactions.columns, history), labels=())
        train: PairSource | SequenceSource = PairSource(
            schema, interactions, max_history, max_pairs, order, seed
        )
        catalogue = TensorColumns(
            dense=interactions.log_shares()[:, None], ids=dict(interactions.items)
        )
    else:
        names = ("history", "target", "negative")
        columns = tuple(Column(name, cardinality, "sequence", table="item") for name in names)
        schema = Schema((), columns, labels=())
        train = SequenceSource(schema, interactions, max_history, negatives, order, seed)
        items = {"target": interactions.items["item"]}
        catalogue = TensorColumns(dense=torch.empty(interactions.num_items, 0), ids=items)
    users = {} if samples == "sequences" else interactions.users
    popularity = interactions.log_shares().argsort(stable=True, descending=True)
    past = interactions.train if interactions.past is None else interactions.past
    test_past = past if interactions.test_past is None else interactions.test_past

    def build_queries(history: Ids, truth: Ids, excluded: Ids) -> QuerySource:
        candidates = None
        if ranked_negatives is not None:
            candidates = draw_candidates(interactions, truth, ranked_negatives)
        bags = interactions.get_item_ids(history)
        return QuerySource(
            schema, users, bags, truth, excluded, catalogue, max_history, candidates, popularity
        )

    return Splits(
        train=train,
        validation=build_queries(past, interactions.validation, past),
        test=build_queries(
            test_past, interactions.test, concat_bags(past, interactions.validation)
        ),
    )


def draw_candidates(interactions: InteractionSplit, truth: Ids, num_negatives: int) -> Ids:
    """Draw the items that are ranked for each user (U,): its held-out items, and `num_negatives` distinct others that
    it has in no part, at random; fewer where there are fewer. The same for every seed of training."""
    bags = [interactions.train, interactions.validation, interactions.test]
    if interactions.past is not None:
        bags.append(interactions.past)
    num_items = interactions.num_items
    known = [set() for _ in truth.counts]  # type: list[set[int]]
    for bag in bags:
        for user, item in zip(bag.samples.tolist(), bag.values.tolist(), strict=True):
            known[user].add(item)
    drawn = []
    for user, count in enumerate(truth.counts.tolist()):
        items: dict[int, None] = {}
        start, wanted = 0, min(num_negatives, num_items - len(known[user])) if count else 0
        while len(items) < wanted:
            words = random_words(stream_key(SPLIT_KEY, 3, user), start, start + 2 * num_negatives)
            start += len(words)
            others = (words % np.uint64(num_items)).astype(np.int64).tolist()
            items |= {item: None for item in others if item not in known[user]}
        drawn.append(list(items)[:wanted])
    offsets = torch.tensor([0, *map(len, drawn)]).cumsum(0)
    negatives = Ids(torch.tensor([i for one in drawn for i in one], dtype=torch.int64), offsets)
    return concat_bags(truth, negatives)


@dataclass(frozen=True, slots=True, eq=False)
class PairSource(BlockSource):
    """Source with one sample per training interaction, at most `max_pairs` of a user, in a new order each epoch.

    A sample has the user, the item, and as history up to `max_history` other items of the user. By order these are

    past      the newest of those before the item: strictly earlier ones where there are times
    file      those that follow the item in the user's list, continued at the start of the list
    shuffled  the same in a new order each epoch, for files without times: a random part of the user's other items
    """

    schema: Schema
    interactions: InteractionSplit
    max_history: int
    max_pairs: int | None
    order: ItemOrder
    shuffle_key: int

    @property
    def num_samples(self) -> int:
        counts = self.interactions.train.counts
        return int(counts.clamp(max=self.max_pairs or len(self.interactions.train.values)).sum())

    def _select_pairs(self, epoch: int) -> Tensor:
        """Return the indices of `max_pairs` interactions of each user: drawn for the epoch by order "past", else the
        first, which another order of each epoch makes others."""
        lists = self.interactions.train
        position = _offsets_and_positions(lists.counts)[1]
        limit = self.max_pairs or len(position) + 1
        if self.order != "past" or int(lists.counts.max() if len(lists.counts) else 0) <= limit:
            return (position < limit).nonzero()[:, 0]
        words = random_words(stream_key(self.shuffle_key, epoch, 4), 0, len(position))
        order = np.lexsort((words, lists.samples.numpy()))
        return torch.from_numpy(np.sort(order[(position < limit).numpy()]))

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        pairs = self._select_pairs(epoch)
        order = pairs[_epoch_order(len(pairs), self.shuffle_key, epoch)]
        lists = self.interactions.train
        log_shares = self.interactions.log_shares()
        if self.order == "shuffled":
            lists = _shuffle_bags(lists, stream_key(self.shuffle_key, epoch, 1))
        return (
            self._build_pair_batch(lists, order[begin:end], log_shares) for begin, end in blocks
        )

    def _build_pair_batch(self, items_by_user: Ids, pairs_B: Tensor, log_shares_I: Tensor) -> Batch:
        assert items_by_user.offsets is not None
        users_B = torch.searchsorted(items_by_user.offsets, pairs_B, right=True) - 1
        items_B = items_by_user.values[pairs_B]
        users = self.interactions.users
        items = self.interactions.items
        ids = {name: gather_ids(column, users_B) for name, column in users.items()}
        ids |= {name: gather_ids(column, items_B) for name, column in items.items()}
        begins_B = items_by_user.offsets[users_B]
        sizes_B = items_by_user.offsets[users_B + 1] - begins_B
        if self.order == "past":
            ends_B = pairs_B
            if self.interactions.num_simultaneous is not None:
                ends_B = pairs_B - self.interactions.num_simultaneous[pairs_B]
            lengths_B = (ends_B - begins_B).clamp(max=self.max_history)
            offsets, index_E = locate_bag_items(ends_B - lengths_B, lengths_B)
        else:
            lengths_B = (sizes_B - 1).clamp(max=self.max_history)
            offsets, position_E = _offsets_and_positions(lengths_B)
            sample_E = torch.repeat_interleave(torch.arange(len(pairs_B)), lengths_B)
            after_E = (pairs_B - begins_B + 1)[sample_E] + position_E
            index_E = begins_B[sample_E] + after_E % sizes_B[sample_E]
        history = Ids(items_by_user.values[index_E], offsets)
        ids["history"] = self.interactions.get_item_ids(history)
        return Batch(len(pairs_B), log_shares_I[items_B][:, None], ids, group=users_B)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSource(BlockSource):
    """Source with one sample per user with two or more training items; users in a new order each epoch.

    A sample has the user's items without the last (`history`), the same shifted by one (`target`), and `negatives`
    items drawn uniformly from all (`negative`).

    order "file" and "past": the newest `max_history` + 1 items in the order of the file or of their times; "shuffled":
    in a new order each epoch, for files without times.
    """

    schema: Schema
    interactions: InteractionSplit
    max_history: int
    negatives: int
    order: ItemOrder
    shuffle_key: int

    @property
    def num_samples(self) -> int:
        return len(self._select_users())

    def _select_users(self) -> Tensor:
        return (self.interactions.train.counts >= 2).nonzero()[:, 0]

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        users = self._select_users()
        users = users[_epoch_order(len(users), self.shuffle_key, epoch)]
        lists = self.interactions.train
        if self.order == "shuffled":
            lists = _shuffle_bags(lists, stream_key(self.shuffle_key, epoch, 1))
        return (self._build_sequence_batch(lists, users[begin:end], epoch) for begin, end in blocks)

    def _build_sequence_batch(self, item_sequences: Ids, users_B: Tensor, epoch: int) -> Batch:
        items = truncate_to_newest_items(gather_ids(item_sequences, users_B), self.max_history + 1)
        assert items.offsets is not None
        lengths_B = items.offsets.diff() - 1
        offsets, index_E = locate_bag_items(items.offsets[:-1], lengths_B)
        key = stream_key(self.shuffle_key, epoch, 2)
        drawn = [
            random_words(key, u * self.negatives, (u + 1) * self.negatives)
            for u in users_B.tolist()
        ]
        num_items = np.uint64(self.interactions.num_items)
        flat = np.concatenate([np.empty(0, np.uint64), *drawn]) % num_items
        bags = {
            "history": Ids(items.values[index_E], offsets),
            "target": Ids(items.values[index_E + 1], offsets),
            "negative": Ids(
                torch.from_numpy(flat.astype(np.int64)),
                torch.arange(len(users_B) + 1) * self.negatives,
            ),
        }
        ids = {name: self.interactions.get_item_ids(bag) for name, bag in bags.items()}
        return Batch(len(users_B), torch.empty(len(users_B), 0), ids, group=users_B)


@dataclass(frozen=True, slots=True, eq=False)
class QuerySource(BlockSource):
    """Source of queries: one sample per user with held-out items (`truth`), in the order of users.

    A sample has the user's columns, the newest items of `history` (if given), and as `key` a `HeldOutItems` with
    `truth`, the `excluded` items and the `candidates`. `catalogue`: all items.
    """

    schema: Schema
    users: Mapping[str, Ids]
    history: Ids | None
    """Bags of the ids of items; those of `truth`, `excluded` and `candidates` are positions in the catalogue."""
    truth: Ids
    excluded: Ids
    catalogue: TensorColumns
    max_history: int
    candidates: Ids | None = None
    popularity: Tensor | None = None
    """Items (I,) by their number of training interactions, the largest first: models are compared with this order."""

    @property
    def num_samples(self) -> int:
        return len(self._select_users())

    def _select_users(self) -> Tensor:
        return (self.truth.counts > 0).nonzero()[:, 0]

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        users = self._select_users()
        return (self._build_query_batch(users[begin:end]) for begin, end in blocks)

    def _build_query_batch(self, users_B: Tensor) -> Batch:
        ids = {name: gather_ids(column, users_B) for name, column in self.users.items()}
        if self.history is not None:
            ids["history"] = truncate_to_newest_items(
                gather_ids(self.history, users_B), self.max_history
            )
        bags = (self.truth, self.excluded, self.candidates)
        key = HeldOutItems(*(None if b is None else gather_ids(b, users_B) for b in bags))  # type: ignore[arg-type]
        dense = torch.zeros(len(users_B), len(self.schema.dense))
        return Batch(len(users_B), dense, ids, group=users_B, key=key)


def hold_out(bags: Ids, fraction: float, key: int) -> tuple[Ids, Ids]:
    """Split each bag of m items into a rest and floor(`fraction` * m) held-out items, drawn at random by `key`.

    Returns (rest, held out); the items stay in order.
    """
    sizes_U = bags.counts
    bag_n = bags.samples
    drawn = random_words(key, 0, len(bag_n))
    order = np.lexsort((drawn, bag_n.numpy()))
    rank_n = torch.empty(len(bag_n), dtype=torch.int64)
    rank_n[torch.from_numpy(order)] = _offsets_and_positions(sizes_U)[1]
    is_held_out = rank_n < torch.floor(sizes_U * fraction + 1e-9).long()[bag_n]
    return _select_items(bags, bag_n, ~is_held_out), _select_items(bags, bag_n, is_held_out)


def group_items_by_user(users_n: Tensor, items_n: Tensor, num_users: int) -> Ids:
    """Group pairs (n,), (n,) into a bag of items for each user, (U,); repeated pairs count once, at the first."""
    pairs_n = users_n * (int(items_n.max()) + 1 if len(items_n) else 1) + items_n
    first = np.sort(np.unique(pairs_n.numpy(), return_index=True)[1])
    users_n = users_n[first]
    items_n = items_n[first]
    by_user = users_n.argsort(stable=True)
    sizes = torch.bincount(users_n, minlength=num_users)
    return Ids(items_n[by_user], _offsets_and_positions(sizes)[0])


def concat_bags(first: Ids, second: Ids) -> Ids:
    """Concatenate bag i of `first` and bag i of `second`, for each i."""
    bag_n = torch.cat([first.samples, second.samples])
    values = torch.cat([first.values, second.values])[bag_n.argsort(stable=True)]
    return Ids(values, _offsets_and_positions(first.counts + second.counts)[0])


def truncate_to_newest_items(bags: Ids, max_items: int) -> Ids:
    """Truncate each bag to its last `max_items` items."""
    assert bags.offsets is not None
    lengths = bags.offsets.diff().clamp(max=max_items)
    offsets, indices = locate_bag_items(bags.offsets[1:] - lengths, lengths)
    return Ids(bags.values[indices], offsets)


def _shuffle_bags(bags: Ids, key: int) -> Ids:
    """Put the items of each bag in an order drawn by `key`."""
    bag_n = bags.samples
    order = np.lexsort((random_words(key, 0, len(bag_n)), bag_n.numpy()))
    return Ids(bags.values[torch.from_numpy(order)], bags.offsets)


def _select_items(bags: Ids, bag_n: Tensor, is_selected_n: Tensor) -> Ids:
    sizes = torch.bincount(bag_n[is_selected_n], minlength=len(bags.counts))
    return Ids(bags.values[is_selected_n], _offsets_and_positions(sizes)[0])


def _epoch_order(num_samples: int, key: int, epoch: int) -> Tensor:
    return torch.from_numpy(random_permutation(num_samples, stream_key(key, epoch)))


def _offsets_and_positions(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return offsets (B + 1,) of bags of `lengths` (B,), and each item's position in its bag (E,)."""
    return locate_bag_items(torch.zeros_like(lengths), lengths)
