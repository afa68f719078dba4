"""Trainers with servers train what as many ranks train that hold the rows themselves, and what one rank trains."""

from __future__ import annotations

import math

import own_model
import pytest
import torch
from ranks import run_ranks
from small_run import CONFIG, digest, opened

from colonnade import Adam, Mesh, fit
from colonnade.config import build_config, override
from colonnade.train.run import open_run


def _plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.3, patience=0)


BASE = {"epochs": 2, "batch_size": 50, "evaluate_steps": 9, "dense_lr": 0.05, "quiet": True}
"""600 samples: 12 batches, the last of an epoch as full as the others."""
CASES = {
    "rows": {},
    "uneven": {"batch_size": 47, "max_steps": 20},
    "ahead": {"staleness_steps": 2, "lookahead": 3},
    "decisions": {
        "accumulate": 5,
        "patience": 2,
        "min_delta": 0.01,
        "rows_clip_norm": 0.02,
        "dense_clip_norm": 0.05,
        "row_schedule": {"name": "linear", "warmup_steps": 5},
        "dense_schedule": _plateau,
    },
}


def trained(mesh, name, servers, tmp_path=None):
    """What a rank has at the end: rows and metrics are everybody's, the dense network the trainers'."""
    model = own_model.Net("float64", optimizer=Adam(lr=0.05))
    torch.manual_seed(5)
    found = fit(model, own_model.splits(), mesh=mesh, servers=servers, **(BASE | CASES[name]))
    outcome = found.outcome
    return {
        "rows": own_model.rows_of(model),
        "dense": model.bias.state_dict(),
        "metrics": found.metrics,
        "outcome": (outcome.steps, outcome.samples, outcome.stopped_early, outcome.best_step),
        "num_rows": sum(model.collection.store.num_rows(t) for t in range(2)),
        "dense_bytes": model.collection.mesh.traffic.bytes_of("dense"),
    }


def all_trained(mesh, servers):
    return {name: trained(mesh, name, servers) for name in CASES}


@pytest.fixture(scope="module")
def with_server():
    return run_ranks(3, all_trained, 1)


@pytest.fixture(scope="module")
def without():
    return run_ranks(2, all_trained, 0)


@pytest.mark.parametrize("name", CASES)
def test_two_trainers_and_a_server_train_what_two_ranks_train(name, with_server, without):
    one, two, server = (found[name] for found in with_server)
    wanted = without[0][name]
    exact = (
        {"rtol": 0, "atol": 0}
        if "rows_clip_norm" not in CASES[name]
        else {"rtol": 1e-12, "atol": 0}
    )
    for found in (one, two, server):
        torch.testing.assert_close(found["rows"], wanted["rows"], **exact)
        assert found["outcome"][0] == wanted["outcome"][0]
        assert found["outcome"][2:] == wanted["outcome"][2:]
        assert list(found["metrics"]) == list(wanted["metrics"])
        for metric, value in wanted["metrics"].items():
            assert found["metrics"][metric] == pytest.approx(value, rel=1e-12, nan_ok=True)
    for found in (one, two):
        torch.testing.assert_close(found["dense"], wanted["dense"], **exact)
    assert server["outcome"][1] == 0  # samples
    assert one["outcome"][1] == wanted["outcome"][1]
    assert one["dense_bytes"] == wanted["dense_bytes"] and not server["dense_bytes"]
    assert server["num_rows"] > 0 and one["num_rows"] == two["num_rows"] == 0


@pytest.mark.parametrize("name", CASES)
def test_and_what_one_rank_trains(name, with_server):
    wanted = trained(Mesh(), name, 0)
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(with_server[0][name]["rows"], wanted["rows"], **close)
    torch.testing.assert_close(with_server[0][name]["dense"], wanted["dense"], **close)
    for metric, value in wanted["metrics"].items():
        assert math.isclose(with_server[0][name]["metrics"][metric], value, rel_tol=1e-9)


TIERED = {"plan.memory.dram": 60_000, "plan.staleness_steps": 1, "train.evaluate_steps": 6}


def run_until(mesh, folder, step, servers):
    """A run of files below memory, begun or gone on with; what this rank's rows came from."""
    settings = {**TIERED, "plan.servers": servers, "train.max_steps": step}
    config = override(build_config(CONFIG), settings)
    run = open_run(config, mesh, folder, data=opened(config))
    outcome = run.train()
    run.close()
    sources = run.trainer.collection.store.sources
    return {
        "steps": outcome.steps,
        "read": sources.read,
        "metrics": outcome.metrics,
        "summary": run.summary(outcome),
    }


def both(mesh, folder, servers):
    """A whole run, half a run, and the other half of what others have left."""
    found = [run_until(mesh, folder / f"whole-{servers}", 20, servers)]
    if (folder / f"half-{1 - servers}").exists():
        found.append(run_until(mesh, folder / f"half-{1 - servers}", 20, servers))
    found.append(run_until(mesh, folder / f"half-{servers}", 9, servers))
    return found


def test_checkpoints_go_from_ranks_with_servers_to_ranks_without_and_back(tmp_path):
    run_ranks(2, both, tmp_path, 0)
    told = run_ranks(3, both, tmp_path, 1)
    (again, _) = run_ranks(2, run_until, tmp_path / "half-1", 20, 0)
    wanted = digest(tmp_path / "whole-0")
    assert digest(tmp_path / "whole-1") == wanted
    assert digest(tmp_path / "half-0") == wanted
    assert digest(tmp_path / "half-1") == wanted
    assert [each["steps"] for each in told[0]] == [20, 11, 9] and again["steps"] == 11
    assert told[0][0]["metrics"] == told[2][0]["metrics"]
    trainer, server = told[0][0], told[2][0]
    assert server["read"] > 0 and trainer["read"] == 0  # from its files
    assert trainer["summary"]["row_sources"]["read"] == server["read"]
    assert trainer["summary"]["num_trainers"] == 2
