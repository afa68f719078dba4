"""Implicit feedback: splits, pairs, sequences, queries; the readers' law; bad files."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from movielens_files import write_movielens

from colonnade.batch import Ids
from colonnade.cli import app
from colonnade.data import Position, Schema, open_interactions, open_source
from colonnade.data.interactions.samples import (
    InteractionSplit,
    SequenceSource,
    concat_bags,
    draw_other_items,
    group_items_by_user,
    truncate_to_newest_items,
)
from colonnade.data.interactions.splits import mark_drawn
from colonnade.errors import DataError


def lists_of(ids: Ids) -> list[list[int]]:
    offsets = ids.offsets.tolist()
    return [ids.values[a:b].tolist() for a, b in pairwise(offsets)]


def bags(lists) -> Ids:
    sizes = torch.tensor([0, *map(len, lists)])
    return Ids(torch.tensor([i for one in lists for i in one], dtype=torch.int64), sizes.cumsum(0))


LISTS = st.lists(st.lists(st.integers(0, 40), unique=True, max_size=12), min_size=1, max_size=8)


@given(lists=LISTS, fraction=st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]), key=st.integers(0, 2**63))
def test_a_share_of_each_group_is_drawn(lists, fraction, key):
    groups = bags(lists).samples.numpy()
    is_drawn = mark_drawn(groups, fraction, key)
    for group, members in enumerate(lists):
        wanted = math.floor(fraction * len(members) + 1e-9)
        assert is_drawn[groups == group].sum() == wanted
    assert (mark_drawn(groups, fraction, key) == is_drawn).all()


@given(lists=LISTS, num_negatives=st.integers(1, 45))
def test_drawn_negatives_are_distinct_and_do_not_depend_on_the_batch(lists, num_negatives):
    users = torch.arange(len(lists)) + 7
    drawn = lists_of(draw_other_items(bags(lists), users, num_negatives, 41))
    for known, user, got in zip(lists, users, drawn, strict=True):
        assert len(got) == len(set(got)) == min(num_negatives, 41 - len(known))
        assert not set(got) & set(known) and set(got) <= set(range(41))
        (alone,) = lists_of(draw_other_items(bags([known]), user[None], num_negatives, 41))
        assert alone == got


def test_drawn_negatives_are_uniform():
    """Chi-squared of 20,000 draws of 10 of 50 items: 99.9 % lie below 85.4 for 49 degrees."""
    drawn = draw_other_items(bags([[]] * 2000), torch.arange(2000), 10, 50).values
    counts = torch.bincount(drawn, minlength=50)
    assert float(((counts - 400) ** 2 / 400).sum()) < 85.4


@given(lists=LISTS, limit=st.integers(1, 13))
def test_newest_and_join(lists, limit):
    assert lists_of(truncate_to_newest_items(bags(lists), limit)) == [one[-limit:] for one in lists]
    assert lists_of(concat_bags(bags(lists), bags(lists[::-1]))) == [
        a + b for a, b in zip(lists, lists[::-1], strict=True)
    ]


def test_an_item_counts_once_for_a_user():
    users, items = torch.tensor([1, 0, 1, 1]), torch.tensor([5, 5, 7, 5])
    assert lists_of(group_items_by_user(users, items, 3)) == [[5], [5, 7], []]


def gowalla(folder, train=None, valid="0 4\n1 6 5\n"):
    (folder / "train.txt").write_text(
        train or "0 0 1 2 3 7\n1 0 1 2 3 4 8 9 10 11 12\n2 5 6\n3 1\n"
    )
    (folder / "valid.txt").write_text(valid)
    return folder


@pytest.fixture
def opened(tmp_path):
    def open_them(**options):
        return open_source("gowalla", gowalla(tmp_path), **options)

    return open_them


def test_the_split_of_gowalla(opened):
    result = opened().train.interactions
    assert lists_of(result.test) == [[4], [6, 5], [], []]
    assert [len(one) for one in lists_of(result.validation)] == [0, 1, 0, 0]
    whole = lists_of(concat_bags(result.train, result.validation))
    assert [sorted(one) for one in whole] == [
        [0, 1, 2, 3, 7], [0, 1, 2, 3, 4, 8, 9, 10, 11, 12], [5, 6], [1],
    ]  # fmt: skip
    assert lists_of(opened(seed=3).train.interactions.train) == lists_of(result.train)


def test_a_part_without_samples_is_not_scored(tmp_path, capsys):
    """A tenth of so short histories is no item, so nothing validates: its metrics were NaN."""
    folder = gowalla(tmp_path, "0 0 1 2\n1 3 4\n", "0 4\n1 2\n")
    command = ["train", "--data", "gowalla", "--path", str(folder), "--run", str(tmp_path / "run")]
    assert app.run_command([*command, "--epochs", "1", "--set", "model.dim=4"]) == 0
    output = capsys.readouterr().out
    assert "test recall@10" in output and "epoch 1 is over" in output
    assert "nan" not in output and "validation ndcg" not in output


def test_a_pair_brings_other_items_as_history(opened):
    source = opened(max_history=3).train
    lists, pairs = lists_of(source.interactions.train), []
    counts = torch.bincount(source.interactions.train.values)
    for batch in source.batches(5, start=Position(2, 0)):
        for s, history in enumerate(lists_of(batch.ids["history"])):
            user, item = int(batch.ids["user"].values[s]), int(batch.ids["item"].values[s])
            others = [i for i in lists[user] if i != item]
            assert len(history) == min(3, len(others)) and set(history) <= set(others)
            assert len(set(history)) == len(history)
            assert float(batch.dense[s]) == pytest.approx(math.log(counts[item] / counts.sum()))
            pairs.append((user, item))
        assert torch.equal(batch.group, batch.ids["user"].values)
    assert sorted(pairs) == sorted((u, i) for u, one in enumerate(lists) for i in one)


def test_an_epoch_brings_so_many_pairs_of_a_user(opened):
    source = opened(max_pairs=3).train
    lists = lists_of(source.interactions.train)
    epochs = []
    for epoch in range(6):
        users = torch.cat([b.group for b in source.batches(4, start=Position(epoch, 0))])
        assert torch.bincount(users).tolist() == [min(3, len(one)) for one in lists]
        assert len(users) == source.num_samples
        epochs.append(
            {
                int(i)
                for b in source.batches(4, start=Position(epoch, 0))
                for i in b.ids["item"].values
            }
        )
    assert set.union(*epochs) == {item for one in lists for item in one}  # in time, all of them


@pytest.mark.parametrize("order", ["none", "file"])
def test_a_sequence_is_learned_place_by_place(tmp_path, order):
    options = {"samples": "sequences", "max_history": 4, "negatives": 6, "order": order}
    folder = gowalla(tmp_path)
    source = open_interactions(
        folder / "train.txt", test=folder / "valid.txt", split_seed=1, **options
    ).train
    lists = lists_of(source.interactions.train)
    users = []
    for batch in source.batches(2):
        columns = zip(
            *(lists_of(batch.ids[n]) for n in ("history", "target", "negative")), strict=True
        )
        for user, (history, target, negative) in zip(batch.group.tolist(), columns, strict=True):
            sequence = [history[0], *target]
            assert history == sequence[:-1] and set(sequence) <= set(lists[user])
            assert len(sequence) == min(5, len(lists[user])) == len(set(sequence))
            if order == "file":
                assert sequence == lists[user][-5:]
            assert len(negative) == 6 and all(0 <= item < 13 for item in negative)
            users.append(user)
    assert sorted(users) == [0, 1, 2]  # user 3 has one item: nothing to learn
    epochs = [
        torch.cat([b.ids["negative"].values for b in source.batches(9, start=Position(epoch))])
        for epoch in (0, 0, 1)
    ]
    assert torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], epochs[2])


@given(
    num_items=st.integers(2, 40), batch_size=st.integers(1, 12), negatives=st.integers(1, 9),
    num_ranks=st.integers(1, 3),
)  # fmt: skip
def test_a_batch_has_distinct_negatives_or_the_whole_catalogue(
    num_items, batch_size, negatives, num_ranks
):
    """Ranks have parts of it; over an epoch, no item is drawn much more often than another."""
    train, none = bags([[0, 1]] * 30), bags([[]] * 30)
    catalogue = {"item": Ids(torch.arange(num_items))}
    split = InteractionSplit(train, none, none, {}, catalogue, ())
    source = SequenceSource(Schema((), (), labels=()), split, 4, negatives, 0)
    ranks = [
        [batch.ids["negative"].values for batch in source.batches(batch_size, rank=r, num_ranks=num_ranks)]
        for r in range(num_ranks)
    ]  # fmt: skip
    batches = [torch.cat(parts) for parts in zip(*ranks, strict=True)]
    assert all(len(items) == len(items.unique()) for items in batches)
    whole, last = divmod(source.num_samples, batch_size)
    assert all(len(items) == min(num_items, negatives * batch_size) for items in batches[:whole])
    assert len(batches) == whole + (last > 0)
    counts = torch.bincount(torch.cat(batches), minlength=num_items)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("samples", ["pairs", "sequences"])
def test_queries_rank_what_was_held_out(opened, samples):
    splits = opened(samples=samples, max_history=2)
    (batch,) = splits.test.batches(10)
    assert batch.group.tolist() == [0, 1] and batch.size == splits.test.num_samples
    assert lists_of(batch.key.truth) == lists_of(splits.test.truth)[:2]
    train, validation = (
        lists_of(p) for p in (splits.train.interactions.train, splits.train.interactions.validation)
    )
    assert (
        lists_of(batch.key.excluded) == [a + b for a, b in zip(train, validation, strict=True)][:2]
    )
    assert lists_of(batch.ids["history"]) == [one[-2:] for one in train[:2]]
    (batch,) = splits.validation.batches(10)
    assert lists_of(batch.key.excluded) == [train[1]]


@pytest.mark.parametrize("samples", ["pairs", "sequences"])
def test_the_readers_law(opened, samples):
    """Ranks' blocks are the batch of one rank; a step can be read alone; epochs differ."""
    source = opened(samples=samples).train

    def shown(batch):
        return {name: lists_of(ids) if ids.offsets is not None else ids.values.tolist()
                for name, ids in batch.ids.items()}  # fmt: skip

    whole = [shown(b) for b in source.batches(3, start=Position(1, 0))]
    ranks = [
        [shown(b) for b in source.batches(3, rank=r, num_ranks=2, start=Position(1, 0))]
        for r in (0, 1)
    ]
    for one, first, second in zip(whole, *ranks, strict=True):
        assert one == {name: first[name] + second[name] for name in one}
    assert [shown(b) for b in source.batches(3, start=Position(1, 1))] == whole[1:]
    assert [shown(b) for b in source.batches(3)] != whole


