"""Splits of interactions into training, validation and test parts: functions of their columns, and bags by user.

    leave_one_out   the last item of each user tests, the one before it validates; users with two items have no
                    validation item, users with one only train
    time            the newest interactions test, those before them validate; equal times stay in one part
    per_user        a share of each user's interactions, drawn at random and rounded down
    rows            a share of all interactions, drawn at random
    users           a share of the users, drawn at random: they train nothing, their last fifth is held out, and their
                    earlier interactions are their history
    files           each interaction is in the part of its file; without a validation file, a share of each user's
                    interactions in the training file, drawn at random, validates

Legend: n interactions, U users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.batch import Ids
from colonnade.data.contract import Column
from colonnade.data.counter import random_words, stream_key
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.data.interactions.columns import Interactions

SplitKind = Literal["leave_one_out", "time", "per_user", "rows", "users", "files"]
TRAIN, VALIDATION, TEST, PAST = range(4)
"""Parts. Interactions in PAST are histories only: those of held-out users."""
HELD_OUT_SHARE = 0.2
"""Share of a held-out user's interactions that is held out, rounded up."""
Parts = NDArray[np.int8]
SPLIT_KEY = stream_key(0, 20)


@dataclass(frozen=True, slots=True, eq=False)
class InteractionSplit:
    """Interactions of a data set, split. Bags have the positions of items, which are distinct in a bag.

    `user` and `item` are columns too: the ids of users and items.
    """

    train: Ids  # (U,) bags of items, in the order of their times, or of the file
    validation: Ids  # (U,)
    test: Ids  # (U,)
    users: Mapping[str, Ids]  # by column, (U,)
    items: Mapping[str, Ids]  # by column, (I,)
    columns: tuple[Column, ...]  # of users and items
    past: Ids | None = None  # (U,) history of each user when it is validated; None: `train`
    is_ordered: bool = False
    """True if items are in order: a history has earlier items only, and that of the test those that validate, too."""
    num_simultaneous: Tensor | None = None
    """Number of earlier items of `train` with the same time (n,): they are in no history of that item. None: zeros."""
    types: Tensor | None = None
    """Type of feedback of each item of `train` (n,) int8, 0 the primary one: a bag has an item once of each type. None:
    types are not told apart."""
    user_keys: NDArray | None = None
    """Ids of the users in files (U,), ascending; None: users are numbered."""
    item_keys: NDArray | None = None  # (I,)

    @property
    def num_items(self) -> int:
        return len(next(iter(self.items.values())).counts)

    @property
    def history(self) -> Ids:
        """Bags of the items (U,) that each user has before those that validate."""
        return self.train if self.past is None else self.past

    def get_item_ids(self, positions: Ids) -> Ids:
        """Return bags of the ids of items, from bags of their positions."""
        # Four times as fast as indexing by brackets, as elsewhere in this file.
        return Ids(self.items["item"].values.index_select(0, positions.values), positions.offsets)

    @property
    def popularity(self) -> Tensor:
        """Items (I,) by their number of training interactions, the largest first."""
        return self.log_shares().argsort(stable=True, descending=True)

    def log_shares(self) -> Tensor:
        """Return the log of each item's share of `train`, or of its primary type, (I,) float32; an item without
        interactions counts as 0.5."""
        items = self.train.values if self.types is None else self.train.values[self.types == 0]
        counts = torch.bincount(items, minlength=self.num_items).double()
        return (counts.clamp(min=0.5) / max(len(items), 1)).log().float()


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Options of a split. The shares are of interactions, of each user's, or of users; cutoffs are for `time`."""

    kind: SplitKind
    test_fraction: float = 0.2
    validation_fraction: float = 0.1
    test_after: float | None = None
    validation_after: float | None = None
    seed: int = 0


