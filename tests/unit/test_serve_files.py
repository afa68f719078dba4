"""Files of a served model that change under the server, and weights that score nothing: no wrong score is answered."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import served
import torch
from exports import reseal
from in_process import INFER, infer, opened, scores_of, wait_for
from safetensors.torch import load_file, save_file
from served import to_json, to_tensors

from colonnade import Predictor
from colonnade.checkpoint.header import list_checkpoints
from colonnade.errors import CheckpointError
from colonnade.publish.model_files import DENSE
from colonnade.publish.model_writer import export_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    served.train(folder / "run", folder / "published")
    return folder


@pytest.fixture(scope="module")
def batch():
    return served.samples()[0]


@pytest.fixture
def exported(trained, tmp_path) -> Path:
    export_run(trained / "run", tmp_path / "exported", at=list_checkpoints(trained / "run")[0])
    return tmp_path / "exported"


def overwrite(path: Path, content: bytes) -> None:
    """Write other bytes into a file, as `cp` and `rsync --inplace` do; its time is later in any case."""
    with path.open("r+b") as file:
        file.truncate(len(content))
        file.write(content)
    os.utime(path, (2e9, 2e9))


def rows_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("rows-*.safetensors"))


@pytest.mark.parametrize("damage", ["other rows", "zeros", "cut short"])
@pytest.mark.parametrize("row_memory", [None, 1 << 20])
def test_rows_that_changed_in_place_score_nothing(
    damage, row_memory, exported, trained, batch, tmp_path
):
    with opened(exported, tmp_path / "state", row_memory_bytes=row_memory) as client:
        assert infer(client, batch).status_code == 200 and client.service.is_ready
        other = tmp_path / "other"
        export_run(trained / "run", other)
        for path in rows_of(exported):
            content = path.read_bytes()
            changed = {
                "other rows": (other / path.name)
                .read_bytes()[: len(content)]
                .ljust(len(content), b"x"),
                "zeros": content[: len(content) // 2].ljust(len(content), b"\0"),
                "cut short": content[: len(content) // 2],
            }[damage]
            overwrite(path, changed)
        wait_for(lambda: not client.service.is_ready)
        answer = infer(client, batch)
        assert answer.status_code == 503 and "rows-" in answer.json()["error"], answer.text
        ready = client("GET", "/v2/health/ready")
        assert ready.status_code == 503 and "rows-" in ready.json()["problem"]


def test_a_file_that_was_touched_is_checked_again_and_served_on(exported, batch, tmp_path):
    with opened(exported, tmp_path / "state") as client:
        expected = scores_of(infer(client, batch))
        files = [table.file.file for table in client.service.model.get_newest().rows.tables]
        wait_for(lambda: all(file.is_checked for file in files))
        for path in rows_of(exported):
            os.utime(path, (2e9, 2e9))
        wait_for(lambda: client.service.model.problem)
        wait_for(lambda: all(file.is_checked for file in files))
        assert client.service.is_ready
        assert (scores_of(infer(client, batch)) == expected).all()


def test_a_folder_that_was_replaced_is_served_on_and_named(exported, trained, batch, tmp_path):
    with opened(exported, tmp_path / "state") as client:
        expected = scores_of(infer(client, batch))
        export_run(trained / "run", tmp_path / "new")
        exported.rename(tmp_path / "old")
        (tmp_path / "new").rename(exported)
        wait_for(lambda: client.service.model.problem)
        assert "Start the server again" in client.service.model.problem and client.service.is_ready
        assert (scores_of(infer(client, batch)) == expected).all()


def test_a_base_that_changed_in_place_is_not_served(trained, batch, tmp_path):
    published = tmp_path / "published"
    shutil.copytree(trained / "published", published)
    with opened(published, tmp_path / "state") as client:
        expected, step = scores_of(infer(client, batch)), client.service.model.step
        paths = list(published.rglob("rows-*.safetensors"))
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, contents, strict=True):
            overwrite(path, content[: len(content) // 2].ljust(len(content), b"\0"))
        wait_for(lambda: not client.service.is_ready)
        for path, content in zip(paths, contents, strict=True):
            overwrite(path, content)
            os.utime(path, (2e9 + 1, 2e9 + 1))
        # The base and the changes after it are loaded one after another, and each step is served.
        wait_for(lambda: client.service.is_ready and client.service.model.step == step)
        assert (scores_of(infer(client, batch)) == expected).all()


def test_a_score_that_is_not_finite_is_an_error(trained, batch, tmp_path):
    with opened(trained / "published", tmp_path / "state", name="clicks") as client:
        predictor = client.service.model.get_newest()
        step = predictor.step
        with torch.no_grad():
            next(predictor.model.parameters()).fill_(float("nan"))
        path = INFER.replace("/model/", "/clicks/")
        answers = [
            infer(client, batch, path),
            client("POST", path, json=to_json(to_tensors(batch))),
        ]
        for answer in answers:
            assert answer.status_code == 500, answer.text
            error = answer.json()["error"]
            assert "'clicks'" in error and f"step {step}" in error and "NaN or inf" in error


def test_a_recommendation_that_is_not_finite_is_an_error(tmp_path):
    served.train_pairs(tmp_path / "pairs")
    with opened(tmp_path / "pairs" / "published", tmp_path / "state") as client:
        assert client("POST", "/recommend", json={"user": {"user": 3}}).status_code == 200
        with torch.inference_mode():
            client.service.model.get_recommender()._active.vectors.fill_(float("inf"))
        answer = client("POST", "/recommend", json={"user": {"user": 3}})
        assert answer.status_code == 500 and "NaN" in answer.json()["error"]
        step = client.service.model.step
        assert f"model 'model', step {step}: got" in answer.json()["error"]


def test_dense_weights_are_checked_when_a_model_is_opened(exported, tmp_path):
    weights = load_file(exported / DENSE)
    name = sorted(weights)[0]
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, exported / DENSE)
    reseal(exported)
    with pytest.raises(CheckpointError, match=f"NaN or inf in the dense weights {name}"):
        Predictor.open(exported)
