"""Data sets of the user's own: every form gives their batches, a run goes on exactly, what does not fit is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import console_of, run_ranks
from test_data_contract import same
from torch.utils.data import DataLoader, Dataset, IterableDataset

from colonnade import Mesh
from colonnade.batch import Batch, Ids
from colonnade.config.run import build_config
from colonnade.data import Column, Position, Schema, Splits, open_batches
from colonnade.data.batches import ENDED, pad_with_empty_batches
from colonnade.data.processes import read_in_processes
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.run.run import open_run

SCHEMA = Schema(("x", "y"), (Column("user", 40), Column("tags", None, "bag")))


def make_batch(step: int, size: int = 6) -> Batch:
    random = torch.Generator().manual_seed(step)
    offsets = torch.arange(size + 1) * 2
    user = torch.randint(40, (size,), generator=random)
    return Batch(
        size,
        torch.randn(size, 2, generator=random),
        {
            "user": Ids(user),
            "tags": Ids(torch.randint(9, (2 * size,), generator=random), offsets),
        },
        label=(user % 2 == 0).float()[:, None],
    )


class Map(Dataset):
    def __init__(self, count=10):
        self.count, self.reads = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.reads.append(index)
        return make_batch(index)


class Stream(IterableDataset):
    def __init__(self, count=10):
        self.count, self.reads = count, []

    def __iter__(self):
        for step in range(self.count):
            self.reads.append(step)
            yield make_batch(step)


class Counted(Stream):
    """Knows where it is, as torchdata's do."""

    at = 0

    def __len__(self):
        return self.count

    def __iter__(self):
        for step in range(self.at, self.count):
            self.reads.append(step)
            self.at = step + 1
            yield make_batch(step)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state_dict):
        self.at = state_dict["at"]


