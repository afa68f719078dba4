"""collection.save and collection.load: folders of a training loop of one's own, in the files of a run's checkpoints."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from own_loop import Loop, assert_same_state
from plans import cache_settings
from ranks import run_ranks
from scenario import STAYS, Net, all_rows, global_batch, loss_of, share_of

import colonnade
from colonnade import Mesh, PlanConfig, RowOptimizer, build_plan
from colonnade.checkpoint.checkpoints import list_checkpoints
from colonnade.checkpoint.completeness import verify_checkpoint
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, CorruptionError
from colonnade.staleness import TableCache, row_clock


def loaded(folder, dense, step=None, stays=None, plan=None):
    """Load a folder and the dense side beside it into a new loop, built with another seed."""
    loop = Loop(stays, seed=8)
    loop.collection.load(folder, step=step, plan=plan, optimizer=loop.rows)
    colonnade.load_dense_state_dict(loop.model, dense[0])
    loop.dense.load_state_dict(copy.deepcopy(dense[1]))
    return loop


def dense_of(loop):
    return copy.deepcopy((colonnade.dense_state_dict(loop.model), loop.dense.state_dict()))


@pytest.mark.parametrize("stays", [None, *STAYS])
def test_training_goes_on_to_the_same_bits(stays, tmp_path):
    loop = Loop(stays)
    loop.train(0, 4)
    loop.collection.save(tmp_path, 4)
    loop.train(4, 6)
    loop.collection.save(tmp_path, 6)
    dense = dense_of(loop)
    losses = loop.train(6, 9)
    again = loaded(tmp_path, dense, stays=stays)
    assert again.train(6, 9) == losses
    assert_same_state(again, loop)
    again.collection.save(tmp_path, 9)  # goes on from what was loaded
    assert list_checkpoints(tmp_path) == [6, 9]
    assert_same_state(loaded(tmp_path, dense_of(again), stays=stays), loop)
    assert len(list(verify_checkpoint(tmp_path, 9))) > 8


def test_a_save_writes_what_has_changed(tmp_path):
    collection = Loop().collection
    colonnade.load_rows(collection, "item", torch.ones(20_000, 5))
    collection.save(tmp_path, 1)

    def size():
        return sum(path.stat().st_size for path in tmp_path.rglob("segment-*.rows"))

    whole = size()
    colonnade.load_rows(collection, "item", torch.zeros(10, 5))
    collection.delete("item", torch.arange(19_990, 20_000))
    collection.save(tmp_path, 2)
    assert size() - whole < whole / 50
    other = Loop(seed=3).collection
    assert other.load(tmp_path) == 2
    assert torch.equal(
        other.rows("item", torch.arange(20)), collection.rows("item", torch.arange(20))
    )
    assert torch.equal(colonnade.trained_ids(other, "item"), torch.arange(19_990))
    older = Loop().collection
    assert older.load(tmp_path, step=1) == 1
    assert len(colonnade.trained_ids(older, "item")) == 20_000


def test_rows_deleted_and_looked_up_again_are_first_values(tmp_path):
    collection = Loop().collection
    colonnade.load_rows(collection, "item", torch.ones(50, 5))
    first = Loop().collection.rows("item", torch.arange(50))
    collection.save(tmp_path, 1)
    collection.delete("item", torch.arange(40))
    stream = collection.lookahead(global_batch(step, 24) for step in range(4))
    collection(next(stream))  # later batches are prepared in a thread meanwhile
    collection.save(tmp_path, 2)
    assert torch.equal(collection.rows("item", torch.arange(40)), first[:40])
    stream.close()
    other = Loop().collection
    other.load(tmp_path)
    assert torch.equal(colonnade.trained_ids(other, "item"), torch.arange(40, 50))


def test_rows_beyond_memory_rest_in_the_folder(tmp_path):
    whole, small = Loop(), Loop()
    plan = build_plan(small.collection.tables, 1, PlanConfig(memory={"dram": 12_000}, lookahead=0))
    assert plan.needs_backing
    small.collection.open(plan, folder=tmp_path / "a")
    assert small.train(0, 5, size=8) == whole.train(0, 5, size=8)
    small.collection.save(tmp_path / "a", 5)
    whole.collection.save(tmp_path / "b", 5)
    dense = dense_of(whole)
    losses = whole.train(5, 8, size=8)
    assert small.train(5, 8, size=8) == losses
    with pytest.raises(CheckpointError, match="and rows are stored in"):
        small.collection.save(tmp_path / "c", 8)
    large = loaded(tmp_path / "b", dense)
    assert large.train(5, 8, size=8) == losses
    tight = loaded(tmp_path / "b", dense, plan=plan)
    assert tight.train(5, 8, size=8) == losses
    tight.collection.save(tmp_path / "b", 8)
    assert_same_state(loaded(tmp_path / "b", dense_of(tight)), whole)


def test_a_folder_of_others_is_left_alone(tmp_path):
    loop, other = Loop(), Loop()
    loop.train(0, 1)
    other.train(0, 1)
    loop.collection.save(tmp_path / "one", 5)
    with pytest.raises(CheckpointError, match="does not go on from; give an empty folder, or load"):
        other.collection.save(tmp_path / "one", 6)
    with pytest.raises(CheckpointError, match="got step 5, wanted one after 5"):
        loop.collection.save(tmp_path / "one", 5)
    loop.collection.save(tmp_path / "two", 5)  # another empty one takes all rows
    with pytest.raises(CheckpointError, match="does not go on from"):
        loop.collection.save(tmp_path / "one", 6)
    with pytest.raises(CheckpointError, match="wanted an empty one"):
        Loop().collection.open(folder=tmp_path / "two")
    with pytest.raises(ConfigError, match="is open already; load instead of open"):
        loop.collection.load(tmp_path / "two")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Loop().collection.load(tmp_path / "nothing")
    assert_same_state(loaded(tmp_path / "two", dense_of(loop)), loop)


def test_another_model_and_a_flipped_bit_are_named(tmp_path):
    loop = Loop()
    loop.train(0, 2)
    loop.collection.save(tmp_path, 2)
    with pytest.raises(CheckpointError, match="admission"):
        Loop("by chance and recent").collection.load(tmp_path)
    rows = max(tmp_path.rglob("segment-*.rows"), key=lambda path: path.stat().st_size)
    data = bytearray(rows.read_bytes())
    data[5000] ^= 1
    rows.write_bytes(data)
    with pytest.raises(CorruptionError):
        Loop().collection.load(tmp_path)


def test_a_save_that_fails_is_made_up_for(tmp_path, monkeypatch):
    loop = Loop()
    loop.train(0, 2)
    loop.collection.save(tmp_path, 2)
    loop.train(2, 3)
    from colonnade.checkpoint import checkpoints

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_durably", full)
        with pytest.raises(ColonnadeError, match="No space left"):
            loop.collection.save(tmp_path, 3)
    dense = dense_of(loop)
    loop.collection.save(tmp_path, 3)
    assert_same_state(loaded(tmp_path, dense), loop)


def test_settings_of_the_optimizer_come_back(tmp_path):
    loop = Loop()
    loop.train(0, 1)
    loop.rows.param_groups[0]["lr"] = 0.0125
    loop.collection.save(tmp_path, 1, optimizer=loop.rows)
    again = loaded(tmp_path, dense_of(loop))
    assert again.rows.param_groups[0]["lr"] == 0.0125


def test_a_moved_folder_loads(tmp_path):
    loop = Loop()
    loop.train(0, 1)
    loop.collection.save(tmp_path / "a", 1)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert_same_state(loaded(tmp_path / "b", dense_of(loop)), loop)


def on_ranks(mesh, folder, source=None):
    """Train two steps, save; or load what was saved, train two more. Return the rows then."""
    model = Net(seed=3 if source is None else 9)
    collection, rows = model.embeddings, RowOptimizer(model.embeddings)
    first = 0
    if source is None:
        collection.open(build_plan(collection.tables, mesh.num_ranks), mesh)
    else:
        first = collection.load(source, mesh=mesh)
    torch.manual_seed(0)  # the dense network stays as it is
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    for step in range(first, first + 2):
        batch = share_of(global_batch(step, 24), mesh.rank, mesh.num_ranks)
        loss_of(model, batch).backward()
        rows.step()
    collection.save(folder, first + 2)
    return all_rows(collection)


def test_any_number_of_ranks_loads(tmp_path):
    run_ranks(2, on_ranks, tmp_path / "two")
    for ranks in (1, 3):
        folder = tmp_path / f"{ranks}"
        if ranks == 1:
            later = on_ranks(Mesh(), folder, tmp_path / "two")
        else:
            later = run_ranks(ranks, on_ranks, folder, tmp_path / "two")[0]
        alone = Net().embeddings
        assert alone.load(folder) == 4
        for name, rows in all_rows(alone).items():
            assert torch.equal(rows, later[name]), name
    one, three = (Net().embeddings for _ in range(2))
    one.load(tmp_path / "1")
    three.load(tmp_path / "3")
    for name, rows in all_rows(one).items():
        torch.testing.assert_close(rows, all_rows(three)[name], rtol=1e-10, atol=1e-14)


def test_a_world_that_changes_saves_on_in_its_folder(tmp_path):
    run_ranks(2, on_ranks, tmp_path)
    later = on_ranks(Mesh(), tmp_path, tmp_path)
    alone = Net().embeddings
    assert alone.load(tmp_path) == 4
    for name, rows in all_rows(alone).items():
        assert torch.equal(rows, later[name]), name


def with_caches(mesh, folder):
    """Train two ranks that keep copies of rows; save while gradients wait at copies."""
    model = Net()
    collection, rows = model.embeddings, RowOptimizer(model.embeddings)
    names = [table.name for table in collection.tables]
    caches = {name: TableCache(100, row_clock(2)) for name in names}
    collection.open(
        build_plan(collection.tables, mesh.num_ranks, PlanConfig(cache=cache_settings(caches))),
        mesh,
    )
    batches = (share_of(global_batch(s, 24), mesh.rank, mesh.num_ranks) for s in range(3))
    for batch in collection.lookahead(batches):
        loss_of(model, batch).backward()
        rows.step()
    with pytest.raises(ConfigError, match=r"plan\.cache"):
        collection.save(folder, 3)
    collection.save(folder, 3, optimizer=rows)
    with rows.synchronized_view():
        return all_rows(collection)


def test_gradients_at_copies_are_saved(tmp_path):
    expected = run_ranks(2, with_caches, tmp_path)[0]
    alone = Net().embeddings
    assert alone.load(tmp_path) == 3
    for name, rows in all_rows(alone).items():
        assert torch.equal(rows, expected[name]), name


def test_rows_on_a_device_are_saved_and_loaded(tmp_path):
    loop, again, third = Loop(), Loop(), Loop()
    plan = build_plan(loop.collection.tables, 1, PlanConfig(memory={"hbm": 20_000}))
    loop.collection.open(plan)
    loop.train(0, 3, size=8)
    loop.collection.save(tmp_path, 3)
    saved, dense = loop.state(), dense_of(loop)
    losses = loop.train(3, 5, size=8)
    again.collection.open(plan)
    again.load(saved)
    assert again.train(3, 5, size=8) == losses
    third.collection.load(tmp_path, plan=plan)
    colonnade.load_dense_state_dict(third.model, dense[0])
    third.dense.load_state_dict(copy.deepcopy(dense[1]))
    assert third.train(3, 5, size=8) == losses
    third.collection.save(tmp_path, 5)
    assert_same_state(loaded(tmp_path, dense_of(third)), loop)


@pytest.mark.parametrize("step", [-1, 2**63, 1.5, "5", None, True])
def test_a_step_that_is_none_is_refused_before_anything_is_written(tmp_path, step):
    loop = Loop()
    loop.train(0, 1)
    with pytest.raises(CheckpointError, match="wanted an integer from 0"):
        loop.collection.save(tmp_path / "saves", step)
    assert not (tmp_path / "saves").exists()
    loop.collection.save(tmp_path / "saves", 2**63 - 1)
    assert Loop().collection.load(tmp_path / "saves") == 2**63 - 1
