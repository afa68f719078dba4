"""Batches move, are pinned and are mapped as torch and its frameworks expect."""

from __future__ import annotations

import torch
from own_loop import Loop
from scenario import global_batch
from torch.utils import _pytree as pytree

from colonnade import Batch, Ids


def test_a_batch_moves_without_its_ids():
    batch = global_batch(0, 8)
    moved = batch.to("meta", non_blocking=True)
    assert {moved.dense.device.type, moved.label.device.type} == {"meta"}
    assert moved.ids["item"].values.device.type == "cpu"
    assert batch.dense.device.type == "cpu"
    assert batch.to("cpu") is batch
    assert batch.to(torch.device("cpu"), non_blocking=True) is batch


def test_pinning_needs_a_gpu(monkeypatch):
    batch = global_batch(0, 8)
    if not torch.cuda.is_available():
        assert batch.pin_memory() is batch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    pinned = batch.pin_memory()
    assert pinned.dense is not batch.dense
    assert torch.equal(pinned.label, batch.label)


def test_a_moved_batch_takes_its_place_in_a_lookahead():
    loop = Loop()
    stream = loop.collection.lookahead(global_batch(step, 8) for step in range(3))
    batch = next(stream)
    moved = batch.to("meta")
    assert batch.context is None
    assert moved.context is not None
    loop.collection.pipeline.drop_batch(moved.context)
    stream.close()


def test_a_batch_is_a_pytree():
    ids = {"a": Ids(torch.tensor([4, 5])), "b": Ids(torch.tensor([6]), torch.tensor([0, 1, 1]))}
    batch = Batch(
        2, torch.ones(2, 3), ids, label=torch.zeros(2, 1), key=["x", "y"], ends_epoch=True
    )
    leaves, structure = pytree.tree_flatten(batch)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 5
    again = pytree.tree_unflatten(leaves, structure)
    assert repr(again) == repr(batch)
    assert pytree.tree_flatten(global_batch(0, 4))[1] == pytree.tree_flatten(global_batch(1, 4))[1]
    doubled = pytree.tree_map_only(torch.Tensor, lambda item: item * 2, batch)
    assert doubled.ids["b"].values.tolist() == [12]
    assert (doubled.size, doubled.key, doubled.ends_epoch) == (2, ["x", "y"], True)
