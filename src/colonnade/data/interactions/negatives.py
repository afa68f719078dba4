"""Negatives beside which held-out items are ranked: some drawn at random, or those of a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.batch import Ids
from colonnade.data.contract import Source
from colonnade.data.interactions.columns import ITEM, USER
from colonnade.data.interactions.files import read_item_lists
from colonnade.data.interactions.samples import RANKING, QuerySource, group_items_by_user
from colonnade.errors import ConfigError, DataError


def replace_negatives(source: Source | None, negatives: int | str | Path) -> QuerySource:
    """Return queries that rank held-out items among others: "all", a number to draw for each user, or those of a file.

    Raises ConfigError for a number below 1 and for a source of other samples, DataError naming the file.
    """
    if not isinstance(source, QuerySource):
        raise ConfigError(
            "ranked negatives are for models that rank items (two_tower, sasrec, graphsage, mrmn), and this data has "
            "no items to rank; leave them out"
        )
    words = str(negatives)
    if words == "all":
        return replace(source, negatives=None, ranking=RANKING)
    if not words.removeprefix("-").isdigit():
        bags, ranking = read_negatives(Path(words).expanduser(), source)
        return replace(source, negatives=bags, ranking=ranking)
    if int(words) < 1:
        raise ConfigError(
            f"got ranked_negatives={words}, wanted the number of drawn items (99), or a file of negatives"
        )
    split = source.interactions
    parts = (split.history, split.validation, split.test)
    known = torch.cat([bag.samples * split.num_items + bag.values for bag in parts]).unique()
    num_known = torch.bincount(known // split.num_items, minlength=len(source.truth.counts))
    fewest = split.num_items - int((num_known * (source.truth.counts > 0)).max())
    ranking = f"held-out items are ranked among {words} drawn items that the user has in no part"
    if fewest < int(words):
        ranking += f", or all of these where there are fewer: {fewest} at least"
    return replace(source, negatives=int(words), ranking=ranking)


def read_negatives(path: Path, source: QuerySource) -> tuple[Ids, str]:
    """Read lines of a user, one of its held-out items, and the negatives of this item.

    Returns the negatives as bags of items (U,), and a line that describes them. What the user has in a part, and what
    the data does not have, is left out. Raises DataError for a held-out item of `source` that has no line.
    """
    split, num_items = source.interactions, source.interactions.num_items
    num_users = len(split.train.counts)
    table = read_item_lists(path)
    users = _find_positions(table.column(USER), split.user_keys, num_users)
    items = _find_positions(table.column(ITEM), split.item_keys, num_items)
    pairs = torch.where((users >= 0) & (items >= 0), users * num_items + items, -1)

    def number_pairs(*bags: Ids) -> Tensor:
        return torch.cat([bag.samples * num_items + bag.values for bag in bags])

    truth = number_pairs(source.truth)
    missing = truth[~torch.isin(truth, pairs)]
    if len(missing):
        user, item = divmod(int(missing[0]), num_items)
        user, item = (
            position if keys is None else keys[position]
            for position, keys in ((user, split.user_keys), (item, split.item_keys))
        )
        raise DataError(
            f"{path}: got no line of the user {user} and its held-out item {item}, wanted one for each held-out item. "
            "Is the split the one of the file? Name the file of held-out items with data.options.test"
        )
    known = number_pairs(split.history, split.train, split.validation, split.test)
    is_negative = (pairs >= 0) & ~torch.isin(pairs, known)
    bags = group_items_by_user(users[is_negative], items[is_negative], num_users)
    left_out = len(pairs) - int(is_negative.sum()) - int(torch.isin(pairs, truth).sum())
    words = f"held-out items are ranked among the negatives of {path.name}, at most {int(bags.counts.max())} of a user"
    return bags, words + f" ({left_out:,} left out: the user or the data has them)" * (left_out > 0)


def _find_positions(column: pa.ChunkedArray, keys: NDArray | None, num_keys: int) -> Tensor:
    """Return the position of each id (n,) in `keys`, by default in numbers below `num_keys`; -1: none."""
    known = pa.array(np.arange(num_keys) if keys is None else keys)
    positions = pc.index_in(column.cast(known.type), value_set=known).fill_null(-1)
    return torch.from_numpy(positions.to_numpy().astype(np.int64))
