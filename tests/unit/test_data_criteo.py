"""The Criteo reader against its slow definition, and what it says about files that are not Criteo files."""

from __future__ import annotations

import gzip
import math
import random
import re
from pathlib import Path

import pytest
import torch
from criteo_files import criteo_lines, write_criteo
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data import Position, open_source
from colonnade.data.counter import GAMMA, mix_words, random_words
from colonnade.data.lines import STRIDE, open_line_file
from colonnade.data.sets.criteo import (
    CATEGORIES,
    DENSE,
    MISSING_ID,
    NAMES,
    check_line,
    open_criteo,
    parse_lines,
)
from colonnade.errors import ColonnadeError, ConfigError, DataError


def parse_slowly(line: str) -> tuple[float, list[float], list[int]]:
    label, *fields = line.split("\t")
    dense = [math.log1p(max(int(field or 0), 0)) for field in fields[:13]]
    return float(label), dense, [int(field, 16) if field else MISSING_ID for field in fields[13:]]


def test_values_are_those_of_the_slow_definition(tmp_path):
    lines = criteo_lines(700, seed=1)
    lines[3] = "\t".join(["1", *[""] * 39])
    lines[4] = "\t".join(["0", *["9" * 18] * 13, *["FFFFffff"] * 26])
    lines[5] = "\t".join(["0", *["-3"] * 13, *["00000000"] * 26])
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    source = open_source("criteo", tmp_path, test_fraction=0).train
    (batch,) = source.batches(1000)
    expected = [parse_slowly(line) for line in lines]
    assert batch.label.flatten().tolist() == [label for label, _, _ in expected]
    torch.testing.assert_close(batch.dense, torch.tensor([dense for _, dense, _ in expected]))
    for f, name in enumerate(CATEGORIES):
        assert batch.ids[name].values.tolist() == [ids[f] for _, _, ids in expected]
    assert source.schema.dense == DENSE
    assert {column.cardinality for column in source.schema.categorical} == {None}


EVERY_RUN = [(lines, size) for lines in (1, 7, 64, 1000) for size in (1, 5, 64, 300)]
TYPICAL_RUNS = {(1, 5), (7, 64), (64, 300), (1000, 1)}
"""Every length of a run and every size of a batch once; the other pairs are slow."""


@pytest.mark.parametrize(
    ("run_lines", "batch_size"),
    [
        pytest.param(*pair, marks=() if pair in TYPICAL_RUNS else pytest.mark.slow)
        for pair in EVERY_RUN
    ],
)
def test_lines_parsed_together_are_the_lines_parsed_alone(
    tmp_path, monkeypatch, run_lines, batch_size
):
    monkeypatch.setattr("colonnade.data.sets.criteo.RUN_LINES", run_lines)
    write_criteo(tmp_path, 300)
    source = open_criteo(tmp_path, test_fraction=0, hash_rows=97).train
    lines = [source.read(i, i + 1) for i in range(300)]
    output = 0
    for batch in source.batches(batch_size):
        alone = lines[output : output + batch.size]
        output += batch.size
        assert torch.equal(batch.dense, torch.cat([one.dense for one in alone]))
        assert torch.equal(batch.label, torch.cat([one.label for one in alone]))
        for name in CATEGORIES:
            values = torch.cat([one.ids[name].values for one in alone])
            assert torch.equal(batch.ids[name].values, values)
    assert output == 300


def test_batches_before_the_line_at_fault_are_read(tmp_path):
    lines = [line.encode() for line in GOOD]
    lines[399] = b"2" + lines[399][1:]
    (tmp_path / "train.txt").write_bytes(b"\n".join(lines) + b"\n")
    batches = open_criteo(tmp_path, test_fraction=0).train.batches(64)
    assert [next(batches).size for _ in range(6)] == [64] * 6
    with pytest.raises(DataError, match="line 400, column label"):
        next(batches)


