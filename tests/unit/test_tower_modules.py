"""Tower modules: what they refuse, how they begin, what they cost, and runs that go on, start anew or are predicted."""

from __future__ import annotations

import pytest
import torch
from small_run import CONFIG
from torch import nn
from typer.testing import CliRunner

import colonnade
from colonnade import Batch, EmbeddingCollection, Feature, Ids, Mesh, Table
from colonnade.cli.app import app
from colonnade.config.run import build_config, override_settings
from colonnade.data.contract import Column, Schema
from colonnade.errors import CheckpointError, ConfigError
from colonnade.exchange.operator_cut import explain_not_remote
from colonnade.interaction import TowerModule
from colonnade.models.build import build_model, resolve_tower_settings
from colonnade.models.dcn import DCNv2
from colonnade.models.dense_cost import cross_layers_cost, dlrm_cost, dlrm_tower_cost, mlp_cost
from colonnade.models.dlrm import DLRM
from colonnade.models.tower_modules import describe_tower_modules
from colonnade.publish.model_writer import export_run
from colonnade.row_state import dense_state_dict
from colonnade.run.run import load_run_config, open_run
from colonnade.topology.towers import Partition, build_round_robin_partition

NAMES = list("abcde")
TOWERS = Partition((("b", "d", "a"), ("e", "c")))


def declared(dim=6, dims=None):
    dims = dims or dict.fromkeys(NAMES, dim)
    tables = [Table(name, dims[name], rows=20) for name in NAMES]
    return tables, [Feature(name, name) for name in NAMES]


def collection(module: TowerModule, fields, dims=None) -> EmbeddingCollection:
    return EmbeddingCollection(*declared(dims=dims), consumers={"mine": (module, fields)})


def batch(size=4) -> Batch:
    ids = {name: Ids(torch.arange(size) + n) for n, name in enumerate(NAMES)}
    return Batch(size, torch.ones(size, 2), ids, label=torch.ones(size, 1))


class Squared(nn.Module):
    """A user's own: (B, F, D) -> (B, F)."""

    def forward(self, fields):
        return fields.square().sum(2)


def test_any_module_is_a_consumer_of_its_tower():
    made = collection(TowerModule(Squared(), [6, 6], 2), ["d", "b"])
    output = made(batch())
    rows = [made.rows(name, batch().ids[name].values).square().sum(1) for name in "db"]
    torch.testing.assert_close(output["mine"], torch.stack(rows, 1))
    wide = nn.Linear(9, 4)
    mixed = dict(zip(NAMES, (6, 3, 6, 6, 6), strict=True))
    made = collection(TowerModule(wide, [3, 6], 4), ["b", "a"], mixed)
    inputs = torch.cat([made.rows(name, batch().ids[name].values) for name in "ba"], 1)
    torch.testing.assert_close(made(batch())["mine"], wide(inputs))
    assert TowerModule(wide, [3, 6], 4).ratio == 9 / 4
    assert "on one rank" in explain_not_remote(made.declaration, "mine")


def test_a_partial_of_vectors_is_the_module():
    module = TowerModule(nn.Flatten(), [6, 6], 12)
    vectors = torch.randn(8, 6)
    result = module.partial(vectors, torch.arange(4).repeat_interleave(2), 4)
    assert torch.equal(result, vectors.reshape(4, 12)) and torch.equal(
        module.combine(result), result
    )
    weighted = module.partial(
        vectors, torch.arange(4).repeat_interleave(2), 4, torch.full((8,), 2.0)
    )
    assert torch.equal(weighted, 2 * result)


class Viewed(nn.Module):
    """Cannot be asked about no samples."""

    def forward(self, fields):
        return fields.reshape(len(fields), -1)


def test_a_module_is_not_asked_about_no_samples():
    vectors = torch.zeros(0, 2, 6, requires_grad=True)
    result = TowerModule(Viewed(), [6, 6], 12).partial_of_fields(vectors)
    assert result.shape == (0, 12)
    result.sum().backward()
    assert vectors.grad is not None


class Halved(nn.Module):
    def forward(self, fields):
        return fields.flatten(1)[::2]


