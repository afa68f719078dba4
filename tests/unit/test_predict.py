"""Predictions have evaluation's bits, from rows that are mapped and never changed."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from example_counts import examples
from exports import reseal
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import console_of, run_ranks
from safetensors.torch import save_file
from small_run import CONFIG

from colonnade import Batch, Concat, EmbeddingCollection, Feature, Ids, Mesh, Predictor, Table, fit
from colonnade.config.run import build_config, override_settings
from colonnade.data import Column, Schema, open_tensors
from colonnade.errors import CheckpointError, ConfigError, CorruptionError, DataError, IdRangeError
from colonnade.files.checksums import compute_checksums
from colonnade.models.build import build_model
from colonnade.models.dlrm import DLRM
from colonnade.publish.model_writer import export_run
from colonnade.row_state import dense_state_dict, load_dense_state_dict
from colonnade.run.run import load_run_config, open_run
from colonnade.store.dram import open_dram_store
from colonnade.store.mapped import open_mapped


def train(mesh, folder, settings):
    run = open_run(
        override_settings(build_config(CONFIG), {"train.epochs": 1, **settings}),
        mesh,
        folder,
        console=console_of(mesh),
    )
    run.train()
    run.close()


@torch.no_grad()
def evaluated(folder: Path, batches: list[Batch]) -> list[torch.Tensor]:
    """Return the scores of evaluation."""
    run = open_run(load_run_config(folder), Mesh(), folder, read_only=True)
    model = run.trainer.model.eval()
    results = [torch.sigmoid(model(batch).double()) for batch in batches]
    run.close()
    return results


def test_batches(folder: Path, size: int = 64) -> list[Batch]:
    run = open_run(load_run_config(folder), Mesh(), folder, read_only=True)
    batches = [*run.trainer.data.test.batches(size), *run.trainer.data.train.batches(size)]
    run.close()
    return batches


test_batches.__test__ = False  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("run") / "run"
    train(Mesh(), place, {})
    return place


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [
        ({}, 1),
        pytest.param({"model.name": "deepfm", "model.bottom": None}, 1, marks=pytest.mark.slow),
        ({"model.name": "dcnv2", "model.bottom": None}, 1),
        ({"model.name": "lr", "model.bottom": None, "model.top": None, "model.dim": None}, 1),
        ({"plan.memory.dram": 90_000}, 2),
        (
            {
                "embedding.dtype": "bfloat16",
                "embedding.master": True,
                "embedding.optimizer": "adam",
            },
            1,
        ),
    ],
)
def test_predictions_are_evaluations_to_the_bit(settings, num_ranks, tmp_path):
    folder = tmp_path / "run"
    if num_ranks == 1:
        train(Mesh(), folder, settings)
    else:
        run_ranks(num_ranks, train, folder, settings)
    batches = test_batches(folder)
    wanted = evaluated(folder, batches)
    export_run(folder, tmp_path / "out")
    for place in (folder, tmp_path / "out"):
        with Predictor.open(place) as predictor:
            for batch, scores in zip(batches, wanted, strict=True):
                result = predictor(batch)
                assert result.dtype == torch.float64 and torch.equal(result, scores)
                assert not result.requires_grad
            printed = list(predictor.scores(iter(batches)))
            assert [batch for batch, _ in printed] == batches
            assert all(torch.equal(a, b) for (_, a), b in zip(printed, wanted, strict=True))


def checksums_of(folder: Path, *names: str) -> list:
    return [(name, compute_checksums(folder / name)) for name in names]


DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@st.composite
def stores(draw):
    """Tables, the ids their files hold, and ids to look up."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    tables, rows_by_table, requests = [], [], []
    for t in range(draw(st.integers(1, 3))):
        rows = draw(st.sampled_from([None, 1, 7, 300, 200_000]))
        ids = st.integers(-(2**63), 2**63 - 1) if rows is None else st.integers(0, rows - 1)
        tables.append(Table(f"t{t}", draw(st.integers(1, 9)), rows=rows, dtype=dtype))
        rows_by_table.append(sorted(draw(st.sets(ids, max_size=40))))
        if rows == 7 and draw(st.booleans()):
            rows_by_table[-1] = list(range(7))  # all of them
        known = st.sampled_from(rows_by_table[-1]) if rows_by_table[-1] else ids
        requests.append([draw(st.lists(ids | known, max_size=60)) for _ in range(2)])
    return tables, rows_by_table, requests


