"""Budgets reach the stores: rows lie where the plan says, bits stay the same, what was written is found again."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from own_model import Net, columns
from rich.console import Console

from colonnade import fit, load_checkpoint
from colonnade.checkpoint.checkpoints import (
    Checkpoints,
    describe_lost_checkpoints,
    open_checkpoints,
)
from colonnade.checkpoint.stores import (
    RowFiles,
    choose_segment_size,
    open_stores,
    order_stripe_directories,
)
from colonnade.comm.mesh import Mesh
from colonnade.config.run import build_config, override_settings
from colonnade.data import open_tensors
from colonnade.errors import CheckpointError, ConfigError, StorageError
from colonnade.files.disk import Disk
from colonnade.run.run import open_run
from colonnade.sizes import StorageLocation
from colonnade.store.log.stripes import (
    SpaceAccount,
    Stripes,
    check_storage_locations,
    check_tier_directories,
)
from colonnade.table import Table
from colonnade.topology.sharding import row_wise


class UnsyncedDisk(Disk):
    """Nothing here crashes: do not wait for the platter."""

    def perform(self, change, action):
        return None if change.verb in ("sync", "sync_dir") else action()


CONFIG = build_config(
    {
        "data": {"name": "synthetic", "options": {"num_train": 1500, "num_test": 300, "seed": 3}},
        "model": {"name": "dlrm", "dim": 4, "bottom": [8], "top": [8]},
        "plan": {"memory": {"dram": "150KiB"}, "lookahead": 1},
        "train": {"batch_size": 50, "epochs": 1},
    }
)


def trained(config, folder):
    run = open_run(config, Mesh(), folder, console=Console(quiet=True))
    try:
        outcome = run.train()
        collection = run.trainer.collection
        ids = torch.arange(3)
        return (
            outcome.metrics,
            [collection.rows(t.name, ids) for t in collection.tables],
            collection,
        )
    finally:
        run.close()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("segment-*.rows"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(CONFIG, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param({"ssd": "a:1GiB"}, marks=pytest.mark.slow),
        pytest.param({"ssd": ["a:1GiB", "b:1GiB"]}, marks=pytest.mark.slow),
        pytest.param({"mapped": "m:100KiB"}, marks=pytest.mark.slow),
        pytest.param({"mapped": "m:9KiB"}, marks=pytest.mark.slow),
        {"mapped": "m:100KiB", "ssd": ["a:1GiB", "b:1GiB"], "tables": {"C3": "8KiB"}},
    ],
    ids=str,
)
def test_any_places_give_the_same_bits(memory, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {f"plan.memory.{name}": value for name, value in memory.items()}
    config = override_settings(CONFIG, {**settings, "plan.write_budget": "1GiB"})
    metrics, rows, collection = trained(config, tmp_path / "run")
    assert metrics == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(rows, plain[1], strict=True))
    uses = [table.tier == "mapped" or table.mapped_rows for table in collection.plan.tables]
    assert any(uses) == ("mapped" in memory)
    for name in ("a", "b"):
        if name in str(memory.get("ssd")):
            assert size_of(tmp_path / name) > 0
            (inside,) = (tmp_path / name).iterdir()  # one folder for this run
            assert inside.name.startswith("colonnade-")
    assert size_of(tmp_path / "run") == 0 or "ssd" not in memory
    assert not list((tmp_path / "m").rglob("*")) if "mapped" in memory else True  # without names
    # Going on, with the places or without naming them again.
    metrics, *_ = trained(override_settings(config, {"train.epochs": 2}), tmp_path / "run")
    assert metrics["epoch"] == 2
    without = override_settings(CONFIG, {"train.epochs": 3})
    assert trained(without, tmp_path / "run")[0]["epoch"] == 3


def test_small_stores_are_spread_in_proportion():
    firsts = [order_stripe_directories([1, 3], number)[0] for number in range(40)]
    assert 8 <= firsts.count(0) <= 12 and set(firsts[:4]) == {0, 1}
    assert order_stripe_directories([], 5) == [] and sorted(
        order_stripe_directories([5, 5, 5], 7)
    ) == [0, 1, 2]


def test_two_runs_share_a_directory(tmp_path):
    data = open_tensors(**columns(300))
    for name in ("one", "two"):
        fit(
            Net(), data, run=tmp_path / name, batch_size=50, quiet=True,
            memory={"dram": "6KiB", "ssd": [str(tmp_path / "rows")]}, lookahead=0,
        )  # fmt: skip
    assert len(list((tmp_path / "rows").iterdir())) == 2
    model = Net()
    assert load_checkpoint(model, tmp_path / "one") == 6  # nobody said where its rows lie
    assert torch.isfinite(model.collection.rows("user", torch.arange(5))).all()


def test_what_cannot_hold_rows_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    check_storage_locations("ssd", [StorageLocation(str(tmp_path / "new" / "place"), 1)])
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match=r"plan\.memory\.ssd: .*file is a file"):
        check_storage_locations("ssd", [StorageLocation(str(tmp_path / "file" / "x"))])
    with pytest.raises(ConfigError, match="the file system has"):
        check_storage_locations("mapped", [StorageLocation(str(tmp_path), 2**62)])
    with pytest.raises(ConfigError, match=r"ssd: .*got 1 bytes, wanted at least 1,048,576"):
        check_tier_directories([StorageLocation(str(tmp_path), 1)], None)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
        with pytest.raises(
            ConfigError, match=r"no room at all \(0 bytes\), so it cannot hold rows"
        ):
            check_storage_locations("ssd", [StorageLocation(str(tmp_path))])
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"plan\.memory\.mapped: .* is not writable"):
        check_storage_locations("mapped", [StorageLocation(str(tmp_path))])


def test_a_directory_that_vanished_is_named(tmp_path):
    data = open_tensors(**columns(300))
    settings = {"batch_size": 50, "quiet": True, "lookahead": 0}
    memory = {"dram": "6KiB", "ssd": [str(tmp_path / "rows")]}
    fit(Net(), data, run=tmp_path / "run", memory=memory, **settings)
    (tmp_path / "rows").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"stripe 1 .*--set plan\.memory\.ssd=") as caught:
        fit(Net(), data, run=tmp_path / "run", memory=memory, epochs=2, **settings)
    assert f"last in {tmp_path / 'rows'}/colonnade-" in str(caught.value)
    memory["ssd"] = [str(tmp_path / "elsewhere")]  # as it says
    fit(Net(), data, run=tmp_path / "run", memory=memory, epochs=2, **settings)


def test_one_directory_under_two_names_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    real, link = (
        StorageLocation(str(tmp_path / "real" / "new")),
        StorageLocation(str(tmp_path / "link" / "new")),
    )
    with pytest.raises(
        ConfigError, match=r"plan\.memory\.ssd: .*link/new is the same directory as .*real/new"
    ):
        check_tier_directories([real, link], None)
    with pytest.raises(ConfigError, match=r"plan\.memory\.mapped: .* is the same directory"):
        check_tier_directories([link], real)
    check_tier_directories([real, StorageLocation(str(tmp_path / "link" / "other"))], None)
    assert not list((tmp_path / "real").iterdir())


def open_two(folder, step, place, tables):
    """A rank's stores of two tables, and what they may keep."""
    stores = open_stores(
        RowFiles(folder, UnsyncedDisk(), [place]), tables, [row_wise(1)] * len(tables), 0, step
    )
    return stores, stores[0].files.stripes.spaces[1]


