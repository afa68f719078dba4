"""Hash-stacked tables: an id's vector is the sum of the rows that hashes choose, whatever the feature, the exchange and
the number of ranks; their slow twin adds rows of a plain matrix, id by id."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from colonnade import (
    FM,
    SGD,
    Batch,
    Concat,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    Predictor,
    RowOptimizer,
    Table,
    build_plan,
    export_run,
    stacked_rows,
)
from colonnade.config.run import build_config, override_settings
from colonnade.data import Column, Schema
from colonnade.data.counter import GAMMA, MASK
from colonnade.data.tabular.hashing import _mix
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.interaction import TargetAttention
from colonnade.models.build import build_tables
from colonnade.run.run import open_run

ROWS, DIM, HASHES, STEPS, SIZE = 7, 3, 3, 4, 6
TABLE = Table("item", DIM, rows=ROWS, hashes=HASHES, optimizer=SGD(lr=0.5), dtype="float64")
FEATURES = [
    Feature("one", "item"),
    Feature("sum", "item"),
    Feature("mean", "item", pooling="mean"),
    Feature("root", "item", pooling="sqrtn"),
    Feature("past", "item", pooling="sequence"),
]
POOLED = ["one", "sum", "mean", "root"]


def rows_by_hand(row_id: int) -> list[int]:
    """`stacked_rows` in plain integers: mix_words(id ^ stream_key(number)) mod rows."""
    keys = [_mix(GAMMA + number & MASK) for number in range(HASHES)]
    return [_mix(row_id & MASK ^ key) % ROWS for key in keys]


def batch_of(step: int, first: int = 0, last: int = SIZE) -> Batch:
    """Samples first .. last - 1: any 64-bit ids; bags of 0 to 3; weights of a bag."""
    random = torch.Generator().manual_seed(step)
    sizes = torch.randint(0, 4, (SIZE,), generator=random)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = torch.randint(-(2**63), 2**63 - 1, (int(ends[-1]),), generator=random)
    weights = torch.rand(len(ids), generator=random, dtype=torch.float64)
    own, offsets = slice(int(ends[first]), int(ends[last])), ends[first : last + 1] - ends[first]
    one = torch.tensor([-1, 2**63 - 1, -(2**63), 0, step, 5])[first:last]
    bags = {name: Ids(ids[own], offsets) for name in ("sum", "mean", "past")}
    bags |= {"one": Ids(one), "root": Ids(ids[own], offsets, weights[own])}
    return Batch(last - first, torch.zeros(last - first, 0), bags)


def by_hand(weight: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Compute a collection's outputs from the matrix of its rows, lookup by lookup."""
    results = {}
    for feature in FEATURES:
        ids = batch.ids[feature.name]
        vectors = [sum(weight[r] for r in rows_by_hand(i)) for i in ids.values.tolist()]
        if feature.pooling == "sequence":
            results[feature.name] = torch.stack(vectors) if vectors else weight[:0]
            continue
        id_weights = torch.ones(len(vectors)) if ids.weights is None else ids.weights
        ends = list(range(batch.size + 1)) if ids.offsets is None else ids.offsets.tolist()
        samples = []
        for a, b in pairwise(ends):
            whole = sum(
                (vectors[i] * id_weights[i] for i in range(a, b)), torch.zeros(DIM).double()
            )
            count = max(1, b - a)
            samples.append(whole / {"mean": count, "sqrtn": count**0.5}.get(feature.pooling, 1))
        results[feature.name] = torch.stack(samples)
    return results


def loss_of(result: dict[str, Tensor], samples: int) -> Tensor:
    scale = {name: k + 1.0 for k, name in enumerate(sorted(result))}
    return sum((value.square().sum() * scale[name] for name, value in result.items())) / samples


def trained_by_hand() -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The rows after all steps of plain gradient descent, and what each step's batch read."""
    collection = EmbeddingCollection([TABLE], FEATURES, seed=1)
    weight = collection.rows("item", torch.arange(ROWS)).clone().requires_grad_()
    read = []
    for step in range(STEPS):
        result = by_hand(weight, batch_of(step))
        (gradient,) = torch.autograd.grad(loss_of(result, SIZE), weight)
        read.append({name: value.detach() for name, value in result.items()})
        weight = (weight.detach() - 0.5 * gradient).requires_grad_()
    return weight.detach(), read


