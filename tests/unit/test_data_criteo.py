"""Criteo files, which are CSV with tabs and without a header, against their slow definition; lines at fault."""

from __future__ import annotations

import math
import re
from unittest import mock

import pytest
import torch
from criteo_files import criteo_lines, write_criteo

from colonnade.config.run import override_settings
from colonnade.data import Position, open_csv, open_source
from colonnade.data.counter import GAMMA, mix_words, random_words
from colonnade.data.lines import read_all_lines
from colonnade.data.processes import ProcessSource
from colonnade.data.sets.criteo import CATEGORIES, CSV_OPTIONS, DENSE, NAMES, open_criteo
from colonnade.data.tabular.hashing import MISSING_ID, hash_text
from colonnade.errors import ColonnadeError, ConfigError, DataError
from colonnade.run.defaults import get_preset, open_data


def parse_slowly(line: str) -> tuple[float, list[float], list[int]]:
    label, *fields = line.split("\t")
    dense = [math.log1p(max(int(field or 0), 0)) for field in fields[:13]]
    ids = [hash_text(field.encode()) if field else MISSING_ID for field in fields[13:]]
    return float(label), dense, ids


def check_batch(batch, lines) -> None:
    expected = [parse_slowly(line) for line in lines]
    assert batch.label.flatten().tolist() == [label for label, _, _ in expected]
    torch.testing.assert_close(batch.dense, torch.tensor([dense for _, dense, _ in expected]))
    for f, name in enumerate(CATEGORIES):
        assert batch.ids[name].values.tolist() == [ids[f] for _, _, ids in expected]


def test_values_are_those_of_the_slow_definition(tmp_path):
    lines = criteo_lines(700, seed=1)
    lines[3] = "\t".join(["1", *[""] * 39])
    lines[4] = "\t".join(["0", *["9" * 15] * 13, *["FFFFffff"] * 26])
    lines[5] = "\t".join(["0", *["-3"] * 13, *["00000000"] * 26])
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    source = open_source("criteo", tmp_path, test_fraction=0).train
    (batch,) = source.batches(1000)
    check_batch(batch, lines)
    assert source.schema.dense == DENSE
    assert {column.cardinality for column in source.schema.categorical} == {None}


def test_it_is_a_csv_file_and_takes_its_options(tmp_path):
    file = write_criteo(tmp_path, 300) / "train.txt"
    pairs = zip(
        open_criteo(tmp_path).train.batches(48),
        open_csv(file, **CSV_OPTIONS).train.batches(48),
        strict=True,
    )
    assert all(torch.equal(a.ids["C9"].values, b.ids["C9"].values) for a, b in pairs)
    category = {"type": "category", "rows": 97}
    schema = {"fields": {"label": "label", "C1": category, "C2": category}}
    hashed = open_criteo(tmp_path, schema=schema, validation_fraction=0.1)
    assert [column.cardinality for column in hashed.train.schema.categorical] == [97, 97]
    parts = (hashed.train, hashed.validation, hashed.test)
    assert [part.num_samples for part in parts] == [210, 30, 60]
    with pytest.raises(ConfigError, match="no option 'hash_rows'"):
        open_source("criteo", tmp_path, hash_rows=97)
    with pytest.raises(ConfigError, match="test_fraction"):
        open_criteo(tmp_path, test_fraction=1.0)
    assert issubclass(DataError, ColonnadeError) and issubclass(DataError, ValueError)


def test_a_run_records_it_as_csv(tmp_path):
    file = write_criteo(tmp_path, 3000) / "train.txt"
    settings = {"data.path": str(tmp_path), "data.options.test_fraction": 0.1}
    config, splits, _ = open_data(override_settings(get_preset("criteo"), settings), None)
    assert (config.data.name, config.data.path) == ("csv", str(file))
    assert config.data.options == {
        **CSV_OPTIONS, "test_fraction": 0.1, "validation_fraction": 0.1
    }  # fmt: skip
    (batch,) = splits.test.batches(300)
    check_batch(batch, criteo_lines(3000)[2700:])


def test_a_run_of_a_version_that_read_it_otherwise_is_refused(tmp_path, colonnade):
    file, run = write_criteo(tmp_path, 400) / "train.txt", str(tmp_path / "run")
    with mock.patch("colonnade.run.defaults._resolve_preset", lambda config: config):
        train = ("train", "--data", "criteo", "--path", str(file), "--run", run)
        assert colonnade(*train, "--set", "train.max_steps=2")[0] == 0
    for command in (
        ("evaluate", run),
        ("predict", run, "--part", "test", "--output", str(tmp_path / "s.csv")),
        ("churn", run, run),
    ):
        status, _, text = colonnade(*command)
        assert status == 2 and "the version that trained it read the data otherwise" in text, text


def test_readers_and_any_start_yield_the_same_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("colonnade.data.tabular.csv.BLOCK_BYTES", 20_000)
    source = open_criteo(write_criteo(tmp_path, 500), shuffle_window=100, test_fraction=0).train
    for epoch in (0, 1):
        wanted = list(source.batches(64, start=Position(epoch, 0)))
        for start in range(len(wanted)):
            position = Position(epoch, start)
            for reader in (source, *([ProcessSource(source, 2)] if start == 3 else [])):
                result = list(reader.batches(64, start=position))
                assert len(result) == len(wanted) - start
                for one, other in zip(result, wanted[start:], strict=True):
                    assert torch.equal(one.dense, other.dense)
                    assert torch.equal(one.ids["C26"].values, other.ids["C26"].values)


