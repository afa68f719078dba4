"""Ratings grouped by user, for models with one process per user: training batches have whole users, and held-out
ratings are joined with the training ratings of their users.

Legend: S training ratings, U users, Q held-out ratings of a batch, C categorical columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.contract import (
    Block,
    BlockSource,
    Column,
    Schema,
    Source,
    Splits,
    multi_id_columns,
)
from colonnade.data.counter import random_permutation, stream_key
from colonnade.data.tensors import TensorColumns, locate_bag_items
from colonnade.errors import ConfigError, DataError

COUNT = "count of "
"""Prefix of the dense columns, the last ones, with the number of training ratings that have the sample's id in a
categorical column. Those of the first column are 0 in held-out ratings, by which a model tells them from training
ratings."""
MAX_RATINGS = 200
"""Largest number of training ratings of a user: the cost of an exact process grows with their cube."""
READ_RATINGS = 1 << 16


def list_count_columns(columns: tuple[Column, ...]) -> tuple[str, ...]:
    """Return the names of the dense columns of counts, one for each categorical column."""
    return tuple(COUNT + column.name for column in columns)


@dataclass(frozen=True, slots=True, eq=False)
class UserSource(BlockSource):
    """Source of training ratings in memory. A sample of an epoch is a user: a batch has all ratings of its users,
    which come in a new order each epoch, and `batch_size` counts users."""

    schema: Schema
    file_schema: Any
    ratings: TensorColumns  # S ratings, user by user
    id_counts: Mapping[str, tuple[Tensor, Tensor]]
    """Distinct ids of each categorical column, ascending, and the number of ratings of each."""
    users: Tensor  # (U,) int64, ascending: ids of the users
    offsets: Tensor  # (U + 1,)
    shuffle_key: int

    @property
    def num_samples(self) -> int:
        return len(self.users)

    @property
    def user_column(self) -> str:
        """Name of the column of users: the first categorical one."""
        return self.schema.categorical[0].name

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        key = stream_key(self.shuffle_key, epoch)
        order = torch.from_numpy(random_permutation(self.num_samples, key))
        return (self.gather_users(order[begin:end]) for begin, end in blocks)

    def gather_users(self, positions: Tensor) -> Batch:
        """Gather all ratings of the users at these positions, user by user."""
        begins = self.offsets[positions]
        rows = locate_bag_items(begins, self.offsets[positions + 1] - begins)[1]
        return self.ratings.gather_rows(rows)

    def count_ratings(self, name: str, ids: Tensor) -> Tensor:
        """Return the number of training ratings of each id (n,) in a categorical column, (n,) float32."""
        known, counts = self.id_counts[name]
        if not len(known):
            return torch.zeros(len(ids))
        positions = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
        return counts[positions] * (known[positions] == ids)

    def find_users(self, ids: Tensor) -> Tensor:
        """Return the positions of the distinct users among `ids` that have training ratings."""
        positions = torch.searchsorted(self.users, ids.unique())
        is_known = torch.isin(self.users[positions.clamp(max=len(self.users) - 1)], ids)
        return positions[is_known & (positions < len(self.users))]


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutRatings:
    """Source of held-out ratings in their own order. A batch has Q of them, then the training ratings of their users.

    Its `key` has Q elements. Labels that are not known are NaN."""

    held_out: Source
    training: UserSource

    @property
    def schema(self) -> Schema:
        return self.training.schema

    @property
    def num_samples(self) -> int | None:
        return self.held_out.num_samples

    def batches(self, batch_size: int, **options: Any) -> Iterator[Batch]:
        """Return this rank's batches, as `Source.batches` does; `batch_size` counts held-out ratings."""
        return map(self._join_training_ratings, self.held_out.batches(batch_size, **options))

    def _join_training_ratings(self, batch: Batch) -> Batch:
        known = self.training.find_users(batch.ids[self.training.user_column].values)
        training = self.training.gather_users(known)
        of_columns = [
            self.training.count_ratings(column.name, batch.ids[column.name].values)
            for column in self.schema.categorical[1:]
        ]
        counts = torch.stack([torch.zeros(batch.size), *of_columns], 1)
        label = torch.full((batch.size, 1), torch.nan) if batch.label is None else batch.label
        assert training.label is not None
        return Batch(
            batch.size + training.size,
            torch.cat([torch.cat([batch.dense, counts], 1), training.dense]),
            {
                name: Ids(torch.cat([batch.ids[name].values, ids.values]))
                for name, ids in training.ids.items()
            },
            label=torch.cat([label, training.label]),
            key=batch.key,
        )


