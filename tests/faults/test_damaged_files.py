"""Any file of a run folder, damaged: every verb says so in one line or does without it; none shows a traceback."""

from __future__ import annotations

import json
import random
import shutil
import sys
from contextlib import suppress

import pytest
import yaml

from colonnade.checkpoint.header import header_path, list_checkpoints, state_folder
from colonnade.checkpoint.states import load_state
from colonnade.cli import main
from colonnade.errors import CorruptionError
from colonnade.files.disk import Disk
from colonnade.files.durable import append_checksum, read_verified, write_durably
from colonnade.store.log.manifest import read_manifest_fields

SETTINGS = (
    "train.batch_size=150", "train.checkpoint_steps=1", "embedding.eviction.max_rows=50", "model.name=lr",
    "train.epochs=2",
)  # fmt: skip
DAMAGES = {
    "empty": b"",
    "random": random.Random(0).randbytes(300),
    "list": b"[1, 2]",
    "deep": b"[" * 100_000,
    "stamped": b'{"format": "colonnade store manifest", "version": 2, "step": 2, "segments": [{"file": "../x"}]}',
    "wrong": b'{"train": 5, "data": [], "step": "x", "tables": 3, "model": 7, "kind": {}, "segments": 5}',
}
FILES = (
    "config.yaml", "plan.json", "summary.json", "machine.json", "metrics.jsonl", "checkpoints/000000000002.json",
    "checkpoints/000000000002/dense", "checkpoints/000000000002/rank-0", "checkpoints/000000000002/retention-0",
    "rows/0-of-1/000/manifest-2.json", "rows/0-of-1/000/live-2.bits", "rows/0-of-1/000/segment-*.rows",
    "rows/0-of-1/000/segment-*.keys",
)  # fmt: skip
TELLING = {
    ("config.yaml", "deep"), ("checkpoints/000000000002.json", "wrong"),
    ("rows/0-of-1/000/manifest-2.json", "stamped"), ("rows/0-of-1/000/manifest-2.json", "wrong"),
}  # fmt: skip
"""Damages that look like what the file should hold, or that its parser may not survive."""


def damages_of_files():
    """Return every damage of every file; by default run those that tell and two of each file's others, in turns."""
    cases = []
    for i, file in enumerate(FILES):
        for j, damage in enumerate(DAMAGES):
            is_default = (file, damage) in TELLING or (j - 2 * i) % len(DAMAGES) < 2
            cases.append(pytest.param(file, damage, marks=[] if is_default else [pytest.mark.slow]))
    return cases


UNCHECKED = (".yaml", ".jsonl", "plan.json", "summary.json", "machine.json")


