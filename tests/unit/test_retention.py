"""Deletion, iteration, and policies that decide which rows stay."""

from __future__ import annotations

import copy

import pytest
import torch
from logs import open_test_log

from colonnade import (
    SGD,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    PlanConfig,
    RowOptimizer,
    Table,
    build_plan,
)
from colonnade.errors import ConfigError

TABLE = Table("item", 4, optimizer=SGD(lr=1.0, momentum=0.5))


def opened(place=None, dram_bytes=None, **changes):
    embeddings = EmbeddingCollection([TABLE], [Feature("item", "item")], seed=1)
    backings = []
    if place is not None:
        backings = [
            open_test_log(
                place,
                table_name="item",
                record_bytes=TABLE.record_bytes,
                identity="item",
                step=None,
            )
        ]
    plan = build_plan([TABLE], 1, PlanConfig(memory={"dram": dram_bytes}))
    return embeddings.open(plan, backings=backings, **changes)


def train(embeddings, rows, ids):
    batch = Batch(len(ids), torch.zeros(len(ids), 0), {"item": Ids(torch.tensor(ids))})
    embeddings(batch)["item"].sum().backward()
    rows.step()


def list_rows(embeddings):
    parts = list(embeddings.scan("item"))
    ids = torch.cat([part.ids for part in parts])
    weights = torch.cat([part.weights for part in parts])
    clocks = torch.cat([part.clocks for part in parts])
    assert len(ids.unique()) == len(ids)
    return {i: (w, c) for i, w, c in zip(ids.tolist(), weights, clocks.tolist(), strict=True)}


@pytest.mark.parametrize("dram_bytes", [None, 20 * (TABLE.record_bytes + 16)])
def test_scan_lists_every_trained_row_once(tmp_path, dram_bytes):
    embeddings = opened(tmp_path, dram_bytes)
    rows = RowOptimizer(embeddings)
    for start in range(0, 60, 10):
        train(embeddings, rows, [*range(start, start + 10), -(2**63)])
    embeddings.eval()
    embeddings(Batch(1, torch.zeros(1, 0), {"item": Ids(torch.tensor([777]))}))  # never trained
    listed = list_rows(embeddings)
    assert sorted(listed) == [-(2**63), *range(60)]
    assert listed[-(2**63)][1] == 6 and listed[3][1] == 1
    ids = torch.tensor(list(listed))
    weights = torch.stack([weight for weight, _ in listed.values()])
    assert torch.equal(embeddings.rows("item", ids), weights)


@pytest.mark.parametrize("dram_bytes", [None, 20 * (TABLE.record_bytes + 16)])
def test_a_deleted_row_is_as_if_never_trained(tmp_path, dram_bytes):
    embeddings = opened(tmp_path, dram_bytes)
    rows = RowOptimizer(embeddings)
    everything = torch.arange(50)
    births = embeddings.rows("item", everything)
    for start in range(0, 50, 10):
        train(embeddings, rows, list(range(start, start + 10)))
    embeddings.store.flush()
    embeddings.delete("item", torch.tensor([3, 3, 47, 999]))
    after = embeddings.rows("item", everything)
    assert torch.equal(after[[3, 47]], births[[3, 47]])
    assert torch.equal(after[4], births[4] - 1)
    assert sorted(list_rows(embeddings)) == [i for i in range(50) if i not in (3, 47)]
    train(embeddings, rows, [3])  # without momentum of its former life
    assert torch.equal(embeddings.rows("item", torch.tensor([3]))[0], births[3] - 1)


def test_deleting_a_row_that_a_batch_uses():
    embeddings = opened()
    rows = RowOptimizer(embeddings)
    births = embeddings.rows("item", torch.tensor([5]))
    train(embeddings, rows, [5])
    output = embeddings(Batch(1, torch.zeros(1, 0), {"item": Ids(torch.tensor([5]))}))["item"]
    embeddings.delete("item", torch.tensor([5]))
    output.sum().backward()
    rows.step()
    assert torch.equal(embeddings.rows("item", torch.tensor([5])), births - 1)


class SeenTwice:
    """Admission: a row stays once it was trained in two steps. Eviction: of rows not seen for three steps."""

    def __init__(self) -> None:
        self.times: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def select_rows_to_delete(self, ids, update_counts, step):
        assert len(ids) == len(update_counts) == len(ids.unique())
        for i in ids.tolist():
            self.times[i] = self.times.get(i, 0) + 1
            self.last[i] = step
        old = [i for i, last in self.last.items() if last < step - 3]
        for i in old:
            del self.last[i]
        return torch.tensor([i for i in ids.tolist() if self.times[i] < 2] + old, dtype=torch.int64)


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_policy_admits_and_evicts_whatever_is_prepared_ahead(lookahead):
    embeddings = EmbeddingCollection([TABLE], [Feature("item", "item")], seed=1)
    embeddings.open(
        build_plan([TABLE], 1, PlanConfig(lookahead=lookahead)), policies={"item": SeenTwice()}
    )
    rows = RowOptimizer(embeddings)
    births = embeddings.rows("item", torch.arange(4))
    steps = [[0, 1], [0, 2], [2], [2, 3], [2], [2], [2], [2]]
    inputs = (
        Batch(len(ids), torch.zeros(len(ids), 0), {"item": Ids(torch.tensor(ids))}) for ids in steps
    )
    for batch in embeddings.lookahead(inputs):
        embeddings(batch)["item"].sum().backward()
        rows.step()
    listed = list_rows(embeddings)
    # 0 was admitted at its second step and evicted later; 1 and 3 were seen once; 2 lost its first update.
    assert sorted(listed) == [2]
    assert listed[2][1] == 6
    assert torch.equal(embeddings.rows("item", torch.tensor([0, 1, 3])), births[[0, 1, 3]])


def test_policies_and_tables_by_name():
    with pytest.raises(ConfigError, match="unknown table 'items'"):
        opened(policies={"items": SeenTwice()})
    embeddings = opened()
    for call in (
        lambda: embeddings.delete("x", torch.arange(1)),
        lambda: list(embeddings.scan("x")),
    ):
        with pytest.raises(ConfigError, match="unknown table 'x'"):
            call()


def test_a_model_is_copied_before_and_after_its_first_batch():
    embeddings = EmbeddingCollection([TABLE], [Feature("item", "item")], seed=1)
    twin = copy.deepcopy(embeddings)
    ids = torch.arange(3)
    assert torch.equal(twin.rows("item", ids), embeddings.rows("item", ids))
    assert torch.equal(copy.deepcopy(embeddings).rows("item", ids), embeddings.rows("item", ids))
