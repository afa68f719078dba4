"""`colonnade towers` on a trained run with planted groups: found again, written, drawn; and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from browser import CHROMIUM, look
from torch import nn

from colonnade.batch import Batch, Ids
from colonnade.cli.feature_sample import measure_affinity, sum_rows_by_sample
from colonnade.comm.mesh import Mesh
from colonnade.config.run import RunConfig, override_settings
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError, DataError
from colonnade.optimizers import SGD
from colonnade.plan.towers.partition import TowerMap
from colonnade.report.tower_map import read_tower_map
from colonnade.run.run import open_run
from colonnade.table import Feature, Table
from colonnade.topology.towers import Partition

GROUPS = [["C1", "C5", "C9"], ["C2", "C4", "C7"], ["C3", "C6", "C8"]]
SETTINGS = {
    "data.name": "synthetic",
    "data.options": {
        "num_train": 20_000, "num_test": 1000, "cardinalities": [8] * 9, "exponent": 0.0,
        "label_model": "pairs", "signal": 8.0, "groups": GROUPS,
    },
    "model.name": "fm", "model.dim": 6, "embedding.optimizer": "adagrad", "embedding.lr": 0.1,
    "train.batch_size": 128, "train.epochs": 1,
}  # fmt: skip


class ListSource:
    def __init__(self, read: list[Batch]) -> None:
        self.read = read

    def batches(self, batch_size: int):
        return iter(self.read)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("towers") / "run"
    run = open_run(override_settings(RunConfig(), SETTINGS), Mesh(), folder)
    run.train()
    run.close()
    return folder


def test_planted_groups_are_found_in_a_trained_run(trained, colonnade, tmp_path):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    out = tmp_path / "partition.json"
    status, output, error = colonnade("towers", trained, "--towers", 3, "--out", out)
    assert (status, error) == (0, "")
    towers = Partition.from_json(out.read_text())
    assert [list(tower) for tower in towers.towers] == GROUPS
    result = TowerMap.from_json((trained / "towers.json").read_text())
    assert result.partition == towers and result.made == {"step": 157, "samples": 1024}
    assert result.learned.within > result.striped.within > 0
    for words in ("learned", "striped", "within", "bytes", "lookups a sample", str(out)):
        assert words in output
    # Nothing else of the run has changed.
    now = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    assert {**now, trained / "towers.json": b""} == {**before, trained / "towers.json": b""}
    # The same again.
    assert colonnade("towers", trained, "--towers", 3)[0] == 0
    assert read_tower_map(trained) == result


def test_vectors_and_loads_of_bags_parts_and_shared_tables():
    tables = [
        Table("item", {"wide": 1, "deep": 4}, rows=50, optimizer=SGD(lr=0.1)),
        Table("open", 4, optimizer=SGD(lr=0.1)),
    ]
    features = [
        Feature("seen", "item", pooling="mean"),
        Feature("last", "item"),
        Feature("words", "open", pooling="sequence"),
    ]
    collection = EmbeddingCollection(tables, features)
    offsets = torch.tensor([0, 2, 2, 5])
    batch = Batch(
        size=3,
        dense=torch.empty(3, 0),
        ids={
            "seen": Ids(torch.tensor([4, 9, 1, 1, 7]), offsets, torch.tensor([1.0, 2, 1, 1, 0.5])),
            "last": Ids(torch.tensor([3, 2, 1])),
            "words": Ids(torch.tensor([-5, 2**40, 8, 9, 9]), offsets),
        },
    )
    deep = collection.rows("item", torch.arange(50))[:, 1:]
    result = [sum_rows_by_sample(collection, tables[f.table == "open"], f, batch) for f in features]
    assert [item.shape for item in result] == [(3, 4)] * 3
    np.testing.assert_allclose(result[0][0], (deep[4] + 2 * deep[9]).numpy(), rtol=1e-6)
    assert (result[0][1] == 0).all()  # an empty bag
    np.testing.assert_array_equal(result[1], deep[[3, 2, 1]].numpy())
    sample = measure_affinity(Sums(), collection, ListSource([batch]), 3, 5, kind="cosine")
    loads = sample.loads
    assert sample.num_samples == 3 and sample.silent == ()
    assert [(load.table, load.lookups) for load in loads] == [
        ("item", 1.6667), ("item", 1.0), ("open", 1.6667)
    ]  # fmt: skip
    assert loads[0].table_bytes == 50 * tables[0].record_bytes and loads[2].table_bytes == 0
    for read in ([], [replace(batch, size=1)]):
        with pytest.raises(DataError, match=f"got {len(read)} samples"):
            measure_affinity(Sums(), collection, ListSource(read), 3, 5)


class Sums(nn.Module):
    """Logits by the ids alone: what `first` and `bag` say together, and what `other` says."""

    def forward(self, batch: Batch) -> torch.Tensor:
        first, bag, other = (batch.ids[name] for name in ("first", "bag", "other"))
        bags = torch.zeros(batch.size).index_add_(0, bag.samples, bag.values * bag.weights)
        return (first.values * bags + other.values)[:, None]


def test_interactions_are_those_of_the_logit_and_bags_are_changed_whole():
    tables = [Table(name, 4, rows=50, optimizer=SGD(lr=0.1)) for name in ("first", "bag", "other")]
    features = [Feature(t.name, t.name, pooling="sum") for t in tables]
    collection = EmbeddingCollection(tables, features)
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(4, (64,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    ids = {name: Ids(torch.randint(50, (64,), generator=generator)) for name in ("first", "other")}
    bag = torch.randint(50, (int(offsets[-1]),), generator=generator)
    ids["bag"] = Ids(bag, offsets, torch.rand(len(bag), generator=generator))
    batch = Batch(size=64, dense=torch.empty(64, 0), ids=ids)
    collection.rows("first", torch.arange(1))  # opens the collection
    model = Sums()
    sample = measure_affinity(model, collection, ListSource([batch]), 64, 5)
    expected = np.eye(3)
    expected[0, 1] = expected[1, 0] = 1
    np.testing.assert_allclose(sample.affinity, expected, atol=1e-4)
    assert sample.silent == ("other",) and model.training
    np.testing.assert_allclose(sample.halves[0], sample.halves[1], atol=1e-4)


def test_a_model_without_logits_has_no_interactions():
    class Ranker(nn.Module):
        objective = SimpleNamespace(monitor="recall", loss=None, evaluate=None)

    collection = EmbeddingCollection([Table("item", 4, rows=5)], [Feature("item", "item")])
    with pytest.raises(ConfigError, match="set --affinity cosine"):
        measure_affinity(Ranker(), collection, ListSource([]), 3, 5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dlrm", "dcnv2"])
def test_groups_are_found_in_the_paper_s_models(model, colonnade, tmp_path):
    """Models whose vectors do not turn to each other: by cosines, half of the fields are in their group's tower."""
    folder = tmp_path / "run"
    options = {**SETTINGS["data.options"], "num_train": 40_000}
    settings = {**SETTINGS, "data.options": options, "model.name": model, "model.dim": 16}
    run = open_run(override_settings(RunConfig(), settings), Mesh(), folder)
    run.train()
    run.close()
    assert colonnade("towers", folder, "--towers", 3)[0] == 0
    tower_map = read_tower_map(folder)
    assert [list(tower) for tower in tower_map.partition.towers] == GROUPS
    assert tower_map.affinity == "interactions" and tower_map.agreement > 0.6
    status, output, _ = colonnade("towers", folder, "--towers", 3, "--affinity", "cosine")
    assert status == 0 and "mean |cosine|" in output
    assert [list(tower) for tower in read_tower_map(folder).partition.towers] != GROUPS


