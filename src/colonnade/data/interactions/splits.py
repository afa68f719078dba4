"""Splits of interactions into training, validation and test parts: pure functions of their columns.

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

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.batch import Ids
from colonnade.data.counter import random_words, stream_key
from colonnade.data.interactions.columns import Interactions
from colonnade.data.interactions.samples import (
    SPLIT_KEY,
    InteractionSplit,
    concat_bags,
    group_items_by_user,
)
from colonnade.errors import ConfigError

SplitKind = Literal["leave_one_out", "time", "per_user", "rows", "users", "files"]
TRAIN, VALIDATION, TEST, PAST = range(4)
"""Parts. Interactions in PAST are histories only: those of held-out users."""
HELD_OUT_SHARE = 0.2
"""Share of a held-out user's interactions that is held out, rounded up."""
Parts = NDArray[np.int8]


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


def count_from_first(groups_n: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    """Count the earlier members of each member's group (n,)."""
    order = np.argsort(groups_n, kind="stable")
    starts = np.cumsum(np.bincount(groups_n, minlength=num_groups)) - np.bincount(
        groups_n, minlength=num_groups
    )
    counts = np.empty(len(groups_n), np.int64)
    counts[order] = np.arange(len(groups_n)) - starts[groups_n[order]]
    return counts


def _count_to_last(interactions: Interactions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of each user's later interactions, and of all of its interactions, (n,) each."""
    num_users = len(interactions.users.keys)
    sizes = np.bincount(interactions.user_n, minlength=num_users)[interactions.user_n]
    return sizes - 1 - count_from_first(interactions.user_n, num_users), sizes


def _leave_last_items_out(interactions: Interactions) -> Parts:
    later, sizes = _count_to_last(interactions)
    parts = np.full(interactions.size, TRAIN, np.int8)
    parts[(later == 1) & (sizes >= 3)] = VALIDATION
    parts[(later == 0) & (sizes >= 2)] = TEST
    return parts


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
        test_after = times[first] if first < size else np.inf
    first = int(np.searchsorted(times, test_after))
    if validation_after is None:
        middle = first - round(first * options.validation_fraction)
        validation_after = times[middle] if middle < first else test_after
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
    later, sizes = _count_to_last(interactions)
    # At least one is held out of each.
    is_past = later >= np.ceil(sizes * HELD_OUT_SHARE)
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
    # Words are drawn in the order of users, so that a split does not depend on how users alternate.
    by_group = np.argsort(groups, kind="stable")
    words = random_words(stream_key(SPLIT_KEY, seed), 0, len(rest))
    order = by_group[np.lexsort((words, groups[by_group]))]
    sizes = np.bincount(groups)[groups[order]]
    rank = count_from_first(groups[order], int(groups.max(initial=0)) + 1)
    parts[rest[order[rank < np.floor(sizes * share + 1e-9)]]] = part


def sees_future(interactions: Interactions, parts: Parts) -> bool:
    """Return whether an interaction trains that is later than one of the test part."""
    times = interactions.time_n
    if times is None or not (parts == TEST).any():
        return False
    return bool(times[parts == TRAIN].max() > times[parts == TEST].min())


def build_split(
    interactions: Interactions,
    parts: Parts,
    *,
    is_ordered: bool,
) -> InteractionSplit:
    """Build the bags of each part.

    is_ordered: validation items come before those of the test, so that they are in the history of its queries."""
    num_users = len(interactions.users.keys)

    def group(*wanted: int) -> Ids:
        mask = np.isin(parts, wanted)
        return group_items_by_user(
            torch.from_numpy(interactions.user_n[mask]),
            torch.from_numpy(interactions.item_n[mask]),
            num_users,
        )

    users, items = interactions.users, interactions.items
    train, past = group(TRAIN), group(TRAIN, PAST)
    validation = group(VALIDATION)
    return InteractionSplit(
        train=train,
        validation=validation,
        test=group(TEST),
        users=users.features,
        items=items.features,
        columns=(*users.columns, *items.columns),
        past=past,
        test_past=concat_bags(past, validation) if is_ordered else past,
        num_simultaneous=_count_simultaneous(interactions.take(parts == TRAIN)),
        user_keys=users.keys,
        item_keys=items.keys,
    )


def _count_simultaneous(training: Interactions) -> torch.Tensor:
    """Count each interaction's earlier ones of the same user and time, in the order of users (n,)."""
    order = np.argsort(training.user_n, kind="stable")
    users = training.user_n[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = users[1:] != users[:-1]
    if training.time_n is not None:
        times = training.time_n[order]
        is_new[1:] |= times[1:] != times[:-1]
    else:
        is_new[:] = True
    runs = np.cumsum(is_new) - 1
    return torch.from_numpy(count_from_first(runs, len(order)))
