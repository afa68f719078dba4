"""Checkpoints copied by URL: a bare machine goes on from the copy to the same bits; a failing place harms nothing."""

from __future__ import annotations

import shutil

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from own_model import Net, assert_same, splits

import colonnade
from colonnade import SGD
from colonnade.checkpoint.header import list_checkpoints
from colonnade.errors import CheckpointError, ConfigError, StorageError
from colonnade.publish.mirror import list_mirrored_steps, open_url
from colonnade.store.log import manifest as manifests

FAST = {"batch_size": 50, "quiet": True, "threads": 1}


class Failing(MemoryFileSystem):
    """Refuses to take files whose name holds `what`, `times` times. A store of its own."""

    protocol = "failing"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    what, times = "", 0

    def put_file(self, path, target, **options):
        if Failing.what in target and Failing.times > 0:
            Failing.times -= 1
            raise OSError("503 Slow Down")
        return super().put_file(path, target, **options)


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    if request.param == "memory":
        files = fsspec.filesystem("memory")
        files.store.clear()
        return "memory://bucket/run"
    return f"file://{tmp_path}/elsewhere/run"


def test_a_bare_machine_goes_on_to_the_same_bits(url, tmp_path):
    straight = Net()
    colonnade.fit(straight, splits(), run=tmp_path / "straight", epochs=3, **FAST)
    settings = {"run": tmp_path / "run", "mirror": url, **FAST}
    colonnade.fit(Net(), splits(), epochs=2, **settings)
    assert list_mirrored_steps(*open_url(url)) == list_checkpoints(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    model = Net()
    result = colonnade.fit(model, splits(), epochs=3, **settings)
    assert result.resumed_at == 24 and result.outcome.steps == 12
    assert_same(straight, model)
    assert list_mirrored_steps(*open_url(url)) == list_checkpoints(tmp_path / "run")


def test_what_is_kept_there_is_what_is_kept_here(url, tmp_path):
    settings = {"run": tmp_path / "run", "mirror": url, "keep_checkpoints": 1, **FAST}
    colonnade.fit(Net(), splits(), epochs=4, checkpoint_steps=3, **settings)
    files, root = open_url(url)
    steps = list_checkpoints(tmp_path / "run")
    assert list_mirrored_steps(files, root) == steps and steps[-1] == 48
    # Not just any file: collection may be writing what the next checkpoint names.
    local = sorted(
        file.path.name
        for place in (tmp_path / "run" / "rows" / "0-of-1").iterdir()
        for step in manifests.committed_steps(place)
        for file in manifests.list_commit_files(place, manifests.read_manifest_fields(place, step))
    )
    copied = sorted(path.split("/")[-1].rsplit("-", 1)[0] for path in files.find(f"{root}/rows"))
    assert copied == local
    # Any checkpoint there can be had.
    fetched = tmp_path / "fetched"
    assert colonnade.fetch_run(url, fetched, at=steps[0]) == steps[0]
    assert colonnade.load_checkpoint(Net(), fetched) == steps[0]
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        colonnade.fetch_run(url, fetched)
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 5"):
        colonnade.fetch_run(url, tmp_path / "other", at=5)


def test_the_best_checkpoint_is_fetched_with_the_newest(url, tmp_path):
    model = Net(optimizer=SGD(lr=40.0))  # which overfits from the second epoch on
    settings = {"run": tmp_path / "run", "mirror": url, "keep_checkpoints": 1, **FAST}
    colonnade.fit(model, splits(), epochs=5, **settings)
    best, newest = list_checkpoints(tmp_path / "run")
    fetched = tmp_path / "fetched"
    assert colonnade.fetch_run(url, fetched) == newest
    assert list_checkpoints(fetched) == [best, newest]
    local, other = Net(optimizer=SGD(lr=40.0)), Net(optimizer=SGD(lr=40.0))
    assert colonnade.load_checkpoint(local, tmp_path / "run", at="best") == best
    assert colonnade.load_checkpoint(other, fetched, at="best") == best
    assert_same(local, other)


@pytest.fixture
def failing():
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.store.clear()
    yield Failing
    Failing.times = 0


@pytest.mark.parametrize("what", ["segment-", "dense", ".json"])
def test_a_place_that_fails_for_a_while(failing, what, tmp_path, capsys):
    failing.what, failing.times = what, 1
    settings = {"run": tmp_path / "run", "mirror": "failing://b/run", **FAST}
    settings["quiet"] = False
    colonnade.fit(Net(), splits(), epochs=2, **settings)
    message = " ".join(capsys.readouterr().out.split())
    assert "could not copy the checkpoint of step 12: 503 Slow Down" in message
    assert list_mirrored_steps(*open_url("failing://b/run")) == [12, 24]  # made up for
    assert colonnade.fetch_run("failing://b/run", tmp_path / "fetched") == 24


def test_a_place_that_always_fails(failing, tmp_path):
    failing.what, failing.times = "", 10**9
    settings = {"run": tmp_path / "run", "mirror": "failing://b/run", **FAST}
    with pytest.raises(
        StorageError, match=r"failing://b/run: .*503 Slow Down.*checkpoints are intact"
    ):
        colonnade.fit(Net(), splits(), epochs=1, **settings)
    assert colonnade.load_checkpoint(Net(), tmp_path / "run") == 12
    assert list_mirrored_steps(*open_url("failing://b/run")) == []


def test_a_copy_cut_short_is_found(tmp_path):
    url = f"file://{tmp_path}/there"
    colonnade.fit(Net(), splits(), run=tmp_path / "run", mirror=url, epochs=1, **FAST)
    victim = next((tmp_path / "there" / "rows").rglob("segment-*.rows-*"))
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-9])
    fetched = tmp_path / "fetched"
    colonnade.fetch_run(url, fetched)
    with pytest.raises(StorageError, match=r"segment-\d+\.rows"):
        colonnade.load_checkpoint(Net(), fetched)
    # The next checkpoint's copy repairs it, because its size gives it away.
    colonnade.fit(Net(), splits(), run=tmp_path / "run", mirror=url, epochs=2, **FAST)
    assert victim.read_bytes() == whole
    colonnade.fetch_run(url, tmp_path / "again")
    assert colonnade.load_checkpoint(Net(), tmp_path / "again") == 24


def test_urls_that_nobody_speaks(tmp_path):
    with pytest.raises(ConfigError, match=r"'nonsense://x'"):
        colonnade.fit(
            Net(), splits(), run=tmp_path / "run", mirror="nonsense://x", epochs=1, **FAST
        )
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        colonnade.fetch_run("memory://nothing/here", tmp_path / "new")
    assert not (tmp_path / "run" / "checkpoints").exists()
