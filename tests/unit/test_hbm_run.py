"""Runs with rows in device memory: checkpoints, resuming, decisions, records and refused settings.

On "cpu" the device is the processor's own memory, which only a test may ask for: the network stays where it is.
"""

from __future__ import annotations

import json

import pytest
import torch
from devices import DEVICES
from small_run import CONFIG, digest, opened

from colonnade import Mesh, PlanConfig, World, build_plan
from colonnade.config.run import build_config, override_settings
from colonnade.errors import ConfigError
from colonnade.plan.plan import Plan
from colonnade.report.pages import render_run_page
from colonnade.report.reading import read_run_folder
from colonnade.run import run as runs

HBM = {"train.device": "cuda", "plan.memory.hbm": 16_000, "train.checkpoint_steps": 10}


@pytest.fixture
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(runs, "move_dense_network", lambda *_: None)
    return request.param


def train(folder, settings):
    config = override_settings(build_config(CONFIG), settings)
    run = runs.open_run(config, Mesh(), folder, data=opened(config))
    try:
        run.train()
        return run
    finally:
        run.close()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize(
    "settings",
    [
        {"plan.memory.dram": 60_000},
        {
            "embedding.eviction.max_rows": 150,
            "embedding.admission.probability": 0.5,
            "plan.memory.dram": 90_000,
        },
        pytest.param({"train.accumulate": 4, "embedding.clip_norm": 0.05}, marks=pytest.mark.slow),
    ],
    ids=["files", "come and go", "micro-batches"],
)
def test_a_run_that_goes_on_ends_as_one_in_memory(device, settings, tmp_path):
    """The tier is the run's own choice each time."""
    train(tmp_path / "dram", settings)
    train(tmp_path / "hbm", {**settings, **HBM, "train.max_steps": 9})
    run = train(tmp_path / "hbm", {**settings, **HBM, "train.max_steps": 23})
    assert run.resumed_at == 9
    store = run.trainer.collection.store
    assert store.sources.evicted_dirty > 0 and store.num_hits > 100
    train(tmp_path / "hbm", settings)
    if device == "cpu":
        assert digest(tmp_path / "hbm") == digest(tmp_path / "dram")


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_what_it_says_of_the_tier(device, tmp_path):
    train(tmp_path, {**HBM, "plan.memory.dram": 60_000, "train.max_steps": 20})
    tiers = json.loads((tmp_path / "summary.json").read_text())["tiers"]
    assert list(tiers) == ["hbm", "dram", "ssd"]
    hbm, dram = tiers["hbm"], tiers["dram"]
    assert hbm["hits"] > 0 and hbm["misses"] == dram["hits"] + dram["misses"]
    assert 0 < hbm["held_bytes"] <= HBM["plan.memory.hbm"]
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.hbm_bytes == HBM["plan.memory.hbm"] and all(t.hbm_rows for t in plan.tables)
    page = render_run_page(read_run_folder(tmp_path))
    assert page.index("<h2>Tiers</h2>") < page.index(">hbm<") < page.index(">dram<")


def test_without_a_gpu_it_is_refused(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"train.device=cuda, but torch sees no GPU"):
        train(tmp_path / "run", HBM)
    assert not (tmp_path / "run").exists()


def test_budgets_too_small_or_too_large_are_refused():
    tables = opened_tables()
    with pytest.raises(ConfigError, match=r"plan.memory.hbm: got 10 bytes, wanted at least \d+"):
        build_plan(tables, 1, PlanConfig(memory={"hbm": 10}))
    plan = build_plan(tables, 1, PlanConfig(memory={"hbm": 1_000}))
    taken = [p.hbm_rows * t.record_bytes for t, p in zip(tables, plan.tables, strict=True)]
    assert 900 < sum(taken) <= 1_000


def opened_tables():
    from colonnade.models.build import build_model

    config = build_config(CONFIG)
    return build_model(opened(config).train.schema, config).embeddings.tables


def test_colonnade_plan_does_not_foretell_it(tmp_path):
    with pytest.raises(ConfigError, match="plan of a sample does not predict"):
        runs.plan_run(override_settings(build_config(CONFIG), HBM), tmp_path, World())
