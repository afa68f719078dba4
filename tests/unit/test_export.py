"""An exported checkpoint: what other programs read equals what the run holds."""

from __future__ import annotations

import json
import os
import resource
import shutil

import pytest
import torch
from ranks import console_of, run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from small_run import CONFIG

from colonnade import Mesh
from colonnade.checkpoint.header import list_checkpoints
from colonnade.config.run import build_config, override_settings
from colonnade.errors import CheckpointError, ConfigError, StorageError
from colonnade.publish.model_writer import export_run
from colonnade.row_state import dense_state_dict
from colonnade.run.run import open_run
from colonnade.store.log.manifest import list_commit_files, read_manifest_fields


def train(mesh, folder, settings):
    run = open_run(
        override_settings(build_config(CONFIG), {"train.epochs": 1, **settings}),
        mesh,
        folder,
        console=console_of(mesh),
    )
    run.train()
    collection = run.trainer.collection
    rows = {
        table.name: collection.rows(table.name, torch.arange(table.rows))
        for table in collection.tables
    }
    dense = {k: v.clone() for k, v in dense_state_dict(run.trainer.model).items()}
    run.close()
    return rows, dense


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [
        ({}, 1),
        ({"plan.memory.dram": 90_000}, 2),
        ({"embedding.dtype": "bfloat16", "embedding.master": True}, 1),
    ],
)
def test_exported_rows_are_the_runs(settings, num_ranks, tmp_path):
    folder, out = tmp_path / "run", tmp_path / "out"
    if num_ranks == 1:
        rows, dense = train(Mesh(), folder, settings)
    else:
        rows, dense = run_ranks(num_ranks, train, folder, settings)[0]
    text = export_run(folder, out, at="last")
    assert text == json.loads((out / "model.json").read_text())
    assert text["step"] == 15 and text["config"]["model"]["dim"] == 4
    for table in text["tables"]:
        result = load_file(out / table["file"])
        ids, weights = result["ids"], result["weights"]
        assert len(ids) == table["count"] > 0
        assert torch.equal(ids, ids.unique())  # ascending, each once
        assert weights.dtype == getattr(torch, table["dtype"])
        assert torch.equal(weights, rows[table["name"]][ids])
    with safe_open(out / "dense.safetensors", "pt") as file:
        for name in file.keys():
            assert torch.equal(file.get_tensor(name), dense[name])


def test_an_older_step_and_what_is_not_there(tmp_path):
    folder = tmp_path / "run"
    train(Mesh(), folder, {"train.keep_checkpoints": 3})
    steps = list_checkpoints(folder)
    assert export_run(folder, tmp_path / "old", at=steps[0])["step"] == steps[0]
    with pytest.raises(ConfigError, match="exists"):
        export_run(folder, tmp_path / "old")
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        export_run(folder, tmp_path / "new", at=7)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export_run(tmp_path / "nothing", tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "old"}


def test_nothing_is_left_of_an_export_that_fails(tmp_path):
    folder = tmp_path / "run"
    train(Mesh(), folder, {})
    place = folder / "rows" / "0-of-1" / "003"
    victim = next(
        list_commit_files(place, read_manifest_fields(place, list_checkpoints(folder)[-1]))
    ).path
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(OSError, match=victim.name):
        export_run(folder, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_no_space_is_reserved_for_an_export_that_does_not_fit(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    train(Mesh(), folder, {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30, 9))
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(StorageError, match="No space left"):
        export_run(folder, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_files_are_for_all_who_may_read_and_a_full_disk_is_named(tmp_path):
    folder, out = tmp_path / "run", tmp_path / "out"
    train(Mesh(), folder, {"model.top": [256, 256]})
    export_run(folder, out)
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    dense = sizes.pop("dense.safetensors")
    assert max(sizes.values()) < dense - 1  # so that it is the one that does not fit
    _, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (dense - 1, limit))
    try:
        with pytest.raises(StorageError, match="again"):
            export_run(folder, tmp_path / "again")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