def test_hashed_ids_are_mix64_modulo_rows(tmp_path):
    write_criteo(tmp_path, 50)
    (plain,) = open_criteo(tmp_path, test_fraction=0).train.batches(50)
    hashed_source = open_criteo(tmp_path, test_fraction=0, hash_rows=97).train
    (hashed,) = hashed_source.batches(50)
    assert {column.cardinality for column in hashed_source.schema.categorical} == {97}
    for name in CATEGORIES:
        pairs = torch.stack([plain.ids[name].values, hashed.ids[name].values], dim=1)
        for a, b in pairs.tolist():
            x = a  # the finaliser of splitmix64, written out
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
            assert b == (x ^ x >> 31) % 97


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
    (everything,) = whole.train.batches(100)
    (last,) = parts.test.batches(100)
    assert torch.equal(last.ids["C1"].values, everything.ids["C1"].values[70:])


def test_shuffled_epochs_hold_the_same_samples_in_other_orders(tmp_path):
    write_criteo(tmp_path, 200)
    source = open_criteo(tmp_path, shuffle=True, seed=5).train
    first, second = (next(source.batches(200, start=Position(epoch, 0))) for epoch in (0, 1))
    again = next(open_criteo(tmp_path, shuffle=True, seed=5).train.batches(200))
    assert torch.equal(first.dense, again.dense)
    assert not torch.equal(first.dense, second.dense)
    assert sorted(map(tuple, first.dense.tolist())) == sorted(map(tuple, second.dense.tolist()))


@given(
    st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"")), max_size=900),
    st.booleans(),
    st.data(),
)
def test_any_run_of_lines_is_read_exactly(tmp_path_factory, contents, has_end, data):
    text = b"\n".join(contents) + (b"\n" if has_end else b"")
    if not text or text.startswith(b"\x1f\x8b"):
        return
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(text)
    lines = re.findall(rb"[^\n]*\n|[^\n]+", text)
    file = open_line_file(path)
    assert file.num_lines == len(lines)
    start = data.draw(st.integers(0, len(lines)))
    stop = data.draw(st.integers(start, len(lines)))
    assert file.read_lines(start, stop) == b"".join(lines[start:stop])


@pytest.mark.parametrize("count", [STRIDE - 1, STRIDE, STRIDE + 1, 3 * STRIDE])
@pytest.mark.parametrize("scan_bytes", [7, 1000, 1 << 20])
def test_the_index_holds_at_its_edges(tmp_path, monkeypatch, count, scan_bytes):
    monkeypatch.setattr("colonnade.data.lines.SCAN_BYTES", scan_bytes)
    lines = [b"%d\n" % i for i in range(count)]
    path = tmp_path / "file"
    path.write_bytes(b"".join(lines))
    file = open_line_file(path)
    for start in (0, 1, STRIDE - 1, STRIDE, count - 1, count):
        for stop in {start, start + 1, STRIDE, STRIDE + 1, count - 1, count}:
            if start <= stop <= count:
                assert file.read_lines(start, stop) == b"".join(lines[start:stop])


def test_lines_longer_than_a_window_are_found(tmp_path):
    lines = [b"a" * 10_000 + b"%d\n" % i for i in range(20)]
    (tmp_path / "file").write_bytes(b"".join(lines))
    file = open_line_file(tmp_path / "file")
    assert file.read_lines(7, 12) == b"".join(lines[7:12])


# --- what is said about bad input -------------------------------------------------------------

GOOD = criteo_lines(600, seed=2)


def broken(tmp_path, number: int, line: str | bytes, end: bytes = b"\n"):
    """A file of 600 lines whose line `number` (from 1) is `line`; read it all."""
    lines = [line.encode() for line in GOOD]
    lines[number - 1] = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "train.txt").write_bytes(b"\n".join(lines) + end)
    source = open_criteo(tmp_path, test_fraction=0).train
    for _ in source.batches(64, rank=1, num_ranks=2):
        pass
    for _ in source.batches(64):
        pass


