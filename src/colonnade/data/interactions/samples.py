"""Samples of split interactions: pairs or sequences that train retrieval, and queries that rank the catalogue.

Legend: U users, I items, n interactions, B samples of a batch, H items of a history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.contract import Block, BlockSource, Column, Schema, Splits, check_choices
from colonnade.data.counter import random_permutation, random_words, read_words, stream_key
from colonnade.data.interactions.splits import SPLIT_KEY, InteractionSplit
from colonnade.data.tensors import TensorColumns, gather_ids, locate_bag_items

SampleKind = Literal["pairs", "sequences"]
LOG_Q = "log_q"
"""Dense column of a pair: log of its item's share of the training interactions."""
TYPE = "type"
"""Dense column of a pair: number of its type of feedback, 0 the primary one."""
RANKING = "all items are ranked, except those that the user has in the training part and, for the test, in validation"
"""Words for the ranking of all items."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutItems:
    """Items of queries in a `Batch.key`: `truth`, which a model should rank first, `excluded`, which are not ranked,
    and `candidates`, which alone are ranked; None: all others are."""

    truth: Ids  # (B,) bags of items
    excluded: Ids  # (B,) bags of items
    candidates: Ids | None = None  # (B,) bags of items


def open_interaction_splits(
    interactions: InteractionSplit,
    *,
    samples: SampleKind,
    seed: int,
    max_history: int,
    max_pairs: int | None,
    negatives: int,
) -> Splits:
    """Open training samples (pairs or sequences), and queries that validate and test.

    Validation ranks no item of the user's history; the test ranks none of them and no validation item.
    Raises ConfigError for another kind of samples.
    """
    check_choices(open_interaction_splits, {"samples": samples})
    cardinality = next(c.cardinality for c in interactions.columns if c.name == "item")
    if samples == "pairs":
        history = Column("history", cardinality, "bag", table="item")
        dense = (LOG_Q,) if interactions.types is None else (LOG_Q, TYPE)
        schema = Schema(dense, (*interactions.columns, history), labels=())
        train: PairSource | SequenceSource = PairSource(
            schema, interactions, max_history, max_pairs, seed
        )
        catalogue = TensorColumns(
            dense=interactions.log_shares()[:, None], ids=dict(interactions.items)
        )
    else:
        names = ("history", "target", "negative")
        columns = tuple(Column(name, cardinality, "sequence", table="item") for name in names)
        schema = Schema((), columns, labels=())
        train = SequenceSource(schema, interactions, max_history, negatives, seed)
        items = {"target": interactions.items["item"]}
        catalogue = TensorColumns(dense=torch.empty(interactions.num_items, 0), ids=items)
    users = {} if samples == "sequences" else interactions.users
    past = (interactions.history,)
    known = (interactions.history, interactions.validation)
    tested = known if interactions.is_ordered else past
    validation, test = interactions.validation, interactions.test
    common = (catalogue, max_history, interactions.popularity)
    return Splits(
        train=train,
        validation=QuerySource(schema, interactions, users, past, validation, past, *common),
        test=QuerySource(schema, interactions, users, tested, test, known, *common),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PairSource(BlockSource):
    """Source with one sample per training interaction, at most `max_pairs` of a user, in a new order each epoch.

    A sample's `key` has the user's training items, which are not its negatives. Its columns are those of the user and
    the item, and as history up to `max_history` other items of the user. By order these are

    known     the newest of those before the item: strictly earlier ones where there are times
    unknown   those that follow the item in the user's list, in a new order each epoch: a random part of the others
    """

    schema: Schema
    interactions: InteractionSplit
    max_history: int
    max_pairs: int | None
    shuffle_key: int

    @property
    def num_samples(self) -> int:
        counts = self.interactions.train.counts
        return int(counts.clamp(max=self.max_pairs or len(self.interactions.train.values)).sum())

    def _select_pairs(self, epoch: int) -> Tensor | None:
        """Return the indices of `max_pairs` interactions of each user, drawn for the epoch if items are in order, else
        the first, which another order of each epoch makes others. None: all."""
        lists = self.interactions.train
        if self.max_pairs is None or self.num_samples == len(lists.values):
            return None
        position = _offsets_and_positions(lists.counts)[1]
        is_selected = position < self.max_pairs
        if not self.interactions.is_ordered:
            return is_selected.nonzero()[:, 0]
        words = random_words(stream_key(self.shuffle_key, epoch, 4), 0, len(position))
        order = np.lexsort((words, lists.samples.numpy()))
        return torch.from_numpy(np.sort(order[is_selected.numpy()]))

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        pairs = self._select_pairs(epoch)
        order = _epoch_order(self.num_samples, self.shuffle_key, epoch)
        order = order if pairs is None else pairs[order]
        lists = self.interactions.train
        log_shares = self.interactions.log_shares()
        types = self.interactions.types
        if not self.interactions.is_ordered:
            key = stream_key(self.shuffle_key, epoch, 1)
            types = None if types is None else _shuffle_bags(Ids(types, lists.offsets), key).values
            lists = _shuffle_bags(lists, key)
        return (
            self._build_pair_batch(lists, types, order[begin:end], log_shares)
            for begin, end in blocks
        )

    def _build_pair_batch(
        self, items_by_user: Ids, types_n: Tensor | None, pairs_B: Tensor, log_shares_I: Tensor
    ) -> Batch:
        assert items_by_user.offsets is not None
        users_B = torch.searchsorted(items_by_user.offsets, pairs_B, right=True) - 1
        items_B = items_by_user.values[pairs_B]
        users = self.interactions.users
        items = self.interactions.items
        ids = {name: gather_ids(column, users_B) for name, column in users.items()}
        ids |= {name: gather_ids(column, items_B) for name, column in items.items()}
        begins_B = items_by_user.offsets[users_B]
        sizes_B = items_by_user.offsets[users_B + 1] - begins_B
        if self.interactions.is_ordered:
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
        history = Ids(items_by_user.values.index_select(0, index_E), offsets)
        ids["history"] = self.interactions.get_item_ids(history)
        known = join_user_bags((self.interactions.train,), users_B)
        truth = Ids(items_B.long(), torch.arange(len(pairs_B) + 1))
        key = HeldOutItems(truth, known)
        dense = log_shares_I[items_B][:, None]
        if types_n is not None:
            dense = torch.cat([dense, types_n[pairs_B][:, None]], dim=1)
        return Batch(len(pairs_B), dense, ids, group=users_B, key=key)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSource(BlockSource):
    """Source with one sample per user with two or more training items; users in a new order each epoch.

    A sample has the user's items without the last (`history`), the same shifted by one (`target`), and `negatives`
    others (`negative`). It has the newest `max_history` + 1 items; in a new order each epoch where their order is
    unknown. Negatives follow each other in an order of all items that is drawn each epoch. A batch has no item twice,
    and the whole catalogue if that is no larger than its negatives: these are then divided evenly among its samples.
    """

    schema: Schema
    interactions: InteractionSplit
    max_history: int
    negatives: int
    shuffle_key: int
    batch_size: int = 1
    """Number of samples of a batch of all ranks: the argument of `batches`."""

    @property
    def num_samples(self) -> int:
        return len(self._select_users())

    def _select_users(self) -> Tensor:
        return (self.interactions.train.counts >= 2).nonzero()[:, 0]

    def batches(self, batch_size: int, **options: Any) -> Iterator[Batch]:
        """Return this rank's batches, as `Source.batches` does."""
        return BlockSource.batches(replace(self, batch_size=batch_size), batch_size, **options)

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        users = self._select_users()
        users = users[_epoch_order(len(users), self.shuffle_key, epoch)]
        lists = self.interactions.train
        if not self.interactions.is_ordered:
            lists = _shuffle_bags(lists, stream_key(self.shuffle_key, epoch, 1))
        key = stream_key(self.shuffle_key, epoch, 2)
        items = torch.from_numpy(random_permutation(self.interactions.num_items, key))
        return (
            self._build_sequence_batch(
                lists, users[begin:end], self._select_negatives(items, begin, end)
            )
            for begin, end in blocks
        )

    def _select_negatives(self, items: Tensor, begin: int, end: int) -> Ids:
        """Return the negatives of the samples from `begin` to `end` of an epoch, of its order of items (I,)."""
        num_drawn = min(len(items), self.negatives * self.batch_size)  # of a batch
        bounds = torch.arange(begin, end + 1) * num_drawn // self.batch_size
        position = torch.arange(int(bounds[0]), int(bounds[-1]))
        return Ids(items[position % len(items)], bounds - bounds[0])

    def _build_sequence_batch(self, item_sequences: Ids, users_B: Tensor, negatives: Ids) -> Batch:
        items = truncate_to_newest_items(gather_ids(item_sequences, users_B), self.max_history + 1)
        assert items.offsets is not None
        lengths_B = items.offsets.diff() - 1
        offsets, index_E = locate_bag_items(items.offsets[:-1], lengths_B)
        bags = {
            "history": Ids(items.values[index_E], offsets),
            "target": Ids(items.values[index_E + 1], offsets),
            "negative": negatives,
        }
        ids = {name: self.interactions.get_item_ids(bag) for name, bag in bags.items()}
        return Batch(len(users_B), torch.empty(len(users_B), 0), ids, group=users_B)


