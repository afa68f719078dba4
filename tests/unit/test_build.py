"""Models built from configuration and schema: every name, every setting, and what is refused."""

from __future__ import annotations

import pytest
import torch

from colonnade import FTRL, Adam, Mesh, RowOptimizer, RowWiseAdagrad
from colonnade.batch import Batch, Ids
from colonnade.config.run import ModelConfig, build_config, override_settings
from colonnade.data import open_source
from colonnade.data.contract import Column, Schema
from colonnade.errors import ConfigError
from colonnade.models.build import MODEL_SPECS, build_model, build_tables
from colonnade.models.dcn import DCNv2
from colonnade.models.split import Scorer
from colonnade.models.two_tower import TwoTower
from colonnade.run.defaults import MODEL_PRESETS, PRESETS, get_preset
from colonnade.train.objective import weighted_loss

SCHEMA = Schema(
    ("age",),
    (
        Column("user", 20),
        Column("tags", 9, "bag"),
        Column("history", 30, "sequence", table="item"),
        Column("item", 30),
    ),
    labels=("click", "buy"),
)
SCORERS = sorted(name for name, kind in MODEL_SPECS.items() if issubclass(kind.model, Scorer))


def batch(size=4) -> Batch:
    offsets = torch.arange(size + 1) * 2
    ids = {
        "user": Ids(torch.arange(size)),
        "tags": Ids(torch.arange(2 * size) % 9, offsets),
        "history": Ids(torch.arange(2 * size), offsets),
        "item": Ids(torch.arange(size) + 3),
    }
    label = torch.tensor([[1.0, 0.0], [0.0, float("nan")]] * (size // 2))
    return Batch(size, torch.ones(size, 1), ids, label=label, world_weight=float(size))


def test_every_name_of_the_configuration_is_a_model():
    names = ModelConfig.model_fields["name"].annotation.__args__
    assert set(names) == set(MODEL_SPECS)


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_learns_several_labels(name):
    model = build_model(SCHEMA, build_config({"model": {"name": name}}))
    logits = model(batch())
    assert logits.shape == (4, 2)
    weighted_loss(logits, batch()).backward()
    RowOptimizer(model.embeddings).step()


def test_dense_weights_depend_on_the_seed_alone():
    built = [
        build_model(SCHEMA, build_config({"model": {"name": "dcn"}, "train": {"seed": seed}}))
        for seed in (1, 1, 2)
    ]
    first, same, other = (model.top[0].weight for model in built)
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_settings_reach_the_model():
    values = {"name": "dcnv2", "dim": 5, "cross_layers": 4, "cross_rank": 3, "structure": "stacked"}
    model = build_model(SCHEMA, build_config({"model": {**values, "top": [7]}}))
    assert isinstance(model, DCNv2) and not model.is_parallel
    cross = model.embeddings.interactions["cross"]
    assert cross.down.shape == (4, 3, 1 + 4 * 5) and cross.last.shape == (7, 1 + 4 * 5)
    assert model.deep.top[-1].in_features == 7


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "deepfm", "bottom": [8]}, ["model.bottom", "deepfm", "dim", "top"]),
        ({"name": "lr", "dim": 8}, ["model.dim", "lr", "none"]),
        ({"name": "dcn", "cross_rank": 8}, ["model.cross_rank", "cross_layers"]),
        ({"name": "sasrec", "top": [8]}, ["model.top", "heads"]),
        ({"name": "dcnv2", "cross_experts": 2}, ["cross_rank"]),
        ({"name": "two_tower", "item_columns": ["film"]}, ["film", "history"]),
        ({"name": "sasrec"}, ["history, target, negative", "samples=sequences"]),
    ],
)
def test_a_setting_the_model_does_not_have_is_refused(model, words):
    with pytest.raises(ConfigError) as caught:
        build_model(SCHEMA, build_config({"model": model}))
    for word in words:
        assert word in str(caught.value)


def test_data_that_a_model_cannot_take_is_refused():
    config = build_config({"model": {"name": "dlrm"}})
    with pytest.raises(ConfigError, match="no categorical column"):
        build_model(Schema(("a",), ()), config)
    with pytest.raises(ConfigError, match="this data has none"):
        build_model(Schema((), (Column("a", 3),), labels=()), config)


