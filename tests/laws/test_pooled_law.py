"""The laws with tables that are pooled at their owners, beside others whose rows travel: world, tier, staleness,
resume and accumulation. The exchange law itself is in test_exchange_law.py."""

from __future__ import annotations

import pytest
import torch
from exchanges import ALL, CHOICES, Choice, gradient_like, open_collection, run_exchange
from ranks import run_ranks
from scenario import all_rows, assert_close, assert_same_bits, global_batch, share_of, train

from colonnade import Batch, Ids, Mesh, RowOptimizer, World
from colonnade.errors import CheckpointError, ConfigError, DataError, IdRangeError

SIZES = [23, 1, 0, 24, 2]
POOLED = dict.fromkeys(("user", "item", "tag"), "pooled")  # "wide" is read as a sequence
MIXED = CHOICES["mixed by table"]


def train_all(mesh, folder):
    ours = {"exchanges": POOLED, "shardings": MIXED.shardings_in(mesh.num_ranks)}
    wide = {"sizes": SIZES, **ours}
    return {
        "row_wise": train(mesh, sizes=SIZES, exchanges=POOLED),
        "mixed": train(mesh, **wide, evaluate_every=2),
        "tiered": train(mesh, **wide, dram_bytes=40_000, lookahead=3, folder=folder),
        "on a device": train(mesh, **wide, hbm_bytes=30_000, device="cpu"),
        "stale": train(mesh, **wide, staleness=2, lookahead=1),
        "stale, far ahead": train(mesh, **wide, staleness=2, lookahead=4, evaluate_every=1),
    }


def train_and_account(mesh, folder):
    return (
        train_all(mesh, folder), accumulate(mesh, MIXED), hold(mesh), hold(mesh, CHOICES["rows"]),
        in_16_bits(mesh),
    )  # fmt: skip


@pytest.fixture(scope="module")
def everyone(tmp_path_factory):
    """Results of both of two ranks."""
    return run_ranks(2, train_and_account, tmp_path_factory.mktemp("rows"))


def test_world_tiers_and_staleness(everyone):
    wanted = train(Mesh(), sizes=SIZES)
    for runs in (rank[0] for rank in everyone):
        assert_close(wanted, runs["row_wise"], rtol=1e-10)
        assert_close(wanted, runs["mixed"], rtol=1e-10)
        assert_same_bits(runs["mixed"], runs["tiered"])
        assert_same_bits(runs["mixed"], runs["on a device"])
        assert_same_bits(runs["stale"], runs["stale, far ahead"])
        assert runs["stale"].losses != runs["mixed"].losses
    assert_close(train(Mesh(), sizes=SIZES, staleness=2), everyone[0][0]["stale"], rtol=1e-10)
    assert_same_bits(everyone[0][0]["mixed"], everyone[1][0]["mixed"])


def in_16_bits(mesh):
    """Return outputs by step and all rows, with rows in 16 bits."""
    return [
        run_exchange(mesh, choice, [9, 0, 1, 13], "bfloat16", 0)[:2]
        for choice in (CHOICES["rows"], MIXED)
    ]


def test_rows_in_16_bits(everyone):
    """Sums in another order are rounded by the same random bits: the last of some weights differs."""
    for (output, rows), (pooled, ours) in (rank[4] for rank in everyone):
        for step, outputs in enumerate(output):
            bound = 0.05 if step else 1e-5
            for wanted, result in zip(outputs, pooled[step], strict=True):
                torch.testing.assert_close(result, wanted, rtol=bound, atol=bound)
        for name, wanted in rows.items():
            torch.testing.assert_close(ours[name], wanted, rtol=0.02, atol=0.02)
    for name, values in everyone[0][4][1][1].items():
        assert torch.equal(values, everyone[1][4][1][1][name])


def accumulate(mesh, choice: Choice):
    """Steps of two batches, the first with two backwards; clipped. Norms before clipping, and all rows."""
    collection = open_collection(mesh, choice, "float64", lookahead=1)
    rows, norms = RowOptimizer(collection, clip_value=0.5), []
    batches = (share_of(global_batch(t, 9 + t), mesh.rank, mesh.num_ranks) for t in range(6))
    for step, batch in enumerate(collection.lookahead(batches)):
        outputs = list(collection(batch).values())
        gradients = [gradient_like(output, step, mesh.rank, i) for i, output in enumerate(outputs)]
        for _ in range(2 - step % 2):
            torch.autograd.backward(outputs, gradients, retain_graph=True)
        if step % 2:
            norms.append(float(rows.clip_grad_norm_(2.0)))
            rows.step()
    return norms, all_rows(collection)


def rows_accumulate(mesh):
    return accumulate(mesh, CHOICES["rows"])


