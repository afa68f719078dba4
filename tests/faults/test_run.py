"""Runs that their input, disk or user interferes with: a clear end, and nothing lost."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time

import pytest
import torch
from forked_command import start_command
from ranks import console_of, run_ranks
from small_run import CONFIG, digest

from colonnade import Mesh, dense_state_dict
from colonnade.checkpoint.header import list_checkpoints
from colonnade.config.run import build_config, override_settings
from colonnade.data import Splits, open_source
from colonnade.errors import (
    CheckpointError,
    CorruptionError,
    NonFiniteError,
    StorageError,
    StoreLocked,
)
from colonnade.files.disk import Change, Disk
from colonnade.run.run import open_run
from colonnade.store.log.manifest import list_commit_files, read_manifest_fields


def config(**settings):
    return override_settings(
        build_config(CONFIG), {k.replace("__", "."): v for k, v in settings.items()}
    )


class Poisoned:
    """A source whose samples of one step hold NaN."""

    def __init__(self, source, step):
        self.source, self.step = source, step
        self.schema, self.num_samples = source.schema, source.num_samples

    def batches(self, batch_size, **where):
        for t, batch in enumerate(self.source.batches(batch_size, **where)):
            if t == self.step:
                batch.dense = torch.full_like(batch.dense, float("nan"))
            yield batch


def poisoned(step):
    data = open_source("synthetic", **CONFIG["data"]["options"])
    return Splits(train=Poisoned(data.train, step), test=data.test)


def test_nan_stops_with_nothing_applied():
    run = open_run(config(train__epochs=1), Mesh(), None, data=poisoned(3))
    with pytest.raises(NonFiniteError, match=r"step 3 .*nothing of this step was applied"):
        run.train()
    reference = open_run(config(train__epochs=1, train__max_steps=3), Mesh(), None)
    reference.train()
    assert_same_model(run, reference)


def test_nan_is_skipped_where_asked():
    run = open_run(
        config(train__epochs=1, train__on_non_finite="skip"), Mesh(), None, data=poisoned(3)
    )
    outcome = run.train()
    assert (outcome.steps, outcome.skipped) == (15, 1)
    rows = run.trainer.collection.rows("C2", torch.arange(900))
    assert torch.isfinite(rows).all()


def poisoned_on_rank_one(mesh):
    """NaN in rank 1's share only; every rank must stop, with nothing applied."""
    data = open_source("synthetic", **CONFIG["data"]["options"])
    if mesh.rank == 1:
        data = poisoned(2)
    run = open_run(config(train__epochs=1), mesh, None, data=data, console=console_of(mesh))
    try:
        run.train()
    except NonFiniteError as error:
        return str(error), run.trainer.collection.step
    return None


def test_nan_on_one_rank_stops_all():
    for message, step in run_ranks(2, poisoned_on_rank_one):
        assert "applied on any rank" in message and step == 2


def skip_with_copies(mesh, staleness, servers=0, lookahead=3, policy="lru"):
    """Skip a step whose batch has a NaN on rank 0; return the rows."""
    settings = {"plan": {"servers": servers, "lookahead": lookahead}}
    if staleness is not None:
        settings["plan"]["cache"] = {
            "size": 50,
            "staleness": staleness,
            "write_share": 1.0,
            "policy": policy,
        }
    plain = config(train__epochs=1, train__on_non_finite="skip", train__evaluate_steps=4)
    data = poisoned(3) if mesh.rank == 0 else None
    run = open_run(
        build_config({**plain.model_dump(), **settings}),
        mesh,
        None,
        data=data,
        console=console_of(mesh),
    )
    outcome = run.train()
    assert (outcome.steps, outcome.skipped) == (15, 1)
    with run.trainer.rows.synchronized_view():
        rows = run.trainer.collection.rows("C2", torch.arange(900))
    assert torch.isfinite(rows).all()
    return rows


def test_a_step_is_skipped_with_copies_of_rows():
    plain, exact, late = (run_ranks(2, skip_with_copies, bound)[0] for bound in (None, 0, 9))
    assert torch.equal(plain, exact) and not torch.equal(plain, late)
    assert all(torch.equal(late, rows) for rows in run_ranks(3, skip_with_copies, 9, 1))


@pytest.mark.parametrize("policy", ["lfu", "lookahead"])
def test_decisions_after_a_skipped_step_do_not_depend_on_how_many_were_made_before(policy):
    one, other = (run_ranks(2, skip_with_copies, 9, 0, n, policy)[0] for n in (0, 4))
    assert torch.equal(one, other)


def assert_same_model(one, other):
    expected = dense_state_dict(other.trainer.model)
    for name, value in dense_state_dict(one.trainer.model).items():
        assert torch.equal(value, expected[name]), name
    for table in one.trainer.collection.tables:
        ids = torch.arange(table.rows)
        actual, expected = (run.trainer.collection.rows(table.name, ids) for run in (one, other))
        assert torch.equal(actual, expected), table.name


