"""Partitions of features into towers, and the ranks of each."""

from __future__ import annotations

import pytest

from colonnade.errors import ConfigError
from colonnade.topology.towers import Partition, build_round_robin_partition, list_tower_ranks
from colonnade.topology.world import World


def test_a_partition_has_each_feature_once_and_goes_through_json():
    partition = Partition((("a", "c"), ("b",)))
    assert partition.features == ("a", "c", "b") and partition.tower_of("b") == 1
    assert Partition.from_json(partition.to_json()) == partition
    assert build_round_robin_partition(["a", "b", "c"], 2) == partition


@pytest.mark.parametrize(
    "towers, message",
    [((), "without towers"), ((("a",), ()), "tower 1: got no features"), ((("a",), ("a",)), "'a'")],
)
def test_partitions_that_cannot_be(towers, message):
    with pytest.raises(ConfigError, match=message):
        Partition(towers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"towers": [["a"], []]}', "tower 1: got no features"),
        ('{"towers": [["a", "b"], ["b"]]}', "'b': got it in towers 0 and 1"),
        ('{"towers": []}', "without towers"),
    ],
)
def test_a_file_says_what_cannot_be(text, message):
    with pytest.raises(ConfigError, match=message):
        Partition.from_json(text)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"towers": 3}', '{"other": []}', '{"towers": ["ab", "c"]}']
)
def test_a_file_that_is_no_partition(text):
    with pytest.raises(ConfigError, match="cannot be read"):
        Partition.from_json(text)


def test_ranks_of_towers():
    two_hosts = World(num_hosts=2, ranks_per_host=2)
    assert list_tower_ranks(two_hosts, 1) == ((0, 1, 2, 3),)
    assert list_tower_ranks(two_hosts, 2) == ((0, 1), (2, 3))
    assert list_tower_ranks(two_hosts, 4) == ((0,), (1,), (2,), (3,))
    with pytest.raises(ConfigError, match="divides the ranks"):
        list_tower_ranks(two_hosts, 3)
    with pytest.raises(ConfigError, match="whole hosts"):
        list_tower_ranks(World(num_hosts=2, ranks_per_host=3), 3)
    with pytest.raises(ConfigError, match="0 towers"):
        build_round_robin_partition(["a"], 0)
