"""Every kind of file states its format and version: today's are read, others refused with both versions named."""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from make_formats import FOLDER, Net, splits

import colonnade
from colonnade.checkpoint.completeness import verify_checkpoint
from colonnade.checkpoint.header import list_checkpoints, read_header
from colonnade.checkpoint.states import load_state
from colonnade.config.run import load_config
from colonnade.data.tabular.declaration import load_file_schema
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError
from colonnade.files.durable import append_checksum, read_verified, verify_content
from colonnade.formats import VERSIONS
from colonnade.plan.measure.device import Device
from colonnade.plan.measure.profile import Profile
from colonnade.plan.plan import Plan
from colonnade.predict import Predictor
from colonnade.publish.deltas import read_current
from colonnade.report.reading import read_run_folder
from colonnade.store.log import key_list, live, manifest, segment, stripes
from colonnade.store.log.commits import verify_store
from colonnade.topology.towers import Partition
from colonnade.train.metrics_file import read_metrics_lines

STEP = 4
ROWS = "run/rows/0-of-1/000"


def of_text(read: Callable[[str], object]) -> Callable[[Path], object]:
    return lambda path: read(path.read_text(encoding="utf-8"))


def of_run(path: Path) -> object:
    return read_run_folder(path.parent)


def read_state(path: Path) -> object:
    return load_state(path, read_header(path.parents[2], STEP)["run"])


def read_keys(path: Path) -> object:
    entry = manifest.read_manifest_fields(path.parent, STEP)["segments"][0]
    checksum = int(entry["checksum"], 16)
    return key_list.read_key_list(key_list.open_key_list(path), 2, entry["records"], checksum)


def read_segment(path: Path) -> object:
    head, fields = (
        path.read_bytes()[: segment.HEADER.size],
        manifest.read_manifest_fields(path.parent, STEP),
    )
    owner = segment.owner_digest("user", fields["identity"])
    return segment.check_segment_header(
        path, head, segment.SegmentShape(fields["record_bytes"], owner)
    )


# By format: a file of the fixture folder, and who reads it.
KINDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "colonnade checkpoint": (f"run/checkpoints/{STEP:012d}.json", lambda p: read_header(p.parents[1], STEP)),
    "colonnade state": (f"run/checkpoints/{STEP:012d}/dense", read_state),
    "colonnade store manifest": (f"{ROWS}/manifest-4.json", lambda p: manifest.read_manifest_fields(p.parent, STEP)),
    "colonnade stripe": ("stripe/stripe.json", lambda p: stripes._read_mark_file(p.parent)),
    "colonnade segment": (f"{ROWS}/segment-00000002.rows", read_segment),
    "colonnade key list": (f"{ROWS}/segment-00000002.keys", read_keys),
    "colonnade live bitmaps": (f"{ROWS}/live-4.bits", lambda p: live.parse_live_bitmaps(p, read_verified(p), STEP)),
    "colonnade config": ("run/config.yaml", load_config),
    "colonnade plan": ("run/plan.json", of_text(Plan.from_json)),
    "colonnade device": ("run/device.json", of_text(Device.from_json)),
    "colonnade profile": ("profile.json", of_text(Profile.from_json)),
    "colonnade towers": ("towers.json", of_text(Partition.from_json)),
    "colonnade summary": ("run/summary.json", of_run),
    "colonnade machine": ("run/machine.json", of_run),
    "colonnade metrics": ("run/metrics.jsonl", read_metrics_lines),
    "colonnade export": ("export/model.json", lambda p: Predictor.open(p.parent, model=Net())),
    "colonnade publication": ("published/published.json", lambda p: read_current(p.parent)),
    "hash_version": ("schema.yaml", load_file_schema),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FOLDER, tmp_path / "formats"))


def change_version(path: Path, by: int) -> tuple[int, int]:
    """Raise the version that a file states, its checksums made good again. Returns (old, new)."""
    data = path.read_bytes()
    if path.suffix in (".rows", ".keys", ".bits"):
        content = bytearray(data if path.suffix == ".rows" else verify_content(path, data))
        (old,) = struct.unpack_from("<I", content, 8)
        struct.pack_into("<I", content, 8, old + by)
        if path.suffix == ".rows":
            struct.pack_into("<I", content, 60, segment.crc32c(bytes(content[:60])))
        path.write_bytes(content if path.suffix == ".rows" else append_checksum(bytes(content)))
        return old, old + by
    if path.name == "dense":
        state = torch.load(io.BytesIO(verify_content(path, data)), weights_only=True)
        buffer = io.BytesIO()
        torch.save(state | {"version": state["version"] + by}, buffer)
        path.write_bytes(append_checksum(buffer.getvalue()))
        return state["version"], state["version"] + by
    is_checked = data.rstrip().rpartition(b"\n")[2].startswith(b"crc32c ")
    text = (verify_content(path, data) if is_checked else data).decode()
    name = "hash_version" if path.name == "schema.yaml" else "version"
    mark = f"{name}: " if path.suffix == ".yaml" else f'"{name}": '
    before, _, after = text.partition(mark)
    digits = len(after) - len(after.lstrip("0123456789"))
    old = int(after[:digits])
    content = f"{before}{mark}{old + by}{after[digits:]}".encode()
    path.write_bytes(append_checksum(content) if is_checked else content)
    return old, old + by


def test_every_format_has_a_file():
    assert set(VERSIONS) <= set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_today_is_read(name, folder):
    file, read = KINDS[name]
    read(folder / file)


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("name", KINDS)
def test_other_versions_are_refused(name, by, folder):
    file, read = KINDS[name]
    old, new = change_version(folder / file, by)
    with pytest.raises((CheckpointError, ConfigError)) as refused:
        read(folder / file)
    text = str(refused.value)
    assert all(re.search(rf"\b{version}\b", text) for version in (old, new)), text
    if name in VERSIONS:
        assert f"{name!r} version {old}" in text and old == VERSIONS[name], text


def test_a_run_of_before_goes_on(folder):
    run = folder / "run"
    assert list_checkpoints(run) == [STEP]
    assert [file.problem for file in verify_checkpoint(run, STEP) if file.problem] == []
    assert all(not file.problem for file in verify_store(folder / ROWS, STEP))
    model = Net()
    assert colonnade.load_checkpoint(model, run) == STEP
    settings = {"batch_size": 20, "keep_checkpoints": 1, "quiet": True, "threads": 1}
    again = colonnade.fit(Net(), splits(), run=run, epochs=2, **settings)
    assert again.resumed_at == STEP and again.outcome.steps == 4  # as recorded
    more = colonnade.fit(Net(), splits(), run=run, epochs=3, **settings)
    assert more.resumed_at == STEP and more.outcome.steps == 2


NOT_BY_PATH = ("colonnade metrics", "colonnade segment")
"""The first is taken for no file; the second is opened by this test."""
BY_PATH = [
    kind
    for kind, (_, read) in KINDS.items()
    if "of_text" not in read.__qualname__ and kind not in NOT_BY_PATH
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", BY_PATH)
def test_a_pipe_is_refused_instead_of_waited_for(folder, kind):
    name, read = KINDS[kind]
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises((ColonnadeError, OSError)) as refused:
        read(folder / name)
    assert "wanted a regular file" in str(refused.value)
