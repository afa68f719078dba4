"""Mistakes in a user's own loop: a clear error or the defined result, and nothing half-applied."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
import torch

from colonnade import (
    SGD,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    Uniform,
    build_plan,
)
from colonnade.errors import ConfigError, DataError, IdRangeError, NonFiniteError


def collection(**open_as):
    sgd = {"optimizer": SGD(lr=1.0), "initializer": Uniform(scale=0.0)}
    tables = [Table("known", 2, rows=9, **sgd), Table("any", 2, **sgd)]
    features = [Feature("k", "known"), Feature("a", "any", pooling="mean")]
    return EmbeddingCollection(tables, features).open(**open_as)


def batch(k=(1, 2), a=(5, 6, 7), offsets=(0, 1, 3), changes=None):
    ids = {"k": Ids(torch.tensor(k)), "a": Ids(torch.tensor(a), torch.tensor(offsets))}
    return Batch(2, torch.zeros(2, 0), ids | (changes or {}))


def step(rows, rows_collection, batch_given):
    result = rows_collection(batch_given)
    (-result["k"].sum()).backward()
    rows.step()


def free(tensor: torch.Tensor) -> torch.Tensor:
    """Free a tensor's storage, as FSDP does between uses; it keeps its shape."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("kind", ["one id", "ids", "offsets", "weights"])
def test_ids_without_memory(kind, is_training):
    """torch itself would read address 0, and end the process."""
    tensors = [torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3]), torch.ones(3)]
    if kind == "one id":
        changes = {"k": Ids(free(torch.tensor([1, 2])))}
    else:
        free(tensors[["ids", "offsets", "weights"].index(kind)])
        changes = {"a": Ids(*tensors)}
    network = collection().train(is_training)
    with pytest.raises(DataError, match="whose storage was freed, wanted a dense CPU tensor"):
        network(batch(changes=changes))
    assert network(batch())["k"].shape == (2, 2)


@pytest.mark.parametrize("size", [8.0, "8", None, torch.ones(2)])
def test_a_batch_size_that_is_no_integer(size):
    with pytest.raises(DataError, match=r"got a batch of size .*, wanted its number of samples"):
        Batch(size, torch.zeros(8, 0), {})
    assert Batch(np.int64(8), torch.zeros(8, 0), {}).size == 8


@pytest.mark.parametrize(
    "offsets", [(0, 1, 2), (0, 2, 300), (1, 2, 3), (0, 3, 2), (0, 3), (0, 1, 2, 3)]
)
def test_offsets_that_do_not_fit(offsets):
    with pytest.raises(DataError, match=r"feature 'a'.*offsets"):
        collection()(batch(offsets=offsets))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": Ids(torch.tensor([1, 2], dtype=torch.int32))}, "int32"),
        ({"k": Ids(torch.tensor([1, 2, 3]))}, "3 ids for 2 samples"),
        ({"k": torch.tensor([1, 2])}, "wanted Ids"),
        ({"a": Ids(torch.tensor([1, 2]), None, torch.tensor([1.0]))}, "1 weights for 2 ids"),
    ],
)
def test_ids_that_do_not_fit(changes, words):
    with pytest.raises(DataError, match=words):
        collection()(batch(changes=changes))


@pytest.mark.parametrize("batch_given", [{"k": torch.tensor([1])}, [1, 2], None])
def test_what_is_no_batch(batch_given):
    with pytest.raises(DataError, match=r"wanted a colonnade\.Batch"):
        collection()(batch_given)


