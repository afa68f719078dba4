"""Types of feedback in files: what trains, what is held out, leaks, and what is refused."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade import ConfigError
from colonnade.data import open_interactions

TYPES = ["buy", "cart", ["view", "glance"]]
ROWS = st.lists(
    st.tuples(
        st.integers(0, 4), st.integers(0, 7), st.sampled_from(["buy", "cart", "view", "glance", "x"]),
        st.integers(1, 30),
    ),
    min_size=30, max_size=90,
)  # fmt: skip


def write(path, rows, times: bool = True):
    header = "user,item,event,timestamp" if times else "user,item,event"
    lines = [",".join(map(str, row[: 4 if times else 3])) for row in rows]
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def read_training(splits) -> set[tuple[int, int, int]]:
    """Return (user, item, type) of the training pairs, by the keys of the file."""
    split = splits.train.interactions
    users, items = split.train.samples.numpy(), split.train.values.numpy()
    keys = split.user_keys[users].tolist(), split.item_keys[items].tolist(), split.types.tolist()
    return set(zip(*keys, strict=True))


def read_part(splits, part: str) -> set[tuple[int, int]]:
    split = splits.train.interactions
    bags = getattr(split, part)
    users, items = split.user_keys[bags.samples.numpy()], split.item_keys[bags.values.numpy()]
    return set(zip(users.tolist(), items.tolist(), strict=True))


@settings(max_examples=examples(60, 300), deadline=None)
@given(rows=ROWS)
def test_held_out_items_leave_every_type(tmp_path_factory, rows):
    """A slow twin: the last purchase of a user tests, the one before validates, and no other type of them trains."""
    path = write(tmp_path_factory.mktemp("rows") / "rows.csv", rows)
    number = {"buy": 0, "cart": 1, "view": 2, "glance": 2}
    first: dict[tuple[int, int, int], int] = {}
    for user, item, event, time in sorted(
        (r for r in rows if r[2] in number), key=lambda r: (r[0], r[3])
    ):
        first.setdefault((user, item, number[event]), time)
    bought = {u: [i for v, i, t in first if (u, 0) == (v, t)] for u in range(5)}
    test = {(u, items[-1]) for u, items in bought.items() if len(items) >= 2}
    validation = {(u, items[-2]) for u, items in bought.items() if len(items) >= 3}
    held_out = test | validation
    training = {(u, i, t) for u, i, t in first if (u, i) not in held_out}
    present = {event for _, _, event, _ in rows}
    if not present >= {"buy", "cart", "view", "glance"} or {t for *_, t in training} != {0, 1, 2}:
        with pytest.raises(ConfigError, match=r"events?|types|train on"):
            open_interactions(path, types=TYPES)
        return
    splits = open_interactions(path, types=TYPES)
    assert read_training(splits) == training
    assert (read_part(splits, "validation"), read_part(splits, "test")) == (validation, test)
    assert splits.train.num_samples == len(training)


def draw_rows(num_users: int = 12, seed: int = 0) -> list[tuple]:
    """Draw distinct views, of which some go on to the cart and are bought, in that order of time."""
    draw = random.Random(seed)
    rows = []
    for user in range(num_users):
        for step, item in enumerate(draw.sample(range(60), 45)):
            for later, event in enumerate(["view", "cart", "buy"][: 1 + step % 3]):
                rows.append((user, item, event, 100 * step + later))
    return rows


@pytest.mark.parametrize("split", ["leave_one_out", "per_user", "rows", "time", "files"])
def test_no_split_trains_what_it_holds_out(tmp_path, split):
    """Plant the leak in every row: a purchase follows a view and a cart of the same item."""
    rows, options = draw_rows(), {}
    if split == "files":
        held_out = [row for row in rows if row[2] == "buy" and row[3] > 4000]
        path = write(tmp_path / "train.csv", rows)  # has the held-out purchases themselves, too
        options = {"test": str(write(tmp_path / "test.csv", [*held_out, (0, 3, "view", 5)]))}
    else:
        path = write(tmp_path / "rows.csv", rows)
        shares = {"test_fraction": 0.4, "validation_fraction": 0.2}
        options = {"split": split, **(shares if split != "leave_one_out" else {})}
    splits = open_interactions(path, types=["buy", "cart", "view"], **options)
    test, training = read_part(splits, "test"), read_training(splits)
    held_out = test | read_part(splits, "validation")
    assert test <= {(user, item) for user, item, event, _ in rows if event == "buy"}
    assert test and not held_out & {(user, item) for user, item, _ in training}
    assert {t for *_, t in training} == {0, 1, 2}
    if split == "time":
        number = {"buy": 0, "cart": 1, "view": 2}
        last = max(time for u, i, event, time in rows if (u, i, number[event]) in training)
        first = min(time for u, i, event, time in rows if event == "buy" and (u, i) in held_out)
        assert last < first


@pytest.mark.parametrize("times", [True, False])
def test_a_sample_has_the_type_of_its_pair(tmp_path, times):
    """Also in the new order of each epoch, where the file has no times; every item of the user is known."""
    path = write(tmp_path / "rows.csv", draw_rows(), times)
    splits = open_interactions(path, types=["buy", "cart", "view"])
    split, training = splits.train.interactions, read_training(splits)
    for epoch in (0, 1):
        drawn = set()
        (batch,) = splits.train.read_epoch(epoch, iter([(0, splits.train.num_samples)]))
        known = batch.key.excluded
        for s in range(batch.size):
            user = int(split.user_keys[batch.group[s]])
            item = int(batch.ids["item"].values[s])
            drawn.add((user, item, int(batch.dense[s, 1])))
            own = split.item_keys[known.values[known.samples == s].numpy()].tolist()
            assert set(own) == {i for u, i, _ in training if u == user}
        assert drawn == training and batch.size == len(training)


def test_numbers_are_types_and_lines_say_what_trains(tmp_path):
    rows = [f"{u},{i},{5 - (u + i) % 5}" for u in range(9) for i in range(75)]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(["user,item,rating", *rows, "77,3,1", "77,4,2"]) + "\n")
    splits = open_interactions(path, event="rating", types=[5, 4, 3, [2, 1]])
    note = next(line for line in splits.notes if line.startswith("types"))
    sizes = [int((splits.train.interactions.types == t).sum()) for t in range(4)]
    assert f"5 {sizes[0]}, 4 {sizes[1]}, 3 {sizes[2]}, 2+1 {sizes[3]} train; 5 is held out" in note
    assert "1 users have no 5, and are not tested" in note
    counts = [len(set(bag)) for bag in pairwise(splits.test.truth.offsets.tolist())]
    assert counts and int((splits.test.truth.counts > 0).sum()) <= 9
    # Popularity, beside which models are ranked, counts the primary type alone.
    best = splits.train.interactions.log_shares().argmax()
    fives = splits.train.interactions.train.values[splits.train.interactions.types == 0]
    assert int((fives == best).sum()) == int(fives.bincount().max())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"types": ["buy", "refund"]}, "got the event 'refund', wanted values of the column 'event': buy, cart, view"),
        ({"types": ["buy"]}, r"got \['buy'\], wanted a list of 2 to 100 types.*data.options.events instead"),
        ({"types": "buy"}, "got 'buy', wanted a list"),
        ({"types": ["buy", "buy"]}, "no event twice"),
        ({"types": ["buy", []]}, "at least one event in each type"),
        ({"types": ["buy", "view"], "events": ["buy"]}, "types with events"),
        ({"types": ["buy", "view"], "samples": "sequences"}, "types with samples=sequences"),
        ({"types": ["buy", "view"], "split": "users"}, "split=users with types"),
        ({"types": ["buy", "view"], "event": "kind"}, "no column 'kind'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, options, words):
    path = write(tmp_path / "rows.csv", draw_rows())
    with pytest.raises(ConfigError, match=words):
        open_interactions(path, **options)


def test_a_file_without_types_and_one_whose_type_is_held_out_are_refused(tmp_path):
    bare = tmp_path / "bare.csv"
    bare.write_text("user,item\n1,2\n1,3\n")
    with pytest.raises(ConfigError, match=r"no column named like events.*events or types need"):
        open_interactions(bare, types=["buy", "view"])
    path = write(tmp_path / "all.csv", [(1, 1, "buy", 1), (1, 2, "buy", 2), (1, 2, "view", 3)])
    with pytest.raises(ConfigError, match="no training interaction of view"):
        open_interactions(path, types=["buy", "view"])