def with_field(number: int, column: str, value: str) -> str:
    fields = GOOD[number - 1].split("\t")
    fields[NAMES.index(column)] = value
    return "\t".join(fields)


@pytest.mark.parametrize("number", [1, 2, 333, 600])
@pytest.mark.parametrize(
    ("column", "value", "wanted"),
    [
        ("label", "2", "0 or 1"),
        ("label", "", "0 or 1"),
        ("label", "0.5", "0 or 1"),
        ("I1", "12x", "an integer or nothing"),
        ("I13", "1.5", "an integer or nothing"),
        ("I7", "nan", "an integer or nothing"),
        ("I7", "inf", "an integer or nothing"),
        ("I7", "NULL", "an integer or nothing"),
        ("I2", "99999999999999999999999", "an integer or nothing"),
        ("C1", "68fd1e6", "8 hexadecimal digits or nothing"),
        ("C13", "68fd1e6g", "8 hexadecimal digits or nothing"),
        ("C26", "68fd1e640", "8 hexadecimal digits or nothing"),
        ("C2", "NaN", "8 hexadecimal digits or nothing"),
    ],
)
def test_a_bad_field_is_named(tmp_path, number, column, value, wanted):
    place = re.escape(f"{tmp_path / 'train.txt'}, line {number}, column {column}: got '{value}', ")
    with pytest.raises(DataError, match=place + f"wanted {wanted}"):
        broken(tmp_path, number, with_field(number, column, value))


@pytest.mark.parametrize("number", [1, 200, 600])
@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda line: line + "\t", 41),
        (lambda line: line.rpartition("\t")[0], 39),
        (lambda line: "", 1),
        (lambda line: line.replace("\t", ","), 1),
        (lambda line: line[: line.index("\t")], 1),
    ],
)
def test_a_wrong_number_of_columns_is_named(tmp_path, number, change, count):
    place = re.escape(f"{tmp_path / 'train.txt'}, line {number}: got {count} columns in ")
    with pytest.raises(DataError, match=place + r".*wanted 40 separated by tabs"):
        broken(tmp_path, number, change(GOOD[number - 1]))


def test_two_rows_in_one_line_are_refused(tmp_path):
    """A lone carriage return ends a row for the fast reader but not a line of the file."""
    with pytest.raises(DataError, match="line 70: got 79 columns"):
        broken(tmp_path, 70, GOOD[69] + "\r" + GOOD[70])


def test_binary_garbage_is_named_and_cut_short(tmp_path):
    garbage = random.Random(0).randbytes(5000).replace(b"\n", b"")
    with pytest.raises(DataError, match=r"line 300: got \d+ columns in .* bytes\)") as error:
        broken(tmp_path, 300, garbage)
    assert len(str(error.value)) < 600
    with pytest.raises(DataError, match=r"line 1: got \d+ columns"):
        broken(tmp_path, 1, garbage)


@given(data=st.data())
def test_no_damage_is_read_as_if_it_were_data(data):
    """Whatever one byte becomes, the fast reader and the slow one agree: the same values or a DataError."""
    line = bytearray(GOOD[data.draw(st.integers(0, 599))].encode())
    at = data.draw(st.integers(0, len(line) - 1))
    line[at] = data.draw(st.integers(0, 255).filter(lambda b: b != 0x0A))
    lines = GOOD[0].encode() + b"\n" + bytes(line) + b"\n"
    path = Path("train.txt")  # for messages only
    try:
        label, dense, ids = parse_lines(lines, 2, path=path, first_line=1)
    except DataError as error:
        with pytest.raises(DataError, match="line 2"):
            check_line(bytes(line), path, 2)
        assert "line 2" in str(error)
        return
    expected = parse_slowly(line.decode())
    assert label[1, 0] == expected[0] and ids[:, 1].tolist() == expected[2]
    torch.testing.assert_close(torch.from_numpy(dense)[1], torch.tensor(expected[1]))