@pytest.mark.parametrize(
    ("module", "out", "words"),
    [
        (Halved(), 12, ["Halved", "(2, 12)", "wanted (4, 12)", "each sample"]),
        (nn.Flatten(), 8, ["Flatten", "(4, 12)", "wanted (4, 8)", "out"]),
        (nn.Identity(), 12, ["Identity", "(4, 2, 6)", "wanted (4, 12)"]),
    ],
)
def test_a_module_that_gives_something_else_than_it_said(module, out, words):
    with pytest.raises(ConfigError) as caught:
        collection(TowerModule(module, [6, 6], out), ["a", "b"])(batch())
    for word in words:
        assert word in str(caught.value)


def test_a_module_for_other_fields():
    with pytest.raises(ConfigError, match=r"'mine' takes fields of dims \[6, 6\]; .* for \[6, 3\]"):
        collection(TowerModule(nn.Flatten(), [6, 3], 9), ["a", "b"])
    with pytest.raises(ConfigError, match="got BatchNorm1d, wanted modules that treat samples one"):
        TowerModule(nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3)), [6, 6], 3)
    with pytest.raises(
        ConfigError, match=r"got LazyBatchNorm1d, wanted modules that treat samples"
    ):
        TowerModule(nn.Sequential(nn.Linear(12, 3), nn.LazyBatchNorm1d()), [6, 6], 3)
    with pytest.raises(ConfigError, match=r"got weights without a shape .* 12 columns"):
        TowerModule(nn.LazyLinear(3), [6, 6], 3)
    with pytest.raises(ConfigError, match="got 0 fields and 3 columns"):
        TowerModule(nn.Flatten(), [], 3)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_module_that_changes_its_fields_is_refused(is_training):
    """Other consumers of them would read what it made of them."""
    module = TowerModule(nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True)), [6, 6], 12)
    model = collection(module, ["a", "b"]).train(is_training)
    with pytest.raises(
        ConfigError, match=r"Sequential: got its fields changed in place.*inplace=False"
    ):
        model(batch())
    values = torch.ones(4, 2, 6, dtype=torch.float64)
    later = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.ReLU(inplace=True))
    assert TowerModule(later, [6, 6], 3).partial_of_fields(values).shape == (4, 3)
    with torch.inference_mode():  # where changes are not counted
        assert module.partial_of_fields(torch.ones(4, 2, 6)).shape == (4, 12)


@pytest.mark.parametrize("model", [DLRM, DCNv2])
def test_what_a_partition_must_be(model):
    def make(*towers, **settings):
        return model(*declared(), num_dense=2, towers=Partition(towers), tower_dim=3, **settings)

    with pytest.raises(ConfigError, match="'film', 'user': this model has no such feature"):
        make(("a", "b", "film"), ("c", "d", "e", "user"))
    with pytest.raises(ConfigError, match="'c', 'e': it is in no tower; the partition is for"):
        make(("a", "b"), ("d",))
    with pytest.raises(ConfigError, match="tower_dim=3 without towers"):
        model(*declared(), num_dense=2, tower_dim=3)
    if model is DLRM:
        with pytest.raises(ConfigError, match="something must leave a tower"):
            make(("a", "b", "c", "d", "e"), tower_vectors=0)


@pytest.mark.parametrize("model", [DLRM, DCNv2])
def test_a_ratio_is_the_least_of_any_tower(model):
    def ratios(ratio, **settings):
        made = model(*declared(), num_dense=2, towers=TOWERS, tower_ratio=ratio, **settings)
        return [operator.ratio for operator in made.embeddings.interactions.values()]

    assert ratios(1) == [1, 1] and ratios(2) == [2, 2] and ratios(6) == [6, 6]
    assert ratios(4) == [6, 6], "1.5 columns of 6 are one"
    assert ratios(2.9) == [3, 3]
    if model is DLRM:
        # Two vectors of a field and one of all: 18 columns to 7 vectors, 12 to 5.
        assert ratios(2, tower_vectors=2, tower_summaries=1) == [18 / 7, 12 / 5]


