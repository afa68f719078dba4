"""Other models than click models: trained on files, killed, resumed to the same bits, ranked, served and exported."""

from __future__ import annotations

import random

import pytest
from shell import Shell, fetch, pick_port

RATIO = 4
"""Number of tastes: a user of one takes the items of that one."""
COMMON = "--set train.threads=1 --set train.checkpoint_steps=20"


def train_and_kill(shell: Shell, command: str, ranks: int = 1, step: int = 40) -> None:
    """Train a run `whole`, and a run `killed`, which is killed on the way and resumed to the end."""
    shell.run(f"{command} --run whole --ranks {ranks}")
    shell.stop_training(f"{command} --run killed --ranks {ranks}", "killed", steps=step)
    shell.resume(f"{command} --run killed --ranks {ranks}", "killed")


def write_views(shell: Shell, count: int = 4_000) -> None:
    """Write views of films by people of one taste each, a file of all films, and users to recommend to."""
    draw = random.Random(1)
    films = [f"film {number:02}" for number in range(40)]
    rows = []
    for _ in range(count):
        film, *watched = draw.sample(films[draw.randrange(RATIO) :: RATIO], 4)
        rows.append((film, "|".join(watched)))
    shell.write_table("views.csv", "film,watched", rows)
    shell.write_table("films.csv", "film", ([film] for film in films))
    users = [("Ann", "film 00|film 04"), ("Bo", "film 03|film 07|film 11")]
    shell.write_table("users.csv", "name,watched", users)
    shell.write(
        "views.yaml",
        "fields:\n  film: {type: category}\n  watched: {type: bag, table: film}\n",
    )


READ_BEST = """
import pyarrow.parquet as pq
for row in pq.read_table("best.parquet").to_pylist():
    print(row["key"], *row["items"], sep=",")
"""


@pytest.mark.slow
@pytest.mark.budget(150)
def test_retrieval_from_a_csv_file_to_recommendations(shell):
    write_views(shell)
    train_and_kill(
        shell,
        f"colonnade train --data csv --path views.csv {COMMON} --set data.options.schema=views.yaml "
        "--set model.name=two_tower --set 'model.item_columns=[film]' --set model.dim=8 "
        "--set train.batch_size=100 --set train.epochs=6 --set embedding.lr=0.3",
        ranks=2,
    )
    shell.run(
        "colonnade recommend killed --users users.csv --items films.csv --k 5 --output best.parquet --key name"
    )
    answers = [line.split(",") for line in shell.run_python(READ_BEST).splitlines()]
    assert [answer[0] for answer in answers] == ["Ann", "Bo"]
    for (_, *items), taste in zip(answers, (0, 3), strict=True):
        numbers = [int(item.removeprefix("film ")) for item in items]
        assert len(numbers) == 5 and all(number % RATIO == taste for number in numbers), answers
    for run in ("whole", "killed"):
        shell.run(f"colonnade export {run} {run}-exported")
    assert shell.read_weights("whole-exported") == shell.read_weights("killed-exported") != {}
    port = pick_port()
    server = shell.start(f"colonnade serve killed-exported --items films.csv --port {port}")
    address = f"http://127.0.0.1:{port}"
    server.wait_until(lambda: fetch(f"{address}/v2/health/ready") is not None, "a ready server")
    body = {"user": {"watched": ["film 00", "film 04"]}, "k": 5}
    assert fetch(f"{address}/recommend", body)["items"] == answers[0][1:]


def write_plays(shell: Shell) -> None:
    """Write plays of songs by users of one taste each, with times in another order than the rows', and their files."""
    draw = random.Random(5)
    plays = [
        (f"user{user}", f"song {number:02}", 1_700_000_000 + 3600 * step + user)
        for user in range(200)
        for step, number in enumerate(draw.sample(range(user % RATIO, 40, RATIO), 8))
    ]
    draw.shuffle(plays)
    shell.write_table("plays.csv", "user_id,song_id,timestamp", plays)
    songs = [(f"song {number:02}", f"g{number % 3}|g{number % 5}", number) for number in range(42)]
    shell.write_table("songs.csv", "song_id,genres,length", songs)
    people = [(f"user{user}", 20 + user % 40) for user in range(190)]
    shell.write_table("people.csv", "user_id,age", people)
    shell.write_table("who.csv", "user_id", [("user5",), ("user10",), ("user199",)])