@dataclass(frozen=True, slots=True, eq=False)
class QuerySource(BlockSource):
    """Source of queries: one sample per user with held-out items (`truth`), in the order of users.

    A sample has the user's columns, the newest items of `history` (if there are bags), and as `key` a `HeldOutItems`.
    All items of the catalogue are ranked except the `excluded` ones; with `negatives`, only the held-out items and
    these. Bags have positions in the catalogue; several of a user are joined.
    """

    schema: Schema
    interactions: InteractionSplit
    users: Mapping[str, Ids]
    history: tuple[Ids, ...]
    truth: Ids
    excluded: tuple[Ids, ...]
    catalogue: TensorColumns
    max_history: int = 0
    popularity: Tensor | None = None
    """Items (I,) by their number of training interactions, the largest first: models are compared with this order."""
    negatives: int | Ids | None = None
    """Number of items drawn for each user, that it has in no part; or bags of items (U,); None: all items."""
    ranking: str = RANKING
    """Words for which items are ranked."""

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
        if self.history:
            bags = truncate_to_newest_items(join_user_bags(self.history, users_B), self.max_history)
            ids["history"] = self.interactions.get_item_ids(bags)
        truth, candidates = join_user_bags((self.truth,), users_B), None
        if self.negatives is not None:
            candidates = concat_bags(truth, self._gather_negatives(users_B))
        key = HeldOutItems(truth, join_user_bags(self.excluded, users_B), candidates)
        dense = torch.zeros(len(users_B), len(self.schema.dense))
        return Batch(len(users_B), dense, ids, group=users_B, key=key)

    def _gather_negatives(self, users_B: Tensor) -> Ids:
        if isinstance(self.negatives, Ids):
            return gather_ids(self.negatives, users_B)
        split = self.interactions
        parts = (split.history, split.train, split.validation, split.test)
        return draw_other_items(
            join_user_bags(parts, users_B), users_B, self.negatives or 0, split.num_items
        )


