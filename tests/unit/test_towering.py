"""Shardings in towers: what a number or a partition makes of a configuration, and what is refused."""

from __future__ import annotations

import pytest

from colonnade import Feature, Table, World
from colonnade.config.run import build_config
from colonnade.errors import ConfigError
from colonnade.hops.links import (
    CALL_MESSAGES,
    predict_saved_processor_seconds,
    tower_call_seconds,
)
from colonnade.plan.build import build_plan
from colonnade.plan.constraints import apply_towers, is_settled, shard_in_towers
from colonnade.planning.choices import apply_tower_partition
from colonnade.topology.towers import Partition

WORLD = World(num_hosts=2, ranks_per_host=2)
TABLES = [Table(name, 4, rows=rows) for name, rows in zip("abcd", (10, 40, 30, 20), strict=True)]
FEATURES = [Feature(name, name) for name in "abcd"] + [Feature("again", "a")]
PARTITION = Partition((("b", "c", "a", "again"), ("d",)))


def planned(plan, partition=None, world=WORLD, tables=TABLES):
    config = apply_towers(build_config({"plan": plan}).plan, tables, FEATURES, partition, world)
    assert is_settled(config, tables, world)
    return {table.name: str(table.sharding) for table in build_plan(tables, world, config).tables}


def test_tables_lie_in_their_towers():
    dealt = planned({"exchange": "towers"})  # a tower on each host, tables dealt in turn
    assert dealt == {
        "a": "host_wise, ranks 0 .. 1", "b": "host_wise, ranks 2 .. 3",
        "c": "host_wise, ranks 0 .. 1", "d": "host_wise, ranks 2 .. 3",
    }  # fmt: skip
    whole = planned({"exchange": "towers", "sharding": "table_wise"}, PARTITION)
    assert whole == {
        "b": "table_wise, rank 0", "c": "table_wise, rank 1", "a": "table_wise, rank 1",
        "d": "table_wise, rank 2",
    }  # fmt: skip
    alone = planned({"exchange": "towers", "towers": 4})
    assert alone == {name: f"table_wise, rank {rank}" for rank, name in enumerate("abcd")}
    own = {"exchange": "towers", "tables": {"a": {"sharding": "table_wise", "ranks": [3]}}}
    assert planned(own)["a"] == "table_wise, rank 3"
    is_open = {"exchange": "towers", "towers": 4, "tables": {"a": {"sharding": "auto"}}}
    assert planned(is_open) == alone
    assert planned({"tables": {"b": {"exchange": "towers"}}})["a"] == "row_wise, ranks 0 .. 3"


def test_a_number_of_towers_beside_exchanges_that_are_yet_to_be_chosen():
    config = build_config({"plan": {"exchange": "auto", "sharding": "auto", "towers": 4}}).plan
    assert apply_towers(config, TABLES, FEATURES, None, WORLD) is config  # choose() is told of it


def test_a_partition_of_some_features_leaves_the_other_tables():
    subset = planned({"exchange": "towers"}, Partition((("a",), ("b",))))
    assert subset["c"] == "row_wise, ranks 0 .. 3" and subset["b"] == "host_wise, ranks 2 .. 3"


def test_servers_of_a_tower_have_its_rows():
    world = World(num_hosts=2, ranks_per_host=3, servers_per_host=2)
    result = shard_in_towers(TABLES, FEATURES, 2, world, dict.fromkeys("abcd", "host_wise"))
    assert (result["a"].sharding.ranks, result["b"].sharding.ranks) == ((1, 2), (4, 5))
    with pytest.raises(ConfigError, match="tower 0 has no server for its rows"):
        shard_in_towers(TABLES, FEATURES, 3, World(ranks_per_host=3, servers_per_host=1))


@pytest.mark.parametrize(
    ("plan", "partition", "message"),
    [
        ({"exchange": "towers", "towers": 3}, None, "3 towers on 4 ranks"),
        ({"exchange": "towers", "towers": 8}, None, "8 towers on 4 ranks"),
        ({"towers": 2}, None, "no table is exchanged by towers"),
        ({"exchange": "auto", "towers": 3}, None, "3 towers on 4 ranks"),
        ({"exchange": "auto", "towers": "file"}, PARTITION, "no table is exchanged by towers"),
        ({"exchange": "towers"}, Partition((("a", "b"), ("again",))), "'a' in tower 0 and 'again'"),
        ({"exchange": "towers"}, Partition((("a",), ("x",))), "the partition is for another model"),
        ({"exchange": "towers", "tables": {"a": {"sharding": "host_wise", "ranks": [1, 2]}}}, None, "of one tower"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(plan, partition, message):
    with pytest.raises(ConfigError, match=message):
        planned(plan, partition)


def test_more_towers_than_tables_are_refused():
    with pytest.raises(ConfigError, match="4 towers for 1 tables"):
        planned({"exchange": "towers", "towers": 4}, tables=TABLES[:1])


class Collection:
    class declaration:
        tables, features = TABLES, FEATURES


def test_a_file_says_which_features_stand_together(tmp_path):
    file = tmp_path / "towers.json"
    file.write_text(PARTITION.to_json())
    config = build_config({"plan": {"exchange": "towers", "towers": str(file)}})
    sharded = apply_tower_partition(config, Collection, WORLD).plan
    assert sharded.towers == 2 and sharded.tables["d"].sharding.ranks == (2, 3)
    assert build_plan(TABLES, WORLD, sharded).towers == 2
    assert apply_tower_partition(config, Collection, World()) is config  # one rank: no towers
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"plan\.towers: .*towers\.json: .*cannot be read"):
        apply_tower_partition(config, Collection, WORLD)
    file.unlink()
    with pytest.raises(ConfigError, match=r"plan\.towers: got"):
        apply_tower_partition(config, Collection, WORLD)


def test_calls_by_towers_have_fewer_slow_messages():
    world = World(num_hosts=8, ranks_per_host=8, message_seconds=1.0, remote_message_seconds=100.0)
    assert world.call_seconds == 7 + 56 * 100
    assert tower_call_seconds(world, 8) == 7 + 7 * 100
    assert tower_call_seconds(world, 64) == world.call_seconds
    assert tower_call_seconds(world, 16) == 3 + 1 + 14 * 100  # halves of hosts


def test_processors_have_fewer_messages_in_more_calls():
    world = World(num_hosts=4, ranks_per_host=4, message_processor_seconds=1e-3)
    item = 1e-3 * 15 / (15 + CALL_MESSAGES)
    assert predict_saved_processor_seconds(world, 4) == pytest.approx(
        2 * (15 - 6 - CALL_MESSAGES) * item
    )
    turns = 2 * (15 - 9 - 2 * CALL_MESSAGES) * item
    assert predict_saved_processor_seconds(world, 4, num_chunks=2) == pytest.approx(turns)
    assert (
        predict_saved_processor_seconds(world, 16)
        == predict_saved_processor_seconds(world, 1)
        == 0.0
    )
