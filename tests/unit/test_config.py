"""Configuration: typed, validated at birth, wrong keys named with the nearest right one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config import (
    RunConfig,
    build_config,
    dump_config,
    load_config,
    override,
    parse_bytes,
)
from colonnade.errors import ConfigError
from colonnade.train.presets import PRESETS


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trian": {}}, ["trian", "train"]),
        ({"train": {"epoch": 3}}, ["train.epoch", "train.epochs"]),
        ({"plan": {"staleness": 3}}, ["plan.staleness", "plan.staleness_steps"]),
        ({"train": {"batch_size": 0}}, ["train.batch_size", "0"]),
        ({"train": {"epochs": "many"}}, ["train.epochs", "many"]),
        ({"plan": {"dram": "2 potatoes"}}, ["plan.dram", "2 potatoes", "GiB"]),
        ({"model": {"name": "transformer"}}, ["model.name", "dlrm"]),
        ({"train": 3}, ["train", "3"]),
    ],
)
def test_errors_name_the_setting_and_the_remedy(values, words):
    with pytest.raises(ConfigError) as caught:
        build_config(values)
    for word in words:
        assert word in str(caught.value)


def test_override_names_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean train\.epochs"):
        override(RunConfig(), {"train.epoch": 3})
    with pytest.raises(ConfigError, match="did you mean train"):
        override(RunConfig(), {"trian.epochs": 3})
    assert override(RunConfig(), {"train.epochs": 3}).train.epochs == 3


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
    assert parse_bytes(f"{number}{unit[0]}") == number * unit[1]
