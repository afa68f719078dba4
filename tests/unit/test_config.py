"""Configuration: typed, validated at birth, wrong keys named with the nearest right one."""

from __future__ import annotations

import itertools
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.model import ModelConfig
from colonnade.config.run import (
    RunConfig,
    build_config,
    dump_config,
    list_fixed_settings,
    load_config,
    override_settings,
)
from colonnade.data.tabular.declaration import FileSchema, load_file_schema
from colonnade.data.tabular.fields import Category
from colonnade.errors import ConfigError
from colonnade.formats import parse_yaml
from colonnade.run.defaults import PRESETS
from colonnade.sizes import StorageLocation, parse_byte_size, parse_storage_location


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trian": {}}, ["trian", "train"]),
        ({"train": {"epoch": 3}}, ["train.epoch", "train.epochs"]),
        ({"plan": {"staleness": 3}}, ["plan.staleness", "plan.staleness_steps"]),
        ({"train": {"batch_size": 0}}, ["train.batch_size", "0"]),
        ({"train": {"epochs": "many"}}, ["train.epochs", "many"]),
        ({"plan": {"memory": {"dram": "2 potatoes"}}}, ["plan.memory.dram", "2 potatoes", "GiB"]),
        ({"model": {"name": "transformer"}}, ["model.name", "dlrm"]),
        ({"train": 3}, ["train", "3"]),
        ({"plan": {"dram": "2GiB"}}, ["plan.dram", "did you mean plan.memory.dram"]),
        ({"plan": {"dramm": "2GiB"}}, ["plan.dramm", "did you mean plan.memory.dram"]),
        ({"plan": {"memory": {"drm": 3}}}, ["plan.memory.drm", "did you mean plan.memory.dram"]),
        ({"plan": {"memory": {"ssd": "/a:0"}}}, ["plan.memory.ssd", "/a:0", "at least 1 byte"]),
        ({"plan": {"memory": {"ssd": [":3GiB"]}}}, ["plan.memory.ssd", "a directory and a size"]),
        ({"plan": {"memory": {"ssd": ["/a", "/a/:3"]}}}, ["/a", "differ"]),
        ({"plan": {"memory": {"ssd": "/a", "mapped": "/a:1"}}}, ["/a", "one tier in a directory"]),
        ({"plan": {"memory": {"mapped": "/a:5ZB"}}}, ["plan.memory.mapped", "5ZB", "GiB"]),
        ({"plan": {"memory": {"hbm": "1GiB"}}}, ["plan.memory.hbm", "device=cpu", "device=cuda"]),
        ({"plan": {"placement": "online"}}, ["plan.placement", "choose from profiled, even"]),
        ({"plan": {"memory": {"hbm": 0}}}, ["plan.memory.hbm", "at least 1 byte"]),
        ({"plan": {"memory": {"dram": 0}}}, ["plan.memory.dram", "at least 1 byte"]),
        (
            {"plan": {"memory": {"dram": 5, "tables": {"t": 6}}}},
            ["plan.memory", "6 bytes", "raise dram"],
        ),
        ({"plan": {"lookahead": "far"}}, ["plan.lookahead", "far", "auto"]),
        ({"plan": {"lookahead": True}}, ["plan.lookahead", "auto"]),
        (
            {"plan": {"write_budget": 0}},
            ["plan.write_budget: got 0, wanted", "1MiB", "leave it out"],
        ),
        ({"plan": {"write_budget": "1MB"}}, ["plan.write_budget: got '1MB', wanted at least 1MiB"]),
        ({"plan": {"memory": {"dram": 0}}}, ["plan.memory.dram: got 0, wanted", "leave it out"]),
        (
            {"plan": {"memory": {"dram": -5}}},
            ["plan.memory.dram: got -5, wanted", "1 byte", "2GiB"],
        ),
        ({"plan": {"memory": {"dram": 1.5}}}, ["plan.memory.dram: got 1.5, wanted"]),
        ({"plan": {"memory": {"tables": {"t": 0}}}}, ["plan.memory.tables.t: got 0, wanted"]),
    ],
)
def test_errors_name_the_setting_and_the_remedy(values, words):
    with pytest.raises(ConfigError) as caught:
        build_config(values)
    for word in words:
        assert word in str(caught.value)


