"""A whole run's writes and syncs, cut at every point: the newest checkpoint that can be seen is whole.

What a power cut may leave is checked at both ends: everything written so far, and only what was synced
(names since their directory was synced are lost too). `test_store_crash.py` looks at torn writes.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from small_run import CONFIG, digest

from colonnade import Mesh
from colonnade.checkpoint.header import list_checkpoints
from colonnade.config.run import build_config, override_settings
from colonnade.files.disk import Change, Disk
from colonnade.run.run import open_run


@dataclass
class Traced(Disk):
    """Records every change; content of appends included."""

    changes: list[Change] = field(default_factory=list)

    def perform(self, change, action):
        result = None if change.verb in ("sync", "sync_dir") else action()
        data = memoryview(bytes(change.data))
        self.changes.append(
            Change(change.verb, change.path, offset=change.offset, data=data, target=change.target)
        )
        return result


class Tree:
    """Files that the system sees, and those that are certain to survive."""

    def __init__(self) -> None:
        self.content: list[bytearray] = []
        self.synced: list[bytes] = []
        self.names: dict[Path, int] = {}
        self.synced_names: dict[Path, dict[Path, int]] = defaultdict(dict)

    def apply(self, change: Change) -> None:
        path = change.path
        if change.verb == "create":
            self.names[path] = len(self.content)
            self.content.append(bytearray())
            self.synced.append(b"")
        elif change.verb == "append":
            content = self.content[self.names[path]]
            content[change.offset : change.offset + len(change.data)] = change.data
        elif change.verb == "truncate":
            del self.content[self.names[path]][change.offset :]
        elif change.verb == "sync":
            self.synced[self.names[path]] = bytes(self.content[self.names[path]])
        elif change.verb == "rename":
            self.names[change.target] = self.names.pop(path)
        elif change.verb == "unlink":
            self.names.pop(path, None)
        elif change.verb == "sync_dir":
            self.synced_names[path] = {p: i for p, i in self.names.items() if p.parent == path}

    def lay_out(self, origin: Path, place: Path, *, only_synced: bool) -> None:
        names = self.names
        if only_synced:
            names = {p: i for name in self.synced_names.values() for p, i in name.items()}
        for path, index in names.items():
            target = place / path.relative_to(origin)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.synced[index] if only_synced else self.content[index])


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The trace of a run that keeps all its checkpoints, and the digest of each checkpoint."""
    folder = tmp_path_factory.mktemp("traced")
    disk = Traced()
    settings = {"plan.memory.dram": 90_000, "plan.staleness_steps": 1, "train.keep_checkpoints": 2}
    config = override_settings(build_config(CONFIG), settings)
    run = open_run(config, Mesh(), folder, disk=disk)
    digests: dict[int, str] = {}
    write = run.checkpoints.write_snapshot

    def write_and_digest(
        collection, captured, say
    ):  # on the checkpoint's thread: training goes on meanwhile
        write(collection, captured, say)
        digests[captured.step] = digest(folder)

    run.checkpoints.write_snapshot = write_and_digest
    run.train()
    run.close()
    return folder, disk.changes, digests


@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_cut_at_every_point(traced, stride, tmp_path):
    """Kill at some points by default, and right after each checkpoint has become durable and the newest."""
    origin, changes, digests = traced
    tree, newest_certain, num_seen = Tree(), -1, 0
    for number, change in enumerate(changes):
        tree.apply(change)
        is_checkpoint = change.verb == "sync_dir" and change.path == origin / "checkpoints"
        if is_checkpoint:
            durable = tree.synced_names[change.path]
            before, newest_certain = (
                newest_certain,
                max([int(p.stem) for p in durable if p.suffix == ".json"], default=-1),
            )
            is_checkpoint = newest_certain > before
        if number % stride and not is_checkpoint and number != len(changes) - 1:
            continue
        for only_synced in (False, True):
            place = tmp_path / f"{number}-{only_synced}"
            place.mkdir()
            tree.lay_out(origin, place, only_synced=only_synced)
            shutil.copy(origin / "config.yaml", place)
            steps = list_checkpoints(place)
            if steps:
                num_seen += 1
                assert digest(place) == digests[steps[-1]]
            assert max(steps, default=-1) >= newest_certain
            shutil.rmtree(place)
    assert num_seen > 20 and len(digests) >= 8