def test_a_size_is_a_limit_on_all_tables_of_a_rank_together(tmp_path):
    """Beyond it a store behaves as on a full disk; with a larger size it goes on, and all bytes are counted again."""
    tables = [Table(name, rows=None, dim=250) for name in ("one", "two")]
    place = tmp_path / "rows" / "colonnade-x"
    stores, space = open_two(tmp_path / "run", None, StorageLocation(str(place), 12 << 20), tables)
    assert stores[1].files.stripes.spaces[1] is space and space.path == tmp_path / "rows"
    width = stores[0].record_bytes
    records = torch.arange(2000 * width).to(torch.uint8).reshape(2000, width)
    for store in stores:
        store.write(torch.arange(2000), records).wait()
        store.commit(1)
    on_disk = [path for path in place.rglob("segment-*")]
    assert space.used == sum(path.stat().st_size for path in on_disk) > 4_000_000
    assert space.expected_growth == 0
    for n in range(2, 8):
        stores[0].write(torch.arange(2000 * n, 2000 * n + 2000), records).wait()
    with pytest.raises(
        StorageError, match=r"plan\.memory\.ssd: got .* of 12,582,912 bytes.*--run"
    ) as caught:
        stores[0].commit(2)
    assert caught.value.errno == errno.ENOSPC and str(tmp_path / "rows") in str(caught.value)
    assert sum(path.stat().st_size for path in place.rglob("segment-*")) <= 12 << 20
    out = torch.empty(2000, width, dtype=torch.uint8)
    for n in (0, 7):  # nothing was lost
        assert stores[0].read(torch.arange(2000 * n, 2000 * n + 2000), out).wait().all()
        assert torch.equal(out, records)
    space.limit_bytes = 40 << 20
    for store in stores:
        store.commit(2)
        store.prune([2])
        store.collect_garbage()
    assert space.used == sum(path.stat().st_size for path in place.rglob("segment-*"))
    stores[0].delete(torch.arange(16000))
    stores[0].commit(3)
    stores[0].prune([3])
    stores[0].collect_garbage()
    assert space.used == sum(path.stat().st_size for path in place.rglob("segment-*")) < 4_000_000
    for store in stores:
        store.close()
    (store, other), space = open_two(
        tmp_path / "run", None, StorageLocation(str(place), 1 << 20), tables
    )
    assert space.used == 0  # opened at no step: nothing is there
    store.close()
    other.close()