def assign_parts(interactions: Interactions, options: SplitOptions) -> Parts:
    """Assign each interaction to a part (n,). Raises ConfigError without times for a split by time, and if nothing is
    left to train on."""
    if options.kind == "files":
        assert interactions.part_n is not None
        parts = interactions.part_n.copy()
        if not (parts == VALIDATION).any():
            _draw_part(
                interactions, parts, VALIDATION, options.validation_fraction, True, options.seed
            )
    elif options.kind == "leave_one_out":
        parts = _leave_last_items_out(interactions)
    elif options.kind == "time":
        parts = _split_by_time(interactions, options)
    elif options.kind == "users":
        parts = _hold_users_out(interactions, options)
    else:
        parts = _draw_parts(interactions, options)
    if not (parts == TRAIN).any():
        raise ConfigError(
            f"split={options.kind}: got no interaction left to train on, of {interactions.size}, wanted one at least; "
            "hold out less, or split otherwise (data.options.split)"
        )
    return parts


def hold_out_primary_type(
    interactions: Interactions, options: SplitOptions
) -> tuple[Interactions, Parts]:
    """Split interactions of the primary type as `assign_parts` does; those of other types train.

    Left out are other types of a held-out pair of user and item, and those in files of held-out items; in a split by
    time, also what is not before all of them. Returns the other interactions and their parts. Raises ConfigError.
    """
    if options.kind == "users":
        raise ConfigError(
            "got split=users with types of feedback, wanted a split in which each user trains: their rows are learned. "
            "Set data.options.split=per_user, leave_one_out, time or rows"
        )
    assert interactions.type_n is not None
    is_primary = interactions.type_n == 0
    parts = np.full(interactions.size, TRAIN, np.int8)
    parts[is_primary] = assign_parts(interactions.take(is_primary), options)
    is_held_out = parts != TRAIN
    pairs = interactions.user_n * np.int64(len(interactions.items.keys)) + interactions.item_n
    is_left_out = np.isin(pairs, pairs[is_held_out])
    if interactions.part_n is not None:
        is_left_out |= interactions.part_n != TRAIN
    if options.kind == "time" and interactions.time_n is not None and is_held_out.any():
        is_left_out |= interactions.time_n >= interactions.time_n[is_held_out].min()
    is_used = is_primary | ~is_left_out
    return interactions.take(is_used), parts[is_used]


def _leave_last_items_out(interactions: Interactions) -> Parts:
    sizes = _count_by_user(interactions)
    ends = np.cumsum(sizes)
    parts = np.full(interactions.size, TRAIN, np.int8)
    parts[ends[sizes >= 3] - 2] = VALIDATION
    parts[ends[sizes >= 2] - 1] = TEST
    return parts


def _count_by_user(interactions: Interactions) -> NDArray[np.int64]:
    """Count the interactions of each user, (U,)."""
    return np.bincount(interactions.user_n, minlength=len(interactions.users.keys))


def _split_by_time(interactions: Interactions, options: SplitOptions) -> Parts:
    times, size = interactions.time_n, interactions.size
    if times is None:
        raise ConfigError(
            "split=time: got interactions without times, wanted a column of times; name it with data.options.time, or "
            "split otherwise (data.options.split)"
        )
    test_after, validation_after = options.test_after, options.validation_after
    # An interaction with the time of the first of a part is in that part.
    first = size - round(size * options.test_fraction)
    if test_after is None:
        test_after = np.partition(times, first)[first] if first < size else np.inf
    first = int((times < test_after).sum())
    if validation_after is None:
        middle = first - round(first * options.validation_fraction)
        validation_after = np.partition(times, middle)[middle] if middle < first else test_after
    parts = np.full(size, TRAIN, np.int8)
    parts[times >= validation_after] = VALIDATION
    parts[times >= test_after] = TEST
    return parts


def _hold_users_out(interactions: Interactions, options: SplitOptions) -> Parts:
    users = np.unique(interactions.user_n)
    drawn = random_words(stream_key(SPLIT_KEY, 2, options.seed), 0, len(users))
    order = users[np.argsort(drawn, kind="stable")]
    num_test = round(len(users) * options.test_fraction)
    num_validation = round((len(users) - num_test) * options.validation_fraction)
    part_of_user = np.full(len(interactions.users.keys), TRAIN, np.int8)
    part_of_user[order[:num_test]] = TEST
    part_of_user[order[num_test : num_test + num_validation]] = VALIDATION
    parts = part_of_user[interactions.user_n]
    sizes = _count_by_user(interactions)
    # At least one is held out of each.
    past_ends = np.cumsum(sizes) - np.ceil(sizes * HELD_OUT_SHARE).astype(np.int64)
    is_past = np.arange(len(parts)) < past_ends[interactions.user_n]
    parts[is_past & (parts != TRAIN)] = PAST
    return parts


