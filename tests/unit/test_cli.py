"""The command line: errors are one line and exit status 2, and a refused command changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from inspect import signature

import pytest

import colonnade as colonnade_package
from colonnade.cli import train as train_verb
from colonnade.cli.app import run_command
from colonnade.cli.ranks import choose_death_signal
from colonnade.cli.settings import MEANINGS
from colonnade.cli.train import parse_set_options
from colonnade.config.run import RunConfig
from colonnade.data import SOURCES

SMALL = [
    "--data", "synthetic", "--set", "data.options.num_train=3000", "--set", "data.options.num_test=500",
    "--set", "data.options.max_cardinality=200", "--set", "train.batch_size=500",
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--data", "synthetic", "--data", "netflix"], "choose from arrow, criteo, csv"),
        (["train", "--data", "synthetic", "--set", "train.epoch=3"], "did you mean train.epochs"),
        (["train", "--data", "synthetic", "--set", "epochs"], "name=value"),
        (["train", "--data", "synthetic", "--set", "=3"], "name=value"),
        (["train", "--data", "synthetic", "--set", "model.bottom=[-3]"], "model.bottom"),
        (["train", "--data", "synthetic", "--set", "embedding.lr=inf"], "embedding.lr"),
        (
            ["train", "--data", "synthetic", "--set", "train.seed=99999999999999999999999"],
            "train.seed",
        ),
        (["train", "--data", "synthetic", "--set", "plan.memory.dram=3XB"], "wanted a size"),
        (["train", "--data", "synthetic", "--set", "data.options.num_train=abc"], "num_train"),
        (["train", "--data", "synthetic", "--set", "data.options.numtrain=5"], "num_train"),
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "--data", "synthetic", "--data", "criteo", "--path", "nowhere"], "nowhere"),
        (["evaluate", "nowhere"], "nowhere"),
        (["bench", "nothing"], "unknown bench"),
        (["trian"], "did you mean train?"),
        (["xyzzy"], "choose from demo, train"),
        (["train", "--data", "synthetic", "--rnaks", "2"], "did you mean --ranks?"),
        (["train", "--data", "synthetic", "--ranks", "two"], "--ranks"),
        (["train", "--data", "synthetic", "--ranks", "0"], "--ranks"),
        (["train", "--data", "synthetic", "--set"], "--set"),
        (["train", "a.yaml", "b.yaml"], "b.yaml"),
        (["train", "no\nwhere.yaml"], "where.yaml"),
        (
            ["train", "--data", "synthetic", "--set", "train.epoch=3", "--set", "model.dims=3"],
            "did you mean train.epochs",
        ),
        (["demo", "--samples", "1"], "--samples"),
        (["evaluate"], "run"),
        (["report"], "run"),
        (["report", "nowhere"], "nowhere"),
        (["report", "."], "no run folder"),
        (["compare", "nowhere"], "at least two"),
        (["compare", "nowhere", "nowhere2"], "nowhere"),
        (["inspect", "nowhere"], "nowhere"),
        (["inspect", "."], "neither a run folder"),
        (["verify", "nowhere"], "nowhere does not exist; name the folder of a run"),
        (["verify", "."], "got a folder without checkpoints/"),
        (["export", "nowhere", "out"], "nowhere"),
        (["export", "nowhere", "out", "--at", "soon"], "nowhere"),
        (["predict", "nowhere"], "--output"),
        (["predict", "nowhere", "--output", "x.csv"], "nothing to score"),
        (["predict", "nowhere", "--output", "x.csv", "--part", "test"], "nowhere"),
        (["predict", ".", "--output", "x.csv", "--part", "test"], "neither a run folder"),
        (["settings", "trian"], "did you mean train?"),
        (["settings", "callback"], "the sections are data, model, embedding, dense, plan, train\n"),
        (["settings", "plan.memory.drma"], "did you mean plan.memory.dram?"),
        (["settings", "data.options.cvs"], "did you mean csv?"),
        (
            ["train", "--data", "synthetic", "--max-steps", "3"],
            "did you mean --set train.max_steps=VALUE?",
        ),
        (
            ["train", "--data", "synthetic", "--train.epochs=3"],
            "did you mean --set train.epochs=VALUE?",
        ),
        (
            ["train", "--data", "synthetic", "--keep-checkpoint", "3"],
            "did you mean --set train.keep_checkpoints=VALUE?",
        ),
        (["train", "--data", "synthetic", "--weight-decay", "3"], "--set dense.weight_decay=VALUE"),
        (["train", "--data", "synthetic", "--batchsize", "3"], "did you mean --batch-size?"),
        (["train", "--data", "synthetic", "--lr", "fast"], "--lr"),
        (["train", "--data", "synthetic", "--model", "deepfm", "--epochs", "-1"], "train.epochs"),
    ],
)
def test_errors_are_one_line(colonnade, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, output = colonnade(*arguments)
    assert status == 2
    assert output.startswith("error: ") and output.count("\n") == 1 and words in output, output
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_printed(colonnade):
    assert colonnade("--version") == (0, f"colonnade {colonnade_package.__version__}\n", "")


def test_short_options_are_settings_and_set_wins(monkeypatch):
    built = []
    monkeypatch.setattr(train_verb, "train_run", lambda config, *_: built.append(config))
    options = [
        "--data",
        "synthetic",
        "--model",
        "deepfm",
        "--epochs",
        "3",
        "--batch-size",
        "64",
        "--lr",
        "0.25",
    ]
    options += ["--seed", "7", "--dram", "1MiB", "--set", "dense.lr=0.5"]
    assert run_command(["train", *options]) == 0
    (config,) = built
    assert config.model.name == "deepfm" and config.train.epochs == 3
    assert config.train.batch_size == 64 and config.train.seed == 7
    assert (config.embedding.lr, config.dense.lr) == (0.25, 0.5)
    assert config.plan.memory.dram == 2**20


@pytest.fixture
def built(monkeypatch):
    """Configurations of `train` commands, which train nothing."""
    configs = []
    monkeypatch.setattr(train_verb, "train_run", lambda config, *_: configs.append(config))
    return configs


def test_a_run_folder_alone_continues_with_its_settings(colonnade, tmp_path):
    run = str(tmp_path / "run")
    assert colonnade("train", "--run", run, *SMALL, "--lr", "0.015", "--seed", "5")[0] == 0
    before = (tmp_path / "run" / "config.yaml").read_text()
    status, shown, output = colonnade("train", "--run", run, "--epochs", "2")
    assert status == 0, output
    assert "resuming" in shown and "epoch 2" in shown
    after = (tmp_path / "run" / "config.yaml").read_text()
    assert after == before.replace("epochs: 1\n", "epochs: 2\n") != before


def test_training_without_data_trains_nothing(colonnade, tmp_path):
    for options in ([], ["--run", str(tmp_path / "new")], ["--epochs", "3"]):
        status, _, output = colonnade("train", *options)
        assert status == 2 and "got no data" in output and "--data csv --path" in output
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine.yaml").write_text("train: {epochs: 2}\n")
    status, _, output = colonnade("train", str(tmp_path / "mine.yaml"))
    assert status == 2 and "mine.yaml names no data, wanted data.name" in output


def test_a_file_of_settings_beside_a_preset_overrides_it(built, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {batch_size: 77}\nmodel: {name: deepfm, dim: 12}\n")
    assert run_command(["train", str(file), "--data", "movielens", "--epochs", "9"]) == 0
    (config,) = built
    assert run_command(["train", "--data", "movielens", "--model", "deepfm"]) == 0
    preset = built[1]
    assert (config.train.batch_size, config.model.dim, config.train.epochs) == (77, 12, 9)
    assert config.data.name == "movielens" and config.embedding == preset.embedding


def test_a_file_and_an_option_must_name_the_same_data(colonnade, built, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("data: {name: criteo, path: train.txt}\n")
    assert run_command(["train", str(file), "--data", "criteo"]) == 0
    status, _, output = colonnade("train", str(file), "--data", "csv")
    assert status == 2 and "got --data csv" in output and "data.name: criteo" in output
    assert len(built) == 1


def test_label_is_an_option_of_train_and_of_inspect(colonnade, built, tmp_path):
    file = tmp_path / "visits.csv"
    file.write_text("bought,user\n1,a\n0,b\n1,c\n")
    status, _, output = colonnade(
        "train", "--data", "csv", "--path", str(file), "--label", "bought"
    )
    assert status == 0, output
    assert built[0].data.options["label"] == "bought"
    _, shown, _ = colonnade("inspect", str(file))
    assert "no schema suggested" in shown and "--label NAME" in " ".join(shown.split())
    _, shown, _ = colonnade("inspect", str(file), "--label", "bought")
    assert "bought: {type: label" in shown or "type: label" in shown
    for verb in (["train", "--data", "csv", "--path", str(file)], ["inspect", str(file)]):
        status, _, output = colonnade(*verb, "--label", "user", "--label", "bought")
        assert status == 2 and "--label: got user, bought, wanted one column" in output


def test_delimiter_and_names_are_options_of_train_and_of_inspect(colonnade, built, tmp_path):
    file = tmp_path / "visits.csv"
    file.write_text("1:a\n0:b\n1:a\n")
    options = ["--delimiter", ":", "--names", "label,user"]
    status, _, output = colonnade("train", "--data", "csv", "--path", str(file), *options)
    assert status == 0, output
    assert built[0].data.options["delimiter"] == ":"
    assert built[0].data.options["names"] == ["label", "user"]
    _, shown, _ = colonnade("inspect", str(file), *options)
    assert "user: {type: category" in shown and "the delimiter is ':'" in shown
    colonnade("train", "--data", "triples", "--path", str(file), "--names", "tail,relation,head")
    assert built[1].data.options["columns"] == ["tail", "relation", "head"]


def test_the_shell_completes_verbs(monkeypatch, capsys):
    monkeypatch.setenv("COMP_WORDS", "colonnade tr")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_COLONNADE_COMPLETE", "complete_bash")
    with pytest.raises(SystemExit):
        run_command([])
    assert capsys.readouterr().out.split() == ["train"]


def test_settings_fit_80_columns_and_are_filtered_by_words(colonnade, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, everything, _ = colonnade("settings")
    assert max(map(len, everything.splitlines())) <= 80
    assert "train.keep_checkpoints = 2" in everything
    _, several, _ = colonnade("settings", "learning rate")
    assert "embedding.lr = none" in several and "train.batch_size" not in several


def test_every_option_of_data_is_described(colonnade):
    options = {name for opener in SOURCES.values() for name in signature(opener).parameters} - {
        "path"
    }
    assert options == set(MEANINGS)
    _, shown, _ = colonnade("settings", "data.options.csv")
    assert "data.options.shuffle_window = 0" in shown and "data.options.null_values" in shown
    _, shown, _ = colonnade("settings", "data.options")
    assert "movielens: data.options.seed" in shown


def test_an_outcome_begins_with_the_metric_and_fits_80_columns(colonnade, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    status, shown, output = colonnade("train", "--run", str(tmp_path / "run"), *SMALL)
    assert status == 0, output
    lines = shown.splitlines()
    outcome = lines[next(i for i, line in enumerate(lines) if line.startswith("epoch 1")) + 1 :]
    assert outcome[0].startswith("test auc: ")
    assert "ssd" not in shown and " 0%" not in shown  # all rows are in memory, nothing is a zero
    assert max(map(len, (line for line in lines if str(tmp_path) not in line))) <= 80


def test_seeds_are_runs_of_their_own_with_their_mean_and_spread(colonnade, tmp_path):
    folder = tmp_path / "runs"
    command = ["train", "--run", str(folder), "--seeds", "2", "--seed", "4", *SMALL]
    status, shown, message = colonnade(*command)
    assert status == 0, message
    names = ("seed-4", "seed-5")
    scores = [
        json.loads((folder / name / "summary.json").read_text())["metrics"]["test_auc"]
        for name in names
    ]
    mean, spread = sum(scores) / 2, abs(scores[0] - scores[1]) / 2**0.5
    assert spread > 0 and f"test auc: {mean:.4f} ± {spread:.4f}" in shown
    before = contents(tmp_path)
    status, again, _ = colonnade(*command)  # finished runs are not trained again
    assert status == 0 and f"test auc: {mean:.4f} ± {spread:.4f}" in again
    assert contents(tmp_path) == before
    status, _, message = colonnade("train", "--run", str(folder / "seed-4"), "--seeds", "2", *SMALL)
    assert status == 2 and "is a run, wanted a folder" in message


def test_a_run_its_evaluation_and_going_back(colonnade, tmp_path):
    folder = str(tmp_path / "run")
    status, first, message = colonnade(
        "train", "--run", folder, *SMALL, "--set", "train.checkpoint_steps=2"
    )
    assert status == 0, message
    for words in ("where rows came from", "where the time went", "test auc", "run folder"):
        assert words in first
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 6 and 0 < summary["metrics"]["test_auc"] < 1

    before = contents(tmp_path)
    status, again, _ = colonnade("train", "--run", folder, *SMALL)
    assert status == 0 and "is finished at step 6" in again and "train.epochs=N" in again
    assert f"test auc: {summary['metrics']['test_auc']:.4f}" in again
    assert contents(tmp_path) == before

    status, evaluated, _ = colonnade("evaluate", folder)
    assert f"auc: {summary['metrics']['test_auc']:.4f}" in evaluated
    status, _, message = colonnade("evaluate", folder, "--at", "3")
    assert status == 2 and "has no checkpoint of step 3" in message
    status, _, message = colonnade("evaluate", folder, "--at", "9" * 5000)
    assert status == 2 and "has no checkpoint of step 999" in message and len(message) < 500
    status, restored, _ = colonnade("evaluate", folder, "--at", "4")
    assert status == 0 and "step 4" in restored


def test_a_finished_run_goes_on_with_more_epochs(colonnade, tmp_path):
    folder = str(tmp_path / "run")
    assert colonnade("train", "--run", folder, *SMALL)[0] == 0
    assert colonnade("train", "--run", folder, *SMALL, "--set", "train.epochs=2")[0] == 0
    before, summary = contents(tmp_path), json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["step"], summary["steps"]) == (12, 6)
    status, text, _ = colonnade("train", "--run", folder, *SMALL)  # fewer than it has trained
    assert status == 0 and "is finished at step 12" in text and contents(tmp_path) == before


def contents(folder):
    """Every file under a folder: content and time of its last change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_refused_command_changes_nothing(colonnade, tmp_path):
    folder = tmp_path / "run"
    assert colonnade("train", "--run", str(folder), *SMALL)[0] == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for change in (
        "model.dim=3",
        "data.options.seed=5",
        "dense.optimizer=sgd",
        "train.batch_size=7",
    ):
        status, _, output = colonnade("train", "--run", str(folder), *SMALL, "--set", change)
        assert status == 2 and change.split("=")[0] in output
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_doctor_says_what_follows(colonnade):
    status, output, _ = colonnade("doctor")
    assert status == 0
    for words in (
        "native path",
        "huge pages",
        "io_uring",
        "memory",
        "what it means",
        "gloo",
        "127.0.0.1",
    ):
        assert words in output


