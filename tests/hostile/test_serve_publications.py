"""Publications that were damaged, or are another model's, under a running server: never served, and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import served
import torch
from exports import read_fields, reseal, small_blocks
from in_process import INFER, fields_of, infer, opened, publish, score_step, scores_of, wait_for
from safetensors.torch import load_file, save_file
from served import TOKEN, bearer, serving, to_binary, to_tensors

from colonnade.checkpoint.header import list_checkpoints
from colonnade.files.disk import Disk
from colonnade.files.durable import write_durably
from colonnade.formats import make_format_stamp
from colonnade.publish import deltas
from colonnade.publish.deltas import (
    CURRENT,
    FORMAT,
    BaseExport,
    delta_file_name,
    read_current,
)
from colonnade.publish.model_files import DENSE, MODEL


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run and its publication of four steps, and another model's."""
    folder = tmp_path_factory.mktemp("served")
    served.train(folder / "run", folder / "published")
    served.train(folder / "other", folder / "others", {"model.dim": 6})
    return folder


@pytest.fixture(scope="module")
def steps(trained) -> list[int]:
    return list_checkpoints(trained / "run")


@pytest.fixture(scope="module")
def batch():
    return served.samples()[0]


def add_base(live: Path, change: Callable[[Path], object]) -> None:
    """Publish a base with a change to its files: all checksums are right, unless the change makes them wrong."""
    current = read_current(live)
    number = current.number + 1
    name = f"base-{number:012d}-forged"
    shutil.copytree(live / current.bases[-1].folder, live / name)
    fields = read_fields(live / name)
    reseal(live / name, step=fields["step"] + 100)
    change(live / name)
    base = BaseExport(name, number, f"tag-{number}", 1000)
    write_pointer(live, replace(current, number=number, tag=base.tag, bases=(*current.bases, base)))


def write_pointer(live: Path, current) -> None:
    fields = {**make_format_stamp(FORMAT), **asdict(current)}
    write_durably(Disk(), live / CURRENT, json.dumps(fields).encode())


def rename_feature(base: Path) -> None:
    schema = read_fields(base)["schema"]
    schema["categorical"][0]["name"] = "K1"
    reseal(base, schema=schema)


def swap_features(base: Path) -> None:
    schema = read_fields(base)["schema"]
    schema["categorical"][:2] = schema["categorical"][1::-1]
    reseal(base, schema=schema)


def add_label(base: Path) -> None:
    schema = read_fields(base)["schema"]
    reseal(base, schema={**schema, "labels": [*schema["labels"], "buy"]})


def widen_table(base: Path) -> None:
    tables = read_fields(base)["tables"]
    tables[0]["rows"] += 1
    reseal(base, tables=tables)


def change_dense(base: Path, change: Callable[[dict], object]) -> None:
    weights = load_file(base / DENSE)
    change(weights)
    save_file(weights, base / DENSE)
    reseal(base)


def drop_weight(base: Path) -> None:
    change_dense(base, lambda weights: weights.pop(sorted(weights)[0]))


def reshape_weight(base: Path) -> None:
    change_dense(base, lambda weights: weights.update({sorted(weights)[0]: torch.zeros(3, 3)}))


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_dense(base: Path) -> None:
    flip_byte(base / DENSE)


def flip_rows(base: Path) -> None:
    flip_byte(base / read_fields(base)["tables"][1]["file"])


def cut_rows(base: Path) -> None:
    path = base / read_fields(base)["tables"][1]["file"]
    os.truncate(path, path.stat().st_size - 4)


def lose_rows(base: Path) -> None:
    (base / read_fields(base)["tables"][1]["file"]).unlink()


def garble_model(base: Path) -> None:
    (base / MODEL).write_bytes(b'{"format": "colonnade export"')