def run(*arguments: object) -> int:
    """Exit status; any other exception is the test's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["colonnade", *map(str, arguments)])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("trained")
    draw = random.Random(1)
    lines = [f"{draw.randint(0, 1)},u{draw.randint(0, 90)},0.5" for _ in range(150)]
    (place / "d.csv").write_text("\n".join(["label,user,price", *lines]) + "\n")
    assert run(*train(place, place / "run")) == 0
    assert (state_folder(place / "run", 2) / "retention-0").is_file()
    return place


def train(place, folder, *more):
    settings = [part for setting in (*SETTINGS, *more) for part in ("--set", setting)]
    return ("train", "--data", "csv", "--path", place / "d.csv", "--run", folder, *settings)


@pytest.mark.parametrize(("file", "damage"), damages_of_files())
def test_no_verb_raises(file, damage, trained, tmp_path, capsys):
    content = DAMAGES[damage]
    verbs = {
        "verify": (),
        "inspect": (),
        "report": (),
        "evaluate": ("--part", "train"),
        "predict": ("--path", trained / "d.csv", "--output", tmp_path / "scores.csv"),
    }
    if (file, damage) == (
        "config.yaml",
        "deep",
    ):  # a second each; all verbs read it by one function
        verbs = {"inspect": ()}
    whole_rows = "rows/" in file or "checkpoints/" in file
    for is_checked in (False, True) if not file.endswith(UNCHECKED) else (False,):
        folder = tmp_path / f"run-{is_checked}"
        shutil.copytree(trained / "run", folder)
        path = sorted(folder.glob(file))[-1]
        path.write_bytes(bytes(append_checksum(content)) if is_checked else content)
        capsys.readouterr()
        commands = [(verb, folder, *more) for verb, more in verbs.items()]
        commands.append(train(trained, folder, "train.epochs=3"))
        for command in commands:
            status, error = run(*command), capsys.readouterr().err
            assert status in (0, 2), command
            assert status == 0 or (error.startswith("error: ") and error.count("\n") == 1), error
            assert "weights_only" not in error and "Traceback" not in error
            if whole_rows and command[0] in ("verify", "evaluate", "train"):
                assert status == 2, command
        with suppress(FileNotFoundError):
            (tmp_path / "scores.csv").unlink()


def test_a_pickle_in_a_state_file_is_refused_and_not_run(trained, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(trained / "run", folder)
    pickle = b"cos\nsystem\n(S'touch " + str(tmp_path / "evil").encode() + b"'\ntR."
    state = state_folder(folder, 2) / "dense"
    state.write_bytes(append_checksum(pickle))
    assert run("verify", folder) == 2
    assert "dense is not what this run saved there" in capsys.readouterr().out
    with pytest.raises(CorruptionError, match="holds more than tensors") as caught:
        load_state(state, "any run")
    assert "weights_only" not in str(caught.value) and not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "name", ["rows/0-of-1/000/manifest-1.json", "checkpoints/000000000001.json"]
)
def test_a_damaged_older_checkpoint_is_named_and_training_goes_on(name, trained, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(trained / "run", folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    assert run("verify", folder) == 2
    out, error = capsys.readouterr()
    assert "checkpoint of step 1 is" in out or "000000000001.json" in out
    assert name in "".join(out.split()) and "1 of" in error
    assert run("verify", folder, "--at", 2) == 0
    capsys.readouterr()
    keep = "train.keep_checkpoints=9"
    for epochs, steps in ((3, [2, 3]), (4, [2, 3, 4])):  # of commits in the same store
        assert run(*train(trained, folder, f"train.epochs={epochs}", keep)) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "checkpoint of step 1 can no longer be opened" in out and name in out.replace(
            " ", ""
        )
        for step in steps:
            assert run("verify", folder, "--at", step) == 0
    (folder / name).write_bytes(content)  # restored from a copy: its rows were kept
    assert run("verify", folder, "--at", 1) == 0 and run("verify", folder) == 0
    assert run("evaluate", folder, "--at", 1, "--part", "train") == 0
    assert run(*train(trained, folder, "train.epochs=5", "train.keep_checkpoints=1")) == 0
    capsys.readouterr()
    assert run("verify", folder) == 0
    store = folder / "rows/0-of-1/000"
    newest = list_checkpoints(folder)[-1]
    listed = {part["file"] for part in read_manifest_fields(store, newest)["segments"]}
    assert {path.name for path in store.glob("segment-*.rows")} == listed  # nothing is left over


EDITS = {
    "train.seed": 7,
    "embedding.init_scale": 0.5,
    "embedding.by_table.user.init_scale": 0.5,
    "data.options.schema.fields": None,
    "data.options.null_values": ["u1"],
    "dense.weight_decay": 0.5,
    "embedding.lr": 0.5,
    "train.publish_at": "last",
    "data.path": "d.csv",
}
CHANGEABLE = {"dense.weight_decay", "embedding.lr", "train.publish_at", "data.path"}


@pytest.fixture
def edited(trained, tmp_path, request):
    """A run with one setting of config.yaml edited."""
    folder, name = tmp_path / "run", request.param
    shutil.copytree(trained / "run", folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    if name == "data.options.schema.fields":
        fields = config["data"]["options"]["schema"]["fields"]
        assert "user" in json.dumps(fields)
        config["data"]["options"]["schema"]["fields"] = json.loads(
            json.dumps(fields).replace('"price"', '"prize"', 1)
        )
    else:
        node = config
        *sections, key = name.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = str(trained / "d.csv") if name == "data.path" else EDITS[name]
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder, name


@pytest.mark.parametrize("edited", EDITS, indirect=True)
def test_an_edit_that_changes_scores_is_named_and_others_are_not(edited, trained, tmp_path, capsys):
    folder, name = edited
    scores = ("--path", trained / "d.csv", "--output", tmp_path / "scores.csv")
    for command in (
        ("verify", folder),
        ("evaluate", folder, "--part", "train"),
        ("predict", folder, *scores),
        ("export", folder, tmp_path / "out"),
        train(trained, folder, "train.epochs=3"),
    ):
        capsys.readouterr()
        status = run(*command)
        out, error = capsys.readouterr()
        if name in CHANGEABLE:
            assert status == 0, (command, error)
        else:
            text = " ".join((out + error).split())
            assert status == 2 and "config.yaml was edited" in text and name in text, (
                command,
                text,
            )
    if name not in CHANGEABLE:
        assert run("serve", folder, "--port", 0) == 2
        assert "config.yaml was edited" in " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_without_settings_is_refused_by_name(trained, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(trained / "run", folder)
    for step in list_checkpoints(folder):
        fields = json.loads(read_verified(header_path(folder, step)))
        assert fields.pop("settings")["train.seed"] == 0
        write_durably(Disk(), header_path(folder, step), json.dumps(fields).encode())
    scores = ("--path", trained / "d.csv", "--output", tmp_path / "scores.csv")
    for command in (
        ("verify", folder),
        ("evaluate", folder, "--part", "train"),
        ("predict", folder, *scores),
        ("serve", folder, "--port", 0),
        train(trained, folder, "train.epochs=3"),
    ):
        capsys.readouterr()
        assert run(*command) == 2, command
        out, error = capsys.readouterr()
        assert "a bad settings: Field required" in " ".join((out + error).split()), command


def test_a_setting_that_changed_on_resume_is_no_edit(trained, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(trained / "run", folder)
    settings = ("train.epochs=3", "embedding.lr=0.3", "train.keep_checkpoints=9")
    assert run(*train(trained, folder, *settings)) == 0
    for step in list_checkpoints(folder):
        assert run("verify", folder, "--at", step) == 0
        assert run("evaluate", folder, "--at", step, "--part", "train") == 0
    capsys.readouterr()
    assert run(*train(trained, folder, "train.epochs=4", "embedding.init_scale=0.5")) == 2
    assert "embedding.init_scale" in capsys.readouterr().err