FORMS = {
    "list": lambda: [make_batch(step) for step in range(10)],
    "map-style": Map,
    "stream": Stream,
    "stateful": Counted,
    "loader of a stream": lambda: DataLoader(Stream(), batch_size=None),
    "loader of a map": lambda: DataLoader(Map(), batch_size=None),
    "function": lambda: lambda epoch: (make_batch(step) for step in range(10)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_its_batches_and_goes_on_anywhere(form):
    wanted = [make_batch(step) for step in range(10)]
    source = open_batches(FORMS[form](), SCHEMA)
    assert source.num_samples is None and source.schema == SCHEMA
    for _epoch in range(2):
        result = list(source.batches(6))
        assert all(same(a, b) for a, b in zip(result, wanted, strict=True))
    for step in (0, 1, 9):
        state = result[step - 1].state if step else None
        rest = open_batches(FORMS[form](), SCHEMA).batches(6, start=Position(0, step, state))
        assert all(same(a, b) for a, b in zip(rest, wanted[step:], strict=True))
    assert list(source.batches(6, start=Position(0, 3, ENDED))) == []


@pytest.mark.parametrize(("kind", "first"), [(Map, 7), (Counted, 7), (Stream, 0)])
def test_only_what_has_neither_index_nor_state_reads_again(kind, first):
    (*_, before, _, _, _) = open_batches(kind(), SCHEMA).batches(6)
    data = kind()
    list(open_batches(data, SCHEMA).batches(6, start=Position(0, 7, before.state)))
    assert data.reads == list(range(first, 10))


def test_a_function_is_asked_for_each_epoch():
    source = open_batches(lambda epoch: [make_batch(epoch)], SCHEMA)
    for epoch in (0, 5):
        (batch,) = source.batches(6, start=Position(epoch, 0))
        assert same(batch, make_batch(epoch))


def changed(**parts):
    return replace(make_batch(0), **parts)


def with_ids(name, ids):
    return changed(ids={**make_batch(0).ids, name: ids})


offsets = torch.arange(7) * 2
BAD = {
    "no batch": ([3], "got a list, wanted a colonnade.Batch.*batch_size=None"),
    "no tensor of samples": ({"user": 3}, r"user: got \(\), wanted \(B,\) or \(B, n\)"),
    "too many": (make_batch(0, 7), "got 7 samples, wanted 0 .. 6: train.batch_size"),
    "dense dtype": (
        changed(dense=torch.zeros(6, 2, dtype=torch.float64)),
        r"dense \(x, y\): got \(6, 2\) float64, wanted \(6, 2\) float32",
    ),
    "dense width": (changed(dense=torch.zeros(6, 3)), r"got \(6, 3\) float32, wanted \(6, 2\)"),
    "dense nan": (
        changed(dense=torch.tensor([[0.0, 1]] * 5 + [[0, float("nan")]])),
        "row 5, column y: got nan",
    ),
    "no dense": (changed(dense=None), "got NoneType, wanted a tensor"),
    "a column less": (
        changed(ids={"tags": make_batch(0).ids["tags"]}),
        "got ids of tags, wanted 'user' too",
    ),
    "a tensor for ids": (with_ids("user", torch.zeros(6)), "column user: got Tensor, wanted .*Ids"),
    "ids dtype": (
        with_ids("user", Ids(torch.zeros(6, dtype=torch.int32))),
        r"column user, values: got \(6,\) int32, wanted \(6,\) int64",
    ),
    "ids shape": (with_ids("user", Ids(torch.zeros(6, 1, dtype=torch.int64))), r"got \(6, 1\)"),
    "bag for one": (
        with_ids("user", Ids(torch.arange(12), offsets)),
        "column user: got .* with off",
    ),
    "one for bag": (with_ids("tags", Ids(torch.arange(6))), "column tags: got ids without offsets"),
    "offsets": (with_ids("tags", Ids(torch.arange(12), offsets + 1)), "start at 1 and end at 13"),
    "falling": (
        with_ids("tags", Ids(torch.arange(12), torch.tensor([0, 4, 2, 6, 8, 10, 12]))),
        "never decreasing",
    ),
    "weights": (
        with_ids("tags", Ids(torch.arange(12), offsets, torch.ones(11))),
        r"weights: got \(11,\) float32, wanted \(12,\)",
    ),
    "label": (changed(label=torch.zeros(6)), r"label: got \(6,\) float32, wanted \(6, 1\) float32"),
    "sample weight": (changed(sample_weight=torch.zeros(6, 1)), "sample_weight: got"),
    "group": (changed(group=torch.zeros(6)), r"group: got \(6,\) float32, wanted \(6,\) int64"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_batch_that_does_not_fit_is_named(case):
    batch, text = BAD[case]
    source = open_batches([make_batch(0), batch], SCHEMA, name="clicks")
    batches = source.batches(6, start=Position(2, 0))
    next(batches)
    with pytest.raises(DataError, match=f"^clicks, epoch 2, batch 1.*{text}"):
        next(batches)


class Stateless(Counted):
    def state_dict(self):
        return {"at": make_batch}


def test_data_sets_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="got a int, wanted something that yields Batch"):
        open_batches(3, SCHEMA)
    with pytest.raises(ConfigError, match="got an iterator"):
        open_batches(iter([]), SCHEMA)
    with pytest.raises(DataError, match="its function returned a int"):
        list(open_batches(lambda epoch: epoch, SCHEMA).batches(4))
    with pytest.raises(
        DataError, match="ended after 10 batches, and the run resumes from batch 11"
    ):
        list(open_batches(Stream(), SCHEMA).batches(6, start=Position(0, 11)))
    with pytest.raises(DataError, match="a Stream has no load_state_dict"):
        list(open_batches(Stream(), SCHEMA).batches(6, start=Position(0, 1, {"at": 1})))
    with pytest.raises(DataError, match=r"batch 0: got a state_dict\(\) that cannot be saved"):
        list(open_batches(Stateless(), SCHEMA).batches(6))
    with pytest.raises(ConfigError, match=r"readers=2 for a data set of your own.*num_workers"):
        read_in_processes(Splits(open_batches(Stream(), SCHEMA)), 2)


# --- in a run ---------------------------------------------------------------------------------


def config(max_steps: int | None, batch_size: int):
    return build_config(
        {
            "model": {"dim": 4, "bottom": [4], "top": [4]},
            "train": {"batch_size": batch_size, "epochs": 2, "max_steps": max_steps, "threads": 1},
        }
    )


def run_to(folder, mesh, data, max_steps, *, batch_size=None) -> dict:
    splits = Splits(open_batches(data, SCHEMA), test=open_batches(data_like(data), SCHEMA))
    run = open_run(
        config(max_steps, batch_size or 6 * mesh.num_ranks),
        mesh,
        folder,
        data=splits,
        console=console_of(mesh),
    )
    try:
        outcome = run.train()
        collection = run.trainer.collection
        ids = torch.arange(40)
        rows = {t.name: collection.rows(t.name, ids).tolist() for t in collection.tables}
        state = {name: v.tolist() for name, v in run.trainer.model.named_parameters()}
        return {
            "rows": rows,
            "dense": state,
            "step": collection.step,
            "samples": run.summary["samples"],  # of all ranks
            "metrics": outcome.metrics,
        }
    finally:
        run.close()


def data_like(data):
    return type(data)(data.count)


@pytest.mark.parametrize("kind", [Map, Stream, Counted])
def test_a_run_goes_on_to_the_same_bits(tmp_path, kind):
    whole = run_to(tmp_path / "whole", Mesh(), kind(), None)
    run_to(tmp_path / "parts", Mesh(), kind(), 7)
    data = kind()
    parts = run_to(tmp_path / "parts", Mesh(), data, None)
    assert parts["step"] == whole["step"] == 20 and whole.pop("samples") == 20 * 6
    assert parts.pop("samples") == 13 * 6 and parts == whole
    assert data.reads[0] == (0 if kind is Stream else 7)


def train_unevenly(mesh, folder, counts, kind):
    """Train at once, and in three parts; return the results."""
    whole = run_to(folder / "whole", mesh, kind(counts[mesh.rank]), None)
    for max_steps in (2, 7, None):
        parts = run_to(folder / "parts", mesh, kind(counts[mesh.rank]), max_steps)
    run_to(folder / "cut", mesh, kind(counts[mesh.rank]), 2)
    return whole, parts


@pytest.mark.parametrize("kind", [Stream, pytest.param(Counted, marks=pytest.mark.slow)])
def test_ranks_may_end_at_different_times(tmp_path, kind):
    """Rank 1 has nothing in the second half of an epoch, also where the run goes on there."""
    (whole, parts), (whole_1, parts_1) = run_ranks(2, train_unevenly, tmp_path, [9, 4], kind)
    assert whole["step"] == 18 and whole["rows"] == whole_1["rows"]
    assert whole["samples"] == whole_1["samples"] == 2 * 6 * (9 + 4)
    assert whole["metrics"]["test_auc"] > 0
    for of_rank in (whole, parts, whole_1, parts_1):
        of_rank.pop("samples")
    assert parts == whole and parts_1 == whole_1
    if kind is Counted:
        with pytest.raises(CheckpointError, match="by 2 ranks in the middle of an epoch"):
            run_to(tmp_path / "cut", Mesh(), kind(), None, batch_size=12)


def test_alone_nothing_is_added():
    batches = [make_batch(0), make_batch(1)]
    assert list(pad_with_empty_batches(iter(batches), SCHEMA, Mesh(), channel="route")) == batches