VERBS = (
    "demo train towers evaluate predict recommend report compare inspect export verify settings doctor bench"
).split()


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches(verb, colonnade):
    status, output, _ = colonnade(verb, "--help")
    assert status == 0
    assert verb == "doctor" or f"colonnade {verb}" in output.split("Examples")[1]


def test_help_needs_no_torch():
    code = (
        "import sys; from colonnade.cli.app import run_command as run; run(['--help']); run(['train', '--help']); "
        "run(['towers', '--help']); "
        "print([n for n in ('torch', 'numpy', 'pyarrow', 'colonnade._native') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_settings_lists_every_field_with_its_words(colonnade, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    lines = colonnade("settings")[1].splitlines()
    for section, part in RunConfig.model_fields.items():
        for name, field in part.annotation.model_fields.items():
            number = next(
                i for i, line in enumerate(lines) if line.split()[0] == f"{section}.{name}"
            )
            words = " ".join((field.description or "").split())
            assert lines[number + 1].strip().startswith(words[:40])


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.6, 1.2])
def test_ctrl_c_while_importing_is_no_traceback(seconds, tmp_path):
    # Before its first line Python itself does not take signals as KeyboardInterrupt everywhere.
    program = "print('ready', flush=True); from colonnade.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", program, "train", "--data", "synthetic", "--run", str(tmp_path / "run")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    time.sleep(seconds)
    child.send_signal(signal.SIGINT)
    _, output = child.communicate(timeout=60)
    assert "Traceback" not in output, output
    assert child.returncode in (0, 130)  # 0: training had begun, and was saved