@pytest.mark.slow
@pytest.mark.budget(150)
@pytest.mark.parametrize("model", ["two_tower", "sasrec"])
def test_own_interactions_from_a_file_to_recommendations(shell, model):
    """Users and items by the names of the files, on two ranks, killed on the way, and served from the export."""
    write_plays(shell)
    train_and_kill(
        shell,
        f"colonnade train --data interactions --path plays.csv {COMMON} --set data.options.users=people.csv "
        f"--set data.options.items=songs.csv --set model.name={model} --set model.dim=8 "
        "--set train.batch_size=50 --set train.epochs=12 --set embedding.lr=0.05",
        ranks=2,
        step=20,
    )
    shell.check_same_metrics("whole", "killed")
    metrics = shell.read_summary("killed")["metrics"]
    assert metrics["test_ndcg@10"] > 2 * metrics["test_popularity_ndcg@10"]
    assert "by popularity" in shell.run("colonnade evaluate killed")
    shell.run(
        "colonnade recommend killed --users who.csv --k 2 --output best.parquet --key user_id"
    )
    answers = [line.split(",") for line in shell.run_python(READ_BEST).splitlines()]
    assert [answer[0] for answer in answers] == ["user5", "user10", "user199"]
    for user, *songs in answers:  # each taste has ten songs, of which eight were played
        taste = int(user.removeprefix("user")) % RATIO
        assert len(songs) == 2 and all(
            int(song.removeprefix("song ")) % RATIO == taste for song in songs
        )
    shell.run("colonnade export killed exported")
    port = pick_port()
    server = shell.start(f"colonnade serve exported --port {port}")
    address = f"http://127.0.0.1:{port}"
    server.wait_until(lambda: fetch(f"{address}/v2/health/ready") is not None, "a ready server")
    assert (
        fetch(f"{address}/recommend", {"user": {"user_id": "user5"}, "k": 2})["items"]
        == answers[0][1:]
    )
    new = {"user": {"history": ["song 01", "song 05", "song 09"], "age": 30}, "k": 2}
    if model == "sasrec":
        new["user"].pop("age")
    best = fetch(f"{address}/recommend", new)["items"]
    assert {int(song.removeprefix("song ")) % RATIO for song in best} == {1}