BASES = {
    rename_feature: "another schema: got the feature Column(name='K1'",
    swap_features: "another schema: got the feature Column(name='C2'",
    add_label: "another schema: got the label buy, wanted None",
    widen_table: "exported from another model",
    drop_weight: "got dense weights",
    reshape_weight: "of shape (3, 3)",
    flip_dense: "torn, altered or another file",
    flip_rows: "torn, altered or another file",
    cut_rows: "wanted",
    lose_rows: "No such file",
    garble_model: MODEL,
}


def forge_base(change: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    return lambda live, trained: add_base(live, change)


def tear_pointer(live: Path, trained: Path) -> None:
    content = (live / CURRENT).read_bytes()
    (live / CURRENT).write_bytes(content[: len(content) // 2])


def lose_pointer(live: Path, trained: Path) -> None:
    (live / CURRENT).unlink()


def put_other_run(live: Path, trained: Path) -> None:
    shutil.rmtree(live)
    shutil.copytree(trained / "others", live)


def pretend_other_run(live: Path, trained: Path) -> None:
    """Another model's publication that claims to be this run's."""
    run = read_current(live).run
    put_other_run(live, trained)
    current = read_current(live)
    for base in current.bases:
        reseal(live / base.folder, run=run)
    write_pointer(live, replace(current, run=run))


def forge_delta(live: Path, trained: Path, **changes: object) -> None:
    """Publish a next change with a wrong part, its checksum right."""
    current = read_current(live)
    delta = deltas.read_delta(trained / "published", current.number)
    tensors = {f"dense/{name}": value.clone() for name, value in delta.dense.items()}
    for t, table in enumerate(delta.tables):
        for part in ("ids", "weights", "gone"):
            tensors[f"rows/{t}/{part}"] = getattr(table, part).clone()
    tensors.update(changes)
    header = replace(
        delta.header, number=current.number + 1, before=current.tag, tag="forged", step=current.step + 9
    )  # fmt: skip
    content = deltas.save(tensors, metadata={"change": json.dumps(asdict(header))})
    write_durably(Disk(), live / delta_file_name(current.number + 1), content)
    write_pointer(live, replace(current, number=current.number + 1, tag="forged"))


def put_nan(live: Path, trained: Path) -> None:
    ids, weights = torch.tensor([1]), torch.full((1, 4), float("nan"))
    forge_delta(live, trained, **{"rows/0/ids": ids, "rows/0/weights": weights})


def put_wide_rows(live: Path, trained: Path) -> None:
    forge_delta(live, trained, **{"rows/0/ids": torch.tensor([1]), "rows/0/weights": torch.ones(1, 9)})  # fmt: skip


def put_far_id(live: Path, trained: Path) -> None:
    forge_delta(live, trained, **{"rows/0/ids": torch.tensor([50]), "rows/0/weights": torch.ones(1, 4)})  # fmt: skip


def lose_delta(live: Path, trained: Path) -> None:
    current = read_current(live)
    write_pointer(live, replace(current, number=current.number + 1, tag="lost"))


OTHERS = {
    tear_pointer: "torn or altered",
    lose_pointer: "holds no publication",
    put_other_run: "wanted run",
    pretend_other_run: "exported from another model",
    put_nan: "NaN or inf",
    put_wide_rows: "other shapes than this network's",
    put_far_id: "other shapes than this network's",
    lose_delta: "change-",
}
HARMS = [(forge_base(change), words) for change, words in BASES.items()] + list(OTHERS.items())
NAMES = [change.__name__ for change in [*BASES, *OTHERS]]


@pytest.mark.parametrize(("harm", "words"), HARMS, ids=NAMES)
def test_what_is_wrong_is_named_and_the_last_good_checkpoint_serves(
    harm, words, trained, batch, steps, tmp_path
):
    live = tmp_path / "live"
    publish(trained, live, steps[1])
    with opened(live, tmp_path / "state") as client:
        model = client.service.model
        expected = score_step(trained, batch, steps[1])[:, 0].numpy()
        harm(live, trained)
        wait_for(lambda: words in (model.problem or ""))  # earlier ones are of half of the files
        ready = client("GET", "/v2/health/ready")
        assert ready.status_code == 200 and words in ready.json()["problem"]
        assert ready.json()["step"] == steps[1]
        metrics = client("GET", "/metrics").text
        assert "colonnade_problem 1.0" in metrics and "colonnade_ready 1.0" in metrics
        info = next(line for line in metrics.splitlines() if line.startswith("colonnade_problem_info{"))  # fmt: skip
        assert words in info.replace('\\"', '"')
        assert f"colonnade_model_step {float(steps[1])}" in metrics
        assert model.num_failures > 0
        for _ in range(3):
            answer = infer(client, batch)
            assert fields_of(answer)["model_version"] == str(steps[1])
            assert np.array_equal(scores_of(answer), expected)
        # A whole publication ends it, in the same process.
        shutil.rmtree(live)
        publish(trained, live, steps[2])
        wait_for(lambda: model.problem is None and model.step == steps[2])
        expected = score_step(trained, batch, steps[2])[:, 0].numpy()
        assert np.array_equal(scores_of(infer(client, batch)), expected)


def test_damage_that_only_a_read_detects_is_refused(batch, trained, monkeypatch, tmp_path):
    """Rows of a new base are checked when they are first read: an answer is right, or names the damaged file."""
    live = tmp_path / "live"
    shutil.copytree(trained / "published", live)
    small_blocks(monkeypatch)
    monkeypatch.setattr("colonnade.store.mapped.MappedRows.start_scrub", lambda rows: None)
    monkeypatch.setattr("colonnade.store.mapped.BLOCK_BYTES", 256)
    reseal(live / read_current(live).bases[-1].folder)
    tensors = to_tensors(batch)
    one = {name: tensor[:1] for name, tensor in tensors.items()}
    with opened(live, tmp_path / "state") as client:
        model = client.service.model
        before = model.step
        trained_ids: list[int] = []

        def damage(base: Path) -> None:
            path = base / read_fields(base)["tables"][1]["file"]
            content = bytearray(path.read_bytes())
            content[-8] ^= 1  # of the last row: the ids are whole
            path.write_bytes(content)
            trained_ids.extend(load_file(path)["ids"].tolist())

        add_base(live, damage)
        wait_for(lambda: model.step != before)
        body, headers = to_binary({**one, "C2": np.array(trained_ids[-1:])})
        answer = client("POST", INFER, content=body, headers=headers)
        assert answer.status_code == 503 and "torn, altered or another file" in answer.json()["error"]  # fmt: skip
        assert "retry-after" in answer.headers
        body, headers = to_binary({**one, "C2": np.array(trained_ids[:1])})
        assert client("POST", INFER, content=body, headers=headers).status_code == 200


@pytest.mark.slow
def test_another_schema_under_workers(trained, batch, steps, tmp_path):
    """Two processes: each serves the checkpoint before, and says why."""
    live = tmp_path / "live"
    publish(trained, live, steps[1])
    (tmp_path / "token").write_text(TOKEN)
    settings = ("--workers", 2, "--poll", 0.05, "--token-file", tmp_path / "token")
    with serving(live, *settings) as server, server.client() as client:
        body, headers = to_binary(to_tensors(batch))
        expected = client.post(INFER, content=body, headers=headers).content
        add_base(live, rename_feature)
        wait_for(lambda: "colonnade_problem 1.0" in client.get("/metrics").text)
        problems = set()

        def see_all() -> bool:
            with server.client() as other:  # a connection of its own, in whichever worker
                ready = other.get("/v2/health/ready")
                problems.add(ready.json()["problem"])
                answer = other.post(INFER, content=body, headers=headers)
            assert ready.status_code == 200 and answer.content == expected
            return len(problems - {None}) == 1 and "another schema" in next(iter(problems - {None}))

        wait_for(see_all)
        assert client.post("/admin/pin", json={"step": steps[0]}, headers=bearer()).status_code == 200  # fmt: skip