@settings(max_examples=examples(20, 60))
@given(stores())
def test_mapped_rows_are_those_of_the_file_or_first_values(tmp_path_factory, drawn):
    tables, stored, requested = drawn
    place, weights, files = tmp_path_factory.mktemp("rows"), [], []
    for t, (table, ids) in enumerate(zip(tables, stored, strict=True)):
        weights.append(torch.randn(len(ids), table.width).to(getattr(torch, table.dtype)))
        path = place / f"{t}.safetensors"
        save_file({"ids": torch.tensor(ids, dtype=torch.int64), "weights": weights[t]}, path)
        files.append((path.name, compute_checksums(path)))
    births = open_dram_store(tables, [1] * len(tables), seed=3).native
    rows = open_mapped(tables, place, files, seed=3)
    for call in range(2):  # the second call's first values take the place of the first's
        columns = [torch.tensor(item[call], dtype=torch.int64) for item in requested]
        offsets = torch.tensor([0, *np.cumsum([len(c) for c in columns])])
        slots = rows.find_slots(
            torch.cat(columns), offsets, torch.arange(len(tables), dtype=torch.int32)
        )
        bases, strides = rows.addresses_and_strides()
        for t, (table, ids) in enumerate(zip(tables, columns, strict=True)):
            table_slots = slots[offsets[t] : offsets[t + 1]].numpy().view(np.uint32)
            for slot, id in zip(table_slots.tolist(), ids.tolist(), strict=True):
                address, size = int(bases[t]) + slot * int(strides[t]), int(strides[t])
                result = bytes((ctypes.c_uint8 * size).from_address(address))
                if id in stored[t]:
                    wanted = weights[t][stored[t].index(id)]
                else:
                    wanted = torch.empty(1, table.width, dtype=getattr(torch, table.dtype))
                    births.initial_values(t, torch.tensor([id]), wanted)
                assert result == wanted.contiguous().view(torch.uint8).numpy().tobytes()
    rows.close()