def test_ctrl_c_in_an_import_ends_the_process_there(tmp_path):
    # torch's C++ modules call Python while they are initialised: what that raises, std::terminate takes.
    (tmp_path / "deaf.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    os.abort()\n"
    )
    program = """
import signal
from colonnade.cli import exit_during_import
signal.signal(signal.SIGINT, exit_during_import)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("outside of imports as ever", flush=True)
import deaf
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])},
    )  # fmt: skip
    assert done.returncode == 130, done
    assert done.stdout == "outside of imports as ever\n" and done.stderr.startswith("stopped")


def test_output_that_nobody_reads_is_no_traceback():
    command = f"{sys.executable} -m colonnade settings | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("data.name") and done.stderr == ""


def test_verify_names_what_is_damaged(colonnade, tmp_path):
    folder = tmp_path / "run"
    ssd = f"plan.memory.ssd={tmp_path / 'disk'}"
    assert colonnade("train", "--run", str(folder), *SMALL, "--set", ssd)[0] == 0
    status, message, err = colonnade("verify", str(folder))
    assert status == 0 and "step 6: intact; " in message and err == ""
    rows = sorted((tmp_path / "disk").rglob("segment-*.rows"))[3]
    keys = sorted((tmp_path / "disk").rglob("segment-*.keys"))[5]
    state = folder / "checkpoints" / "000000000006" / "rank-0"
    for path in (rows, keys, state):
        data = bytearray(path.read_bytes())
        data[-20] ^= 4
        path.write_bytes(data)
    missing = sorted(folder.rglob("live-6.bits"))[9]
    missing.unlink()
    status, message, err = colonnade("verify", str(folder), "--at", "last")
    damaged = "".join(line for line in message.splitlines() if line.startswith("damaged"))
    assert status == 2 and "5 of" in err and "files are damaged" in err
    for path in (rows, keys, keys.with_suffix(".rows"), state, missing):
        assert str(path) in damaged, path


def test_a_state_of_another_checkpoint_is_no_part_of_this_one(colonnade, tmp_path):
    folder = tmp_path / "run"
    arguments = ("train", "--run", str(folder), *SMALL)
    assert colonnade(*arguments, "--set", "train.checkpoint_steps=4")[0] == 0
    older, newer = (folder / "checkpoints" / f"{step:012d}" / "dense" for step in (4, 6))
    newer.write_bytes(older.read_bytes())
    status, message, err = colonnade("verify", str(folder))
    assert status == 2 and "dense is not what this run saved there" in message
    status, _, err = colonnade("evaluate", str(folder))
    assert status == 2 and "dense is not what this run saved there" in err


def test_verify_finds_directories_that_moved(colonnade, tmp_path):
    folder = str(tmp_path / "run")
    ssd = f"plan.memory.ssd={tmp_path / 'disk'}"
    assert colonnade("train", "--run", folder, *SMALL, "--set", ssd)[0] == 0
    (tmp_path / "disk").rename(tmp_path / "moved")
    status, message, err = colonnade("verify", folder)
    assert status == 2 and "--set plan.memory.ssd=" in message and "damaged or missing" in err
    status, message, _ = colonnade("verify", folder, "--directory", str(tmp_path / "moved"))
    assert status == 0 and "intact" in message


def test_from_a_run_to_scores_and_pages(colonnade, tmp_path):
    folder, out = str(tmp_path / "run"), tmp_path / "served"
    assert colonnade("train", "--run", folder, *SMALL)[0] == 0
    status, message, _ = colonnade("export", folder, str(out))
    assert status == 0 and "26 tables" in message
    for place in (folder, str(out), str(tmp_path / "run" / "checkpoints" / "000000000006.json")):
        status, message, err = colonnade("inspect", place)
        assert status == 0 and "C26" in message and err == ""
    test = ("--part", "test", "--output")
    status, message, _ = colonnade("predict", str(out), *test, str(tmp_path / "a.csv"))
    assert status == 0 and "500 samples scored" in message
    status, message, _ = colonnade("predict", folder, "--at", "6", *test, str(tmp_path / "b.csv"))
    assert status == 0 and (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 501
    status, message, _ = colonnade("inspect", str(tmp_path / "a.csv"))
    assert status == 0 and "score" in message
    status, message, _ = colonnade("report", folder)
    assert status == 0 and "<title>run" in (tmp_path / "run" / "report.html").read_text()
    second = str(tmp_path / "second")
    assert colonnade("train", "--run", second, *SMALL, "--set", "embedding.lr=0.05")[0] == 0
    page = tmp_path / "page.html"
    status, message, _ = colonnade("compare", folder, second, "--output", str(page))
    assert (
        status == 0 and "embedding.lr" in message and "model.dim" not in message and page.exists()
    )


def test_outputs_that_cannot_be_written_are_one_line(colonnade, tmp_path):
    folder = str(tmp_path / "run")
    assert colonnade("train", "--run", folder, *SMALL)[0] == 0
    beyond = str(tmp_path / "no" / "such.html")
    for command in (
        ["report", folder, "--output", beyond],
        ["compare", folder, folder, "--output", beyond],
        ["predict", folder, "--part", "test", "--output", str(tmp_path / "no" / "x.csv")],
        ["predict", folder, "--part", "test", "--output", str(tmp_path / "x.doc")],
        ["export", folder, folder],
    ):
        status, _, output = colonnade(*command)
        assert status == 2 and output.startswith("error: ") and output.count("\n") == 1, output
    assert not (tmp_path / "no").exists()


def test_names_are_there_when_asked_for():
    code = (
        "import sys, colonnade; assert 'torch' not in sys.modules; "
        "assert colonnade.errors.ConfigError and not hasattr(colonnade, 'Tabel'); "
        "assert set(colonnade.__all__) <= set(dir(colonnade)); "
        "from colonnade import *; assert Table and Predictor and colonnade.__version__"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_may_be_named(colonnade, tmp_path):
    folder = str(tmp_path / "run")
    assert colonnade("train", "--run", folder, *SMALL, "--set", "train.checkpoint_steps=4")[0] == 0
    for at, step in (("last", 6), ("4", 4), ("6", 6)):
        status, output, _ = colonnade("evaluate", folder, "--at", at)
        assert status == 0 and f"step {step} (" in output and "test:" in output
    for at, words in (("best", "no checkpoint is known to be the best"), ("5", "it has [4, 6]")):
        status, _, output = colonnade("evaluate", folder, "--at", at)
        assert status == 2 and words in output and output.count("\n") == 1


def test_lists_are_written_with_or_without_quotes():
    wanted = {"model.item_columns": ["item", "year"]}
    for text in ("[item, year]", '["item", "year"]', "['item','year']"):
        assert parse_set_options([f"model.item_columns={text}"]) == wanted


def test_a_run_that_never_checkpointed_may_be_tried_again_with_other_settings(colonnade, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,x,u\n" + "1,2,a\n0,3,b\n" * 20 + "1,oops,a\n")
    schema = tmp_path / "s.yaml"
    schema.write_text("fields: {label: {type: label}, x: {type: number}, u: {type: category}}\n")
    arguments = (
        "train", "--data", "csv", "--path", str(path), "--run", str(tmp_path / "run"),
        "--set", f"data.options.schema={schema}", "--set", "train.batch_size=4",
    )  # fmt: skip
    status, _, output = colonnade(*arguments)
    assert status == 2 and "line 42" in output
    schema.write_text("fields: {label: {type: label}, x: {type: category}, u: {type: category}}\n")
    assert colonnade(*arguments)[0] == 0


def test_under_torchrun_a_run_has_a_name(colonnade, tmp_path, monkeypatch):
    """Ranks that name it by their clocks name it otherwise."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    for words in (["demo"], ["train", "--data", "synthetic"]):
        status, out, output = colonnade(*words)
        assert (status, out) == (2, "") and "with --run" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_on_two_ranks_of_torchrun(tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--",
        "colonnade", "demo", "--samples", "3000", "--run", str(tmp_path / "run"),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("A click stream") == ended.stdout.count("best any model could") == 1
    assert (tmp_path / "run" / "report.html").exists()


def test_a_rank_whose_launcher_is_killed_checkpoints_only_where_nobody_starts_it_again():
    assert (
        choose_death_signal({})
        == choose_death_signal({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
        == signal.SIGTERM
    )
    assert choose_death_signal({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}) == signal.SIGKILL


# --- inspect, of data files --------------------------------------------------------------------------------


def write_clicks(path, delimiter=",", header=",label,user_id,city,created_at,note\n"):
    rows = [f"{i},{i % 2},{i % 7},c{i % 3},2024-03-{i + 1:02}," for i in range(9)]
    path.write_text((header + "\n".join(rows) + "\n").replace(",", delimiter))
    return path


def test_inspect_shows_rows_counts_and_a_schema(colonnade, tmp_path):
    path = write_clicks(tmp_path / "a.csv")
    status, out, err = colonnade("inspect", str(path))
    assert status == 0 and err == ""
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert lines["rows"] == ["rows", "9"]
    assert lines["column"] == "column type missing distinct row 1 row 2 row 3".split()
    assert lines["user_id"] == ["user_id", "integer", "0", "7", "0", "1", "2"]
    assert lines["city"] == ["city", "text", "0", "3", "c0", "c1", "c2"]
    assert lines["note"][:4] == ["note", "empty", "9", "-"]
    assert "column_0: {type: key, dtype: integer}" in out
    assert "created_at_weekday: {type: time, column: created_at, part: weekday, unit: s}" in out
    assert "left out: note (no value in the first rows)" in out
    assert max(map(len, out.split("on disk")[1].split("suggested schema")[0].splitlines())) <= 80


def test_inspect_takes_the_options_of_reading(colonnade, tmp_path):
    path = write_clicks(tmp_path / "a.dat", delimiter="\t", header="")
    status, _, err = colonnade("inspect", str(path))
    assert status == 2 and "--data csv" in err
    names = "row,label,user_id,city,day,note"
    options = ("--data", "csv", "--delimiter", "tab", "--names", names)
    status, out, _ = colonnade("inspect", str(path), *options)
    assert status == 0 and "user_id: {type: category, dtype: integer}" in out
    (tmp_path / "days").mkdir()
    write_clicks(tmp_path / "days" / "b.csv")
    status, out, _ = colonnade("inspect", str(tmp_path / "days"), "--data", "csv")
    assert status == 0 and "city: {type: category" in out
    status, _, err = colonnade("inspect", str(path), "--data", "criteo")
    assert status == 2 and "wanted a kind of file: arrow, csv" in err


def test_inspect_shows_no_control_characters(colonnade, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,[/x],a\x1b[31m\n1,\x1b[2J,2\n0,b,3\n")
    status, out, _ = colonnade("inspect", str(path))
    assert status == 0 and "\x1b" not in out and "[/x]" in out and "\\x1b[2J" in out


INSPECT = """
import sys
from colonnade.cli.app import run_command as run
assert run(["inspect", sys.argv[1]]) == 0
assert "torch" not in sys.modules, "torch was imported"
"""


def test_inspect_imports_no_torch(tmp_path):
    path = write_clicks(tmp_path / "a.csv")
    subprocess.run(
        [sys.executable, "-c", INSPECT, str(path)], check=True, stdout=subprocess.DEVNULL
    )


def test_inspect_takes_about_a_second_of_processor_time(tmp_path):
    """0.7 s at 2.8 GHz; with torch it would be three."""
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip("other processes compute")
    path = write_clicks(tmp_path / "a.csv")

    def measure() -> float:
        before = os.times()
        test_inspect_imports_no_torch(path.parent)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    assert min(measure() for _ in range(3)) < 1.5