def test_a_run_takes_the_towers_of_another(tmp_path):
    """Towers that `colonnade towers` wrote; another command line is refused with what to type."""
    runner, run, other = CliRunner(), str(tmp_path / "run"), str(tmp_path / "other")
    base = ["train", "--data", "synthetic", "--set", "data.options.num_train=600"]
    base += ["--set", "data.options.num_test=100", "--set", "data.options.cardinalities=[9,9,9,9]"]
    base += ["--model", "dlrm", "--epochs", "1", "--batch-size", "64"]
    auto = ["--set", "model.towers=auto", "--set", "model.tower_ratio=2"]
    assert runner.invoke(app, [*base, "--run", run]).exit_code == 0
    missing = runner.invoke(app, [*base, *auto, "--run", other, "--towers-from", run])
    assert missing.exit_code != 0 and "towers.json" in str(missing.output) + str(missing.exception)
    assert runner.invoke(app, ["towers", run, "--towers", "2"]).exit_code == 0
    assert runner.invoke(app, [*base, *auto, "--run", other, "--towers-from", run]).exit_code == 0
    written = Partition.from_json((tmp_path / "run" / "towers.json").read_text())
    towers = load_run_config(tmp_path / "other").model.towers
    assert [list(tower) for tower in written.towers] == towers
    refused = runner.invoke(app, [*base, "--run", str(tmp_path / "no"), "--towers-from", run])
    assert refused.exit_code != 0 and "model.towers=auto" in str(refused.output) + str(
        refused.exception
    )


def weights(model) -> dict[str, torch.Tensor]:
    return dense_state_dict(model)


@pytest.mark.parametrize("model", [DLRM, DCNv2])
def test_a_module_begins_by_its_features_alone(model):
    """Wherever its tower stands; and what lies around the towers begins as if there were no modules."""
    results = []
    for order in (TOWERS.towers, TOWERS.towers[::-1]):
        torch.manual_seed(3)
        made = model(*declared(), num_dense=2, towers=Partition(order), tower_dim=6)
        results.append(weights(made))
    for name, value in results[0].items():
        other = name.replace("tower0", "towerX").replace("tower1", "tower0").replace("X", "1")
        assert torch.equal(value, results[1][other]), name
    torch.manual_seed(3)
    flat = weights(model(*declared(), num_dense=2))
    assert all(torch.equal(value, results[0][name]) for name, value in flat.items())
    torch.manual_seed(3)
    another = model(*declared(), num_dense=2, towers=TOWERS, tower_dim=6, seed=1)
    name = next(name for name in weights(another) if "tower0" in name and "weight" in name)
    assert not torch.equal(weights(another)[name], results[0][name])


@pytest.mark.parametrize("model", [DLRM, DCNv2])
def test_towers_without_modules_are_the_flat_model(model):
    torch.manual_seed(3)
    towered = model(*declared(), num_dense=2, towers=TOWERS)
    torch.manual_seed(3)
    flat = model(*declared(), num_dense=2)
    assert torch.equal(towered(batch()), flat(batch())) and towered.towers == TOWERS
    assert list(weights(towered)) == list(weights(flat)) and towered.dense_cost == flat.dense_cost


@pytest.mark.parametrize("num_dense", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"towers": TOWERS, "tower_dim": 3}])
@pytest.mark.parametrize(
    ("model", "more"),
    [
        (DLRM, {}),
        (DLRM, {"keep_fields": True, "tasks": 2}),
        (DCNv2, {}),
        (DCNv2, {"cross_rank": 2, "structure": "stacked"}),
        (DCNv2, {"cross_rank": 2, "tasks": 2}),
        (DCNv2, {"cross_rank": 2, "top": ()}),
        (DCNv2, {"cross_rank": 2, "cross_experts": 3, "top": ()}),
    ],
)
def test_work_counts_all_weights(model, more, settings, num_dense):
    made = model(*declared(), num_dense=num_dense, **more, **settings)
    assert made.dense_cost.parameters == sum(item.numel() for item in made.parameters())
    if not settings:
        assert made.dense_cost == made.flat_dense_cost


def test_work_is_that_of_the_literature():
    """MLPerf's DLRM and DCN-v2 on Criteo, MFLOP a sample forward and backward; DLRM's towers of 64 .. 8."""
    bottom, top = [512, 256], [1024, 1024, 512, 256]

    def dlrm(dim):
        return dlrm_cost(13, 27, dim, bottom=bottom, top=top)

    assert dlrm(128).products == 2_458_496 and round(dlrm(128).flops / 1e6, 2) == 14.75
    results = [
        round((dlrm_tower_cost(26, 128, dim) + dlrm(dim)).flops / 1e6, 2) for dim in (64, 32, 16, 8)
    ]
    assert results == [15.26, 14.23, 13.72, 13.46]
    dcn = mlp_cost([13, *bottom, 128]) + cross_layers_cost(27 * 128, layers=3, rank=512)
    assert round((dcn + mlp_cost([27 * 128, *top, 1])).flops / 1e6, 2) == 96.18


