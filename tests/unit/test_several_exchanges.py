"""Costs that a plan of several exchanges avoids: nothing is put side by side or cut apart, and no push waits for
another."""

from __future__ import annotations

import pytest
import torch
from plans import by_table
from ranks import run_ranks

from colonnade import (
    SGD,
    Batch,
    Concat,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Table,
    Uniform,
    build_plan,
)
from colonnade.comm.mesh import PendingCall
from colonnade.topology.sharding import table_wise

SAMPLES, DIM = 6, 4
EXCHANGES = {"a": "rows", "b": "pooled", "c": "rows", "d": "pooled"}
TAKEN = {"some": ("a", "b", "c"), "others": ("c", "b"), "same": ("a", "b", "c")}
"""Features by consumer; d has none."""


def opened(mesh: Mesh = Mesh(), homes=None, **settings) -> EmbeddingCollection:  # noqa: B008
    tables = [
        Table(name, DIM, rows=20, optimizer=SGD(lr=0.5), initializer=Uniform(scale=1.0))
        for name in EXCHANGES
    ]
    consumers = {name: (Concat(), taken) for name, taken in TAKEN.items()}
    features = [Feature(name, name) for name in EXCHANGES]
    collection = EmbeddingCollection(tables, features, consumers=consumers, seed=1)
    plan = build_plan(
        collection.tables,
        mesh.num_ranks,
        PlanConfig(**settings, tables=by_table(exchange=EXCHANGES, sharding=homes)),
    )
    return collection.open(plan, mesh)


def batch_of(seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    ids = {name: Ids(torch.randint(0, 20, (SAMPLES,), generator=random)) for name in EXCHANGES}
    return Batch(SAMPLES, torch.zeros(SAMPLES, 0), ids)


def operations(output: torch.Tensor) -> list[str]:
    """Return the operations of backward after it, by name."""
    results, remaining = [], [output.grad_fn]
    while remaining:
        if (item := remaining.pop()) is not None:
            results.append(item.name())
            remaining += [after for after, _ in item.next_functions]
    return results


def test_outputs_are_written_where_they_are_read_and_gradients_read_where_they_were_given():
    collection = opened()
    batch = batch_of(0)
    outputs = collection(batch)
    for output in outputs.values():
        assert operations(output) == ["_PoolBackward", "torch::autograd::AccumulateGrad"]
    for name, taken in TAKEN.items():
        for i, feature in enumerate(taken):
            rows = collection.rows(feature, batch.ids[feature].values)
            assert torch.equal(outputs[name][:, i * DIM : (i + 1) * DIM], rows)
    gradient = [torch.randn(*outputs[name].shape) for name in ("some", "others", "d")]
    torch.autograd.backward([outputs[name] for name in ("some", "others", "d")], gradient)
    pushed: list[list[torch.Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        for part in collection.exchange.parts:

            def begin_push(lookup, gradients, *others, begin=part.begin_push):
                pushed.append(gradients)
                return begin(lookup, gradients, *others)

            patch.setattr(part, "begin_push", begin_push)
        collection.pipeline.send_gradients()
    addresses = {value.data_ptr() for value in gradient}
    assert len(pushed) == len(collection.exchange.parts)
    for gradients in pushed:
        assert {value.data_ptr() for value in gradients} <= addresses


def test_several_backwards_are_added_once_for_all_exchanges():
    whole, twice = opened(), opened()
    gradient = torch.randn(SAMPLES, 3 * DIM)
    for collection, parts in ((whole, [gradient]), (twice, [gradient / 2, gradient / 2])):
        output = collection(batch_of(0))["some"]
        for part in parts:
            output.backward(part, retain_graph=True)
        RowOptimizer(collection).step()
    for name in EXCHANGES:
        ids = torch.arange(20)
        assert torch.equal(whole.rows(name, ids), twice.rows(name, ids))


def test_a_batch_that_is_given_up_leaves_no_gradient():
    collection = opened()
    outputs = collection(batch_of(0))
    outputs["some"].sum().backward()
    (context,) = collection.pipeline.gradients.contexts
    assert len(context.gradients.backwards) == 1
    collection.discard_batches()
    assert not context.gradients.backwards


def next_uses(mesh: Mesh) -> list[int]:
    """Codes of this rank's rows, where it has none of the tables of one exchange."""
    homes = {"b": table_wise(0), "d": table_wise(0)}
    collection = opened(mesh, homes)
    batch = batch_of(mesh.rank)
    batch.next_use = {name: torch.full((SAMPLES,), 7, dtype=torch.uint8) for name in EXCHANGES}
    context = collection.pipeline.prepare_batch(batch)
    collection.pipeline.drop_batch(context)
    assert len(context.owned.next_use) == len(context.owned.ids)
    return context.owned.next_use.tolist()


def test_a_rank_without_rows_of_one_exchange_knows_next_uses_of_the_others():
    for codes in run_ranks(2, next_uses):
        assert codes and set(codes) == {7}


def pushed(mesh: Mesh) -> list[str]:
    """Return the order in which a step's pushes begin and are waited for."""
    collection = opened(mesh)
    outputs = collection(batch_of(mesh.rank))
    torch.autograd.backward(list(outputs.values()), [torch.ones_like(o) for o in outputs.values()])
    message: list[str] = []
    begins, waits = Mesh._begin_call, PendingCall.wait
    with pytest.MonkeyPatch.context() as patch:

        def begin(self, channel, start, *scope):
            message.append(f"{channel} begins")
            return begins(self, channel, start, *scope)

        def wait(self):
            message.append(f"{self.channel} is waited for")
            return waits(self)

        patch.setattr(Mesh, "_begin_call", begin)
        patch.setattr(PendingCall, "wait", wait)
        collection.pipeline.send_gradients()
    return message


def test_what_one_exchange_pushes_travels_while_the_next_one_computes():
    for text in run_ranks(2, pushed):
        assert text == ["push begins"] * 2 + ["push is waited for"] * 2