def test_movielens_as_implicit_feedback(tmp_path):
    films = range(1, 21)
    ratings = [[user for user in (1, 2, 4, 7) for _ in films], [*films] * 4, [5] * 80]
    movies = [f"{film}::Film (19{70 + film})::Drama" for film in films]
    folder = write_movielens(tmp_path, movies=movies, ratings=ratings)
    splits = open_source("movielens_retrieval", folder)
    schema = splits.train.schema
    assert [c.name for c in schema.categorical] == [
        "user", "sex", "age", "occupation", "zip3", "item", "year", "genres", "history",
    ]  # fmt: skip
    assert schema.labels == () and schema.dense == ("log_q",)
    tables = {c.table for c in schema.categorical}
    assert "history" not in tables and "item" in tables
    batch = next(splits.train.batches(4))
    assert set(batch.ids) == {c.name for c in schema.categorical}
    assert set(splits.test.catalogue.ids) == {"item", "year", "genres"}


def test_real_movielens(shared_data):
    splits = open_source("movielens_retrieval", shared_data / "ml-1m")
    result = splits.train.interactions
    sizes = [len(part.values) for part in (result.train, result.validation, result.test)]
    assert sum(sizes) == 575_281  # ratings of 4 and 5
    assert splits.test.num_samples == 6034


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("0 1 2\n1 x 3\n", ["train.txt, line 2", "'x'", "numbers"]),
        ("0 -1\n", ["train.txt, line 1", "'-1'"]),
        ("0 99999999999999999999\n", ["train.txt, line 1", "99999999999999999999"]),
        ("0\n1\n", ["train.txt", "no item"]),
    ],
)
def test_bad_files_name_their_line(tmp_path, train, words):
    with pytest.raises(DataError) as caught:
        open_source("gowalla", gowalla(tmp_path, train))
    for word in words:
        assert word in str(caught.value)
