"""Files that are no plain files, names that a terminal would obey, and values too large or too deep: one clear line."""

from __future__ import annotations

import os

import pytest

from colonnade.data.tabular.hashing import MAX_TEXT_BYTES
from colonnade.terminal import Terminal, escape_control_characters

SMALL = ("--set", "train.batch_size=100", "--set", "model.top=[4]")
HEADER = "label,user,item,price\n"
LINES = "".join(f"{i % 2},u{i % 40},i{i % 9},0.5\n" for i in range(300))


@pytest.fixture
def colonnade(colonnade, monkeypatch, tmp_path):
    """The command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return colonnade


def check_refused(result: tuple[int, str, str], *words: str) -> None:
    status, _, error = result
    assert status == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    for word in words:
        assert word in error, error


def make_pipe(folder):
    (folder / "day_1.csv").write_text(HEADER + LINES)
    os.mkfifo(folder / "day_2.csv")


def make_broken_link(folder):
    (folder / "day_1.csv").write_text(HEADER + LINES)
    (folder / "day_2.csv").symlink_to("nowhere.csv")


def make_link_loop(folder):
    (folder / "day_2.csv").symlink_to("day_3.csv")
    (folder / "day_3.csv").symlink_to("day_2.csv")


@pytest.mark.parametrize("make", [make_pipe, make_broken_link, make_link_loop])
@pytest.mark.parametrize("path", ["data", "data/day_2.csv", "data/*.csv"])
def test_what_is_no_regular_file_is_named(make, path, colonnade, tmp_path):
    (tmp_path / "data").mkdir()
    make(tmp_path / "data")
    if path == "data/*.csv" and make is not make_pipe:
        path = "data"  # a pattern matches no broken link
    refused = colonnade("train", "--data", "csv", "--path", path, "--run", "run", *SMALL)
    is_followed = path.endswith("day_2.csv") and make is make_broken_link
    check_refused(refused, "nowhere.csv" if is_followed else "day_2.csv")
    assert not (tmp_path / "run").exists()
    check_refused(colonnade("inspect", "data/day_2.csv"), "day_2.csv")


@pytest.mark.parametrize("data", ["criteo", "csv", "parquet", "movielens"])
def test_a_link_loop_is_no_data(data, colonnade, tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    check_refused(colonnade("train", "--data", data, "--path", "a", "--run", "run"), "a")


def test_names_are_printed_as_they_are(colonnade, tmp_path):
    header = "label,[/x],\x1b[31mred,:smile:\n"
    (tmp_path / "d.csv").write_text(header + LINES)
    run = "run[/x]"
    status, out, error = colonnade("inspect", "d.csv")
    assert status == 0 and "[/x]" in out and r"\x1b[31mred" in out and ":smile:" in out, error
    assert "\x1b" not in out
    arguments = ("train", "--data", "csv", "--path", "d.csv", "--run", run, *SMALL)
    for verb in (arguments, arguments, ("inspect", run), ("verify", run), ("export", run, "out[/x]"),
                 ("inspect", "out[/x]"), ("compare", run, run), ("report", run)):  # fmt: skip
        status, out, error = colonnade(*verb)
        assert status == 0, (verb, error)
        assert "\x1b" not in out + error, verb


def test_control_characters_become_escapes(capsys):
    assert escape_control_characters("a\x1b[2Jb\tc\nd\x07é") == "a\\x1b[2Jb\tc\nd\\x07é"
    Terminal().print("[bold]x[/y] :smile: \x1b[31m")
    assert capsys.readouterr().out == "[bold]x[/y] :smile: \\x1b[31m\n"


def test_a_text_of_16_mb_is_refused_at_once(colonnade, tmp_path):
    long = f"1,u1,{'x' * (16 << 20)},0.5\n"
    (tmp_path / "d.csv").write_text(HEADER + LINES + long + LINES)
    refused = colonnade("train", "--data", "csv", "--path", "d.csv", "--run", "run", *SMALL)
    check_refused(refused, "d.csv, line 302, column item", "16,777,216", f"{MAX_TEXT_BYTES:,}")


@pytest.mark.parametrize("name", ["schema.yaml", "config.yaml"])
def test_values_3000_deep_are_refused(name, colonnade, tmp_path):
    (tmp_path / "d.csv").write_text(HEADER + LINES)
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    (tmp_path / name).write_text(deep)
    data = ("train", "--data", "csv", "--path", "d.csv", "--run", "run")
    commands = {
        "schema.yaml": (*data, "--set", "data.options.schema=schema.yaml"),
        "config.yaml": ("train", "config.yaml", "--run", "run"),
    }
    check_refused(colonnade(*commands[name]), name, "nesting depth")
    check_refused(colonnade(*data, "--set", f"data.options={deep}"), "data.options")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.epochs=two", "got 'two', wanted a whole number"),
        ("train.epochs=1.5", "got 1.5, wanted a whole number"),
        ("train.batch_size=0", "got 0, wanted greater than or equal to 1"),
        ("embedding.lr=fast", "got 'fast', wanted a number"),
        ("data.next_use_hints=maybe", "got 'maybe', wanted true or false"),
        ("model.bottom=x", "got 'x', wanted a list"),
        ("model.name=deepfmm", "did you mean deepfm?"),
        ("model.name=zzz", "choose from lr, fm"),
    ],
)
def test_values_of_another_kind(setting, words, colonnade):
    check_refused(
        colonnade("train", "--data", "synthetic", "--set", setting),
        setting.partition("=")[0],
        words,
    )