class FullDisk(Disk):
    """Has room for `changes` changes, then none."""

    def __init__(self, changes):
        self.remaining = changes

    def perform(self, change: Change, action):
        self.remaining -= change.verb in ("append", "create")
        if self.remaining < 0 and change.verb in ("append", "create"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return action()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The digest of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight")
    open_run(config(), Mesh(), folder).train()
    return digest(folder)


@pytest.mark.parametrize("changes", [7, 17, 24, 40])
def test_full_disk_during_a_checkpoint(changes, straight, tmp_path):
    folder = tmp_path / "run"
    run = open_run(config(), Mesh(), folder, disk=FullDisk(changes + 2))
    with pytest.raises(StorageError, match=r"No space left|[Ff]ree space"):
        run.train()
    run.close()
    steps = list_checkpoints(folder)
    again = open_run(config(), Mesh(), folder)
    assert again.resumed_at == (steps[-1] if steps else None)
    again.train()
    again.close()
    assert digest(folder) == straight


def test_two_runs_on_one_folder(tmp_path):
    run = open_run(config(), Mesh(), tmp_path)
    with pytest.raises(StoreLocked, match="another run"):
        open_run(config(), Mesh(), tmp_path)
    run.close()


@pytest.fixture(scope="module")
def first_epoch(tmp_path_factory):
    """The folder of a run of one epoch, for copies."""
    folder = tmp_path_factory.mktemp("first_epoch")
    run = open_run(config(train__epochs=1), Mesh(), folder)
    run.train()
    run.close()
    return folder


@pytest.fixture
def finished(first_epoch, tmp_path):
    """The folder of a finished run that a test may damage or go on with."""
    shutil.copytree(first_epoch, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_folder_of_another_model(finished):
    with pytest.raises(CheckpointError, match=r"model\.dim"):
        open_run(config(model__dim=8), Mesh(), finished)
    digest(finished)  # and what was there is still there


def test_more_epochs_go_on(finished, straight):
    more = open_run(config(), Mesh(), finished)
    assert more.resumed_at == 15
    more.train()
    more.close()
    assert digest(finished) == straight


@pytest.mark.parametrize("victim", ["keys", "live", "dense", "rank-0", "json", "manifest"])
def test_a_flipped_byte_is_found_and_named(finished, victim):
    patterns = {
        "keys": "rows/0-of-1/003/segment-*.keys",
        "live": "rows/0-of-1/003/live-15.bits",
        "manifest": "rows/0-of-1/003/manifest-*.json",
        "dense": "checkpoints/*15/dense",
        "rank-0": "checkpoints/*15/rank-0",
        "json": "checkpoints/*15.json",
    }
    path = sorted(finished.glob(patterns[victim]))[-1]
    if victim == "keys":
        path = list(list_commit_files(path.parent, read_manifest_fields(path.parent, 15)))[-1].path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises((StorageError, CheckpointError), match=path.name):
        open_run(config(), Mesh(), finished)


def test_a_flipped_byte_of_a_row_is_found_and_named(finished):
    """Opening reads no row; reading all of them does."""
    place = finished / "rows" / "0-of-1" / "003"
    path = next(list_commit_files(place, read_manifest_fields(place, 15))).path
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(bytes(data))
    run = open_run(config(), Mesh(), finished)
    backing = run.checkpoints.backings[3]
    with pytest.raises(CorruptionError, match=f"{path.name}: record "):
        backing.verify_records()
    with pytest.raises(CorruptionError, match=f"{path.name}: record "):
        for _ in backing.scan():
            pass
    run.close()


def go_on_with_two(mesh, folder):
    run = open_run(config(), mesh, folder, console=console_of(mesh))
    resumed = run.resumed_at
    run.train()
    run.close()
    return resumed


def test_a_checkpoint_of_one_rank_goes_on_with_two(finished):
    assert run_ranks(2, go_on_with_two, finished) == [15, 15]
    assert list_checkpoints(finished)[-1] == 30
    restored = open_run(config(), Mesh(), finished)
    assert restored.resumed_at == 30
    restored.close()


@pytest.mark.parametrize(
    ("ranks", "way"),
    [(1, "forked"), (2, "forked"), *(pytest.param(n, "started", marks=pytest.mark.slow) for n in (1, 2))],
)  # fmt: skip
def test_ctrl_c_checkpoints_and_ends(ranks, way, tmp_path):
    words = [
        "train", "--data", "synthetic", "--run", str(tmp_path / "run"), "--ranks", str(ranks),
        "--set", "data.options.num_train=4000000",
        "--set", "train.epochs=9", "--set", "train.batch_size=512",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = start_command(tmp_path / "output", environment, words, is_forked=way == "forked")
    deadline = time.monotonic() + 60
    metrics = tmp_path / "run" / "metrics.jsonl"
    while time.monotonic() < deadline and not (
        metrics.exists() and metrics.read_text().count("\n") > 2
    ):
        time.sleep(0.1)
    child.send(signal.SIGINT)
    child.wait(60)
    output = child.read_output()
    assert child.code == 0, output
    assert "stopped as requested" in output and "Traceback" not in output, output
    assert list_checkpoints(tmp_path / "run")