SCHEMA = Schema(("x",), tuple(Column(name, 20) for name in NAMES))


def configured(**model):
    return build_config({"model": {"dim": 6, **model}})


def test_partitions_come_from_numbers_files_and_lists(tmp_path):
    file = tmp_path / "towers.json"
    file.write_text(TOWERS.to_json())
    for message, wanted in (
        (2, build_round_robin_partition(NAMES, 2)),
        (str(file), TOWERS),
        ([list(tower) for tower in TOWERS.towers], TOWERS),
    ):
        config = configured(towers=message, tower_dim=3)
        model = build_model(SCHEMA, config)
        assert model.towers == wanted and model.dim == 3
        retained = resolve_tower_settings(SCHEMA, config)
        assert retained.model.towers == [list(tower) for tower in wanted.towers]
        assert resolve_tower_settings(SCHEMA, retained) == retained


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"towers": "nowhere.json"}, ["model.towers", "nowhere.json", "No such file"]),
        ({"towers": 6}, ["model.towers", "6 towers for 5 features", "1 .. 5"]),
        ({"towers": [["a", "b"], ["b", "c", "d", "e"]]}, ["model.towers", "'b'", "towers 0 and 1"]),
        ({"towers": [["a", "b", "c", "d", "e"], []]}, ["model.towers", "tower 1", "no features"]),
        ({"towers": [["a", "z"]]}, ["'z'", "another model"]),
        ({"tower_dim": 3}, ["tower_dim=3", "without towers"]),
        ({"towers": 2, "tower_vectors": 2}, ["model.tower_vectors", "model.tower_dim"]),
        ({"tower_ratio": 4}, ["tower_ratio=4", "without towers"]),
        ({"towers": 2, "tower_dim": 3, "tower_ratio": 2}, ["tower_dim=3", "tower_ratio=2", "one"]),
        ({"towers": 2, "tower_ratio": 100}, ["tower_ratio=100", "no column", "at most 6"]),
        ({"towers": "auto"}, ["model.towers", "auto", "--towers-from"]),
        ({"towers": 2, "name": "deepfm"}, ["model.towers", "deepfm has no such setting"]),
        ({"towers": 2, "tower_dim": 3, "tower_layers": 2}, ["model.tower_layers", "dlrm has no"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(ConfigError) as caught:
        build_model(SCHEMA, configured(**settings))
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_no_partition(tmp_path):
    file = tmp_path / "towers.json"
    for content in (b"\xff\xfe", b"{}", b"[1"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"model\.towers: .*towers\.json"):
            build_model(SCHEMA, configured(towers=str(file)))


def test_what_modules_save_is_said():
    model = DLRM(*declared(), num_dense=2, towers=TOWERS, tower_dim=3)
    text = describe_tower_modules(model, model.embeddings)
    assert "2 tower modules (3+2 fields): 15 floats of a sample leave them of 30 (CR 2.00)" in text
    assert (
        f"42 parameters. The dense network takes {model.dense_cost.flops / 1e6:.2f} MFLOP" in text
    )
    flat = DLRM(*declared(), num_dense=2)
    assert describe_tower_modules(flat, flat.embeddings) == ""
    own = collection(TowerModule(Squared(), [6, 6], 2), ["a", "b"])
    assert describe_tower_modules(own, own).endswith(
        "2 floats of a sample leave them of 12 (CR 6.00); 0 parameters"
    )


BASE = build_config({**CONFIG, "train": {**CONFIG["train"], "max_steps": 4, "checkpoint_steps": 2}})
TOWERED = {"model.towers": [["C3", "C1"], ["C2", "C4"]], "model.tower_dim": 2}
OTHERWISE = {**TOWERED, "model.towers": [["C3", "C1"], ["C4", "C2"]]}


def trained(folder, settings, **more):
    run = open_run(override_settings(BASE, settings), Mesh(), folder, **more)
    try:
        return run.train(), run
    finally:
        run.close()


@pytest.fixture(scope="module")
def towered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towered") / "run"
    trained(folder, TOWERED)
    return folder


def test_a_towered_run_is_evaluated_exported_predicted_and_inspected(towered, tmp_path):
    run = open_run(load_run_config(towered), Mesh(), towered, read_only=True)
    batches = list(run.trainer.data.test.batches(64))
    with torch.no_grad():
        wanted = [torch.sigmoid(run.trainer.model.eval()(batch).double()) for batch in batches]
    run.close()
    export_run(towered, tmp_path / "out")
    with colonnade.Predictor.open(tmp_path / "out") as predictor:
        for batch, text in zip(batches, wanted, strict=True):
            assert torch.equal(predictor(batch), text)
    inspected = CliRunner().invoke(
        app, ["inspect", str(towered / "checkpoints" / f"{4:012d}.json")]
    )
    assert (
        inspected.exit_code == 0 and "DLRMTower" in inspected.output and "2.00" in inspected.output
    )


def test_a_run_goes_on_with_its_towers_alone(towered, tmp_path):
    for other in (OTHERWISE, {**TOWERED, "model.tower_dim": 3}, {}):
        with pytest.raises(CheckpointError, match=r"model\.tower.* start anew; train\.warm_start="):
            open_run(override_settings(BASE, other), Mesh(), towered)
    assert trained(towered, {**TOWERED, "train.max_steps": 5})[0].steps == 1


def test_without_modules_another_partition_goes_on(tmp_path):
    trained(tmp_path, {"model.towers": 2})
    assert trained(tmp_path, {"model.towers": 3, "train.max_steps": 5})[0].steps == 1


def test_a_checkpoint_of_other_towers_is_refused(tmp_path):
    """Tower modules are described by the checkpoint, also for a model from Python."""

    def fitted(towers, dim):
        data = colonnade.data.open_source("synthetic", **CONFIG["data"]["options"])
        names = [item.name for item in data.train.schema.categorical]
        tables = [
            Table(item.name, 4, rows=item.cardinality) for item in data.train.schema.categorical
        ]
        features = [Feature(name, name) for name in names]
        model = DLRM(tables, features, num_dense=13, towers=Partition(towers), tower_dim=dim)
        colonnade.fit(model, data, run=tmp_path, max_steps=2, batch_size=50, quiet=True)

    fitted((("C1", "C2"), ("C3", "C4")), 2)
    with pytest.raises(
        CheckpointError,
        match=r"other towers: tower0\.features was .*C1.* another partition or module starts it anew",
    ):
        fitted((("C3", "C4"), ("C1", "C2")), 2)


@pytest.mark.parametrize("case", ["other towers", "from flat"])
def test_a_warm_start_takes_rows_and_what_agrees(case, towered, tmp_path):
    """And says what began anew: modules of other features, what reads them, and what has another shape."""
    source, start = towered, OTHERWISE
    if case == "from flat":
        source, start = tmp_path / "flat", TOWERED
        trained(source, {})
    warm = {**start, "train.warm_start": str(source), "train.max_steps": 0}
    new = open_run(override_settings(BASE, warm), Mesh(), tmp_path / "new")
    fresh = open_run(override_settings(BASE, start), Mesh(), None)
    old = open_run(load_run_config(source), Mesh(), source, read_only=True)
    ids = torch.arange(50)
    rows = [run.trainer.collection.rows("C1", ids) for run in (new, old, fresh)]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    begun, other, first = (weights(run.trainer.model) for run in (new, old, fresh))
    same = {
        "other towers": ["bottom.2.weight", "top.2.weight", "tower0"],
        "from flat": ["top.2.weight", "bottom.0"],
    }
    anew = {
        "other towers": ["tower1", "top.0"],
        "from flat": ["tower0", "tower1", "top.0", "bottom.2"],
    }
    for name, value in begun.items():
        if any(part in name for part in anew[case]):
            assert torch.equal(value, first[name]), name
        elif any(part in name for part in same[case]):
            assert torch.equal(value, other[name]), name
    for run in (new, fresh, old):
        run.close()
    from colonnade.run.start import plan_warm_start

    built = build_model(new.trainer.data.train.schema, override_settings(BASE, start))
    text = str(plan_warm_start(built, built.embeddings.tables, str(source)))
    assert (
        "started anew, because towers or their modules differ: " in text and "top.0.weight" in text
    )
