"""`--network`: a run of `colonnade.fit` is served with the network that a function in a file builds."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import httpx
import pytest
import served
import torch

import colonnade
from colonnade import Batch, Ids, Predictor
from colonnade.data import open_tensors
from colonnade.errors import CheckpointError, ConfigError
from colonnade.publish.delivery import list_published_steps
from colonnade.publish.deltas import read_current
from colonnade.serve.endpoints.http import build_app
from colonnade.serve.service import Service
from colonnade.serve.versions import load_network_builder

NETWORK = """
import sizes  # a file beside it

from colonnade import Feature, Table
from colonnade.models import DLRM

def build_network():
    tables = [Table(name, 4, rows=sizes.ROWS) for name in ("user", "item")]
    return DLRM(tables, [Feature(t.name, t.name) for t in tables], num_dense=0, bottom=(4,), top=(8,))

if __name__ == "__main__":
    raise SystemExit("it is not run as a program")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a network's file, and a publication of three steps."""
    folder = tmp_path_factory.mktemp("network")
    (folder / "network.py").write_text(NETWORK)
    (folder / "sizes.py").write_text("ROWS = 20\n")
    ids = {name: torch.randint(20, (96,)) for name in ("user", "item")}
    data = open_tensors(
        ids, label=(ids["user"] % 2).float(), cardinalities={"user": 20, "item": 20}
    )
    colonnade.fit(
        load_network_builder(f"{folder / 'network.py'}:build_network")(), data, run=folder / "run", batch_size=32,
        checkpoint_steps=1, publish=str(folder / "published"), quiet=True,
    )  # fmt: skip
    return folder


def ask(service: Service, method: str, path: str, fields: object = None) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(service), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json=fields)

    return asyncio.run(send())


def test_the_newest_and_older_steps_are_served(trained, tmp_path):
    network = f"{trained / 'network.py'}:build_network"
    build = load_network_builder(network)
    steps = list(list_published_steps(trained / "published", read_current(trained / "published")))
    assert len(steps) == 3
    users, items = torch.arange(5), torch.arange(5) + 7
    batch = Batch(5, torch.empty(5, 0), {"user": Ids(users), "item": Ids(items)})
    records = [{"user": user, "item": user + 7} for user in range(5)]
    tensors = {"user": users.numpy(), "item": items.numpy()}
    service = Service(
        served.options(trained / "published", tmp_path, network=network, max_versions=1)
    )
    service.start()
    try:
        answer = ask(service, "POST", "/score", records)
        assert answer.status_code == 200, answer.text
        assert answer.json()["step"] == steps[-1]
        with Predictor.open(trained / "published", model=build()) as predictor:
            assert answer.json()["scores"] == predictor(batch)[:, 0].tolist()
        for step in steps:
            path = f"/v2/models/model/versions/{step}/infer"
            scored = ask(service, "POST", path, served.to_json(tensors)).json()
            with Predictor.open(trained / "published", at=step, model=build()) as predictor:
                assert scored["outputs"][0]["data"] == predictor(batch)[:, 0].tolist()
    finally:
        service.close()


def test_without_a_network_the_error_names_the_option(trained):
    with pytest.raises(CheckpointError, match=r"--network FILE\.py:FUNCTION"):
        Predictor.open(trained / "published")


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ("", "", "wanted FILE.py:FUNCTION"),
        ("", "build network", "wanted FILE.py:FUNCTION"),
        ("", "build", "has no function 'build'"),
        ("build = 3", "build", "has no function 'build'"),
        ("def build(:", "build", "ended with SyntaxError"),
        ("import no_such_module_here", "build", "ended with ModuleNotFoundError"),
        ("raise SystemExit(3)", "build", "ended with SystemExit"),
        ("def build(): return 3", "build", "returned a int"),
        ("def build(schema): return schema", "build", "ended with TypeError"),
    ],
)
def test_a_wrong_network_is_named(trained, tmp_path, content, name, words):
    (tmp_path / "network.py").write_text(content)
    network = f"{tmp_path / 'network.py'}:{name}"
    service = Service(served.options(trained / "published", tmp_path / "state", network=network))
    try:
        with pytest.raises(ConfigError, match="--network") as error:
            service.model.start()
        assert words in str(error.value)
    finally:
        service.log.close()


def test_a_missing_file_is_named(tmp_path):
    for text in ("", "build", f"{tmp_path / 'nothing.py'}:build", f"{tmp_path}:build"):
        with pytest.raises(ConfigError, match=r"wanted FILE\.py:FUNCTION"):
            load_network_builder(text)


def test_the_file_is_a_program_still(trained, monkeypatch):
    monkeypatch.syspath_prepend(str(trained))
    with pytest.raises(SystemExit):
        runpy.run_path(str(trained / "network.py"), run_name="__main__")
