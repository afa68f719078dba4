"""Ratings grouped by user: whole users in training batches, training ratings beside held-out ones, bad input by name;
the model by the command line, on a file of one's own."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.csv as pc
import pytest
import torch

from colonnade.data import open_csv
from colonnade.data.ratings import MAX_RATINGS, HeldOutRatings
from colonnade.data.tabular.fields import Label
from colonnade.errors import ConfigError, DataError

SCHEMA = """fields:
  stars: {type: label, kind: number, between: [1, 5]}
  dish: {type: category}
  hour: {type: number}
  customer: {type: category}
"""


def write_ratings(folder, name="ratings.csv", num_users=9, num_ratings=10, seed=0):
    draw = np.random.default_rng(seed)
    lines = ["customer,dish,hour,stars"]
    for _ in range(num_users * num_ratings):
        user, dish, hour = draw.integers(num_users), draw.integers(5), draw.uniform(0, 24)
        stars = min(5, max(1, 3 + (-1) ** user * 0.8 * (dish - 2) + 0.2 * draw.normal()))
        lines.append(f"person {user},dish {dish},{hour:.1f},{stars:.1f}")
    (folder / name).write_text("\n".join(lines) + "\n")
    (folder / "schema.yaml").write_text(SCHEMA)
    return folder / name


def open_ratings(folder, **options):
    options = {"group_by": "customer", "schema": folder / "schema.yaml"} | options
    return open_csv(folder / "ratings.csv", **options)


def test_batches_have_whole_users_for_any_number_of_ranks(tmp_path):
    write_ratings(tmp_path)
    data = open_ratings(tmp_path)
    schema = data.train.schema
    assert [column.name for column in schema.categorical] == ["customer", "dish"]
    assert schema.dense == ("hour", "count of customer", "count of dish")
    whole = [*data.train.batches(4)]
    assert data.train.num_samples == 9 and len(whole) == 3
    assert sum(batch.size for batch in whole) == 90
    for column, name in enumerate(("customer", "dish"), 1):
        ids = torch.cat([batch.ids[name].values for batch in whole])
        counts = torch.cat([batch.dense[:, column] for batch in whole])
        assert all(float(count) == (ids == id).sum() for id, count in zip(ids, counts, strict=True))
    ranks = (data.train.batches(4, rank=rank, num_ranks=3) for rank in range(3))
    for step, batches in enumerate(zip(*ranks, strict=True)):
        joined = torch.cat([batch.ids["customer"].values for batch in batches])
        assert torch.equal(joined, whole[step].ids["customer"].values)
        users = [set(batch.ids["customer"].values.tolist()) for batch in batches]
        assert not users[0] & users[1] and not users[1] & users[2] and not users[0] & users[2]
    again = next(open_ratings(tmp_path).train.batches(4))
    assert torch.equal(again.label, whole[0].label)


def test_held_out_ratings_come_with_the_training_ratings_of_their_users(tmp_path):
    write_ratings(tmp_path)
    data = open_ratings(tmp_path, test_fraction=0.2)
    plain = open_csv(tmp_path / "ratings.csv", schema=tmp_path / "schema.yaml", test_fraction=0.2)
    assert isinstance(data.test, HeldOutRatings) and data.test.num_samples == 18
    for batch, held_out in zip(data.test.batches(5), plain.test.batches(5), strict=True):
        size = held_out.size
        assert torch.equal(batch.label[:size], held_out.label)
        assert torch.equal(batch.dense[:size, :1], held_out.dense)
        assert not batch.dense[:size, 1].any() and (batch.dense[size:, 1:] > 0).all()
        dishes = torch.cat([part.ids["dish"].values for part in data.train.batches(100)])
        counts = [(dishes == dish).sum() for dish in batch.ids["dish"].values[:size]]
        assert batch.dense[:size, 2].tolist() == counts
        users = batch.ids["customer"].values
        assert set(users[size:].tolist()) <= set(users[:size].tolist())
        for user in users[:size].unique():
            assert (users[size:] == user).sum() == sum(
                (part.ids["customer"].values == user).sum() for part in data.train.batches(100)
            )


def test_unknown_ratings_are_left_out_of_training(tmp_path):
    path = write_ratings(tmp_path)
    text = path.read_text().splitlines()
    text[3] = text[3].rpartition(",")[0] + ","
    path.write_text("\n".join(text) + "\n")
    with pytest.raises(DataError, match="line 4, column stars: got nothing"):
        next(open_ratings(tmp_path).train.batches(4))
    schema = SCHEMA.replace("kind: number", "kind: number, missing: unknown")
    (tmp_path / "schema.yaml").write_text(schema)
    assert sum(batch.size for batch in open_ratings(tmp_path).train.batches(4)) == 89


@pytest.mark.parametrize(
    ("edit", "options", "words"),
    [
        ((SCHEMA, SCHEMA), {"group_by": "user"}, "group_by: got 'user', wanted the category of"),
        (("hour: {type: number}", "seen: {type: bag, column: dish}"), {}, "several ids in 'seen'"),
        (("hour: {type: number}", "hour: {type: weight}"), {}, "got weights of ratings"),
        (("hour: {type: number}", "hour: {type: label, kind: number}"), {}, "got 2 labels"),
        (("  stars: {type: label, kind: number, between: [1, 5]}\n", ""), {}, "got 0 labels"),
        ((SCHEMA, SCHEMA), {"days": True}, "got days and group_by='customer'"),
        (("[1, 5]", "[5, 1]"), {}, "between=.*lower bound first"),
    ],
)
def test_data_that_are_no_ratings_are_refused(tmp_path, edit, options, words):
    write_ratings(tmp_path)
    (tmp_path / "schema.yaml").write_text(SCHEMA.replace(*edit))
    with pytest.raises(ConfigError, match=words):
        open_ratings(tmp_path, **options)


def test_a_dish_alone_is_no_context(tmp_path):
    write_ratings(tmp_path)
    schema = "fields:\n  stars: {type: label, kind: number}\n  customer: {type: category}\n"
    (tmp_path / "schema.yaml").write_text(schema)
    with pytest.raises(ConfigError, match="'customer' alone, wanted also what users rate"):
        open_ratings(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("person 1,dish 1,3.0,7", "line 92, column stars: got 7, wanted a number, from 1 to 5"),
        ("person 1,dish 1,,3", "line 92, column hour: got nothing"),
        ("person 1,dish 1,inf,3", "line 92, column hour: got inf"),
        ("person 1,dish 1,noon,3", "line 92, column hour: got 'noon'"),
    ],
)
def test_bad_values_are_refused_with_their_line(tmp_path, line, words):
    path = write_ratings(tmp_path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=words):
        open_ratings(tmp_path)


def test_a_user_with_too_many_ratings_is_named(tmp_path):
    path = write_ratings(tmp_path)
    path.write_text(path.read_text() + "Zoe,dish 1,3.0,4\n" * (MAX_RATINGS + 1))
    words = f"customer Zoe: got {MAX_RATINGS + 1} training ratings, wanted at most {MAX_RATINGS}"
    with pytest.raises(DataError, match=words):
        open_ratings(tmp_path)
    with pytest.raises(DataError, match=words):
        open_ratings(tmp_path, test_fraction=0.1, order_by="hour")


def test_between_needs_a_number():
    with pytest.raises(ConfigError, match="between"):
        Label("y", between=(1, 5))


COMMON = "train --data csv --path ratings.csv --model gplvmf --run run --set data.options.schema=schema.yaml"


def test_a_file_is_trained_on_predicted_and_evaluated(tmp_path, monkeypatch, colonnade):
    """A constant context changes nothing, a user without ratings gets the mean of all, and one far from all others as
    much doubt."""
    monkeypatch.chdir(tmp_path)

    def run(command: str, status: int = 0) -> str:
        code, output, errors = colonnade(*command.split())
        assert code == status, errors
        return f"{output} {errors}".replace("\n", " ")

    write_ratings(tmp_path, num_users=20, num_ratings=20)
    (tmp_path / "ratings.csv").write_text(
        "\n".join(
            line + (",place" if number == 0 else ",home")
            for number, line in enumerate((tmp_path / "ratings.csv").read_text().splitlines())
        )
    )
    (tmp_path / "schema.yaml").write_text(SCHEMA + "  place: {type: category}\n")
    settings = "--set data.options.group_by=customer --set data.options.test_fraction=0.2 --set train.epochs=40"
    run(f"{COMMON} {settings} --set train.batch_size=5 --set dense.lr=0.05 --set embedding.lr=0.05")
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert metrics["test_rmse"] < 0.6 and metrics["test_relevance_place"] == 0
    new = "customer,dish,hour,place\nperson 1,dish 1,12,home\nnobody,dish 1,12,home\nperson 1,dish 1,9999,home\n"
    new += "person 1,dish A,12,home\nperson 1,dish B,12,home\n"
    (tmp_path / "new.csv").write_text(new)
    run("predict run --path new.csv --output new-scores.csv")
    known, unknown, far, *unseen = pc.read_csv("new-scores.csv").to_pylist()
    assert unseen[0] == pytest.approx(unseen[1]) and unseen[0]["sd"] > known["sd"]
    assert known["sd"] < 0.9 * unknown["sd"] and unknown["sd"] == pytest.approx(far["sd"])
    assert 2 < unknown["mean"] < 4
    assert "relevance dish" in run("evaluate run")
    assert "80 samples scored" in run("predict run --part test --output test-scores.csv")
    lines = (tmp_path / "ratings.csv").read_text().splitlines()[321:]
    labels = [float(line.split(",")[3]) for line in lines]
    scores = pc.read_csv("test-scores.csv")["mean"].to_numpy()
    assert np.sqrt(np.mean((scores - labels) ** 2)) == pytest.approx(metrics["test_rmse"], rel=1e-6)
    assert "what predictions are made from" in run("predict run --part train --output no.csv", 2)
    for command in ("churn run run", "serve run", "export run exported --torch"):
        assert "training ratings of each user" in run(command, 2)