def draw_items(key: int, users_B: Tensor, num_draws: int, num_items: int) -> Tensor:
    """Draw items for each user uniformly with replacement, (B, num_draws) int64; a user's depend only on `key`."""
    position = users_B[:, None] * num_draws + torch.arange(num_draws)
    words = read_words(key, position.numpy().astype(np.uint64)) % np.uint64(num_items)
    return torch.from_numpy(words.astype(np.int64))


def draw_other_items(known: Ids, users_B: Tensor, num_negatives: int, num_items: int) -> Ids:
    """Draw distinct items that are not in the bag of `known` items of each user (B,): `num_negatives`, or all others if
    there are fewer. A user's items do not depend on the others of the batch, nor on the seed of training."""
    size = len(users_B)
    taken = (known.samples * num_items + known.values).unique()
    num_known = torch.bincount(taken // num_items, minlength=size)
    num_missing = (num_items - num_known).clamp(max=num_negatives)
    drawn = taken[:0]  # sample * num_items + item, in the order of the draws
    for draw in range(1 << 30):
        lacking = (num_missing > 0).nonzero()[:, 0]
        if not len(lacking):
            break
        key = stream_key(SPLIT_KEY, 3, draw)
        items = draw_items(key, users_B[lacking], 2 * num_negatives, num_items)
        fresh = (lacking[:, None] * num_items + items).flatten()
        fresh = fresh[~torch.isin(fresh, taken)]
        first = torch.from_numpy(np.sort(np.unique(fresh.numpy(), return_index=True)[1]))
        fresh = fresh[first]
        rank = _offsets_and_positions(torch.bincount(fresh // num_items, minlength=size))[1]
        fresh = fresh[rank < num_missing[fresh // num_items]]
        drawn, taken = torch.cat([drawn, fresh]), torch.cat([taken, fresh])
        num_missing = num_missing - torch.bincount(fresh // num_items, minlength=size)
    sample = drawn // num_items
    order = sample.argsort(stable=True)
    offsets = _offsets_and_positions(torch.bincount(sample, minlength=size))[0]
    return Ids((drawn % num_items)[order], offsets)


def join_user_bags(parts: Sequence[Ids], users_B: Tensor) -> Ids:
    """Gather the bags of items of some users from each part, and join those of a user, as int64."""
    bags = reduce(concat_bags, [gather_ids(part, users_B) for part in parts])
    return Ids(bags.values.long(), bags.offsets)


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
    return Ids(bags.values.index_select(0, indices), offsets)


def _shuffle_bags(bags: Ids, key: int) -> Ids:
    """Put the items of each bag in an order drawn by `key`."""
    bag_n = bags.samples
    order = np.lexsort((random_words(key, 0, len(bag_n)), bag_n.numpy()))
    return Ids(bags.values[torch.from_numpy(order)], bags.offsets)


def _epoch_order(num_samples: int, key: int, epoch: int) -> Tensor:
    return torch.from_numpy(random_permutation(num_samples, stream_key(key, epoch)))


def _offsets_and_positions(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return offsets (B + 1,) of bags of `lengths` (B,), and each item's position in its bag (E,)."""
    return locate_bag_items(torch.zeros_like(lengths), lengths)
