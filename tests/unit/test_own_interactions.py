"""Interactions from files of any kind: columns, splits against a slow twin, leaks, and a run by the command line."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections import Counter
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade import ConfigError, DataError, Recommender
from colonnade.batch import Ids
from colonnade.cli import app
from colonnade.cli.record_files import read_records
from colonnade.data import (
    Position,
    SplitOptions,
    assign_parts,
    open_interactions,
    open_source,
    read_interactions,
)
from colonnade.data.interactions.columns import Entities, Interactions
from colonnade.data.interactions.samples import HeldOutItems
from colonnade.data.interactions.splits import PAST, TEST, TRAIN, VALIDATION
from colonnade.models.retriever import rank_by_popularity, rank_held_out


def lists_of(ids: Ids) -> list[list[int]]:
    return [ids.values[a:b].tolist() for a, b in pairwise(ids.offsets.tolist())]


def write_csv(path: Path, header: list[str], rows: list, delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows(([header] if header else []) + rows)
    return path


def read_twin(rows: list[tuple]) -> list[tuple]:
    """Read (user, item, time): user by user, in the order of times, each pair once."""
    known, result = set(), []
    for user, item, time in sorted(rows, key=lambda row: (row[0], row[2])):
        if (user, item) not in known:
            known.add((user, item))
            result.append((user, item, time))
    return result


ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(0, 20)), min_size=1, max_size=40
)


@settings(max_examples=examples(60, 300), deadline=None)
@given(rows=ROWS, form=st.integers(0, 6), text=st.booleans(), order=st.permutations(range(3)))
def test_files_of_any_form_are_read_alike(tmp_path_factory, rows, form, text, order):
    folder = tmp_path_factory.mktemp("rows")
    names = [
        ("user", "item", "timestamp"),
        ("userId", "movieId", "ts"),
        ("user_id", "asin", "date"),
    ]
    values = [
        (f"u {u}" if text else u * 2**59 - 2**62, f"i,{i}" if text else i - 3, 1_600_000_000 + t)
        for u, i, t in rows
    ]
    columns = [names[form % 3][c] for c in order]
    shuffled = [[row[c] for c in order] for row in values]
    if form == 0:
        source = write_csv(folder / "a.csv", columns, shuffled)
    elif form == 1:
        source = write_csv(folder / "a.tsv", columns, shuffled, "\t")
    elif form == 2:  # RecBole
        types = {"user_id": "token", "asin": "token", "date": "float"}
        header = [f"{name}:{types[name]}" for name in columns]
        source = write_csv(folder / "a.inter", header, shuffled, "\t")
    elif form == 3:
        table = pa.table({name: [row[i] for row in shuffled] for i, name in enumerate(columns)})
        pq.write_table(table, source := folder / "a.parquet")
    elif form == 4:
        source = pa.table({name: [row[i] for row in shuffled] for i, name in enumerate(columns)})
    elif form == 5:
        source = write_csv(folder / "a.csv", columns, shuffled, ";")
    else:  # no header, blanks or tabs, in the usual order
        source = write_csv(folder / "u.data", [], [list(row) for row in values], "\t")
    data, _, note = read_interactions({TRAIN: source})
    wanted = read_twin(values)
    got = list(
        zip(
            data.users.keys[data.user_n].tolist(),
            data.items.keys[data.item_n].tolist(),
            (data.time_n // 1_000_000).tolist(),
            strict=True,
        )
    )
    assert got == wanted and "time=" in note
    assert data.users.keys.tolist() == sorted({row[0] for row in wanted})


def make(rows, num_users=6, num_items=9) -> Interactions:
    rows = read_twin(rows)
    users, items, times = (np.array([row[c] for row in rows]) for c in range(3))
    return Interactions(
        Entities(np.arange(num_users)), Entities(np.arange(num_items)), users, items, times
    )


@settings(max_examples=examples(60, 300), deadline=None)
@given(rows=ROWS, share=st.sampled_from([0.1, 0.3, 0.5]))
def test_splits_are_those_of_a_slow_twin(rows, share):
    data = make(rows)
    users = data.user_n.tolist()
    for kind in ("leave_one_out", "time", "per_user", "rows", "users"):
        try:
            parts = assign_parts(data, SplitOptions(kind, share, share)).tolist()
        except ConfigError as error:
            assert "left to train on" in str(error)
            continue
        of_user = {u: [p for p, v in zip(parts, users, strict=True) if v == u] for u in set(users)}
        if kind == "leave_one_out":
            for got in of_user.values():
                wanted = [TRAIN] * len(got)
                wanted[-1:] = [TEST] if len(got) > 1 else [TRAIN]
                if len(got) > 2:
                    wanted[-2] = VALIDATION
                assert got == wanted
        elif kind == "time":
            by_age = [part for _, part in sorted(zip(data.time_n.tolist(), parts, strict=True))]
            assert by_age == sorted(parts)  # TRAIN < VALIDATION < TEST
            by_time: dict[int, set] = {}
            for part, time in zip(parts, data.time_n.tolist(), strict=True):
                by_time.setdefault(time, set()).add(part)
            assert all(len(one) == 1 for one in by_time.values())
        elif kind == "per_user":
            for got in of_user.values():
                tests = math.floor(len(got) * share + 1e-9)
                assert got.count(TEST) == tests
                assert got.count(VALIDATION) == math.floor((len(got) - tests) * share + 1e-9)
        elif kind == "rows":
            assert parts.count(TEST) == math.floor(len(parts) * share + 1e-9)
        else:
            for got in of_user.values():
                if TRAIN not in got:
                    held_out = math.ceil(len(got) * 0.2)
                    assert got[:-held_out] == [PAST] * (len(got) - held_out)
                    assert got[-1] in (VALIDATION, TEST)
                else:
                    assert set(got) == {TRAIN}
            assert sum(TEST in got for got in of_user.values()) == round(len(of_user) * share)


@settings(max_examples=examples(30, 200), deadline=None)
@given(rows=ROWS, samples=st.sampled_from(["pairs", "sequences"]))
def test_training_sees_nothing_that_comes_later(rows, samples):
    """Item 99 is in the test part only; each history is strictly earlier than its item."""
    rows = [*rows, (0, 7, 0), (0, 8, 1), (0, 99, 1000)]
    table = pa.table({n: [r[c] for r in rows] for c, n in enumerate(("user", "item", "time"))})
    splits = open_interactions(table, samples=samples, negatives=1)
    time_of = {(u, i): t for u, i, t in reversed(read_twin(rows))}
    users = splits.train.interactions.users["user"].values.tolist()
    for batch in splits.train.batches(7):
        if samples == "sequences":
            for user, history, target in zip(
                batch.group.tolist(),
                lists_of(batch.ids["history"]),
                lists_of(batch.ids["target"]),
                strict=True,
            ):
                assert 99 not in history + target
                for earlier, later in zip(history, target, strict=True):
                    assert time_of[users[user], earlier] <= time_of[users[user], later]
            continue
        for user, item, history in zip(
            batch.ids["user"].values.tolist(),
            batch.ids["item"].values.tolist(),
            lists_of(batch.ids["history"]),
            strict=True,
        ):
            assert item != 99
            wanted = [
                i
                for u, i, t in read_twin(rows)
                if u == user and t < time_of[user, item] and i != 99
            ]
            assert history == wanted
    (batch,) = splits.test.batches(100)
    test_users = batch.ids["user"].values.tolist() if samples == "pairs" else None
    position = splits.train.interactions.item_keys.tolist().index(99)
    assert [position] in lists_of(batch.key.truth)
    if test_users is not None:  # a query's history has the validation item, too
        own = [i for u, i, _ in read_twin(rows) if u == 0]
        assert lists_of(batch.ids["history"])[test_users.index(0)] == own[:-1]


def test_other_pairs_of_a_long_list_train_in_each_epoch():
    table = pa.table({"user": [0] * 30 + [1], "item": [*range(30), 5], "time": [*range(30), 3]})
    source = open_interactions(table, max_pairs=4).train
    assert source.num_samples == 5
    epochs = []
    for epoch in range(12):
        (batch,) = source.batches(100, start=Position(epoch))
        own = batch.ids["item"].values[batch.ids["user"].values == 0].tolist()
        assert len(set(own)) == 4
        epochs.append(own)
    assert len(set().union(*map(set, epochs))) > 15


def test_popularity_ranks_as_a_full_sort():
    generator = torch.Generator().manual_seed(0)
    for num_items in (1, 7, 30):
        counts = torch.randint(0, 4, (num_items,), generator=generator).float()
        order = counts.argsort(stable=True, descending=True)
        lists = [torch.randperm(num_items, generator=generator)[:n] for n in (0, 1, num_items)]
        offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
        bags = Ids(torch.cat(lists), offsets)
        for candidates in (None, bags):
            held_out = HeldOutItems(bags, bags, candidates)
            wanted = rank_held_out(torch.ones(3, 1), counts[:, None], held_out)
            assert torch.equal(rank_by_popularity(order, held_out), wanted)


def test_drawn_candidates_are_no_items_of_the_user():
    rows = [(u, (7 * u + k) % 20, k) for u in range(6) for k in range(5)]
    table = pa.table({n: [r[c] for r in rows] for c, n in enumerate(("user", "item", "time"))})
    splits = open_interactions(table, ranked_negatives=9)
    keys = splits.train.interactions.item_keys.tolist()
    (batch,) = splits.test.batches(100)
    for user, truth, candidates in zip(
        batch.group.tolist(),
        lists_of(batch.key.truth),
        lists_of(batch.key.candidates),
        strict=True,
    ):
        own = {keys.index((7 * user + k) % 20) for k in range(5)}
        assert candidates[:1] == truth and len(set(candidates)) == 10
        assert not own & set(candidates[1:])


def test_ids_of_two_types_in_two_files_are_texts(tmp_path):
    write_csv(tmp_path / "a.csv", ["user", "item"], [[1, 5], [2, 6]])
    write_csv(tmp_path / "b.csv", ["user", "item"], [["1", "x"], ["u", "5"]])
    data, _, _ = read_interactions({TRAIN: tmp_path})
    assert data.items.keys.tolist() == ["5", "6", "x"] and data.users.keys.tolist() == [
        "1",
        "2",
        "u",
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_lists_of_one_length_are_lists_beside_others(tmp_path, size):
    """A test file with equally many items a user has the rows of a table of ratings."""
    (tmp_path / "train.txt").write_text("0 1 2 3\n1 2\n")
    items = list(range(4, 4 + size))
    line = " ".join(map(str, items))
    (tmp_path / "test.txt").write_text(f"0 {line}\n1 {line}\n")
    split = open_interactions(tmp_path).train.interactions
    assert [split.item_keys[bag].tolist() for bag in lists_of(split.test)] == [items] * 2


def test_ids_without_a_row_in_the_files_about_them_are_counted(tmp_path):
    path = write_own(tmp_path)
    splits = open_interactions(path, users=tmp_path / "users.csv", items=tmp_path / "items.csv")
    items = len({item for _, item, _ in read_rows(path)})
    assert "; 21 of 24 users have no row in " in splits.notes[0]
    assert f"; {items - 5} of {items} items have no row in " in splits.notes[0]


def test_a_pair_of_both_parts_is_in_the_training_part(tmp_path):
    (tmp_path / "train.txt").write_text("0 1 2 3\n1 2\n\n")
    (tmp_path / "test.txt").write_text("0 3 4\n1 5\n")
    splits = open_interactions(tmp_path)
    keys = splits.train.interactions.item_keys
    test = lists_of(splits.train.interactions.test)
    assert [keys[items].tolist() for items in test] == [[4], [5]]
    assert "split files" in splits.notes[1]


def test_core_leaves_out_what_is_rare():
    rows = [(u, i) for u in range(4) for i in range(4)] + [(0, 9), (9, 0)]
    table = pa.table({"user": [r[0] for r in rows], "item": [r[1] for r in rows]})
    splits = open_interactions(table, core=2, split="rows")
    assert splits.train.interactions.user_keys.tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="core=9"):
        open_interactions(table, core=9)


USERS = [["u0", "12", "F"], ["u1", "40", "M"], ["u2", "33", ""], ["new", "21", "F"]]
ITEMS = [[0, "a|b", 1999], [1, "b", 2001], [2, "c|a", 1980], [3, "a", 1990], [7, "b|c", 2010]]


def write_own(folder: Path) -> Path:
    """Users who like items of their own parity, with files of users and items."""
    rng = random.Random(0)
    rows = [
        [f"u{u}", i, 1_600_000_000 + 60 * t]
        for u in range(24)
        for t, i in enumerate(rng.sample([i for i in range(24) if i % 2 == u % 2], 9))
    ]
    rng.shuffle(rows)
    write_csv(folder / "a.csv", ["user", "item", "timestamp"], rows)
    write_csv(folder / "users.csv", ["user", "age", "sex"], USERS)
    write_csv(folder / "items.csv", ["item", "genres", "year"], ITEMS)
    return folder / "a.csv"


@pytest.mark.parametrize("model", ["two_tower", "sasrec"])
def test_a_run_recommends_by_the_names_of_the_files(tmp_path, model, capsys):
    path, run = write_own(tmp_path), tmp_path / "run"
    files = ["--set", f"data.options.users={tmp_path}/users.csv", "--set",
             f"data.options.items={tmp_path}/items.csv"]  # fmt: skip
    command = ["train", "--data", "interactions", "--path", str(path), "--run", str(run)]
    options = ["--set", f"model.name={model}", "--set", "model.dim=8", "--set", "train.epochs=2"]
    assert app.run_command([*command, *files, *options]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "user=user, item=item, time=timestamp" in output and "by popularity" in output
    assert app.run_command(["evaluate", str(run)]) == 0
    output = capsys.readouterr().out
    assert "all items are ranked, except those that the user has in the training part" in output
    assert re.search(r"ndcg@10: 0\.\d{4}   by popularity 0\.\d{4}\n", output)
    with Recommender.open(run) as recommender:
        known, new = {"user": "u3"}, {"user": "nobody", "history": [2, 4]}
        if model == "two_tower":
            new |= {"age": 30, "sex": "M"}
        best = recommender.recommend([known, new], k=50)
        taken = {row[1] for row in read_rows(path) if row[0] == "u3"}
        assert not taken & {str(item) for item in best.items[0]}
        assert set(best.items[1]) == set(range(24)) - {2, 4}
        whole = {"user": "u3", "history": in_order(path, "u3")}
        if model == "two_tower":
            whole |= {"age": None, "sex": None}
        assert recommender.recommend([whole], k=50).items[0] == best.items[0]
        # An item that the model does not know says nothing, and an empty cell leaves a column out.
        unknown = {**new, "history": [2, 999, 4, 10**12]}
        for record, row in (
            (unknown, 1),
            ({**known, "history": None}, 0),
            ({**known, "history": ""}, 0),
        ):
            again = recommender.recommend([record], k=50)
            assert again.scores[0] == pytest.approx(best.scores[row], abs=1e-5)
        popular = recommender.recommend([{"user": "none"}], k=50)
    # Items of a file are those of the data by their ids, texts in CSV: with its users, what they took, and popularity.
    rows = {row["item"]: row for row in read_records(tmp_path / "items.csv")}
    rows = [rows.get(str(i), {"item": str(i), "genres": "", "year": ""}) for i in range(24)]
    with Recommender.open(run, items=rows) as recommender:
        assert asdict(recommender.recommend([known, new], k=50)) == asdict(best)
        assert asdict(recommender.recommend([{"user": "none"}], k=50)) == asdict(popular)
    with Recommender.open(run, items=[*rows[:9], {**rows[0], "item": "99"}]) as recommender:
        again = recommender.recommend([known, new], k=50).items
        assert [[i for i in items if i != 99] for items in again] == [
            [i for i in items if i < 9] for items in best.items
        ]
        assert recommender.recommend([{"user": "none"}], k=50).items[0][-1] == 99


@pytest.mark.parametrize("model", ["two_tower", "sasrec"])
def test_users_of_whom_nothing_is_known_get_the_most_popular_items(tmp_path, model, capsys):
    """Records have the names of the file. Unknown items of a history are no history; evaluation has the same rule."""
    rows = [[c, f"p{(c * k) % 7}", k] for c in range(10, 30) for k in range(5)]
    rows += [[9, f"p{k}", 100] for k in range(3)]  # users of the test alone have no history
    rows += [[8, "p5", 100]]
    path, run = write_csv(tmp_path / "a.csv", ["customer_id", "sku", "bought_at"], rows), "run"
    command = ["train", "--data", "interactions", "--path", str(path), "--run", str(tmp_path / run)]
    for setting in (f"model.name={model}", "model.dim=4", "train.epochs=1", "data.options.split=time",
                    "data.options.test_after=50", "data.options.validation_fraction=0"):  # fmt: skip
        command += ["--set", setting]
    assert app.run_command(command) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "0 validate, 4 test (from 100 on)" in output
    for value, popular in re.findall(r"test \S+@10: (\S+) by popularity (\S+)", output):
        assert value == popular
    new = [{"customer_id": 77}, {"history": []}, {"customer_id": "x", "history": ["p99"]}]
    (tmp_path / "users.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [*new, {"customer_id": 10}])
    )
    options = ["--users", tmp_path / "users.jsonl", "--output", tmp_path / "best.parquet"]
    assert app.run_command(["recommend", str(tmp_path / run), *map(str, options)]) == 0
    assert "unknown: 3 users, who get" in (text := capsys.readouterr().out) and "; 1 items" in text
    table = pq.read_table(tmp_path / "best.parquet")
    assert table["by_popularity"].to_pylist() == [True, True, True, False]
    counts = Counter(item for _, item, time in rows if time < 50)
    wanted = sorted(counts, key=lambda item: (-counts[item], item))
    assert table["items"].to_pylist()[:3] == [wanted] * 3
    with Recommender.open(tmp_path / run) as recommender:
        with pytest.raises(DataError, match=r"got a column 'user', .*'customer_id'"):
            recommender.recommend([{"user": 10}])


def read_rows(path: Path) -> list[list[str]]:
    with path.open() as file:
        return list(csv.reader(file))[1:]


def in_order(path: Path, user: str) -> list[int]:
    rows = sorted((int(time), int(item)) for name, item, time in read_rows(path) if name == user)
    return [item for _, item in rows]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([["a", 1, 5], ["b", 2, 5], ["c", 3, 5]], {"split": "time"}, "left to train on"),
        ([["a", 1, 5], ["", 2, 6]], {}, "column 'user', value 2: got nothing"),
        ([["a", 1, 5], ["b", 2, ""]], {}, "row 2: got no time"),
        ([["a", 1, 5], ["b", 2, "soon"]], {}, "got 'soon' as a time"),
        ([["a", 1, 5]], {"user": "person"}, "no column 'person'"),
        ([["a", 1, 5]], {"at_least": 4}, "no column named like ratings"),
        ([["a", 1, 5]], {"events": ["buy"]}, "no column named like events"),
        ([["a", 1, 5], ["b", 2, 6]], {"split": "time", "test_after": "noon"}, "as a cutoff"),
        ([["a", 1, 5], ["b", 2, 6]], {"test_after": 6}, "6 as a cutoff for split=leave_one_out, wanted split=time"),
        ([["a", 1, 5], ["b", 2, 6]], {"split": "time", "test_after": "2024-05-31"}, "wanted a number"),
        ([["a", 1, 1_700_000_000], ["b", 2, 1_700_000_009]], {"split": "time", "test_after": 1_700_000_005},
         "1700000005 as a cutoff, wanted a time such as"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(tmp_path, rows, options, message):
    path = write_csv(tmp_path / "a.csv", ["user", "item", "time"], rows)
    with pytest.raises((ConfigError, DataError), match=message):
        open_interactions(path, **options)


def test_a_user_described_twice_is_an_error(tmp_path):
    path = write_own(tmp_path)
    write_csv(tmp_path / "users.csv", ["user", "age"], [["u1", 3], ["u1", 4]])
    with pytest.raises(DataError, match="'u1' twice"):
        open_interactions(path, users=tmp_path / "users.csv")


def test_clicks_without_a_label_name_the_other_reader(tmp_path, capsys):
    path = write_own(tmp_path)
    command = ["train", "--data", "csv", "--path", str(path), "--run", str(tmp_path / "run")]
    assert app.run_command(command) != 0
    assert "--data interactions" in capsys.readouterr().err


def write_negatives(folder: Path, form: str) -> tuple[Path, Path, dict[int, list[int]]]:
    """Write training and test files and a file of negatives; return the negatives of each user, too."""
    rng = random.Random(2)
    train, test, lines, wanted = [], [], [], {}
    for user in range(1, 13):
        own = rng.sample(range(30), 6)
        wanted[user] = rng.sample([i for i in range(30) if i not in own], 5)
        train += [[user, item, 5, 1_600_000_000 + t] for t, item in enumerate(own[:-1])]
        test.append([user, own[-1], 5, 1_700_000_000])
        head = f"({user},{own[-1]})\t" if form == "ncf" else f"{user} {own[-1]} "
        # One that the user has, and one that the data does not have.
        lines.append(head + "\t".join(map(str, [*wanted[user], own[0], 999])))
    train += [[0, item, 5, 1_600_000_000] for item in range(30)]
    write_csv(folder / "a.train.rating", [], train, "\t")
    write_csv(folder / "a.test.rating", [], test, "\t")
    (folder / "a.test.negative").write_text("\n".join(lines) + "\n")
    return folder / "a.train.rating", folder / "a.test.rating", wanted


@pytest.mark.parametrize("form", ["ncf", "plain"])
def test_negatives_of_a_file_are_ranked_alone(tmp_path, form):
    train, test, wanted = write_negatives(tmp_path, form)
    file = tmp_path / "a.test.negative"
    splits = open_interactions(train, test=test, ranked_negatives=str(file))
    split = splits.train.interactions
    assert "24 left out" in splits.notes[2] and splits.validation.negatives is None
    (batch,) = splits.test.batches(100)
    for user, truth, candidates in zip(
        batch.group.tolist(),
        lists_of(batch.key.truth),
        lists_of(batch.key.candidates),
        strict=True,
    ):
        negatives = split.item_keys[candidates[1:]].tolist()
        assert candidates[:1] == truth and negatives == wanted[split.user_keys[user]]
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(DataError, match="no line of the user 1 and its held-out item"):
        open_interactions(train, test=test, ranked_negatives=file)
    with pytest.raises(ConfigError, match="wanted the number of drawn items"):
        open_interactions(train, test=test, ranked_negatives=0)
    file.write_text("(1,2)\t3\tx\n")
    with pytest.raises(DataError, match=r"line 1.*'x'"):
        open_interactions(train, test=test, ranked_negatives=file)


def test_a_run_is_evaluated_by_several_protocols(tmp_path, capsys, monkeypatch):
    """Stopping and the best step follow the metric of the drawn negatives; another protocol changes no file."""
    monkeypatch.chdir(tmp_path)
    write_negatives(tmp_path, "ncf")
    options = {"test": "a.test.rating", "ranked_negatives": 4}
    settings = {"model.dim": 4, "train.epochs": 9, "train.patience": 2, "train.monitor": "mrr@10"}
    settings |= {f"data.options.{name}": value for name, value in options.items()}
    command = ["train", "--data", "interactions", "--path", "a.train.rating", "--run", "run"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    assert app.run_command(command) == 0
    assert "best of validation mrr@10" in capsys.readouterr().out
    outputs = {}
    for negatives in (None, "all", "4", "a.test.negative"):
        more = [] if negatives is None else ["--ranked-negatives", negatives]
        assert app.run_command(["evaluate", "run", "--at", "best", *more]) == 0
        outputs[negatives] = " ".join(capsys.readouterr().out.split())
    assert outputs[None] == outputs["4"] and "among 4 drawn items" in outputs["4"]
    assert "fewer" not in outputs["4"]
    assert app.run_command(["evaluate", "run", "--ranked-negatives", "500"]) == 0
    assert "or all of these where there are fewer: 24 at least" in " ".join(
        capsys.readouterr().out.split()
    )
    assert "negatives of a.test.negative, at most 5 of a user" in outputs["a.test.negative"]
    assert "all items are ranked" in outputs["all"]
    hits = [re.search(r"hit rate@10: (\S+)", outputs[name])[1] for name in ("all", "4")]
    assert float(hits[0]) < float(hits[1]) == 1.0  # of five items, all are among the first ten
    assert app.run_command(["evaluate", "run", "--ranked-negatives", "none.txt"]) != 0
    assert "no such file" in capsys.readouterr().err
    assert app.run_command([*command, "--set", "train.monitor=hits@3", "--run", "other"]) != 0
    assert "wanted a metric of the validation part" in capsys.readouterr().err


def test_training_items_of_a_user_are_no_negatives():
    """Later items of a user, too, which are not in its history."""
    rows = [(u, (3 * u + k) % 11, k) for u in range(5) for k in range(6)]
    table = pa.table({n: [r[c] for r in rows] for c, n in enumerate(("user", "item", "time"))})
    source = open_interactions(table, max_history=2).train
    lists = lists_of(source.interactions.train)
    for batch in source.batches(7):
        assert lists_of(batch.key.excluded) == [lists[user] for user in batch.group.tolist()]
        keys = source.interactions.item_keys
        assert keys[batch.key.truth.values].tolist() == batch.ids["item"].values.tolist()


def test_interactions_of_odd_shapes(tmp_path):
    """One interaction a user, equal times, times that go back, repeats, users and items of the test alone."""
    one = open_interactions(pa.table({"user": [1, 2, 3], "item": [1, 2, 3], "time": [5, 5, 5]}))
    assert one.train.num_samples == 3 and one.test.num_samples == one.validation.num_samples == 0
    equal = pa.table({"user": [1] * 4, "item": [4, 3, 2, 1], "time": [7] * 4})
    (batch,) = open_interactions(equal).train.batches(10)
    assert batch.ids["history"].values.tolist() == []  # no item is earlier than another
    reverse = pa.table({"user": [1, 1, 1, 1, 1], "item": [9, 8, 7, 7, 6], "time": [5, 4, 3, 1, 2]})
    split = open_interactions(reverse).train.interactions
    keys = split.item_keys
    parts = [
        keys[part.values.numpy()].tolist() for part in (split.train, split.validation, split.test)
    ]
    assert parts == [[7, 6], [8], [9]]
    write_csv(tmp_path / "train.csv", ["user", "item"], [["a", "x"], ["a", "y"], ["b", "x"]])
    write_csv(tmp_path / "test.csv", ["user", "item"], [["a", "new"], ["stranger", "x"]])
    splits = open_interactions(tmp_path)
    split = splits.train.interactions
    trained = set(split.item_keys[split.train.values.numpy()].tolist())
    assert trained == {"x", "y"} and split.user_keys.tolist() == ["a", "b", "stranger"]
    (batch,) = splits.test.batches(10)
    assert [split.item_keys[items].tolist() for items in lists_of(batch.key.truth)] == [
        ["new"],
        ["x"],
    ]
    assert lists_of(batch.ids["history"])[1] == []


@settings(max_examples=examples(40, 200), deadline=None)
@given(rows=ROWS, split=st.sampled_from(["leave_one_out", "time", "per_user", "rows", "users"]))
def test_items_of_the_test_alone_are_never_trained(rows, split):
    """Whatever the split: no sample of training has a pair of a held-out part."""
    table = pa.table({n: [r[c] for r in rows] for c, n in enumerate(("user", "item", "time"))})
    for samples in ("pairs", "sequences"):
        try:
            splits = open_interactions(table, split=split, samples=samples, negatives=1)
        except ConfigError as error:
            assert re.search("left to train on|split=per_user: got no", str(error))
            continue
        split_of = splits.train.interactions
        trained = [set(items) for items in lists_of(split_of.train)]
        ids = split_of.items["item"].values
        for batch in splits.train.batches(5):
            for name in ("item", "history", "target"):
                if name in batch.ids:
                    bags = batch.ids[name]
                    for sample, item in zip(
                        bags.samples.tolist(), bags.values.tolist(), strict=True
                    ):
                        position = int((ids == item).nonzero())
                        assert position in trained[int(batch.group[sample])]


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [("split", "leave-one-out", "leave_one_out"), ("order", "tme", "time"), ("samples", "sequence", "sequences")],
)  # fmt: skip
def test_values_of_options_are_checked(option, value, hint, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("user,item\n" + "".join(f"1,{item}\n" for item in range(20)))
    for call in (partial(open_source, "interactions"), open_interactions):
        with pytest.raises(ConfigError, match=rf"{option}: got '{value}'.*Did you mean '{hint}'"):
            call(path, **{option: value})


def test_shares_of_a_split_without_any_are_refused(tmp_path):
    table = pa.table({"user": [1, 1, 1], "item": [1, 2, 3], "time": [1.0, 2.0, 3.0]})
    for share in ("test_fraction", "validation_fraction"):
        with pytest.raises(
            ConfigError, match=rf"{share}=0\.5 for split=leave_one_out, wanted none"
        ):
            open_interactions(table, **{share: 0.5})
    assert open_interactions(table, split="time", test_fraction=0.3).test.num_samples == 1


@pytest.mark.parametrize(("num_items", "name"), [(4, "test"), (9, "validation"), (12, None)])
def test_shares_that_are_no_interaction_of_any_user_are_refused(num_items, name):
    pairs = [(u, i) for u in range(3) for i in range(num_items)]
    table = pa.table({"user": [u for u, _ in pairs], "item": [i for _, i in pairs]})
    if name is None:
        notes = open_interactions(table).notes
        assert notes[1].endswith("3 validate, 6 test; of 3 users 3 validate, 3 test")
        return
    with pytest.raises(
        ConfigError, match=f"no interaction for {name}, .*more than {num_items}, .*{name}_fraction"
    ):
        open_interactions(table)
    shares = {"test_fraction": 0.5, "validation_fraction": 0}
    assert open_interactions(table, **shares).notes[1].endswith("of 3 users 0 validate, 3 test")


def test_times_are_recognised_by_a_last_word_and_other_columns_are_listed(tmp_path):
    path = tmp_path / "a.csv"
    rows = [f"u{i % 5},{i % 7},{1_700_000_000 - i},x" for i in range(60)]
    path.write_text("\n".join(["member,Title Id,watched_at,device", *rows]) + "\n")
    splits = open_source("interactions", path, item="Title Id")
    assert "time=watched_at; not read: device" in splits.notes[0]
    assert "split leave_one_out" in splits.notes[1]
