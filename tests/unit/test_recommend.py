"""Recommendations are numpy's full sort of the scores, of one checkpoint each."""

from __future__ import annotations

import csv
import json
import math
import random
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade import DataError, Mesh, Predictor, Recommender
from colonnade.batch import Batch, Ids
from colonnade.checkpoint.header import list_checkpoints
from colonnade.config.run import build_config, override_settings
from colonnade.data import open_source
from colonnade.errors import ConfigError
from colonnade.models import retriever
from colonnade.models.retriever import rank_items, recall_and_ndcg, to_column_major
from colonnade.run import run as run_module
from colonnade.run.run import load_run_config, open_run

NUM_USERS, NUM_ITEMS = 40, 30
COMMON = {
    "train": {"batch_size": 32, "epochs": 2},
    "embedding": {"optimizer": "adagrad", "lr": 0.1, "init_scale": 0.1},
}
TWO_TOWER = {"name": "two_tower", "dim": 8, "temperature": 0.2}
SASREC = {"name": "sasrec", "dim": 8, "blocks": 1, "max_length": 6, "temperature": 0.2}


def bags(lists) -> Ids:
    offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
    return Ids(torch.tensor([i for one in lists for i in one], dtype=torch.int64), offsets)


@settings(max_examples=examples(60, 500), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(0, 4), st.integers(1, 40)),
    k=st.integers(1, 45),
    block=st.integers(1, 41),
    tile=st.integers(1, 6),
    levels=st.integers(1, 4),  # few levels: many ties
)
def test_blocks_of_items_rank_as_a_full_sort(seed, shape, k, block, tile, levels):
    num_queries, num_items = shape
    generator = torch.Generator().manual_seed(seed)
    # Whole numbers: any order of adding products is exact.
    queries = torch.randint(0, levels, (num_queries, 3), generator=generator).float()
    items = torch.randint(0, levels, (num_items, 3), generator=generator).float()
    rng = random.Random(seed)
    masked = [
        rng.sample(range(num_items), rng.randrange(num_items + 1)) for _ in range(num_queries)
    ]
    with mock.patch.object(retriever, "TILE", tile):
        top, scores = rank_items(queries, items, bags(masked), k, block)
    assert top.shape == scores.shape == (num_queries, min(k, num_items))
    for q in range(num_queries):
        wanted = (items.numpy() @ queries[q].numpy()).astype(np.float64)
        wanted[masked[q]] = -math.inf
        order = np.lexsort((np.arange(num_items), -wanted))[:k]
        assert scores[q].tolist() == wanted[order].tolist()
        assert top[q].tolist() == [i if wanted[i] > -math.inf else -1 for i in order.tolist()]