def test_first_order_weights_have_their_own_optimizer():
    rows = {"optimizer": "adam", "lr": 0.01, "betas": (0.8, 0.9)}
    wide = {"optimizer": "ftrl", "lr": 0.1, "l1": 0.5}
    config = build_config({"model": {"name": "deepfm"}, "embedding": {**rows, "wide": wide}})
    table = build_tables(SCHEMA, config)[0][0]
    assert dict(table.dim) == {"deep": 16, "wide": 2}
    assert table.optimizer["deep"] == Adam(lr=0.01, betas=(0.8, 0.9))
    assert table.optimizer["wide"] == FTRL(lr=0.1, l1=0.5)
    assert table.initializer["wide"].scale == 0


def test_first_order_weights_train_as_the_rows_otherwise():
    config = build_config(
        {"model": {"name": "fm"}, "embedding": {"eps": 1e-3, "wide": {"lr": 0.5}}}
    )
    table = build_tables(SCHEMA, config)[0][0]
    assert table.optimizer["deep"] == RowWiseAdagrad(lr=0.02, eps=1e-3)
    assert table.optimizer["wide"] == RowWiseAdagrad(lr=0.5, eps=1e-3)


def test_a_setting_the_wide_optimizer_does_not_have_is_refused():
    wide = {"optimizer": "ftrl", "momentum": 0.5}
    with pytest.raises(ConfigError, match=r"embedding\.wide\.momentum"):
        build_model(SCHEMA, build_config({"model": {"name": "fm"}, "embedding": {"wide": wide}}))


def test_a_table_has_an_optimizer_a_rate_and_first_values_of_its_own():
    by_table = {
        "item": {"optimizer": "adam", "lr": 0.1, "init_scale": 0.5},
        "tags": {"lr": 0.25, "init_scale": 0.0},
    }
    rows = {"lr": 0.01, "eps": 1e-3, "init_scale": 0.125, "wide": {"lr": 2.0}, "by_table": by_table}
    config = build_config({"model": {"name": "deepfm"}, "embedding": rows})
    user, tags, item = build_tables(SCHEMA, config)[0]
    every = RowWiseAdagrad(lr=0.01, eps=1e-3), RowWiseAdagrad(lr=0.25, eps=1e-3), Adam(lr=0.1)
    assert [table.optimizer["deep"] for table in (user, tags, item)] == list(every)
    assert [t.initializer["deep"].scale for t in (user, tags, item)] == [0.125, 0.0, 0.5]
    assert {t.optimizer["wide"].lr for t in (user, tags, item)} == {2.0}
    config = override_settings(config, {"model.name": "lr", "embedding.by_table.user.lr": 3.0})
    user, tags, item = build_tables(SCHEMA, config)[0]
    assert user.optimizer == RowWiseAdagrad(lr=3.0, eps=1e-3) and item.initializer.scale == 0.5


def test_a_table_has_bounds_of_its_own():
    by_table = {"item": {"max_norm": 3.0}, "tags": {"weight_bound": 0.5}}
    rows = {"max_norm": 1.0, "weight_bound": 10.0, "by_table": by_table}
    user, tags, item = build_tables(SCHEMA, build_config({"embedding": rows}))[0]
    assert [t.max_norm for t in (user, tags, item)] == [1.0, 1.0, 3.0]
    assert [t.weight_bound for t in (user, tags, item)] == [10.0, 0.5, 10.0]


@pytest.mark.parametrize(
    ("by_table", "words"),
    [
        (
            {"items": {"lr": 1.0}},
            "embedding.by_table.items: this data has no table of that name; it has",
        ),
        (
            {"item": {"momentum": 0.5}},
            "embedding.by_table.item.momentum: rowwise_adagrad has no such",
        ),
    ],
)
def test_what_a_table_cannot_have_of_its_own_is_refused(by_table, words):
    with pytest.raises(ConfigError, match=words):
        build_tables(SCHEMA, build_config({"embedding": {"by_table": by_table}}))