def trained(mesh: Mesh, **plan) -> tuple[Tensor, list[dict[str, Tensor]]]:
    collection = EmbeddingCollection([TABLE], FEATURES, seed=1)
    collection.open(build_plan(collection.tables, mesh.num_ranks, PlanConfig(**plan)), mesh)
    rows, read = RowOptimizer(collection), []
    share = SIZE // mesh.num_ranks
    first = mesh.rank * share
    for batch in collection.lookahead(batch_of(t, first, first + share) for t in range(STEPS)):
        result = collection(batch)
        read.append({name: value.detach().clone() for name, value in result.items()})
        loss_of(result, SIZE).backward()
        rows.step()
    collection.eval()
    with torch.no_grad():  # a sequence of no sample, and of none with an id
        none = collection(batch_of(0, 0, 0))
    assert none["past"].shape == (0, DIM) and none["mean"].shape == (0, DIM)
    return collection.rows("item", torch.arange(ROWS)), read


def test_a_stacked_table_trains_what_its_definition_trains():
    wanted, read = trained_by_hand()
    result, ours = trained(Mesh())
    torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-14)
    for expected, actual in zip(read, ours, strict=True):
        assert set(expected) == set(actual)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-14, msg=name)


def of_ranks(mesh: Mesh) -> list:
    hot = trained(mesh, tables={"item": {"replicated_rows": [1, 4]}})
    return [trained(mesh), hot, trained(mesh, exchange="rows", staleness_steps=0)]