def write_interactions(folder: Path) -> Path:
    """Users who like items of their own parity, most of all the small ones."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    for name, count in (("train", 8), ("valid", 3)):
        lines = []
        for user in range(NUM_USERS):
            items = {2 * int(15 * rng.random() ** 2) + user % 2 for _ in range(count)}
            lines.append(f"{user} " + " ".join(map(str, sorted(items))))
        (folder / f"{name}.txt").write_text("\n".join([*lines, ""]))
    return folder


def train(place: Path, data: Path, model: dict, options: dict, changes: dict | None = None):
    config = build_config(
        {
            **COMMON,
            "data": {"name": "gowalla", "path": str(data), "options": options},
            "model": model,
        }
    )
    run = open_run(override_settings(config, changes or {}), Mesh(), place)
    result = run.train()
    run.close()
    return result


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_interactions(tmp_path_factory.mktemp("data") / "gowalla")


@pytest.fixture(scope="module")
def towers(data, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("towers") / "run"
    train(place, data, TWO_TOWER, {})
    return place


def full_sort(predictor: Predictor, user: dict, masked: set[int], k: int) -> tuple[list, list]:
    """The slow twin: all scores, sorted by numpy."""
    model, schema = predictor.model, predictor.schema
    catalogue = open_source(
        "gowalla", predictor.config.data.path, **predictor.config.data.options
    ).test.catalogue
    with torch.inference_mode():
        ids = {"history": bags([user["history"]])}
        if "user" in user and schema.categorical[0].name == "user":
            ids["user"] = Ids(torch.tensor([user["user"]]))
        query = model.queries(Batch(1, torch.zeros(1, len(schema.dense)), ids))
        items = to_column_major(model.items(catalogue.gather_rows(torch.arange(NUM_ITEMS))))
        scores = (query @ items.T)[0].numpy().copy()
    scores[list(masked)] = -np.inf
    order = np.lexsort((np.arange(len(scores)), -scores))[:k]
    order = order[scores[order] > -np.inf]
    return order.tolist(), scores[order].tolist()


USER = {"user": 3, "history": [1, 5, 7]}


def taken_by(data: Path, user: int) -> set[int]:
    files = [(data / name).read_text().splitlines() for name in ("train.txt", "valid.txt")]
    return {int(item) for lines in files for item in lines[user].split()[1:]}


def test_best_items_are_a_full_sort_without_those_taken(towers, data):
    with Recommender.open(towers) as recommender, Predictor.open(towers) as predictor:
        taken = taken_by(data, 3)
        for k in (1, 10, 500):
            best = recommender.recommend([USER], k)
            assert (best.items[0], best.scores[0]) == full_sort(
                predictor, USER, taken | {1, 5, 7}, k
            )
            assert best.step == predictor.step == recommender.step
            every = recommender.recommend([USER], k, exclude_seen=False)
            assert (every.items[0], every.scores[0]) == full_sort(predictor, USER, set(), k)
        assert len(every.items[0]) == NUM_ITEMS
        best = recommender.recommend(
            [USER], 5, exclude=[[0, 2, 4, 999, -(2**80)]], exclude_seen=False
        )
        assert (best.items[0], best.scores[0]) == full_sort(predictor, USER, {0, 2, 4}, 5)
        # A user whom the training data does not have is known by its own columns alone.
        subset = [USER, {"user": 0, "history": []}, {"user": 3, "history": None}]
        together = recommender.recommend(subset, 7, exclude=[[0], [], [2]])
        assert [len(items) for items in together.items] == [7, 7, 7]
        assert not taken_by(data, 0) & {*together.items[1]}
        assert recommender.recommend(subset, 7, exclude=[[0], [], [2]]) is not together
        assert recommender.recommend(subset, 7, exclude=[[0], [], [2]]).items == together.items


def test_recommendations_have_the_recall_of_evaluation(data, tmp_path):
    for name, model, options in (
        ("two_tower", TWO_TOWER, {}),
        ("sasrec", SASREC, {"samples": "sequences", "max_history": 6}),
        (
            "graphsage",
            {"name": "graphsage", "dim": 8},
            {"samples": "neighbours", "fan_outs": [3, 2]},
        ),
    ):
        place = tmp_path / name
        train(place, data, model, options)
        run = open_run(load_run_config(place), Mesh(), place, read_only=True)
        wanted = run.trainer.evaluate(run.trainer.data.test)
        test = run.trainer.data.test
        run.close()
        with Recommender.open(place, at="last") as recommender:
            values = []
            for batch in test.batches(16):
                best = recommender.recommend_batch(batch, 20, batch.key.excluded)
                top = torch.tensor([items + [-1] * (20 - len(items)) for items in best.items])
                values.append(recall_and_ndcg(top, batch.key.truth, 20)[0])
        assert float(torch.cat(values).mean()) == pytest.approx(wanted["recall@20"], rel=1e-12)


def test_sequences_exclude_their_history_and_the_users_items(data, tmp_path):
    train(tmp_path / "run", data, SASREC, {"samples": "sequences", "max_history": 6})
    with (
        Recommender.open(tmp_path / "run") as recommender,
        Predictor.open(tmp_path / "run") as predictor,
    ):
        assert recommender.encoder.columns == ("history",)
        best = recommender.recommend([{"history": [4, 8]}], 6)
        assert (best.items[0], best.scores[0]) == full_sort(
            predictor, {"history": [4, 8]}, {4, 8}, 6
        )
        best = recommender.recommend([{"history": [4, 8], "user": "11"}], 6)
        masked = {4, 8} | taken_by(data, 11)
        assert (best.items[0], best.scores[0]) == full_sort(
            predictor, {"history": [4, 8]}, masked, 6
        )


def test_a_publication_is_followed_checkpoint_by_checkpoint(data, tmp_path):
    published, place = tmp_path / "published", tmp_path / "run"
    changes = {
        "train.publish": str(published),
        "train.checkpoint_steps": 3,
        "train.keep_checkpoints": 50,
    }
    train(place, data, TWO_TOWER, {}, {**changes, "train.epochs": 1})
    with Recommender.open(published) as recommender:
        first = recommender.step
        assert not recommender.refresh()
        for epochs in (2, 3):
            before = recommender.recommend([USER], 10)
            train(place, data, TWO_TOWER, {}, {**changes, "train.epochs": epochs})
            same = recommender.recommend([USER], 10)
            assert (same.items, same.scores, same.step) == (
                before.items,
                before.scores,
                before.step,
            )
            assert recommender.refresh() and recommender.step > before.step
            assert not recommender.refresh()
            now = recommender.recommend([USER], 10)
            with Predictor.open(published) as predictor:
                assert now.step == predictor.step
                wanted = full_sort(predictor, USER, taken_by(data, 3) | {1, 5, 7}, 10)
                assert (now.items[0], now.scores[0]) == wanted
        assert recommender.step > first and recommender.step == max(list_checkpoints(place))


def test_each_answer_is_of_one_checkpoint_while_others_are_loaded(data, tmp_path):
    published, place = tmp_path / "published", tmp_path / "run"
    changes = {
        "train.publish": str(published),
        "train.checkpoint_steps": 2,
        "train.keep_checkpoints": 50,
    }
    train(place, data, TWO_TOWER, {}, {**changes, "train.epochs": 1})
    answers: dict[int, set[str]] = {}
    with Recommender.open(published) as recommender:
        recommender.follow(seconds=0.01)
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                best = recommender.recommend([USER], 10)
                answers.setdefault(best.step, set()).add(repr((best.items, best.scores)))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        train(place, data, TWO_TOWER, {}, {**changes, "train.epochs": 4})
        newest = max(list_checkpoints(place))
        deadline = threading.Event()
        for _ in range(500):
            if recommender.step == newest:
                break
            deadline.wait(0.02)
        stop.set()
        for thread in threads:
            thread.join()
        assert recommender.problem is None and recommender.num_failures == 0
        assert recommender.step == newest and len(answers) >= 2
    assert {len(texts) for texts in answers.values()} == {1}


WORDS = [f"film {n:02}" for n in range(12)]


@pytest.fixture(scope="module")
def films(tmp_path_factory) -> Path:
    """A run of two towers on a CSV file, whose ids of items are texts."""
    place = tmp_path_factory.mktemp("films")
    rng = random.Random(1)
    lines = ["customer,film,kind,watched"]
    for _ in range(400):
        customer, film = rng.randrange(20), rng.randrange(12)
        watched = "|".join(rng.sample(WORDS, 2))
        lines.append(f"c{customer},{WORDS[film]},{film % 3},{watched}")
    (place / "views.csv").write_text("\n".join([*lines, ""]))
    schema = {"fields": {
        "customer": {"type": "category"}, "film": {"type": "category"}, "kind": {"type": "category", "cardinality": 3},
        "watched": {"type": "bag", "table": "film"},
    }}  # fmt: skip
    config = build_config({
        **COMMON, "data": {"name": "csv", "path": str(place / "views.csv"), "options": {"schema": schema}},
        "model": {**TWO_TOWER, "item_columns": ["film", "kind"]},
    })  # fmt: skip
    run = open_run(config, Mesh(), place / "run")
    run.train()
    run.close()
    return place


FILMS = [{"film": word, "kind": n % 3} for n, word in enumerate(WORDS)]


def test_records_of_items_are_a_catalogue(films):
    shuffled = random.Random(2).sample(FILMS, len(FILMS))
    user = {"customer": "c3", "watched": ["film 04", "film 07"]}
    with (
        Recommender.open(films / "run", items=FILMS) as recommender,
        Recommender.open(films / "run", items=shuffled) as other,
    ):
        best = recommender.recommend([user], 12)
        assert {*best.items[0]} == {*WORDS} - {"film 04", "film 07"}
        assert best.scores[0] == sorted(best.scores[0], reverse=True)
        assert other.recommend([user], 12).items == best.items
        fewer = recommender.recommend([user], 3, exclude=[[best.items[0][0], "film 99"]])
        assert fewer.items[0] == best.items[0][1:4]
        assert len(recommender.recommend([user], 12, exclude_seen=False).items[0]) == 12
    with Recommender.open(films / "run", items=FILMS[:3]) as recommender:
        assert len(recommender.recommend([user], 12).items[0]) == 3


def test_catalogues_that_cannot_be_are_refused(films, towers, tmp_path):
    for items, error, message in (
        (None, ConfigError, "the csv reader has no catalogue of items, wanted .*--items FILE"),
        ([*FILMS, FILMS[0]], DataError, "record 12, column film: got 'film 00', which record 0 has, wanted each"),
        ([*FILMS, {"kind": 1}], DataError, "record 12: got no column .film., which the model reads"),
        ([*FILMS, {"film": 3, "kind": 1}], DataError, "record 12, column film: got 3, wanted the id of an item: all"),
        ([{"film": "a", "kind": 7}], DataError, "record 0, column kind: got 7, wanted an id 0 .. 2"),
        ([], DataError, "got no record, wanted at least one"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            Recommender.open(films / "run", items=items)


@pytest.mark.parametrize(
    ("users", "settings", "message"),
    [
        ([], {}, "got no record"),
        ([{"histori": [1]}], {}, "record 0: got a column 'histori', .*did you mean 'history'"),
        (
            [{"user": 3, "history": ["a"]}],
            {},
            "record 0, column history: got 'a', wanted an integer",
        ),
        ([{"user": "x"}], {}, "record 0, column user: got 'x', wanted"),
        ([{"user": True}], {}, "record 0, column user: got true, wanted"),
        ([{"user": 3, "history": [True]}], {}, "record 0, column history: got true, wanted a list"),
        ([USER], {"k": 0}, "got k=0, wanted 1 to 10,000 items"),
        ([USER], {"k": 10**9}, "got k=1000000000, wanted 1 to 10,000 items"),
        ([USER], {"k": True}, "got k=true"),
        (
            [USER],
            {"exclude": [1, 2]},
            "exclude: got a list of 2 values, wanted a list of ids for each of 1 users",
        ),
        ([USER], {"exclude": [["a"]]}, "user 0, exclude: got 'a', wanted an integer"),
        ([USER], {"exclude": [[True]]}, "user 0, exclude: got true, wanted an integer"),
    ],
)
def test_users_that_cannot_be_are_refused(towers, users, settings, message):
    with Recommender.open(towers) as recommender, pytest.raises(DataError, match=message):
        recommender.recommend(users, **settings)


def test_a_model_of_scores_recommends_nothing(tmp_path):
    config = build_config(
        {**COMMON, "data": {"name": "synthetic", "options": {"num_train": 500, "num_test": 100}}}
    )
    run = open_run(
        override_settings(config, {"train.epochs": 1, "train.batch_size": 128}),
        Mesh(),
        tmp_path / "run",
    )
    run.train()
    run.close()
    with pytest.raises(
        ConfigError, match=r"wanted a retrieval model .*`Predictor` or `colonnade predict`"
    ):
        Recommender.open(tmp_path / "run")


def test_a_run_of_a_version_that_numbered_ids_otherwise_says_so(data, tmp_path, colonnade):
    with mock.patch.object(run_module, "build_portable_options", lambda options, _: options):
        train(tmp_path / "run", data, TWO_TOWER, {})
    status, _, text = colonnade("evaluate", str(tmp_path / "run"))
    assert status == 2 and "has no data.options.schema, which runs on gowalla record" in text


def test_the_command_writes_lists_in_the_order_of_the_users(towers, films, colonnade, tmp_path):
    users = [{"user": n % NUM_USERS, "history": [n % NUM_ITEMS]} for n in range(70)]
    pq.write_table(pa.Table.from_pylist(users), tmp_path / "users.parquet")
    (tmp_path / "users.jsonl").write_text("".join(json.dumps(user) + "\n" for user in users))
    (tmp_path / "users.csv").write_text(
        "user,history\n" + "".join(f"{u['user']},{u['history'][0]}\n" for u in users)
    )
    with Recommender.open(towers) as recommender:
        wanted = [recommender.recommend(users[at : at + 32], 4) for at in range(0, 70, 32)]
    items = [one for best in wanted for one in best.items]
    scores = [one for best in wanted for one in best.scores]
    for ending in ("parquet", "jsonl", "csv"):
        path = tmp_path / f"{ending}.parquet"
        status, text, _ = colonnade(
            "recommend", str(towers), "--users", str(tmp_path / f"users.{ending}"), "--k", "4", "--batch-size", "32",
            "--output", str(path), "--key", "user",
        )  # fmt: skip
        assert status == 0 and "70 users, 30 items ranked" in text, text
        table = pq.read_table(path)
        assert table.column_names == ["key", "items", "scores", "by_popularity"]
        assert [str(key) for key in table["key"].to_pylist()] == [str(u["user"]) for u in users]
        assert table["items"].to_pylist() == items and table["scores"].to_pylist() == scores
    for ending, delimiter in (("csv", ","), ("tsv", "\t")):
        path = tmp_path / f"best.{ending}"
        command = [
            "recommend",
            towers,
            "--users",
            tmp_path / "users.csv",
            "--k",
            "4",
            "--batch-size",
            "32",
        ]
        assert colonnade(*command, "--output", path)[0] == 0
        rows = list(csv.DictReader(path.open(newline=""), delimiter=delimiter))
        assert [[int(item) for item in row["items"].split("|")] for row in rows] == items
        assert [[float(x) for x in row["scores"].split("|")] for row in rows] == scores
    assert (
        "wanted a name that ends in .parquet, .csv, .tsv"
        in colonnade(*command, "--output", "b.txt")[2]
    )
    (tmp_path / "films.jsonl").write_text("".join(json.dumps(film) + "\n" for film in FILMS))
    (tmp_path / "them.csv").write_text("name,customer,watched\nAnn,c1,film 01|film 02\n")
    status, text, _ = colonnade(
        "recommend", films / "run", "--users", tmp_path / "them.csv", "--items", tmp_path / "films.jsonl",
        "--output", str(tmp_path / "out.parquet"), "--key", "name",
    )  # fmt: skip
    assert status == 0 and "users are known by their records alone" in text, text
    assert pq.read_table(tmp_path / "out.parquet")["key"].to_pylist() == ["Ann"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("users.xlsx", "", "wanted a name that ends in .csv, "),
        ("users.jsonl", "{", "line 1: got no JSON"),
        ("users.jsonl", "[1]\n", "line 1: got list, wanted an object on each line"),
        ("users.csv", "user,historie\n1,2\n", "got a column 'historie'"),
        ("absent.csv", None, "absent.csv"),
    ],
)
def test_files_of_users_that_cannot_be_are_refused(
    towers, colonnade, tmp_path, name, text, message
):
    if text is not None:
        (tmp_path / name).write_text(text)
    output = tmp_path / "out.parquet"
    status, _, error = colonnade(
        "recommend", str(towers), "--users", str(tmp_path / name), "--output", str(output)
    )
    assert status == 2 and message in error and not output.exists()
