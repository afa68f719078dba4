"""DataLoaders and other iterables of batches, as `fit` takes them: schema of the first batch, ranks, resume."""

from __future__ import annotations

import pytest
import torch
from test_data_contract import same
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import colonnade
from colonnade import Batch, EmbeddingCollection, Feature, Ids, Table
from colonnade.data import Column, Schema, Splits, open_batches
from colonnade.data.batches import open_loader
from colonnade.data.contract import Position
from colonnade.errors import ConfigError, DataError

SCHEMA = Schema(("price", "size0", "size1"), (Column("user"), Column("tags", kind="bag")))


class Samples(Dataset):
    """Samples as a user's data set has them: numbers, tensors of one length, a label."""

    def __len__(self):
        return 60

    def __getitem__(self, i):
        return {
            "user": i % 7,
            "tags": torch.tensor([i % 3, i % 4]),
            "price": i / 8,
            "size": torch.tensor([float(i), -1.0]),
            "click": float(i % 7 > 3),
        }


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        tables = [Table("user", 4), Table("tags", 4)]
        self.embeddings = EmbeddingCollection(tables, [Feature(t.name, t.name) for t in tables])
        self.linear = nn.Linear(8, 1)

    def forward(self, batch):
        vectors = self.embeddings(batch)
        return self.linear(torch.cat([vectors["user"], vectors["tags"]], 1))


def load(**options):
    generator = torch.Generator().manual_seed(5)
    return DataLoader(
        Samples(), batch_size=16, **({"shuffle": True, "generator": generator} | options)
    )


def build_batches():
    """Return the batches of the loader without shuffling, by plain Python."""
    batches = []
    for begin in range(0, 60, 16):
        rows = range(begin, min(begin + 16, 60))
        tags = torch.tensor([tag for i in rows for tag in (i % 3, i % 4)])
        ids = {
            "user": Ids(torch.tensor([i % 7 for i in rows])),
            "tags": Ids(tags, 2 * torch.arange(len(rows) + 1)),
        }
        dense = torch.tensor([[i / 8, float(i), -1.0] for i in rows])
        label = torch.tensor([[float(i % 7 > 3)] for i in rows])
        batches.append(Batch(len(rows), dense, ids, label=label))
    return batches


def test_a_loader_gives_the_batches_of_a_twin():
    source = open_loader(load(shuffle=False), 1, None, name="data")
    assert source.schema == Schema(SCHEMA.dense, SCHEMA.categorical, ("click",))
    wanted = build_batches()
    for batches in (source.batches(16), source.batches(16, start=Position(3))):
        assert all(same(a, b) for a, b in zip(batches, wanted, strict=True))
    rest = source.batches(16, start=Position(0, 2))
    assert all(same(a, b) for a, b in zip(rest, wanted[2:], strict=True))
    own = open_loader(wanted, 1, None, name="data")  # batches are as they are
    assert own.schema.categorical == SCHEMA.categorical
    assert own.schema.dense == ("dense0", "dense1", "dense2")
    assert all(same(a, b) for a, b in zip(own.batches(16), wanted, strict=True))


def test_fit_takes_a_loader_and_draws_what_it_draws_without_a_look():
    schema = Schema(SCHEMA.dense, SCHEMA.categorical, ("click",))
    for seed in (None, 5):  # the loader's own generator, or torch's
        models = []
        for opener in (lambda loader: loader, lambda loader: open_batches(loader, schema)):
            model = Plain()
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            data = Splits(opener(load(generator=generator)), validation=opener(load()))
            result = colonnade.fit(model, data, epochs=2, quiet=True)
            assert result.outcome.steps == 8 and result.metrics["validation_auc"] > 0
            models.append(model)
        assert torch.equal(models[0].linear.weight, models[1].linear.weight)


def test_a_run_resumes_at_a_batch(tmp_path):
    """A sampler that knows the epoch gives the same bits, resumed or not."""

    def fit(run, **settings):
        sampler = DistributedSampler(Samples(), num_replicas=1, rank=0, seed=3)
        model = Plain()
        loader = load(sampler=sampler, shuffle=None, generator=None)
        return model, colonnade.fit(
            model, loader, run=tmp_path / run, epochs=3, quiet=True, **settings
        )

    whole, result = fit("whole")
    assert result.outcome.steps == 12
    fit("parts", max_steps=6)
    model, result = fit("parts")
    assert result.resumed_at == 6
    assert torch.equal(whole.linear.weight, model.linear.weight)


def test_several_ranks_need_a_sampler_that_knows_them():
    with pytest.raises(
        ConfigError, match=r"got a DataLoader on 2 ranks.*DistributedSampler\(data_set"
    ):
        open_loader(load(), 2, None, name="data")
    with pytest.raises(ConfigError, match=r"got a list on 2 ranks"):
        open_loader(build_batches(), 2, None, name="data")
    by_rank = []
    for rank in range(2):
        sampler = DistributedSampler(Samples(), num_replicas=2, rank=rank, shuffle=False)
        loader = load(sampler=sampler, shuffle=None, generator=None)
        batches = open_loader(loader, 2, None, name="data").batches(32, rank=rank, num_ranks=2)
        by_rank.append([x for batch in batches for x in batch.dense[:, 1].tolist()])
    assert by_rank == [list(range(0, 60, 2)), list(range(1, 60, 2))]


GOOD = {"user": torch.arange(3), "label": torch.zeros(3)}
BAD = {
    "an iterator": (iter([GOOD]), "got an iterator, which one epoch uses up"),
    "nothing": ([], "got no batch, wanted one at least"),
    "numbers": ([3], "first batch: got a int, wanted a mapping of names to tensors, or a colonnade.Batch"),
    "a path": ("clicks.csv", "got a str as the train data, wanted a Source, or a DataLoader.*open_csv"),
    "another column": ([GOOD, {**GOOD, "item": torch.arange(3)}], "batch 1: got ids item, user;.*wanted ids user;"),
    "a column less": ([GOOD, {"label": torch.zeros(3)}], "batch 1: got ids none; .*wanted ids user; "),
    "another label": ([GOOD, {"user": torch.arange(3), "y": torch.zeros(3)}], "labels y; wanted .*labels label,"),
    "another order": (
        [GOOD | {"a": torch.rand(3), "b": torch.rand(3)}, GOOD | {"b": torch.rand(3), "a": torch.rand(3)}],
        "batch 1: got .*numbers b, a; .*numbers a, b;",
    ),
    "another kind": ([GOOD, {**GOOD, "user": torch.zeros(3, 2).long()}], "batch 1, column user: got ids with offsets"),
    "texts": ([{**GOOD, "city": ["a", "b", "c"]}], r"first batch: got city of type list, wanted numbers"),
    "two sizes": ([{**GOOD, "item": torch.arange(4)}], r"first batch, column item: got \(4,\) int64, wanted \(3,\)"),
    "sizes of numbers": ([{**GOOD, "a": torch.rand(3), "b": torch.rand(4)}], "got dense columns of several lengths"),
    "too many": ([GOOD, {"user": torch.arange(9), "label": torch.zeros(9)}], "got 9 samples, wanted 0 .. 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_loaders_at_fault(name):
    data, message = BAD[name]
    with pytest.raises((ConfigError, DataError), match=message):
        tables = [Table("user", 4)]
        model = nn.Sequential(EmbeddingCollection(tables, [Feature("user", "user")]))
        loss = lambda output, batch: output["user"].sum(1)  # noqa: E731
        colonnade.fit(model, data, loss=loss, batch_size=4, quiet=True)