def write_places(shell: Shell) -> None:
    """Write visits in the form of Gowalla: a user, then the places, on each line."""
    draw = random.Random(2)
    for name, count in (("train.txt", 10), ("valid.txt", 2)):
        lines = []
        for user in range(200):
            places = draw.sample(range(user % RATIO, 80, RATIO), count)
            lines.append(" ".join(map(str, (user, *places))))
        shell.write(f"places/{name}", "\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.budget(150)
@pytest.mark.parametrize("model", ["sasrec", "graphsage"])
def test_sequences_and_graphs(shell, model):
    """Sequences of places with SASRec; users and places as a graph with GraphSAGE."""
    write_places(shell)
    train_and_kill(
        shell,
        f"colonnade train --data gowalla --path places {COMMON} --set model.name={model} "
        "--set model.dim=8 --set train.batch_size=20 --set train.epochs=12 --set embedding.lr=0.05",
        ranks=1 if model == "graphsage" else 2,
        step=20,
    )
    shell.check_same_metrics("whole", "killed")
    assert shell.read_summary("killed")["metrics"]["test_recall@20"] > 0.4  # at random: 0.25


@pytest.mark.slow
@pytest.mark.budget(150)
def test_knowledge_graph(shell):
    """Entities in a ring; relations are steps of 1, 2 and -1."""
    entities, steps = 40, (1, 2, -1)
    facts = [(e, (e + s) % entities, r) for e in range(entities) for r, s in enumerate(steps)]
    random.Random(3).shuffle(facts)
    for name, part in (("train", facts[:90]), ("valid", facts[90:105]), ("test", facts[105:])):
        lines = [str(len(part)), *(" ".join(map(str, fact)) for fact in part)]
        shell.write(f"ring/{name}2id.txt", "\n".join(lines) + "\n")
    for name, count in (("entity", entities), ("relation", len(steps))):
        lines = [str(count), *(f"{name}{number}\t{number}" for number in range(count))]
        shell.write(f"ring/{name}2id.txt", "\n".join(lines) + "\n")
    train_and_kill(
        shell,
        f"colonnade train --data fb15k237 --path ring {COMMON} --set model.name=rotate "
        "--set model.dim=16 --set train.batch_size=10 --set train.epochs=40 --set train.patience=0",
    )
    shell.check_same_metrics("whole", "killed")
    assert "hits@1" in shell.run("colonnade evaluate killed")


@pytest.mark.slow
@pytest.mark.budget(150)
def test_two_labels(shell):
    """Clicks and purchases, the second often unknown: two columns of scores, of the run and of its export."""
    draw = random.Random(4)
    rows = []
    for index in range(6_000):
        user, item = draw.randrange(100), draw.randrange(50)
        click = int(draw.random() < (0.8 if (user + item) % 2 else 0.2))
        rows.append((click, "" if index % 3 else click * (item % 2), f"u{user}", f"i{item}"))
    shell.write_table("clicks.csv", "click,bought,user,item", rows[:5_500])
    shell.write_table("test.csv", "click,bought,user,item", rows[5_500:])
    shell.write(
        "schema.yaml",
        "fields:\n  click: {type: label}\n  bought: {type: label, missing: unknown}\n"
        "  user: {type: category}\n  item: {type: category}\n",
    )
    train_and_kill(
        shell,
        f"colonnade train --data csv --path clicks.csv {COMMON} --set data.options.schema=schema.yaml "
        "--set data.options.test=test.csv --set model.name=deepfm --set model.dim=4 "
        "--set train.batch_size=20 --set train.epochs=2",
    )
    shell.check_same_metrics("whole", "killed")
    shell.run("colonnade export killed exported")
    shell.check_same_scores("killed", "exported")
    scores = shell.read_scores("killed.csv")
    assert len(scores) == 500 and all(len(row) == 2 for row in scores)


@pytest.mark.slow
@pytest.mark.budget(100)
def test_ratings_from_a_csv_file_to_predictions(shell):
    draw = random.Random(3)
    rows = []
    for _ in range(1500):
        guest, dish, hour = draw.randrange(50), draw.randrange(10), round(draw.uniform(0, 24), 1)
        stars = 3 + (-1) ** guest * (dish - 4.5) / 3 + draw.gauss(0, 0.2)
        rows.append((f"guest {guest}", f"dish {dish}", hour, round(min(5.0, max(1.0, stars)), 1)))
    shell.write_table("stars.csv", "guest,dish,hour,stars", rows)
    unrated = [("guest 0", "dish 9", 12), ("guest 1", "dish 9", 12), ("nobody", "dish 9", 12)]
    shell.write_table("unrated.csv", "guest,dish,hour", unrated)
    label = "{type: label, kind: number, between: [1, 5]}"
    shell.write(
        "stars.yaml",
        f"fields:\n  stars: {label}\n  guest: {{type: category}}\n  dish: {{type: category}}\n"
        "  hour: {type: number}\n",
    )
    train_and_kill(
        shell,
        f"colonnade train --data csv --path stars.csv {COMMON} --model gplvmf --set data.options.schema=stars.yaml "
        "--set data.options.group_by=guest --set data.options.test_fraction=0.2 --set train.batch_size=10 "
        "--set train.epochs=20",
        ranks=2,
    )
    for run in ("whole", "killed"):
        shell.run(f"colonnade predict {run} --path unrated.csv --output {run}.csv")
    text = (shell.folder / "killed.csv").read_text()
    assert text == (shell.folder / "whole.csv").read_text()
    (high, sd), (low, _), (mean, doubt) = (map(float, line.split(",")) for line in text.split()[1:])
    assert high > 4 and low < 2 and 2 < mean < 4 and doubt > 2 * sd
    assert "relevance dish" in shell.run("colonnade evaluate killed")