def test_threads_that_call_at_once_are_refused_and_the_collection_still_works():
    embeddings = collection()
    rows, inside, leave = RowOptimizer(embeddings), threading.Event(), threading.Event()
    errors: list[Exception] = []
    embeddings.ensure_open()
    prepare = embeddings.pipeline.prepare_batch

    def slow_prepare(*arguments, **options):
        inside.set()
        leave.wait(10)
        return prepare(*arguments, **options)

    def call():
        try:
            embeddings(batch())
        except Exception as error:
            errors.append(error)

    embeddings.pipeline.prepare_batch = slow_prepare
    first = threading.Thread(target=call)
    first.start()
    assert inside.wait(10)
    others = [threading.Thread(target=call) for _ in range(7)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    with pytest.raises(ConfigError, match="wanted one at a time"):
        rows.step()
    leave.set()
    first.join()
    embeddings.pipeline.prepare_batch = prepare
    assert len(errors) == 7
    assert all(isinstance(e, ConfigError) and "wanted one at a time" in str(e) for e in errors)
    rows.zero_grad()
    step(rows, embeddings, batch())
    assert embeddings.rows("known", torch.tensor([1, 2])).tolist() == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("bad", [9, -1, 2**63 - 1, -(2**63)])
def test_ids_outside_a_vocabulary(bad):
    with pytest.raises(IdRangeError, match=rf"'k'.*id {bad}, wanted 0 \.\. 8"):
        collection()(batch(k=(1, bad)))


def test_nan_weights_are_refused():
    weights = torch.tensor([float("nan"), 1.0])
    with pytest.raises(NonFiniteError, match="'k'"):
        collection()(batch(changes={"k": Ids(torch.tensor([1, 2]), None, weights)}))


def test_nan_gradients_change_nothing():
    embeddings = collection()
    rows = RowOptimizer(embeddings)
    (embeddings(batch())["k"] * float("nan")).sum().backward()
    with pytest.raises(NonFiniteError, match="no row was changed"):
        rows.step()
    step(rows, embeddings, batch())
    assert embeddings.rows("known", torch.arange(9)).sum() == 4


def test_one_batch_many_times():
    embeddings = collection()
    rows = RowOptimizer(embeddings)
    one = batch()
    for batch_given in embeddings.lookahead([one] * 10):
        step(rows, embeddings, batch_given)
    assert embeddings.rows("known", torch.tensor([1])).tolist() == [[10.0, 10.0]]


def test_batches_that_nobody_uses_are_unpinned(tmp_path):
    from scenario import open_backings

    backings = open_backings(tmp_path, Mesh(), collection().tables)
    embeddings = EmbeddingCollection(collection().tables, collection().declaration.features)
    plan = build_plan(embeddings.tables, 1, PlanConfig(memory={"dram": 700}))
    embeddings.open(plan, Mesh(), backings=backings)
    embeddings.eval()
    output = 0
    for number, batch_given in enumerate(
        embeddings.lookahead(batch(a=(3 * n, 3 * n + 1, 3 * n + 2)) for n in range(60))
    ):
        output += 1
        if number % 2:
            embeddings(batch_given)
    assert output == 60


def test_leaving_the_loop_early_ends_the_thread():
    embeddings = collection()
    before = set(threading.enumerate())  # earlier tests' may end meanwhile
    for _ in range(5):
        for batch_given in embeddings.lookahead(batch() for _ in range(50)):
            embeddings(batch_given)
            break
    gc.collect()
    deadline = time.monotonic() + 5
    while (new := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not new


def test_backward_after_step_is_refused():
    embeddings = collection()
    rows = RowOptimizer(embeddings)
    loss = embeddings(batch())["k"].sum()
    rows.step()
    with pytest.raises(RuntimeError, match="backward before step"):
        loss.backward()


def test_step_before_anything():
    RowOptimizer(collection()).step()


def test_schedulers_work():
    embeddings = collection()
    rows = RowOptimizer(embeddings)
    schedule = torch.optim.lr_scheduler.StepLR(rows, step_size=1, gamma=0.5)
    for _ in range(3):  # 1 + 0.5 + 0.25
        step(rows, embeddings, batch())
        schedule.step()
    assert embeddings.rows("known", torch.tensor([2])).tolist() == [[1.75, 1.75]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Table("t", 0),
        lambda: Table("t", 4.5),
        lambda: Table("t", 4, rows=0),
        lambda: Table("t", 4, rows=-3),
        lambda: Table("", 4),
        lambda: Table("t", 4, dtype="int8"),
        lambda: Table("t", 4, optimizer="sgd"),
        lambda: SGD(lr=float("nan")),
        lambda: RowWiseAdagrad(lr=-1.0),
        lambda: Feature("f", "t", pooling="max"),
        lambda: EmbeddingCollection([], []),
        lambda: EmbeddingCollection([Table("t", 2), Table("t", 3)], []),
        lambda: EmbeddingCollection([Table("t", 2)], [Feature("f", "u")]),
        lambda: collection().rows("zz", torch.arange(2)),
    ],
)
def test_declarations_that_cannot_work(make):
    with pytest.raises(ConfigError):
        make()


def test_modules_can_still_be_applied_and_moved():
    embeddings = collection()
    embeddings.apply(lambda module: None).to("cpu")
    assert list(embeddings.parameters()) == []


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Table(1000, 16), "got name=1000, wanted text. Write Table"),
        (lambda: EmbeddingCollection(1000, 16), "got 1000 as tables, wanted a list of Table"),
        (lambda: EmbeddingCollection([Table("a", 2)], ["a"]), "as features, wanted a list of"),
        (lambda: RowOptimizer(torch.nn.Linear(1, 1)), "got a Linear, wanted the model's Embedding"),
        (lambda: RowOptimizer(collection().parameters()), "got a generator, wanted the model's"),
    ],
)
def test_a_collection_is_no_torch_embedding(build, words):
    with pytest.raises(ConfigError, match=words):
        build()


def test_a_printed_model_lists_tables_and_features():
    shown = str(torch.nn.Sequential(collection()))
    assert "table 'known': dim 2, 9 rows" in shown and "table 'any': dim 2, any id" in shown
    assert "feature 'a': table 'any', pooling mean" in shown