def _draw_parts(interactions: Interactions, options: SplitOptions) -> Parts:
    """Draw the test part, then the validation part of what is left."""
    parts = np.full(interactions.size, TRAIN, np.int8)
    shares = ((TEST, options.test_fraction), (VALIDATION, options.validation_fraction))
    for draw, (part, share) in enumerate(shares):
        is_per_user = options.kind == "per_user"
        _draw_part(interactions, parts, part, share, is_per_user, 2 * options.seed + draw)
    return parts


def _draw_part(
    interactions: Interactions, parts: Parts, part: int, share: float, is_per_user: bool, seed: int
) -> None:
    """Move a share of the training part, of each user's or of all, to another part, in place."""
    rest = np.flatnonzero(parts == TRAIN)
    groups = interactions.user_n[rest] if is_per_user else np.zeros(len(rest), np.int64)
    parts[rest[mark_drawn(groups, share, stream_key(SPLIT_KEY, seed))]] = part


def mark_drawn(groups_n: NDArray[np.integer], share: float, key: int) -> NDArray[np.bool_]:
    """Draw floor(`share` * m) of the m members of each group by `key`, (n,). groups_n: ascending."""
    order = np.lexsort((random_words(key, 0, len(groups_n)), groups_n))
    sizes = np.bincount(groups_n)
    rank = np.arange(len(groups_n)) - (np.cumsum(sizes) - sizes)[groups_n]
    is_drawn = np.empty(len(groups_n), np.bool_)
    is_drawn[order] = rank < np.floor(sizes * share + 1e-9)[groups_n]
    return is_drawn


def sees_future(interactions: Interactions, parts: Parts) -> bool:
    """Return whether an interaction trains that is later than one of the test part."""
    times = interactions.time_n
    if times is None or not (parts == TEST).any():
        return False
    first_test = times.min(where=parts == TEST, initial=times.max())
    return bool(times.max(where=parts == TRAIN, initial=times.min()) > first_test)


def build_split(
    interactions: Interactions,
    parts: Parts,
    *,
    is_ordered: bool,
) -> InteractionSplit:
    """Build the bags of each part. is_ordered: items are in the order of their times, or of the file."""
    num_users = len(interactions.users.keys)

    def group(*wanted: int) -> Ids:
        mask = np.isin(parts, wanted)
        sizes = torch.from_numpy(np.bincount(interactions.user_n[mask], minlength=num_users))
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return Ids(torch.from_numpy(interactions.item_n[mask]), offsets)

    users, items = interactions.users, interactions.items
    types = interactions.type_n
    return InteractionSplit(
        train=group(TRAIN),
        validation=group(VALIDATION),
        test=group(TEST),
        users=users.features,
        items=items.features,
        columns=(*users.columns, *items.columns),
        past=group(TRAIN, PAST) if (parts == PAST).any() else None,
        is_ordered=is_ordered,
        num_simultaneous=_count_simultaneous(interactions, parts),
        types=None if types is None else torch.from_numpy(types[parts == TRAIN]),
        user_keys=users.keys,
        item_keys=items.keys,
    )


def _count_simultaneous(interactions: Interactions, parts: Parts) -> Tensor | None:
    """Count each training interaction's earlier ones of the same user and time (n,) int32; None: there are none."""
    users, times, is_train = interactions.user_n, interactions.time_n, parts == TRAIN
    if times is None:
        return None
    repeats = np.flatnonzero((users[1:] == users[:-1]) & (times[1:] == times[:-1])) + 1
    if not len(repeats):
        return None
    # A run of equal times starts before the first of neighbouring repeats.
    is_first = np.diff(repeats, prepend=-1) > 1
    starts = repeats[is_first][np.cumsum(is_first) - 1] - 1
    num_before = np.cumsum(is_train, dtype=np.int32)
    num_before -= is_train
    counts = np.zeros(is_train.sum(), np.int32)
    starts, repeats = starts[is_train[repeats]], repeats[is_train[repeats]]
    counts[num_before[repeats]] = num_before[repeats] - num_before[starts]
    return torch.from_numpy(counts)