def test_relations_of_rotate_begin_anywhere_on_the_circle():
    columns = [Column(name, 9, table="entity") for name in ("head", "tail")]
    columns += [Column("relation", 4), Column("candidate", 9, "sequence", table="entity")]
    config = build_config(
        {"model": {"name": "rotate", "dim": 4}, "embedding": {"init_scale": 0.01}}
    )
    model = build_model(Schema((), tuple(columns), labels=()), config)
    starts = {table.name: table.initializer.scale for table in model.embeddings.tables}
    assert starts == {"entity": 0.01, "relation": 1.0} and model.relation_range == 1.0


def test_columns_of_one_table_share_rows_and_sequences_are_pooled():
    tables, features = build_tables(SCHEMA, build_config({}))
    assert [t.name for t in tables] == ["user", "tags", "item"]
    assert [(f.name, f.table, f.pooling) for f in features] == [
        ("user", "user", "sum"), ("tags", "tags", "mean"), ("history", "item", "mean"), ("item", "item", "sum"),
    ]  # fmt: skip


@pytest.mark.parametrize("pooling", ["sum", "sqrtn"])
def test_a_setting_pools_bags_alone(pooling):
    config = build_config({"embedding": {"pooling": pooling}})
    assert [f.pooling for f in build_tables(SCHEMA, config)[1]] == ["sum", pooling, "mean", "sum"]


def test_two_towers_use_the_columns_they_are_given():
    values = {"name": "two_tower", "item_columns": ["item"], "query_columns": ["history"]}
    model = build_model(SCHEMA, build_config({"model": values}))
    assert isinstance(model, TwoTower) and model.known_items == ["history"]
    assert [t.name for t in model.embeddings.tables] == ["item"]


def test_precision_and_compilation_come_from_the_configuration():
    config = build_config({"model": {"compile": True}, "train": {"autocast": "bfloat16"}})
    model = build_model(SCHEMA, config)
    assert model.autocast == torch.bfloat16 and model._compiled is not None


@pytest.mark.parametrize("data", sorted(PRESETS))
@pytest.mark.parametrize("name", [None, *sorted(MODEL_SPECS)])
def test_presets_are_settings_that_their_model_has(data, name):
    config = get_preset(data, name)
    assert config.model.name == (name or PRESETS[data].model.name)
    if name in (None, *MODEL_PRESETS.get(data, {})) or name in SCORERS:
        build_tables(SCHEMA, config)


def test_a_model_no_preset_knows_is_named():
    with pytest.raises(ConfigError, match="transformer"):
        get_preset("movielens", "transformer")
    with pytest.raises(ConfigError, match="movielens"):
        get_preset("netflix")


def test_unknown_labels_add_nothing():
    """The loss over known labels, over the weight of all: ranks with other unknowns still add up."""
    logits = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    inputs = batch()
    inputs.sample_weight = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64)
    inputs.world_weight = 5.0
    loss = weighted_loss(logits, inputs)
    loss.backward()
    total, chance = 0.0, logits.detach().sigmoid()
    for s in range(4):
        for task in range(2):
            label = float(inputs.label[s, task])
            if label == label:
                right = chance[s, task] if label else 1 - chance[s, task]
                total -= inputs.sample_weight[s] * right.log()
    torch.testing.assert_close(loss.detach(), total / (5 * 2))
    assert (logits.grad == 0).tolist() == [[False, False], [False, True]] * 2


def test_ranks_losses_add_up_with_unknown_labels():
    logits, inputs = torch.randn(4, 2), batch()
    parts = [
        Batch(2, inputs.dense[s], {}, label=inputs.label[s], world_weight=4.0)
        for s in (slice(0, 2), slice(2, 4))
    ]
    whole = weighted_loss(logits, inputs)
    halves = [weighted_loss(logits[s : s + 2], part) for s, part in zip((0, 2), parts, strict=True)]
    torch.testing.assert_close(sum(halves), whole)


@pytest.mark.slow
def test_one_epoch_of_a_preset_learns(shared_data):
    """Real data: two towers beat popularity (recall@20 0.1402) after an epoch."""
    from colonnade.config.run import override_settings
    from colonnade.run.run import open_run

    config = override_settings(
        get_preset("movielens_retrieval"),
        {"train.epochs": 1, "data.path": str(shared_data / "ml-1m")},
    )
    assert open_source("movielens_retrieval", shared_data / "ml-1m").test is not None
    opened = open_run(config, Mesh(), None)
    assert opened.train().metrics["test_recall@20"] > 0.15