def test_files_of_a_checkpoint_count_when_it_is_opened(tmp_path):
    tables = [Table("one", rows=None, dim=250)]
    place = tmp_path / "rows" / "colonnade-x"
    (store,), space = open_two(
        tmp_path / "run", None, StorageLocation(str(place), 12 << 20), tables
    )
    records = torch.zeros(2000, store.record_bytes, dtype=torch.uint8)
    for step in (1, 2):  # the first checkpoint's segment is forgotten and kept for that checkpoint
        store.write(torch.arange(2000), records).wait()
        store.commit(step)
    store.close()
    # A size lowered since: nothing is lost, nothing more is written.
    (store,), space = open_two(tmp_path / "run", 2, StorageLocation(str(place), 2 << 20), tables)
    assert space.used == sum(path.stat().st_size for path in place.rglob("segment-*")) > 4_000_000
    store.write(torch.arange(5), records[:5]).wait()
    with pytest.raises(StorageError, match=r"holds 4,\d\d\d,\d\d\d of 2,097,152 bytes"):
        store.commit(3)
    space.limit_bytes = 1 << 30
    store.commit(3)
    store.close()


def test_a_new_segment_goes_where_there_is_room(tmp_path):
    stripes = Stripes(tmp_path)
    stripes.capacities = {1: 100, 2: 1000}
    stripes.spaces = {1: SpaceAccount(tmp_path / "a", 100), 2: SpaceAccount(tmp_path / "b", 1000)}
    stripes.spaces[1].adjust_used(40)
    stripes.spaces[2].adjust_used(500)
    assert stripes.choose_stripe_number({}, 10, 50) == 1  # the least full
    assert stripes.choose_stripe_number({}, 10, 70) == 2  # that has room for all of it
    stripes.spaces[2].adjust_growth(450)
    assert (
        stripes.choose_stripe_number({}, 10, 70) == 1
    )  # neither has room for all: the freest of the two
    stripes.spaces[1].adjust_used(60)
    assert stripes.choose_stripe_number({}, 10, 70) == 2
    stripes.spaces[2].adjust_used(500)
    with pytest.raises(
        StorageError, match=r"a holds 100 of 100 bytes, .*b holds 1,000 of 1,000 bytes"
    ):
        stripes.choose_stripe_number({}, 10, 70)
    assert choose_segment_size([None]) == choose_segment_size([]) == 256 << 20
    assert choose_segment_size([None, 80 << 20]) == 10 << 20 and choose_segment_size([5]) == 1 << 20


def test_an_older_checkpoint_out_of_reach_is_said_once(tmp_path):
    data = open_tensors(**columns(300))
    settings = {"batch_size": 50, "lookahead": 0}
    old, new = ({"dram": "6KiB", "ssd": [str(tmp_path / name)]} for name in ("old", "new"))
    fit(Net(), data, run=tmp_path / "run", memory=old, quiet=True, **settings)
    tables = Net().collection.tables
    # By hand what collection does in time: the newest checkpoint has no segment in the old directory.
    checkpoints, step = open_checkpoints(
        RowFiles(tmp_path / "run", directories=[StorageLocation(new["ssd"][0])]), tables, Mesh()
    )
    for store in checkpoints.backings:
        for rows in list(store.scan()):
            store.write(rows.ids, rows.records).wait()
        store.collect_garbage()
        store.commit(step + 1)
    assert describe_lost_checkpoints(checkpoints) == []
    checkpoints.close()
    (tmp_path / "old").rename(tmp_path / "gone")
    directories = [StorageLocation(checkpoints.outside_folders[0].as_posix())]
    files = RowFiles(tmp_path / "run", UnsyncedDisk(), directories)
    stores = open_stores(files, tables, [row_wise(1)] * len(tables), 0, step + 1)
    checkpoints = Checkpoints(tmp_path / "run", Mesh(), stores, keep=2, disk=UnsyncedDisk())
    (message,) = describe_lost_checkpoints(checkpoints)
    assert f"checkpoint of step {step} can no longer be opened: {tmp_path / 'old'}" in message
    assert "newest checkpoint is intact" in message
    checkpoints.close()


def test_a_space_gives_no_byte_beyond_its_limit(tmp_path):
    space = SpaceAccount(tmp_path, 100)
    assert space.reserve_bytes(60) and not space.reserve_bytes(41) and space.used == 60
    assert space.reserve_bytes(40) and not space.reserve_bytes(1)
    assert SpaceAccount(tmp_path, None).reserve_bytes(2**62)