def test_batches_and_backwards_accumulate_and_are_clipped(everyone):
    wanted = run_ranks(2, rows_accumulate)[0]
    assert min(wanted[0]) > 2.0
    for norms, result in (rank[1] for rank in everyone):
        assert norms == pytest.approx(wanted[0], rel=1e-10)
        for name, values in wanted[1].items():
            torch.testing.assert_close(result[name], values, rtol=1e-10, atol=1e-12)


def hold(mesh, choice: Choice = MIXED):
    """Return the state of a prefetched batch, and its values."""
    collection = open_collection(mesh, choice, "float64", staleness_steps=1)
    ticket = collection.pipeline.prepare_batch(
        share_of(global_batch(3, 11), mesh.rank, mesh.num_ranks)
    )
    collection.pipeline.fetch_rows(ticket)
    stored = collection.exchange.export_prefetched(ticket)
    values = collection.exchange.compute_outputs(ticket, collection.backward_handle)
    collection.pipeline.drop_batch(ticket)
    return stored, {name: value.detach() for name, value in values.items()}


def restored(choice: Choice, stored, step: int = 3):
    """Values of the same batch in a world of one, where nothing is fetched; and what a second checkpoint holds of
    it."""
    collection = open_collection(Mesh(), choice, "float64", staleness_steps=1)
    batch = global_batch(step, 11)
    ticket = collection.pipeline.prepare_batch(batch, (0, stored))  # no step is left before it
    again = collection.exchange.export_prefetched(ticket)
    return collection.exchange.compute_outputs(ticket, collection.backward_handle), again


def test_what_was_read_ahead_is_read_in_another_world(everyone):
    stored = [rank[2][0] for rank in everyone]
    result, again = restored(MIXED, stored)
    for name, value in result.items():
        wanted = torch.cat([rank[2][1][name] for rank in everyone])
        assert torch.equal(wanted, value.detach()), name
    assert torch.equal(again["pooled.sums"], torch.cat([item["pooled.sums"] for item in stored]))
    # It is what was held, not what the rows are now.
    other = [
        {name: value * (2 if value.is_floating_point() else 1) for name, value in item.items()}
        for item in stored
    ]
    doubled, _ = restored(MIXED, other)
    assert all(torch.equal(doubled[name], 2 * result[name]) for name in result)


@pytest.mark.parametrize("name", ["mixed by table", "rows"])
def test_rows_that_were_read_ahead_are_summed_by_other_exchanges(everyone, name):
    """A run of bounded staleness goes on with rows pooled at their owners."""
    stored = [rank[3][0] for rank in everyone]
    result, _ = restored(CHOICES[name], stored)
    for output in result:
        wanted = torch.cat([rank[3][1][output] for rank in everyone])
        torch.testing.assert_close(result[output].detach(), wanted, rtol=1e-12, atol=1e-14)
    doubled = [{k: v * (2 if v.is_floating_point() else 1) for k, v in value.items()} for value in stored]  # fmt: skip
    again, _ = restored(CHOICES[name], doubled)
    assert all(torch.equal(again[output], 2 * result[output]) for output in result)


@pytest.mark.parametrize("name", ["rows", "pooled"])
def test_what_another_exchange_held_is_refused(everyone, name):
    with pytest.raises(CheckpointError, match="another exchange"):
        restored(CHOICES[name], [rank[2][0] for rank in everyone])


# Refusals

ALONE = Mesh(World(ranks_per_host=2))
"""A rank whose peers are nowhere: whatever travels fails, for it has no process groups."""


def test_a_sequence_is_refused_when_the_exchange_is_opened():
    with pytest.raises(ConfigError, match=r"'history' of table 'wide'.*sequence.*exchange rows"):
        open_collection(Mesh(), Choice(dict.fromkeys(ALL, "pooled")), "float32")


@pytest.mark.parametrize("name", ["rows", "pooled", "mixed", "all three"])
def test_wrong_ids_are_refused_before_anything_travels(name):
    collection = open_collection(ALONE, CHOICES[name], "float32")
    right = global_batch(0, 7)
    with pytest.raises(AssertionError):
        collection.pipeline.prepare_batch(right)
    before = dict(ALONE.traffic.sent_bytes)
    for feature, ids, error in (
        ("user", Ids(right.ids["user"].values + 53), IdRangeError),
        ("tags", Ids(right.ids["tags"].values - 11, right.ids["tags"].offsets), IdRangeError),
        ("item", Ids(right.ids["item"].values.int()), DataError),
        ("seen", Ids(right.ids["seen"].values, right.ids["seen"].offsets[1:]), DataError),
    ):
        batch = Batch(7, right.dense, {**right.ids, feature: ids}, label=right.label)
        with pytest.raises(error, match=feature):
            collection.pipeline.prepare_batch(batch)
    assert before and dict(ALONE.traffic.sent_bytes) == before