def test_towers_that_nothing_supports_are_called_uncertain(colonnade, tmp_path):
    folder = tmp_path / "run"
    options = {**SETTINGS["data.options"], "num_train": 256}
    settings = {**SETTINGS, "data.options": options, "model.name": "dcnv2"}
    run = open_run(override_settings(RunConfig(), settings), Mesh(), folder)
    run.train()
    run.close()
    status, output, _ = colonnade("towers", folder, "--towers", 3)
    tower_map = read_tower_map(folder)
    assert status == 0 and tower_map.agreement < 0.6
    assert "These towers are uncertain" in output.replace("\n", " ")


def test_the_report_draws_them(trained, colonnade, tmp_path):
    from colonnade.report.page import write_page
    from colonnade.report.pages import render_run_page
    from colonnade.report.reading import read_run_folder

    (trained / "towers.json").unlink(missing_ok=True)
    assert "Features in the plane" not in render_run_page(read_run_folder(trained))
    colonnade("towers", trained, "--towers", 3, "--capacity", "count=1.5")
    html = render_run_page(read_run_folder(trained))
    assert "Features in the plane" in html and "Load of each tower" in html
    if CHROMIUM is not None:
        write_page(html, tmp_path / "run.html")
        observed = look(tmp_path / "run.html", 390, tmp_path)
        assert observed["console"] == [] and observed["scroll"] <= 390
        chart = next(c for c in observed["charts"] if c["title"] == "Features in the plane")
        assert chart["shapes"] >= 9 and chart["width"] <= chart["room"] + 1
    (trained / "towers.json").write_text('{"towers": [["C1"]]}')
    status, _, output = colonnade("report", trained)
    assert status == 2 and "towers.json" in output and "write it again" in output
    (trained / "towers.json").unlink()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--towers"),
        (("--towers", 10), "10 towers for 9 features"),
        (("--towers", 0), "--towers"),
        (("--towers", 2, "--distance", "near"), "coherent, diverse"),
        (("--towers", 2, "--affinity", "near"), "interactions, cosine"),
        (("--towers", 2, "--capacity", "rows=2"), "count, bytes, lookups"),
        (("--towers", 2, "--capacity", "bytes=lots"), "bytes=1.5"),
        (("--towers", 2, "--capacity", "bytes=0.5"), "1 or more"),
        (("--towers", 4, "--capacity", "bytes=1.01"), "Set bytes=1.34"),
        (("--towers", 2, "--part", "exam"), "train, validation, test"),
        (("--towers", 2, "--part", "validation"), "no validation part"),
        (("--towers", 2, "--at", "7"), "7"),
        (("--towers", 2, "--out", "nowhere/p.json"), "there is no folder nowhere"),
    ],
)
def test_refusals(trained, colonnade, arguments, words):
    status, _, output = colonnade("towers", trained, *arguments)
    assert status == 2 and words in output and output.count("\n") == 1
    assert not (trained / "towers.json").exists()


def test_a_run_without_a_checkpoint(tmp_path, colonnade):
    status, _, output = colonnade("towers", tmp_path / "none", "--towers", 2)
    assert status == 2 and "none" in output