def group_ratings(
    splits: Splits, user_column: str, seed: int, read_value: Callable[[int], Any]
) -> Splits:
    """Read the training part into memory and group it by user; join the other parts with it.

    The column of users becomes the first categorical one, and the counts of `COUNT` are added. Training ratings with a
    NaN label are left out. read_value: function from the number of a training sample to its user as the file has it.
    Raises ConfigError for data that are no ratings, DataError for a user with more than MAX_RATINGS.
    """
    plain = splits.train.schema
    _check_rating_columns(plain, user_column)
    batches = list(splits.train.batches(READ_RATINGS))
    if batches[0].sample_weight is not None:
        raise ConfigError("group_by: got weights of ratings, wanted none: leave the field out")
    columns = sorted(plain.categorical, key=lambda column: column.name != user_column)
    schema = replace(
        plain,
        dense=(*plain.dense, *list_count_columns(tuple(columns))),
        categorical=tuple(columns),
    )
    label = torch.cat([batch.label for batch in batches if batch.label is not None])
    ids = {c.name: torch.cat([batch.ids[c.name].values for batch in batches]) for c in columns}
    is_known = label[:, 0].isfinite().nonzero()[:, 0]
    rows = is_known[ids[user_column][is_known].argsort(stable=True)]
    ids = {name: values[rows] for name, values in ids.items()}
    counts, id_counts = [], {}
    for name, values in ids.items():
        known, positions, numbers = values.unique(return_inverse=True, return_counts=True)
        counts.append(numbers[positions].float())
        id_counts[name] = known, numbers.float()
    dense = torch.cat([batch.dense for batch in batches])[rows]
    ratings = TensorColumns(
        dense=torch.cat([dense, torch.stack(counts, 1)], 1),
        ids={name: Ids(values) for name, values in ids.items()},
        label=label[rows],
    )
    users, sizes = ids[user_column].unique_consecutive(return_counts=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    if len(users) and int(sizes.max()) > MAX_RATINGS:
        first = rows[offsets[sizes.argmax()]]
        raise DataError(
            f"{user_column} {read_value(int(first))}: got {int(sizes.max())} training ratings, wanted at most "
            f"{MAX_RATINGS} of a user, because the time of an exact Gaussian process grows with their cube. Remove "
            "some, or train fm"
        )
    file_schema = getattr(splits.train, "file_schema", None)
    train = UserSource(schema, file_schema, ratings, id_counts, users, offsets, seed)
    validation, test = (
        None if part is None else HeldOutRatings(part, train)
        for part in (splits.validation, splits.test)
    )
    return replace(splits, train=train, validation=validation, test=test)


def _check_rating_columns(schema: Schema, user_column: str) -> None:
    """Raise ConfigError unless samples have a user, another column, one label and one id in each column."""
    names = [column.name for column in schema.categorical]
    if user_column not in names:
        raise ConfigError(
            f"group_by: got {user_column!r}, wanted the category of users, one of {', '.join(names)}; set "
            "data.options.group_by"
        )
    if len(names) + len(schema.dense) < 2:
        raise ConfigError(
            f"group_by: got {user_column!r} alone, wanted also what users rate, such as an item"
        )
    if len(schema.labels) != 1:
        raise ConfigError(f"group_by: got {len(schema.labels)} labels, wanted one: the rating")
    if bags := multi_id_columns(schema):
        raise ConfigError(
            f"group_by: got several ids in {min(bags)!r}, wanted one in each column; leave the field out"
        )
