"""Hints of the command line for first-time users."""

from __future__ import annotations

import pytest

from colonnade.terminal import Terminal


@pytest.fixture
def clicks(tmp_path):
    path = tmp_path / "clicks.csv"
    lines = [f"u{i % 7},{i % 5}.5,{i % 2}" for i in range(400)]
    path.write_text("\n".join(["user,price,click", *lines]) + "\n")
    return str(path)


def test_files_without_a_reader_and_a_reader_without_files_are_explained(colonnade, clicks):
    for arguments, hint in [
        (["--path", clicks], "--data csv"),
        (["--path", "clicks.rec"], "--data NAME"),
        ([clicks], f"colonnade train --data csv --path {clicks}"),
        (["--data", "csv"], "--path FILE"),
        (["--data", "parquet"], "--path FILE"),
    ]:
        status, _, output = colonnade("train", *arguments)
        assert status == 2 and hint in output and "argument" not in output, output


def test_evaluate_takes_the_part_that_there_is(colonnade, clicks, tmp_path):
    short = ["--data", "csv", "--path", clicks, "--model", "lr", "--epochs", "1"]
    with_validation, without = str(tmp_path / "a"), str(tmp_path / "b")
    has_validation = ["--set", "data.options.validation_fraction=0.2"]
    assert colonnade("train", *short, *has_validation, "--run", with_validation)[0] == 0
    status, output, _ = colonnade("evaluate", with_validation)
    assert status == 0 and ", validation:" in output and "auc" in output
    status, _, output = colonnade("evaluate", with_validation, "--part", "test")
    assert status == 2 and "choose from train, validation" in output
    status, output, _ = colonnade("train", *short, "--run", without)
    assert status == 0 and "no metrics, because no sample is held out" in output  # so few
    status, _, output = colonnade("evaluate", without)
    assert status == 2 and "--part train" in output and "test_fraction" in output
    status, output, _ = colonnade("evaluate", without, "--part", "train")
    assert status == 0 and ", train:" in output


def test_settings_finds_words_in_options_of_data_too(colonnade):
    _, together, _ = colonnade("settings", "learning", "rate")
    assert (
        together == colonnade("settings", "learning rate")[1] and "embedding.lr = none" in together
    )
    _, output, _ = colonnade("settings", "shuffle")
    assert "data.options.shuffle_window" in output
    _, output, _ = colonnade("settings", "data.options.shuffle_window")
    assert "csv: data.options.shuffle_window = 0" in output and "synthetic" not in output
    status, _, output = colonnade("settings", "data.options.shufle_window")
    assert status == 2 and "did you mean shuffle_window" in output


def test_a_message_in_a_pipe_is_one_line(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    Terminal().print("word " * 60)
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setenv("COLUMNS", "80")
    Terminal().print("word " * 60)
    assert capsys.readouterr().out.count("\n") > 3
