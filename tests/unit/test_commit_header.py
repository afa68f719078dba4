"""One judge of a checkpoint: what is missing or another checkpoint's is refused by every verb, and nobody scores with
it."""

from __future__ import annotations

import json
import random
import shutil
import sys
from contextlib import suppress

import pytest

from colonnade.checkpoint.completeness import read_checkpoint
from colonnade.checkpoint.header import header_path, read_header, state_folder
from colonnade.cli import main
from colonnade.errors import CheckpointError, CorruptionError
from colonnade.files.disk import Disk
from colonnade.files.durable import append_checksum, read_verified
from colonnade.publish.deltas import DeltaPublisher

SETTINGS = (
    "train.batch_size=500",
    "train.checkpoint_steps=4",
    "train.epochs=1",
    "data.options.validation_fraction=0",
    "embedding.eviction.max_rows=50",
    "model.top=[8]",
)


def run(monkeypatch, capsys, *arguments: object) -> tuple[int, str]:
    """Exit status, and all that was printed."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["colonnade", *map(str, arguments)])
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder with checkpoints of steps 4 and 6 and retention files, and its data."""
    place = tmp_path_factory.mktemp("trained")
    draw = random.Random(1)
    lines = [
        f"{draw.randint(0, 1)},u{draw.randint(0, 400)},i{draw.randint(0, 90)},{draw.random():.3f}"
        for _ in range(3000)
    ]
    (place / "d.csv").write_text("\n".join(["label,user,item,price", *lines]) + "\n")
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    arguments = [
        "train",
        "--data",
        "csv",
        "--path",
        place / "d.csv",
        "--run",
        place / "run",
        *settings,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["colonnade", *map(str, arguments)])
        with suppress(SystemExit):
            main()
    assert (state_folder(place / "run", 6) / "retention-0").is_file()
    return place


@pytest.fixture
def folder(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path / "run"


def remove_retention(folder):
    (state_folder(folder, 6) / "retention-0").unlink()


def swap_header(folder):
    shutil.copy2(header_path(folder, 4), header_path(folder, 6))


def swap_retention(folder):
    shutil.copy2(state_folder(folder, 4) / "retention-0", state_folder(folder, 6) / "retention-0")


def swap_manifest(folder):
    for newer in folder.rglob("manifest-6.json"):
        shutil.copy2(newer.with_name("manifest-4.json"), newer)


DAMAGES = {
    remove_retention: "retention-0 is missing",
    swap_header: "got the header of step 4, wanted that of step 6",
    swap_retention: "retention-0 is not what this run saved there",
    swap_manifest: "not what this run saved there",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_verb_refuses(damage, trained, folder, tmp_path, monkeypatch, capsys):
    verbs = {
        "verify": (),
        "evaluate": (),
        "predict": ("--path", trained / "d.csv", "--output", tmp_path / "scores.csv"),
        "export": (tmp_path / "out",),
    }
    if (
        damage is not swap_header
    ):  # which makes another export by itself: the header's time is in its name
        status, text = run(monkeypatch, capsys, "predict", folder, *verbs["predict"])
        assert status == 0, text
        (tmp_path / "scores.csv").unlink()
    damage(folder)
    for verb, more in verbs.items():
        status, text = run(monkeypatch, capsys, verb, folder, *more)
        assert status == 2, (verb, text)
        assert DAMAGES[damage] in text or (verb == "verify" and "6" in text), (verb, text)
    again = ("train", "--data", "csv", "--path", trained / "d.csv", "--run", folder)
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    status, text = run(monkeypatch, capsys, *again, *settings, "--set", "train.epochs=2")
    assert status == 2 and DAMAGES[damage] in text, text
    assert not (tmp_path / "scores.csv").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_publication_and_a_warm_start_refuse(damage, folder, tmp_path):
    damage(folder)
    with pytest.raises((CheckpointError, CorruptionError), match=DAMAGES[damage]):
        read_checkpoint(folder, 6)
    lines: list[str] = []
    publication = DeltaPublisher(folder, tmp_path / "published", Disk())
    publication.send(6, [6], lines.append)
    assert DAMAGES[damage] in lines[0]
    assert not (tmp_path / "published" / "published.json").exists()


CHANGES = {
    "ranks": ({"num_ranks": 10**9}, "1,000,000,000 ranks"),
    "rows on ranks": (
        {"shardings": {"user": {"kind": "row_wise", "ranks": [[0, 10**9]]}}},
        "rank 1,000,000,000",
    ),
    "negative step": ({"step": -1}, "step"),
    "step as text": ({"step": "six"}, "step"),
    "no model": ({"model": None}, "model"),
    "a path as state": ({"states": {"../../evil": "00000000"}}, "states"),
    "a path as rows": ({"rows": {"../../evil": []}}, "rows"),
    "older version": (
        {"version": 2},
        "version 2, this Colonnade reads 'colonnade checkpoint' version 3",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_header_with_wrong_values_is_refused(name, folder, monkeypatch, capsys):
    fields, words = CHANGES[name]
    path = header_path(folder, 6)
    header = json.loads(read_verified(path)) | fields
    path.write_bytes(append_checksum(json.dumps(header).encode()))
    with pytest.raises((CheckpointError, CorruptionError), match=words):
        read_header(folder, 6)
    for verb in ("verify", "evaluate"):
        status, text = run(monkeypatch, capsys, verb, folder)
        assert status == 2 and words in text and "Traceback" not in text, text


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b"{}", b"null"], ids=lambda c: repr(c[:4])
)
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_header_that_is_none_is_refused(content, is_checked, folder):
    header_path(folder, 6).write_bytes(append_checksum(content) if is_checked else content)
    with pytest.raises((CheckpointError, CorruptionError), match=r"000000000006\.json: got"):
        read_header(folder, 6)