def test_override_names_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean train\.epochs"):
        override_settings(RunConfig(), {"train.epoch": 3})
    with pytest.raises(ConfigError, match="did you mean train"):
        override_settings(RunConfig(), {"trian.epochs": 3})
    assert override_settings(RunConfig(), {"train.epochs": 3}).train.epochs == 3


def test_settings_by_table_and_sections_that_may_be_left_out_name_the_nearest_too():
    for values, text in (
        ({"plan": {"cache": {"siez": 3}}}, "did you mean plan.cache.size?"),
        (
            {"plan": {"cache": {"tables": {"C1": {"siez": 3}}}}},
            "did you mean plan.cache.tables.C1.size?",
        ),
        (
            {"embedding": {"tables": {"C1": {"hash": 3}}}},
            "did you mean embedding.tables.C1.hashes?",
        ),
        ({"plan": {"cache": 10}}, "plan.cache: got 10, wanted settings of it by name"),
        ({"plan": {"tables": {"C1": 2}}}, "plan.tables.C1: got 2, wanted settings of it"),
    ):
        with pytest.raises(ConfigError) as error:
            build_config(values)
        assert text in str(error.value)
    config = override_settings(
        build_config({}), {"embedding.tables.C1.hashes": 3, "embedding.tables.C1.rows": 50}
    )
    assert config.embedding.tables["C1"].hashes == 3
    with pytest.raises(ConfigError, match=r"plan\.cache\.tables\.C1: got 3, wanted settings"):
        override_settings(build_config({}), {"plan.cache.tables.C1": 3})


def test_places_have_a_path_and_perhaps_a_size(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert parse_storage_location("/a:64GiB") == StorageLocation("/a", 64 << 30)
    assert parse_storage_location("/a") == StorageLocation("/a", None)
    assert parse_storage_location("/a:b") == StorageLocation(
        "/a:b", None
    )  # a colon may be part of a name
    assert parse_storage_location("rows:5") == StorageLocation(str(tmp_path / "rows"), 5)
    config = override_settings(
        RunConfig(),
        {
            "plan.memory.ssd": "rows:1KiB",
            "plan.memory.mapped": "/m",
            "plan.memory.tables.t": "1KiB",
        },
    )
    memory = config.plan.memory
    assert memory.ssd_locations == (StorageLocation(str(tmp_path / "rows"), 1024),)
    assert memory.mapped_location == StorageLocation("/m") and memory.tables == {"t": 1024}
    assert build_config(yaml.safe_load(dump_config(config))) == config
    monkeypatch.chdir("/")
    assert build_config(yaml.safe_load(dump_config(config))) == config  # wherever it is read


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_written_config_reads_back(name, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(PRESETS[name]))
    assert load_config(path) == PRESETS[name]


@pytest.mark.parametrize("content", ["a: [", "- 1\n- 2\n", "\x00\xff", "train: {epochs: -1}"])
def test_files_that_are_no_config(content, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_config(path)
    with pytest.raises(ConfigError, match="nowhere"):
        load_config(tmp_path / "nowhere.yaml")


@given(
    st.integers(0, 10**6),
    st.sampled_from([("", 1), ("KiB", 2**10), (" GiB", 2**30), ("MB", 10**6)]),
)
def test_sizes(number, unit):
    assert parse_byte_size(f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize("text", ["1e999", "nan", "2 GiBs", ""])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="wanted a size such as 512MiB"):
        parse_byte_size(text)


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{previous}'] * 9)}]\n"
    for previous, name in itertools.pairwise("abcdefghi")
)
MERGES = ALIASES.replace("[x, x, x, x, x, x, x, x, x]", "{x: 1}").replace("[*", "{<<: [*")
MERGES = MERGES.replace("]", "]}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ALIASES, "aliases .* repeat more than 10,000 values"),
        (MERGES, "aliases .* repeat more than 10,000 values"),
        ("train: &a {x: *a}", "contains itself"),
        ("train: " + "[" * 100_000, "nesting depth|nested too deeply"),
    ],
)
def test_a_file_that_expands_without_end_is_refused_at_once(text, words, tmp_path):
    """388 million values in 500 bytes: nothing that reads them would end."""
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    began = time.process_time()
    for load in (load_config, load_file_schema):
        with pytest.raises(ConfigError, match=f"bomb.yaml: not YAML: .*({words})"):
            load(path)
    assert time.process_time() - began < 5


