"""Files of triples and edges with names: drawn files against a plain twin, parts, leaks, errors, and a run by CLI."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import colonnade
from colonnade import Recommender
from colonnade.cli import app
from colonnade.config.run import override_settings
from colonnade.data import open_source
from colonnade.errors import ConfigError, DataError
from colonnade.run.defaults import get_preset, open_data
from colonnade.run.run import load_run_config

HEADERS = (
    None,
    "head relation tail",
    "subject predicate object",
    "h r t",
    "Source Relation Target",
    "head_id relationId tail-id",
)
ORDERS = ([0, 1, 2], [0, 2, 1], [2, 1, 0], [1, 2, 0])


def write_triples(folder, name, triples, *, separator="\t", header=None, order=(0, 1, 2)):
    """Write triples with their columns in an order. Returns the path."""
    rows = ([header.split()] if header else []) + [list(map(str, triple)) for triple in triples]
    path = folder / name
    path.write_text("".join(separator.join(row[c] for c in order) + "\n" for row in rows))
    return path


def read_names(data, part):
    """Triples of a part, in names."""
    entities, relations = (
        json.loads(data.options[f"{kind}_names"]) for kind in ("entity", "relation")
    )
    rows = getattr(data, part).triples.tolist()
    return [(entities[h], relations[r], entities[t]) for h, r, t in rows]


def draw_triples(seed, size, names):
    rng = random.Random(seed)
    return [(rng.choice(names), f"r{rng.randrange(3)}", rng.choice(names)) for _ in range(size)]


KINDS = {
    "text": ["Zürich", "a", "B-1", "NA", "null", "007", "7", "x:y", "ä"],
    "integer": [0, 5, 17, 2**63 - 1, -3, 10, 9],
}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 40),
    kind=st.sampled_from(sorted(KINDS)),
    ending=st.sampled_from(
        [
            ("t.csv", ","),
            ("t.csv", ";"),
            ("t.tsv", "\t"),
            ("t.txt", " "),
            ("t.txt", "\t"),
            ("t.txt", "|"),
            ("t.data", ","),
        ]
    ),
    header=st.sampled_from(HEADERS),
    order=st.sampled_from(ORDERS),
)
def test_any_file_has_the_triples_of_a_plain_reader(
    tmp_path_factory, seed, size, kind, ending, header, order
):
    triples = draw_triples(seed, size, KINDS[kind])
    folder = tmp_path_factory.mktemp("triples")
    path = write_triples(
        folder, ending[0], triples, separator=ending[1], header=header, order=order
    )
    names = ("head", "relation", "tail")
    options = {} if header or order == [0, 1, 2] else {"columns": [names[c] for c in order]}
    data = open_source(
        "triples", path, validation_fraction=0.2, test_fraction=0.2, split_seed=seed, **options
    )
    parts = {part: read_names(data, part) for part in ("train", "validation", "test")}
    assert Counter(chain(*parts.values())) == dict.fromkeys(triples, 1)
    trained = {name for triple in parts["train"] for name in triple}
    assert trained == {name for triple in triples for name in triple}  # nothing is unseen
    assert [t for t in dict.fromkeys(triples) if t in set(parts["train"])] == parts["train"]
    entities = json.loads(data.options["entity_names"])
    assert entities == sorted({e for h, _, t in triples for e in (h, t)}, key=sort_key)
    again = open_source(
        "triples",
        path,
        validation_fraction=0.2,
        test_fraction=0.2,
        split_seed=seed,
        **options,
        **data.options,
    )
    assert again.options == data.options
    for part in parts:
        assert getattr(again, part).triples.equal(getattr(data, part).triples)


def sort_key(name):
    return name.encode() if isinstance(name, str) else name


def test_parquet_and_names_of_columns(tmp_path):
    table = pa.table({"to": [3, 1], "when": [0.5, 1.5], "from": [1, 2], "link": ["a", "b"]})
    pq.write_table(table, tmp_path / "t.parquet")
    data = open_source("triples", tmp_path / "t.parquet", columns=["from", "link", "to"])
    assert read_names(data, "train") == [(1, "a", 3), (2, "b", 1)]
    roles = ["tail", "other", "head", "relation"]
    assert read_names(
        open_source("triples", tmp_path / "t.parquet", columns=roles), "train"
    ) == read_names(data, "train")
    assert data.notes[0] == "t.parquet: head from from, relation from link, tail from to"


PARTS = {
    "train": [("a", "r", "b"), ("a", "r", "b"), ("b", "r", "c"), ("c", "s", "c"), ("b", "s", "a")],
    "dev": [("b", "r", "a"), ("a", "s", "c")],
    "test": [
        ("b", "s", "a"),
        ("a", "s", "c"),
        ("a", "new", "b"),
        ("zoe", "r", "a"),
        ("c", "r", "a"),
    ],
}


def test_leaks_repeats_and_unknown_names_of_given_parts(tmp_path):
    for part, triples in PARTS.items():
        write_triples(tmp_path, f"{part}.txt", triples)
    (tmp_path / "README.md").write_text("no data")
    data = open_source("triples", tmp_path)
    assert read_names(data, "train") == [("a", "r", "b"), ("b", "r", "c"), ("c", "s", "c")]
    assert read_names(data, "validation") == [("b", "r", "a")]
    assert read_names(data, "test") == [("b", "s", "a"), ("a", "s", "c"), ("c", "r", "a")]
    notes = "\n".join(data.notes)
    assert (
        "warning: 1 train triples are in validation or test too (a leak): removed from train"
        in notes
    )
    assert (
        "warning: 1 validation triples are in test too (a leak): removed from validation" in notes
    )
    assert "repeated triples, counted once: 1 removed" in notes
    assert "warning: 2 test triples have an entity or a relation without a training triple" in notes
    assert "3 entities, 2 relations, 2.3 triples for each entity" in notes


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        ("", {}, DataError, "got an empty file"),
        ("head,relation,tail\n", {}, DataError, "got no row"),
        ("a b\nc d\n", {}, DataError, r"got 2 columns \(a, b\), wanted 3: head, relation, tail"),
        ("a b c\nd e\n", {}, DataError, "line 2: got 2 columns"),
        ("a,b,c\nd,,f\n", {}, DataError, "line 2, column column 2: got nothing, wanted a value"),
        ("a,b,c\n", {"columns": "head"}, ConfigError, "got columns='head', wanted a list"),
        ("a,b,c\n", {"columns": ["head", "tail"]}, ConfigError, "in the order of the file"),
        ("a,b,c\n", {"columns": ["head", "relation", "tail", "x"]}, DataError, "got 3 columns"),
        ("a,b,c\n", {"test_fraction": 1.0}, ConfigError, "got fractions 0.05, 1.0"),
        ("a,b,c\n", {"entity_names": '["a"]', "relation_names": '["b"]'}, DataError, "got the name 'c'"),
    ],
)  # fmt: skip
def test_faulty_files_are_named_with_what_to_do(tmp_path, text, options, error, message):
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(error, match=message):
        open_source("triples", tmp_path / "t.txt", **options)


def test_parts_of_a_folder_must_be_clear(tmp_path):
    write_triples(tmp_path, "test.txt", [("a", "r", "b")])
    with pytest.raises(DataError, match=r"got test and no file train"):
        open_source("triples", tmp_path)
    for name in ("train.txt", "train.csv"):
        write_triples(tmp_path, name, [("a", "r", "b")])
    with pytest.raises(DataError, match=r"got train.csv, train.txt, wanted one file for train"):
        open_source("triples", tmp_path)


@pytest.mark.parametrize("header", ["user_id,friend_id", "follower,followee", "source,target"])
def test_headers_of_edges_are_no_edges(tmp_path, header):
    path = tmp_path / "e.csv"
    path.write_text(f"{header}\n1,2\n3,4\n5,6\n")
    data = open_source("edges", path)
    assert data.train.interactions.user_keys.tolist() == [*range(1, 7)]


@pytest.mark.parametrize(
    "header", ["customer_id,sku,n", "userId,movieId,n", "movieId,userId,rating"]
)
def test_users_and_items_are_no_nodes_of_one_kind(tmp_path, header):
    path = tmp_path / "e.csv"
    path.write_text(f"{header}\n5,5,1\n5,6,1\n6,5,1\n")
    with pytest.raises(ConfigError, match=r"one kind of nodes, .*--set model.name=graphsage"):
        open_source("edges", path)
    data = open_source("edges", path, columns=header.split(",")[:2])
    assert "2 nodes, of which 2 are in both columns" in data.notes[1]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 60))
def test_edges_are_those_of_a_plain_reader(tmp_path_factory, seed, size):
    rng = random.Random(seed)
    edges = [(f"n{rng.randrange(9)}", f"n{rng.randrange(9)}") for _ in range(size)]
    path = tmp_path_factory.mktemp("edges") / "e.txt"
    path.write_text("".join(f"{a} {b}\n" for a, b in edges))
    wanted = {tuple(sorted(e)) for e in edges if e[0] != e[1]}
    data = open_source("edges", path, fan_outs=[2], split_seed=seed, test_fraction=0.3)
    interactions = data.train.interactions
    nodes = interactions.user_keys.tolist()
    assert nodes == sorted({*chain(*wanted)}) == interactions.item_keys.tolist()
    parts = [
        [
            (nodes[u], nodes[i])
            for u, i in zip(bag.samples.tolist(), bag.values.tolist(), strict=True)
        ]
        for bag in (interactions.train, interactions.validation, interactions.test)
    ]
    assert Counter(chain(*parts)) == Counter([*wanted, *((b, a) for a, b in wanted)])
    assert {a for a, _ in parts[0]} == set(nodes) and data.train.first_item == 0


def write_links(folder, is_bipartite):
    """Links among nodes of one of three kinds, and of users with films of their kind, whose numbers overlap."""
    rng = random.Random(0)
    rows = [
        (a, b)
        for a in range(30)
        for b in rng.sample([b for b in range(a % 3, 30, 3) if is_bipartite or b != a], 6)
    ]
    path = folder / "links.csv"
    lines = [f"{a},{b}" if is_bipartite else f"n{a},n{b}" for a, b in rows]
    path.write_text("\n".join(["user_id,movie_id" if is_bipartite else "from,to", *lines]))
    return path, rows


@pytest.mark.parametrize("is_bipartite", [False, True])
def test_a_graph_recommends_by_name(tmp_path, colonnade, is_bipartite):
    path, rows = write_links(tmp_path, is_bipartite)
    kind = ["interactions", "--set", "model.name=graphsage", "--set", "data.options.split=rows"]
    command = ["train", "--path", path, "--run", tmp_path / "run", "--data"]
    command += kind if is_bipartite else ["edges"]
    status, text, _ = colonnade(*command, "--epochs", "12", "--set", "model.dim=8")
    assert status == 0 and re.search(r"test recall@10: \d\.\d+   by popularity 0\.\d+", text), text
    column, name = ("user_id", int) if is_bipartite else ("node", lambda n: f"n{n}")
    (tmp_path / "who.csv").write_text(f"{column}\n{name(4)}\n{name(8)}\nnobody\n")
    status, text, _ = colonnade(
        "recommend", tmp_path / "run", "--users", tmp_path / "who.csv", "--output",
        tmp_path / "best.parquet", "--k", "3", "--key", column,
    )  # fmt: skip
    assert status == 0 and "unknown: 1 users" in text
    best = pq.read_table(tmp_path / "best.parquet").to_pylist()
    assert [row["by_popularity"] for row in best] == [False, False, True]
    for node, row in zip((4, 8), best, strict=False):
        known = {name(b) for a, b in rows if a == node} | {name(a) for a, b in rows if b == node}
        alike = {name(n) for n in range(node % 3, 30, 3)}
        assert row["key"] == str(name(node))
        if is_bipartite:
            assert len({*row["items"]} & alike) >= 2
        else:
            assert not {name(node), *known} & {*row["items"]}
    with Recommender.open(tmp_path / "run") as recommender:
        test = load_test_part(tmp_path / "run")
        (batch,) = test.batches(100)
        wanted = recommender.recommend_batch(batch, 4, batch.key.excluded)
        users = [{column: test.interactions.user_keys[u]} for u in batch.group.tolist()]
        truth = [test.interactions.item_keys[i] for i in batch.key.truth.values.tolist()]
        result = recommender.recommend(users, 4)
        samples = batch.key.truth.samples.tolist()
        for u, (wanted_items, items) in enumerate(zip(wanted.items, result.items, strict=True)):
            held_out = {item for item, sample in zip(truth, samples, strict=True) if sample == u}
            expected = [item for item in wanted_items if item not in held_out]
            assert items[: len(expected)] == expected
        for records, message in (
            ([{}], f"1 records without a value in '{column}'"),
            ([{column: True}], f"record 0, column {column}: got true, wanted an id"),
            ([{"histroy": [1]}], "which the model was not trained on"),
        ):
            with pytest.raises(DataError, match=message):
                recommender.recommend(records)
    with pytest.raises(ConfigError, match="got records of items for a graph"):
        Recommender.open(tmp_path / "run", items=[{"item": 1}])
    path.write_text(path.read_text() + f"\n{name(4)},{name(77)}\n")
    status, _, text = colonnade("evaluate", tmp_path / "run")
    assert (
        status == 2 and "the nodes of the graph are not those that the run was trained on" in text
    )


def load_test_part(run):
    config = load_run_config(run)
    return open_source(config.data.name, config.data.path, **config.data.options).test


CITIES = {
    "Paris": "France",
    "Rome": "Italy",
    "Berlin": "Germany",
    "Wien": "Austria",
    "Oslo": "Norway",
}


def facts():
    for city, land in CITIES.items():
        yield city, "capital of", land
        yield city, "in", land
        yield land, "has", city
        for i in range(3):
            yield f"{city} {i}", "near", city
            yield f"{city} {i}", "in", land


def test_a_named_graph_is_trained_evaluated_and_asked_by_name(tmp_path, capsys):
    path = write_triples(tmp_path, "facts.tsv", facts(), header="head relation tail")
    run = tmp_path / "run"
    small = (
        "model.dim=16 train.batch_size=4 train.epochs=8 embedding.lr=0.1 train.threads=1".split()
    )
    command = [
        "train",
        "--data",
        "triples",
        "--path",
        str(path),
        "--run",
        str(run),
        "--model",
        "transe",
    ]
    command += [part for setting in small for part in ("--set", setting)]
    assert app.run_command(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "facts.tsv: head from head, relation from relation, tail from tail" in shown
    assert "25 entities, 4 relations, 1.8 triples for each entity" in shown
    assert app.run_command(["evaluate", str(run)]) == 0
    assert "hits@10" in capsys.readouterr().out
    assert app.run_command(["inspect", str(path), "--data", "triples"]) == 0
    assert "25 entities, 4 relations" in capsys.readouterr().out
    with colonnade.Predictor.open(run) as predictor:
        questions = [("Paris", "in", None), (None, "capital of", "Italy")]
        best = colonnade.rank_answers(predictor, questions, k=3)
        assert "France" in dict(best[0]) and "Rome" in dict(best[1])
        assert all(len(answers) == 3 for answers in best)
        others = colonnade.rank_answers(predictor, questions, k=25, exclude_known=True)
        assert "France" not in dict(others[0]) and "Rome" not in dict(others[1])
        with pytest.raises(
            DataError, match=r"question 0: got the entity 'Rom', wanted one of the 25"
        ):
            colonnade.rank_answers(predictor, [("Rom", "in", None)])
        for question in (("Rome", "in", "Italy"), ("Rome", None, None)):
            with pytest.raises(DataError, match="wanted a relation, and None in place of"):
                colonnade.rank_answers(predictor, [question])
    capsys.readouterr()
    assert app.run_command(["serve", str(run), "--port", "0"]) == 2
    assert "ask a knowledge graph model by name" in capsys.readouterr().err
    write_triples(
        tmp_path, "facts.tsv", [*facts(), ("Bern", "in", "Swiss")], header="head relation tail"
    )
    assert app.run_command([*command, "--epochs", "9"]) == 2
    assert "entity_names" in capsys.readouterr().err


def test_settings_follow_the_size_of_a_graph(tmp_path):
    rng = random.Random(0)
    triples = {(rng.randrange(900), rng.randrange(4), rng.randrange(900)) for _ in range(3000)}
    path = write_triples(tmp_path, "t.txt", sorted(triples))
    config = override_settings(get_preset("triples"), {"data.path": str(path)})
    chosen, data, line = open_data(config, None)
    assert (chosen.train.batch_size, chosen.embedding.lr) == (64, 0.0299)
    steps = -(-data.train.num_samples // 64)
    assert chosen.train.patience * steps >= 500 > (chosen.train.patience - 1) * steps
    assert "train.batch_size=64" in line and "train.patience" in line
    own = {"train.batch_size": 32, "embedding.lr": 0.01, "train.patience": 1}
    assert open_data(override_settings(config, own), None)[2] == ""