def test_words_are_splitmix64():
    """The first outputs of the published generator (Vigna's splitmix64.c) for state 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert random_words(1234567, 0, 3).tolist() == known
    assert len(set(mix_words(random_words(0, 0, 1000)).tolist())) == 1000
    assert GAMMA % 2 == 1


def test_the_split_is_by_time(tmp_path):
    write_criteo(tmp_path, 100)
    whole = open_criteo(tmp_path, test_fraction=0)
    assert whole.test is None and whole.train.num_samples == 100
    parts = open_criteo(tmp_path, test_fraction=0.3)
    assert (parts.train.num_samples, parts.test.num_samples) == (70, 30)
    (batch,) = parts.test.batches(100)
    check_batch(batch, criteo_lines(100)[70:])


# --- what is said about bad input -------------------------------------------------------------

GOOD = criteo_lines(600, seed=2)


def broken(tmp_path, number: int, line: str, end: str = "\n"):
    """A file of 600 lines whose line `number` (from 1) is `line`; read it all."""
    lines = [*GOOD[: number - 1], line, *GOOD[number:]]
    (tmp_path / "train.txt").write_bytes(("\n".join(lines) + end).encode())
    source = open_criteo(tmp_path, test_fraction=0).train
    for _ in source.batches(64, rank=1, num_ranks=2):
        pass


def with_field(number: int, column: str, value: str) -> str:
    fields = GOOD[number - 1].split("\t")
    fields[NAMES.index(column)] = value
    return "\t".join(fields)


@pytest.mark.parametrize("number", [1, 333, 600])
@pytest.mark.parametrize(
    ("column", "value", "wanted"),
    [
        ("label", "yes", "a number"),
        ("label", "2", "a label that is 0 or 1"),
        ("label", "", "a label"),
        ("I1", "12x", "a number"),
        ("I7", "inf", "a finite number"),
    ],
)
def test_a_bad_field_is_named(tmp_path, number, column, value, wanted):
    place = re.escape(f"{tmp_path / 'train.txt'}, line {number}, column {column}: got ")
    with pytest.raises(DataError, match=place + f".*wanted {wanted}"):
        broken(tmp_path, number, with_field(number, column, value))


@pytest.mark.parametrize("number", [1, 200, 600])
@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda line: line + "\t", 41),
        (lambda line: line.rpartition("\t")[0], 39),
        (lambda line: line.replace("\t", ","), 1),
        (lambda line: line[: line.index("\t")], 1),
    ],
)
def test_a_wrong_number_of_columns_is_named(tmp_path, number, change, count):
    place = re.escape(f"{tmp_path / 'train.txt'}, line {number}: got {count} columns in ")
    with pytest.raises(DataError, match=place + r".*wanted 40 as names has them"):
        broken(tmp_path, number, change(GOOD[number - 1]))


def test_two_rows_in_one_line_are_refused(tmp_path):
    """A lone carriage return ends a row for the parser but not a line of the file."""
    with pytest.raises(DataError, match="line 70: got a carriage return inside"):
        broken(tmp_path, 70, GOOD[69] + "\r" + GOOD[70])
    with pytest.raises(DataError, match="line 70: got a carriage return inside"):
        broken(tmp_path, 70, GOOD[69].replace("\t", "\r\t", 1))


def test_a_quote_is_a_character(tmp_path):
    broken(tmp_path, 300, with_field(300, "C5", '"'))


def test_windows_line_ends_are_read(tmp_path):
    (tmp_path / "train.txt").write_bytes("\r\n".join([*GOOD, ""]).encode())
    check_batch(next(open_criteo(tmp_path, test_fraction=0).train.batches(600)), GOOD)


def test_files_that_are_no_text_and_files_that_change_are_refused(tmp_path):
    path = tmp_path / "train.txt"
    for text, words in ((b"", "empty file"), (b"\x1f\x8b" + b"x" * 99, "got a gzip file .*gunzip")):
        path.write_bytes(text)
        for open_file in (open_criteo, read_all_lines):
            with pytest.raises(DataError, match=rf"train\.txt: .*{words}"):
                open_file(path)
    with pytest.raises(DataError, match="no such file"):
        read_all_lines(tmp_path / "absent")
    with pytest.raises(DataError, match="got a folder"):
        read_all_lines(tmp_path)
    source = open_criteo(write_criteo(tmp_path, 30)).train
    with path.open("a") as file:
        file.write(GOOD[0])
    with pytest.raises(DataError, match="changed since"):
        next(source.batches(4))
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        next(source.batches(4))


# --- the real file ----------------------------------------------------------------------------


def test_criteo10k(shared_data):
    if not (shared_data / "criteo10k").is_dir():
        pytest.skip(f"no criteo10k in {shared_data}")
    parts = open_source("criteo", shared_data)
    assert (parts.train.num_samples, parts.test.num_samples) == (8000, 2000)
    lines = (shared_data / "criteo10k" / "train.txt").read_text().splitlines()
    check_batch(next(parts.train.batches(8000)), lines[:8000])
    check_batch(next(parts.test.batches(2000)), lines[8000:])