class Own(torch.nn.Module):
    """Everything a reader may give: bags with weights, a sequence, two features of one table, parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(
            [Table("item", {"deep": 6, "wide": 1}), Table("user", 4, rows=50)],
            [
                Feature("item", "item"), Feature("seen", "item", pooling="mean"),
                Feature("last", "item", pooling="sequence"), Feature("user", "user"),
            ],
            consumers={"deep": (Concat(), ["item.deep", "seen.deep", "user"])},
            seed=5,
        )  # fmt: skip
        self.top = torch.nn.Linear(16, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        result = self.embeddings(batch)
        return self.top(result["deep"]) + result["item.wide"] + result["last.deep"].sum()


def own_batch(size: int, generator: torch.Generator) -> Batch:
    def draw(n: int, high: int) -> torch.Tensor:
        return torch.randint(0, high, (n,), generator=generator)

    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), draw(size, 4).cumsum(0)])
    lookups = int(bounds[-1])
    return Batch(
        size,
        dense=torch.zeros(size, 0),
        ids={
            "item": Ids(draw(size, 400)),
            "seen": Ids(draw(lookups, 400), bounds, torch.rand(lookups, generator=generator)),
            "last": Ids(draw(lookups, 400), bounds),
            "user": Ids(draw(size, 50)),
        },
    )


def test_a_network_of_ones_own_is_served(tmp_path):
    generator, model = torch.Generator().manual_seed(0), Own()
    collection = model.embeddings
    # Half of the items are "trained": a store that holds them stands beside one that is served.
    weights = torch.randn(200, 7, generator=generator)
    ids = torch.arange(0, 400, 2)
    save_file({"ids": ids, "weights": weights}, tmp_path / "item.safetensors")
    users = torch.randn(50, 4, generator=generator)
    save_file({"ids": torch.arange(50), "weights": users}, tmp_path / "user.safetensors")
    twin = Own()
    load_dense_state_dict(twin, dense_state_dict(model))
    twin.embeddings.open()
    for t, (known, rows) in enumerate(((ids, weights), (torch.arange(50), users))):
        store, table = twin.embeddings.store, collection.tables[t]
        offsets = torch.tensor([0] * (t + 1) + [len(known)] * (2 - t))
        slots, _ = store.acquire(known, offsets)
        records = torch.zeros(len(known), table.record_bytes, dtype=torch.uint8)
        records[:, : 4 * table.width] = rows.view(torch.uint8).view(len(known), -1)
        store.native.unpack(t, slots, records)
    files = checksums_of(tmp_path, "item.safetensors", "user.safetensors")
    collection.open_exported(open_mapped(collection.tables, tmp_path, files, seed=5))
    with torch.no_grad():
        model.eval(), twin.eval()
        for size in (1, 33, 8):
            batch = own_batch(size, generator)
            assert torch.equal(model(batch), twin(batch))
    batch.ids["user"].values[0] = 50
    with pytest.raises(IdRangeError, match=r"feature 'user'.*got id 50, wanted 0 \.\. 49"):
        model(batch)
    with pytest.raises(ConfigError, match="open already"):
        collection.open_exported(collection._exported_rows)
    with pytest.raises(ConfigError, match="serves exported rows"):
        collection.rows("user", torch.arange(3))


def test_a_model_trained_from_python_is_given_again(tmp_path):
    generator = torch.Generator().manual_seed(1)
    ids = {n: torch.randint(0, 60, (512,), generator=generator) for n in ("user", "item")}
    label = torch.randint(0, 2, (512, 1), generator=generator).float()

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        tables = [Table("user", 4, rows=60), Table("item", 4)]
        features = [Feature("user", "user"), Feature("item", "item")]
        return DLRM(tables, features, num_dense=0, top=[8])

    data = open_tensors(ids, cardinalities={"user": 60}, label=label)
    model = build()
    fit(model, data, run=tmp_path / "run", batch_size=64, quiet=True)
    with pytest.raises(CheckpointError, match="give the network"):
        Predictor.open(tmp_path / "run")
    with Predictor.open(tmp_path / "run", model=build()) as predictor, torch.no_grad():
        for batch in data.batches(64):
            wanted = torch.sigmoid(model.eval()(batch).double())
            assert torch.equal(predictor(batch), wanted)


def test_a_run_is_exported_once_and_again_when_it_has_changed(folder, tmp_path):
    first = Predictor.open(folder).folder
    stamps = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert Predictor.open(folder).folder == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == stamps
    assert [p.name for p in (folder / "serving").iterdir()] == [first.name]
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        Predictor.open(folder, at=7)
    with pytest.raises(ConfigError, match="holds one checkpoint"):
        Predictor.open(first, at=3)
    with pytest.raises(CheckpointError, match="no folder"):
        Predictor.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither a run folder"):
        Predictor.open(tmp_path)
    train(Mesh(), folder, {"train.epochs": 2})
    remaining, written = (first.with_name(f".30-{number}.4711.tmp") for number in "ab")
    for place, ago in ((remaining, 4000), (written, 0)):  # one of a process that was killed
        place.mkdir()
        (place / "rows").write_text("half")
        for item in (place / "rows", place):
            os.utime(item, (time.time() - ago,) * 2)
    second = Predictor.open(folder)
    assert second.step == 30 and second.folder != first
    assert written.exists() and not remaining.exists()
    shutil.rmtree(written)


def test_rows_are_mapped_read_only_and_shared(folder):
    predictor = Predictor.open(folder)
    path = str(predictor.rows.tables[3].file.path.resolve())
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if path in line]
    assert any(line.split()[1] == "r--s" for line in maps)
    predictor.close()


def test_threads_may_call_at_once(folder):
    batches = test_batches(folder)
    predictor = Predictor.open(folder)
    wanted = [predictor(batch) for batch in batches]
    wrong = []

    def work(start: int) -> None:
        for i in [*range(start, len(batches)), *range(start)]:
            if not torch.equal(predictor(batches[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(3 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_closed_predictor_says_so(folder):
    predictor, batch = Predictor.open(folder), test_batches(folder)[0]
    ends: list[str] = []

    def score():
        try:
            while True:
                predictor(batch)
        except ConfigError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=score) for _ in range(3)]
    for thread in threads:
        thread.start()
    predictor(batch)
    predictor.close()  # beside calls under way
    for thread in threads:
        thread.join()
    assert len(ends) == 3 and all("closed" in text for text in ends)
    with pytest.raises(ConfigError, match="closed; open it again"):
        predictor.model(batch)
    predictor.close()


def test_scores_end_early_and_pass_errors_on(folder):
    predictor, batches = Predictor.open(folder), test_batches(folder)

    def broken():
        yield batches[0]
        raise DataError("row 7 is wrong")

    read_batches = predictor.scores(broken())
    assert torch.equal(next(read_batches)[1], predictor(batches[0]))
    with pytest.raises(DataError, match="row 7"):
        next(read_batches)
    before = threading.active_count()
    early = predictor.scores(iter(batches))
    next(early)
    early.close()
    assert threading.active_count() == before


def test_what_does_not_fit_is_refused(folder, tmp_path):
    out = tmp_path / "out"
    export_run(folder, out)
    output = json.loads((out / "model.json").read_text())
    with pytest.raises(CheckpointError, match="exported from another model"):
        Predictor.open(out, model=Own())
    with pytest.raises(ConfigError, match="0 EmbeddingCollections"):
        Predictor.open(out, model=torch.nn.Linear(1, 1))
    victim = out / output["tables"][1]["file"]
    whole = victim.read_bytes()
    swapped = bytearray(whole)
    begin = 8 + int.from_bytes(whole[:8], "little")
    swapped[begin : begin + 16] = whole[begin + 8 : begin + 16] + whole[begin : begin + 8]
    broken = [
        (whole[:-8], "a header of .* that says"), (b"", "which take .* bytes, wanted at most"),
        (b"\xff" * len(whole), "a header of"),
        (b"\x04" + b"\0" * 7 + b"{{{{".ljust(len(whole)), "Invalid JSON"),
        (b"\x08" + b"\0" * 7 + b"{}".ljust(len(whole)), "without ids"), (bytes(swapped), "do not ascend"),
    ]  # fmt: skip
    for content, words in broken:
        victim.write_bytes(content)
        reseal(out)
        with pytest.raises(CorruptionError, match=words) as error:
            Predictor.open(out)
        assert victim.name in str(error.value)
    victim.write_bytes(whole)
    dense = (out / "dense.safetensors").read_bytes()
    (out / "dense.safetensors").write_bytes(dense[: len(dense) // 2])
    reseal(out)
    with pytest.raises(CorruptionError, match=r"dense\.safetensors: got"):
        Predictor.open(out)
    older = '{"format": "colonnade export", "version": 1}'
    for text, words in (("{}", "got format None version"), (older, "version 1, this .* version 2")):
        (out / "model.json").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            Predictor.open(out)


def test_a_retrieval_model_is_searched_not_scored(tmp_path):
    schema = Schema(dense=(), categorical=(Column("user", 30), Column("item", 40)))
    config = build_config({"model": {"name": "two_tower", "dim": 4, "top": [4]}})
    model, twin = build_model(schema, config), build_model(schema, config)
    for number, rows in enumerate((30, 40)):
        path = tmp_path / f"{number}.safetensors"
        width = model.embeddings.tables[number].width
        save_file({"ids": torch.arange(rows), "weights": torch.randn(rows, width)}, path)
    files = checksums_of(tmp_path, "0.safetensors", "1.safetensors")
    rows = open_mapped(model.embeddings.tables, tmp_path, files, seed=0)
    model.embeddings.open_exported(rows)
    predictor = Predictor(model.eval(), rows, schema=schema, config=config, step=0, folder=tmp_path)
    ids = {"user": Ids(torch.arange(5)), "item": Ids(torch.arange(5))}
    batch = Batch(5, dense=torch.zeros(5, 0), ids=ids)
    with pytest.raises(ConfigError, match=r"TwoTower gives no logits.*model\.queries"):
        predictor(batch)
    with torch.inference_mode():
        queries, items = predictor.model.queries(batch), predictor.model.items(batch)
    assert queries.shape == items.shape and len(queries) == 5
    assert not torch.equal(
        queries, twin.eval().queries(batch)
    )  # the exported rows, not first values