def test_ranks_train_what_one_rank_trains():
    """Ranks, with hot rows on each of them, read their part of what one rank reads."""
    wanted, read = trained_by_hand()
    every = run_ranks(2, of_ranks)
    for rank, result in enumerate(every):
        for rows, ours in result:
            torch.testing.assert_close(rows, wanted, rtol=1e-10, atol=1e-12)
            for expected, actual in zip(read, ours, strict=True):
                part = slice(rank * SIZE // 2, (rank + 1) * SIZE // 2)
                for name in POOLED:
                    torch.testing.assert_close(
                        actual[name], expected[name][part], rtol=1e-10, atol=1e-12
                    )


def pooled(mesh: Mesh, exchange: str) -> tuple[Tensor, Tensor]:
    """Features in a consumer, whose bags owners add up."""
    collection = EmbeddingCollection(
        [TABLE], FEATURES[:4], consumers={"fm": (FM(), POOLED), "all": (Concat(), POOLED)}, seed=1
    )
    collection.open(
        build_plan(collection.tables, mesh.num_ranks, PlanConfig(exchange=exchange)), mesh
    )
    rows, share = RowOptimizer(collection), SIZE // mesh.num_ranks
    first, read = mesh.rank * share, []
    for batch in collection.lookahead(batch_of(t, first, first + share) for t in range(STEPS)):
        result = collection(batch)
        read.append(torch.cat([result["fm"], result["all"]], 1).detach().clone())
        ((result["fm"].square().sum() + result["all"].square().sum()) / SIZE).backward()
        rows.step()
    return collection.rows("item", torch.arange(ROWS)), torch.cat(read)


def pooled_ranks(mesh: Mesh) -> list:
    return [pooled(mesh, exchange) for exchange in ("pooled", "rows")]


def test_owners_that_pool_add_up_the_same():
    wanted, _ = pooled(Mesh(), "rows")
    for results in run_ranks(2, pooled_ranks):
        for rows, _ in results:
            torch.testing.assert_close(rows, wanted, rtol=1e-10, atol=1e-12)


def test_attention_sees_one_vector_for_each_id():
    features = [Feature("one", "item"), Feature("past", "item", pooling="sequence")]
    attention = TargetAttention(1)
    collection = EmbeddingCollection(
        [TABLE], features, consumers={"found": (attention, ["one", "past"])}, seed=1
    )
    batch = batch_of(3)
    weight = collection.rows("item", torch.arange(ROWS))
    result = collection(batch)["found"]
    wanted = by_hand(weight, batch_of(3))
    other = attention(wanted["one"], wanted["past"], batch_of(3).ids["past"].offsets)
    torch.testing.assert_close(result, other, rtol=1e-12, atol=1e-14)


def test_what_cannot_be_stacked_is_said():
    with pytest.raises(ConfigError, match="without rows"):
        Table("t", 2, hashes=2)
    for wrong in (0, 17, True, 1.5):
        with pytest.raises(ConfigError, match=r"1 \.\. 16"):
            Table("t", 2, rows=5, hashes=wrong)
    with pytest.raises(ConfigError, match="its ids are its rows"):
        stacked_rows(Table("t", 2, rows=5), torch.arange(3))
    ids = torch.tensor([-1, 0, 2**63 - 1, 12])
    assert stacked_rows(TABLE, ids).tolist() == [rows_by_hand(i) for i in ids.tolist()]
    collection = EmbeddingCollection([TABLE], FEATURES[:1])
    with pytest.raises(DataError, match="3 ids for 2 samples"):
        collection(Batch(2, torch.zeros(2, 0), {"one": Ids(torch.arange(3))}))


def test_few_rows_tell_many_ids_apart():
    """50,000 ids in 2,000 rows: with one hash every id shares its row; with two, hardly any shares both."""
    for hashes, limit in ((1, 2_000), (2, 2_000_000)):
        rows = stacked_rows(Table("t", 2, rows=2000, hashes=hashes), torch.arange(50_000))
        apart = len(torch.unique(rows.sort(1).values, dim=0))
        assert apart <= limit and (hashes == 1 or apart > 48_000)
        assert len(rows.unique()) == 2000


def test_a_configuration_stacks_open_tables():
    columns = (Column("a"), Column("b"), Column("c", cardinality=9))
    schema = Schema(dense=(), categorical=columns, labels=("y",))
    values = {"eviction": {"max_rows": 500}, "tables": {"b": {"rows": 50, "hashes": 3}}}
    a, b, c = build_tables(schema, build_config({"embedding": values}))[0]
    assert (b.rows, b.hashes, b.eviction) == (50, 3, None)
    assert a.eviction is not None and a.rows is None and a.hashes is None
    assert (c.rows, c.hashes) == (9, None)
    for wrong, text in (
        ({"hashes": 2}, "got hashes=2 without rows"),
        ({"rows": 5, "eviction": {"max_rows": 3}}, "wanted one of them"),
        ({"rows": 5, "admission": {"probability": 0.5}}, "wanted one of them"),
        ({"rows": 0}, "rows"),
    ):
        with pytest.raises(ConfigError, match=text):
            build_config({"embedding": {"tables": {"b": wrong}}})


def test_a_run_is_planned_checkpointed_exported_and_predicts(tmp_path):
    """Run on a file, with memory for some rows: predictions have evaluation's bits; other hashes are refused."""
    words = ["|".join(f"w{(7 * i + j * j) % 113}" for j in range(i % 4)) for i in range(240)]
    lines = [f"{i % 2},u{i % 17},{word}" for i, word in enumerate(words)]
    (tmp_path / "clicks.csv").write_text("click,user,words\n" + "\n".join(lines) + "\n")
    fields = {"click": {"type": "label"}, "user": {"type": "category"}, "words": {"type": "bag"}}
    options = {"schema": {"fields": fields}}
    config = build_config(
        {
            "data": {"name": "csv", "path": str(tmp_path / "clicks.csv"), "options": options},
            "model": {"name": "deepfm", "dim": 4, "over": "fields"},
            "embedding": {"tables": {"words": {"rows": 40}, "user": {"rows": 11, "hashes": 1}}},
            "plan": {"placement": "profiled", "memory": {"dram": 40_000}},
            "train": {"batch_size": 24, "threads": 1},
        }
    )
    folder = tmp_path / "run"
    run = open_run(config, Mesh(), folder)
    run.train()
    batch = next(iter(run.trainer.data.train.batches(50)))
    model = run.trainer.model.eval()
    with torch.no_grad():
        wanted = torch.sigmoid(model(batch).double())
    run.close()
    export_run(folder, tmp_path / "out")
    for place in (folder, tmp_path / "out"):
        with Predictor.open(place) as predictor:
            assert torch.equal(predictor(batch), wanted)
    with pytest.raises(CheckpointError, match="hashes"):
        open_run(override_settings(config, {"embedding.tables.words.hashes": 3}), Mesh(), folder)
    other = override_settings(
        config, {"embedding.tables.words.rows": 41, "train.warm_start": str(folder)}
    )
    with pytest.raises(
        CheckpointError, match="words has 2 hashes into 40 rows there, 2 hashes into 41"
    ):
        open_run(other, Mesh(), tmp_path / "other")