def test_windows_line_ends_are_read(tmp_path):
    (tmp_path / "train.txt").write_bytes("\r\n".join([*GOOD, ""]).encode())
    crlf = next(open_criteo(tmp_path, test_fraction=0).train.batches(600))
    (tmp_path / "train.txt").write_bytes("\n".join([*GOOD, ""]).encode())
    plain = next(open_criteo(tmp_path, test_fraction=0).train.batches(600))
    assert torch.equal(crlf.ids["C26"].values, plain.ids["C26"].values)


def test_a_file_cut_anywhere_in_its_last_line_is_noticed_or_whole(tmp_path):
    """Prefixes of the last line are refused; the whole line needs no newline."""
    last = with_field(600, "C26", "68fd1e64")
    for length in range(1, len(last) + 1):
        try:
            broken(tmp_path, 600, last[:length], end=b"")
        except DataError as error:
            assert "line 600" in str(error)
            assert length < len(last)
        else:
            assert length == len(last)


def test_a_cut_just_before_an_empty_field_is_refused(tmp_path):
    line = with_field(600, "C26", "")
    with pytest.raises(DataError, match="line 600, column C26: got the end of the file"):
        broken(tmp_path, 600, line, end=b"")
    broken(tmp_path, 600, line)


def test_gzip_is_refused_even_when_truncated(tmp_path):
    packed = gzip.compress("\n".join(GOOD).encode())
    for data in (packed, packed[: len(packed) // 2], packed[:2]):
        (tmp_path / "train.txt").write_bytes(data)
        with pytest.raises(DataError, match=r"train\.txt: got a gzip file .*gunzip"):
            open_criteo(tmp_path)


def test_an_empty_file_a_directory_and_a_file_that_changes_are_refused(tmp_path):
    path = tmp_path / "train.txt"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty file"):
        open_criteo(path)
    with pytest.raises(DataError, match="no such file"):
        open_line_file(tmp_path / "absent")
    with pytest.raises(DataError, match="directory"):
        open_line_file(tmp_path)
    write_criteo(tmp_path, 30)
    source = open_criteo(tmp_path).train
    with path.open("a") as file:
        file.write(GOOD[0])
    with pytest.raises(DataError, match="changed since"):
        next(source.batches(4))
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        next(source.batches(4))


def test_bad_options_are_refused(tmp_path):
    write_criteo(tmp_path, 10)
    with pytest.raises(ConfigError, match=r"test_fraction=1\.0"):
        open_criteo(tmp_path, test_fraction=1.0)
    with pytest.raises(ConfigError, match="hash_rows=0"):
        open_criteo(tmp_path, hash_rows=0)
    assert issubclass(DataError, ColonnadeError) and issubclass(DataError, ValueError)


# --- the real file ----------------------------------------------------------------------------


def test_criteo10k(shared_data):
    if not (shared_data / "criteo10k").is_dir():
        pytest.skip(f"no criteo10k in {shared_data}")
    parts = open_source("criteo", shared_data)
    assert (parts.train.num_samples, parts.test.num_samples) == (8000, 2000)
    path = shared_data / "criteo10k" / "train.txt"
    expected = [parse_slowly(line) for line in path.read_text().splitlines()]
    assert len(expected) == 10_000
    batches = [*parts.train.batches(1000), *parts.test.batches(1000)]
    ids = torch.cat([torch.stack([b.ids[c].values for c in CATEGORIES], 1) for b in batches])
    assert torch.equal(ids, torch.tensor([ids for _, _, ids in expected]))
    label = torch.cat([b.label for b in batches]).flatten()
    assert label.tolist() == [label for label, _, _ in expected]
    torch.testing.assert_close(
        torch.cat([b.dense for b in batches]), torch.tensor([dense for _, dense, _ in expected])
    )