def test_a_file_may_use_aliases(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train: &t {epochs: 3}\nmodel: {dim: 8}\n")
    assert load_config(path).train.epochs == 3
    assert parse_yaml("a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\ne: [*a, *a]")["d"] == {"b": 1, "c": 3}


def test_a_long_vocabulary_is_read_by_libyaml(monkeypatch):
    """PyYAML's own parser takes four to ten times as long: 12 s for 200,000 texts."""
    words = [f"word{i}" for i in range(2_000)]
    schema = FileSchema((Category("city", vocabulary=tuple(words)),))
    for name in ("scanner.Scanner", "parser.Parser", "emitter.Emitter"):
        module, kind = name.split(".")
        monkeypatch.setattr(getattr(getattr(yaml, module), kind), "__init__", None)
    assert FileSchema.from_yaml(schema.to_yaml()) == schema
    config = build_config({"data": {"name": "csv", "options": {"schema": schema.to_dict()}}})
    assert build_config(parse_yaml(dump_config(config))) == config


def test_what_a_run_keeps_for_life():
    """Decided beside each setting; by section: a model's are fixed, a plan's are not."""
    settings = {
        "embedding.by_table.item.optimizer": "adam", "embedding.by_table.item.lr": 0.1,
        "embedding.tables.user.eviction.max_rows": 9, "data.options.rows": 5, "data.options.threads": 2,
        "data.options.test": "elsewhere", "data.options.schema": {"fields": [{"name": "test"}], "threads": 1},
    }  # fmt: skip
    fixed = list_fixed_settings(override_settings(RunConfig(), settings))
    assert fixed["data.options.schema.fields"] == [{"name": "test"}]
    sections = {"model", "embedding", "dense", "data", "train"}
    assert {name.split(".")[0] for name in fixed} == sections
    assert {name for name in fixed if name.startswith("data.")} == {
        "data.name", "data.last_batch", "data.options.rows", "data.options.schema.fields", "data.options.schema.threads"
    }  # fmt: skip
    assert {name for name in fixed if name.startswith(("train.", "dense."))} == {
        "train.batch_size", "train.seed", "train.progressive", "dense.optimizer",
            "train.codistill.weight", "train.codistill.every_steps", "train.codistill.burn_in_steps",
    }  # fmt: skip
    models = {f"model.{name}" for name in ModelConfig.model_fields} - {
        "model.compile",
        "model.towers",
    }
    assert {name for name in fixed if name.startswith("model.")} == models
    rest = {name.removeprefix("embedding.") for name in fixed if name.startswith("embedding.")}
    assert {name for name in rest if not name.startswith(("admission.", "eviction.", "tables."))} == {
        "optimizer", "init_scale", "dtype", "master", "pooling", "wide.optimizer", "wide.init_scale",
        "by_table.item.optimizer", "by_table.item.init_scale",
    }  # fmt: skip
    assert rest >= {"tables.user.eviction.max_rows", "admission.updates", "eviction.max_rows"}
    towers = override_settings(RunConfig(), {"model.towers": 2, "model.tower_dim": 4})
    assert list_fixed_settings(towers)["model.towers"] == 2


def test_a_long_setting_is_compared_by_its_digest():
    def digest(texts):
        options = {"data.options.schema": {"vocabulary": texts}}
        fixed = list_fixed_settings(override_settings(RunConfig(), options))
        return fixed["data.options.schema.vocabulary"]

    texts = [f"text {i}" for i in range(1000)]
    assert digest(texts) == digest(list(texts)) != digest(texts[::-1])
    assert len(digest(texts)) < 100
