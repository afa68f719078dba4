"""`colonnade train --data csv` and `--data parquet`, end to end: a schema declared or inferred, recorded, resumed."""

from __future__ import annotations

import json
import random

import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from colonnade.data import open_source

SCHEMA = """
fields:
  bought: {type: label}
  user: {type: category, rows: 200}
  words: {type: bag}
  price: {type: number, missing: 0.0, transform: log1p}
"""


@pytest.fixture
def colonnade(colonnade):
    """Output and errors as one text."""

    def run(*arguments):
        status, output, errors = colonnade(*arguments)
        return status, output + errors

    return run


def write(path, count=3000):
    """A user buys what is cheap, and always when a word says so: AUC far above chance is within reach."""
    rng = random.Random(1)
    lines = ["user,words,price,bought"]
    for _ in range(count):
        price, words = rng.choice([1, 5, 20, 100]), rng.sample(["new", "sale", "red", "blue"], 2)
        odds = 0.8 * ("sale" in words) + 0.15 * (price < 10)
        bought = int(rng.random() < odds)
        lines.append(f"u{rng.randrange(50)},{'|'.join(words)},{price},{bought}")
    if path.suffix == ".csv":
        path.write_text("\n".join(lines) + "\n")
    else:
        text = pyarrow.csv.read_csv(pyarrow.BufferReader("\n".join(lines).encode()))
        pq.write_table(text, path, row_group_size=500)
    return path


SETTINGS = [
    "--set", "train.batch_size=100", "--set", "data.options.test_fraction=0.2", "--set", "train.threads=1",
    "--set", "data.options.shuffle_window=1000", "--set", "train.epochs=2",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_train_resume_and_evaluate(kind, colonnade, tmp_path, monkeypatch):
    path = write(tmp_path / f"sales.{kind}")
    schema = tmp_path / "schema.yaml"
    schema.write_text(SCHEMA)
    monkeypatch.chdir(tmp_path)
    run = str(tmp_path / "run")
    command = ["train", "--data", kind, "--path", path.name, "--run", run, *SETTINGS]
    declared = [*command, "--set", "data.options.schema=schema.yaml"]
    status, output = colonnade(*declared)
    assert status == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["test_auc"] > 0.8, summary
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]
    assert recorded["options"]["schema"]["fields"]["words"] == {"type": "bag", "dtype": "text"}

    # From another folder, without the schema's file: the run folder knows.
    schema.rename(tmp_path / "elsewhere.yaml")
    monkeypatch.chdir("/")
    status, output = colonnade("evaluate", run)
    assert status == 0 and f"auc: {summary['metrics']['test_auc']:.4f}" in output, output
    again = open_source(kind, recorded["path"], **recorded["options"])
    parts = (again.train, again.validation, again.test)
    assert [part.num_samples for part in parts] == [2100, 300, 600]

    # Going on with the same schema is fine; with another one it is refused, and says where they differ.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere.yaml").rename(schema)
    status, output = colonnade(*declared, "--set", "train.epochs=3")
    assert status == 0, output
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    schema.write_text(SCHEMA.replace("rows: 200", "rows: 100"))
    status, output = colonnade(*declared)
    assert status == 2 and "data.options.schema.fields.user.rows=200" in output, output
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before


def test_a_run_goes_on_under_its_schema(colonnade, tmp_path):
    """However the run is resumed."""
    path, run = write(tmp_path / "sales.csv", 400), tmp_path / "run"
    schema = tmp_path / "schema.yaml"
    schema.write_text(SCHEMA)
    command = ["train", "--data", "csv", "--path", str(path), "--run", str(run), *SETTINGS]
    declared = [*command, "--set", f"data.options.schema={schema}"]
    assert colonnade(*declared)[0] == 0
    config = run / "config.yaml"
    written = yaml.safe_load(config.read_text())["data"]["options"]["schema"]
    assert written["encoding_version"] == 3 and written["fields"]["price"]["std"]
    for epochs, options in (
        ("3", declared),
        ("4", command),
        ("5", [*command, "--set", "data.options.label=bought"]),
    ):
        status, output = colonnade(*options, "--set", f"train.epochs={epochs}")
        assert status == 0, output
        assert yaml.safe_load(config.read_text())["data"]["options"]["schema"] == written
    status, output = colonnade(*command, "--set", "data.options.label=price")
    assert status == 2, output


def test_inspect_counts_texts_that_may_be_missing_values(colonnade, tmp_path):
    values = ["NA", "x", "None", "y", "NULL", "NA"]
    path = tmp_path / "a.csv"
    path.write_text("label,u,v\n" + "".join(f"{i % 2},{u},{i}.5\n" for i, u in enumerate(values)))
    status, output = colonnade("inspect", str(path))
    assert status == 0, output
    output = " ".join(output.split())
    assert "u: the texts NA (2 times), None (1 times) are categories" in output
    assert r"add to its line: null_values: ['NULL', '\N', 'NA', 'None']" in output
    schema = tmp_path / "schema.yaml"
    schema.write_text(
        "fields:\n  label: {type: label}\n"
        "  u: {type: category, dtype: text, null_values: ['NULL', '\\N', 'NA', 'None']}\n"
    )
    (batch,) = open_source("csv", path, schema=schema).train.batches(9)
    assert (batch.ids["u"].values == -(2**63)).tolist() == [True, False, True, False, True, True]


def test_nothing_declared(colonnade, tmp_path):
    path = write(tmp_path / "sales.csv")
    run = tmp_path / "run"
    command = ["train", "--data", "csv", "--path", str(path), "--run", str(run), *SETTINGS]
    status, output = colonnade(*command)
    assert status == 2 and "Say which column it is" in output and not run.exists(), output
    status, output = colonnade(*command, "--set", "data.options.label=bought")
    assert status == 0, output
    assert json.loads((run / "summary.json").read_text())["metrics"]["test_auc"] > 0.8


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(colonnade, tmp_path):
    path = write(tmp_path / "sales.parquet", 1200)
    metrics = []
    for ranks in ("1", "2"):
        run = tmp_path / f"run{ranks}"
        status, output = colonnade(
            "train", "--data", "parquet", "--path", str(path), "--run", str(run), *SETTINGS,
            "--set", "data.options.label=bought", "--ranks", ranks,
        )  # fmt: skip
        assert status == 0, output
        metrics.append(json.loads((run / "summary.json").read_text())["metrics"])
    assert metrics[0]["test_auc"] == pytest.approx(metrics[1]["test_auc"], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.options.schema=nowhere.yaml"], "nowhere.yaml: No such file"),
        (["data.options.lable=bought"], "did you mean 'label'"),
        (["data.options.label=bougth"], "did you mean 'bought'"),
        (["data.options.label=price"], "at_least"),
        (["data.options.label=bought", "data.options.test_fraction=2"], "test_fraction=2"),
        (["data.options.label=bought", "data.options.days=maybe"], "days='maybe'"),
        (["data.options.schema={'fields': {'bought': 'lable'}}"], "did you mean 'label'"),
        (["data.options.label=bought", "data.options.test=nowhere.csv"], "no such file"),
    ],
)
def test_a_refused_command_writes_nothing(settings, message, colonnade, tmp_path):
    path = write(tmp_path / "sales.csv", 20)
    chosen = [word for setting in settings for word in ("--set", setting)]
    run = tmp_path / "run"
    status, words = colonnade("train", "--data", "csv", "--path", str(path), "--run", str(run), *chosen)  # fmt: skip
    assert status == 2 and message in words and words.startswith("error: "), words
    assert words.count("\n") == 1 and not run.exists()
