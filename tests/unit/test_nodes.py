"""Nodes for a target rate: each inequality binds where its numbers say so, and more memory never needs more nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade import Table
from colonnade.cli import app
from colonnade.cli.plan_nodes import (
    build_model_shape,
    compute_node_rates,
    parse_node,
    parse_node_rates,
)
from colonnade.cli.plan_tables import describe_nodes
from colonnade.errors import ConfigError
from colonnade.plan.cost.nodes import (
    PUBLISHED,
    ModelShape,
    Node,
    NodeRates,
    compute_ratio_needs,
    count_nodes,
)
from colonnade.plan.cost.prediction import FRAME_BYTES, HEADER_BYTES, SPARE

GIB = 2.0**30
MODEL = ModelShape(name="model", rows=90e9, record_bytes=516.0)
NODE = Node(dram_bytes=480 * GIB, ssd_bytes=8192 * GIB)
RATES = NodeRates(
    in_memory=250_000.0,
    tiered=155_000.0,
    dram_share=1 / 8,
    reads_per_sample=0.5,
    reads_per_second=87_000.0,
)
TARGET = 400_000.0
positive = st.floats(1e-3, 1e6)


def test_bounds_are_the_inequalities_with_their_numbers():
    needed = count_nodes(MODEL, TARGET, NODE, RATES)
    memory_bytes = 90e9 * (516 + HEADER_BYTES)
    assert needed.in_memory.bounds == pytest.approx(
        {"capacity": memory_bytes / (480 * GIB), "rate": TARGET / 250_000}
    )
    assert needed.tiered.bounds == pytest.approx(
        {
            "capacity": 90e9 * (516 + FRAME_BYTES) * SPARE / (8192 * GIB),
            "DRAM share": memory_bytes / 8 / (480 * GIB),
            "rate": TARGET / 155_000,
            "reads": TARGET * 0.5 / 87_000,
        }
    )
    assert (needed.in_memory.nodes, needed.tiered.nodes) == (94, 12)
    assert (needed.in_memory.binding, needed.tiered.binding) == ("capacity", "DRAM share")
    assert needed.ratio == needed.max_ratio == pytest.approx(94 / 12)


@pytest.mark.parametrize(
    ("model", "target", "node", "rates", "binding"),
    [
        (MODEL, TARGET, replace(NODE, ssd_bytes=2048 * GIB), RATES, "capacity"),
        (MODEL, 10 * TARGET, NODE, replace(RATES, reads_per_sample=0.1), "rate"),
        (MODEL, 10 * TARGET, NODE, RATES, "rate"),
        (MODEL, TARGET, NODE, replace(RATES, reads_per_sample=5.0), "reads"),
        (MODEL, TARGET, NODE, replace(RATES, dram_share=0.5), "DRAM share"),
    ],
)
def test_the_slowest_inequality_binds(model, target, node, rates, binding):
    needed = count_nodes(model, target, node, rates)
    assert needed.tiered.binding == binding
    assert needed.tiered.nodes - 1 < max(needed.tiered.bounds.values()) <= needed.tiered.nodes
    assert needed.ratio <= needed.max_ratio


@pytest.mark.parametrize("share", [1 / 8, 1 / 6, 1 / 4])
def test_the_range_of_the_abstract_is_that_of_a_fourth_to_an_eighth_of_rows_in_dram(share):
    """MTrainS states 4 to 8 times fewer nodes where capacity binds. Its inputs are not public: this is the range that
    the inequalities give for a published size, if rates hold with that share of rows in DRAM."""
    needed = count_nodes(PUBLISHED[-1], TARGET, NODE, replace(RATES, dram_share=share))
    assert needed.in_memory.binding == "capacity"
    # Whole nodes: at most one more than the bound.
    assert needed.in_memory.nodes / (needed.tiered.bounds["DRAM share"] + 1) <= needed.ratio
    assert 3.8 <= needed.ratio <= 8


def test_eight_times_fewer_where_the_rates_allow_it_and_what_it_needs_where_they_do_not():
    enough = count_nodes(MODEL, TARGET, NODE, replace(RATES, dram_share=1 / 10))
    assert enough.ratio >= 8
    short = count_nodes(MODEL, TARGET, NODE, RATES)
    assert short.ratio < 8
    needs = compute_ratio_needs(short, NODE, 8)
    assert needs is not None and needs.nodes == 94 // 8
    able = RATES
    able = replace(
        able, dram_share=needs.dram_share, tiered=max(155_000.0, needs.samples_per_second)
    )
    assert count_nodes(MODEL, TARGET, NODE, able).ratio >= 8
    assert "8 times fewer needs 11 node(s), each with 36,364 samples/s" in "\n".join(
        describe_nodes(short, NODE)
    )


def test_no_tiers_save_nodes_that_the_processors_need():
    needed = count_nodes(MODEL, 100 * TARGET, NODE, RATES)
    assert needed.in_memory.binding == "rate" and needed.ratio == needed.max_ratio == 1.0
    assert needed.tiered.nodes > needed.in_memory.nodes
    assert compute_ratio_needs(needed, NODE, 4) is None
    text = "\n".join(describe_nodes(needed, NODE))
    assert "nothing to save: tiers need as many nodes or more" in text
    assert "with disks of any size: at most 1.0 times fewer" in text


def test_nothing_to_save_if_the_rows_fit_in_one_node():
    needed = count_nodes(replace(MODEL, rows=1e6), 1000.0, NODE, RATES)
    assert (needed.in_memory.nodes, needed.tiered.nodes, needed.ratio) == (1, 1, 1.0)
    assert "nothing to save: the rows fit in one node's DRAM" in "\n".join(
        describe_nodes(needed, NODE)
    )


@settings(max_examples=200, deadline=None)
@given(positive, positive, positive, positive, positive, st.floats(0.01, 1), st.floats(1, 4))
def test_more_memory_never_needs_more_nodes(rows, target, dram, ssd, mapped, share, factor):
    model = replace(MODEL, rows=rows * 1e6)
    node = Node(dram_bytes=dram * GIB, ssd_bytes=ssd * GIB, mapped_bytes=mapped * GIB)
    rates = replace(RATES, dram_share=share)
    before = count_nodes(model, 1e3 * target, node, rates)
    assert before.ratio >= 1
    for name in ("dram_bytes", "ssd_bytes", "mapped_bytes"):
        larger = replace(node, **{name: factor * getattr(node, name)})
        after = count_nodes(model, 1e3 * target, larger, rates)
        assert after.tiered.nodes <= before.tiered.nodes
        assert after.in_memory.nodes <= before.in_memory.nodes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"target": 0.0}, "got 0.0, wanted a target in samples/s more than 0; give --target"),
        ({"target": float("nan")}, "got nan, wanted a target"),
        ({"model": replace(MODEL, rows=0)}, "got 0, wanted a number of rows of model"),
        ({"node": Node(dram_bytes=0.0, ssd_bytes=GIB)}, "wanted bytes of DRAM of a node"),
        ({"node": Node(dram_bytes=GIB)}, "got a node with DRAM only, wanted disks or mapped"),
        ({"node": Node(dram_bytes=GIB, ssd_bytes=-1.0)}, "got -1.0, wanted bytes of disks"),
        ({"rates": replace(RATES, tiered=300_000.0)}, "wanted tiers that are not faster"),
        ({"rates": replace(RATES, dram_share=2.0)}, "got 2.0 of the rows in DRAM, wanted at most"),
        (
            {"rates": replace(RATES, reads_per_sample=-1.0)},
            "got -1.0, wanted reads per sample of 0",
        ),
        ({"rates": replace(RATES, reads_per_second=0.0)}, "got 0.5 reads a sample from disks of 0"),
        (
            {"target": 1e308, "rates": replace(RATES, in_memory=1e-5, tiered=1e-5)},
            "got inf nodes by rate, wanted a finite number; give a lower --target",
        ),
    ],
)
def test_impossible_inputs_are_named(changed, words):
    inputs = {"model": MODEL, "target": TARGET, "node": NODE, "rates": RATES} | changed
    with pytest.raises(ConfigError, match=r"^--nodes: ") as caught:
        count_nodes(**inputs)
    assert words in str(caught.value)


def test_rows_in_mapped_memory_are_not_in_dram():
    tables = [Table("a", 4, rows=100), Table("b", 8, rows=300)]
    a, b = (table.record_bytes for table in tables)
    prediction = SimpleNamespace(
        samples_per_second=100.0, step_seconds=0.5, processor_seconds=0.5, write_seconds=0.0,
        device_seconds=0.1, all_in_memory=200.0, reads_per_sample=2.0,
        tables=[
            SimpleNamespace(name="a", tier="dram", rows_in_memory=40),
            SimpleNamespace(name="b", tier="mapped", rows_in_memory=300),
        ],
    )  # fmt: skip
    cached = [SimpleNamespace(name="a", mapped_rows=20), SimpleNamespace(name="b", mapped_rows=0)]
    planned = SimpleNamespace(prediction=prediction, plan=SimpleNamespace(tables=cached))
    rates, total = compute_node_rates(planned, tables), 100 * a + 300 * b
    assert rates.dram_share == pytest.approx(40 * a / total)
    assert rates.mapped_share == pytest.approx((20 * a + 300 * b) / total)
    node = replace(NODE, mapped_bytes=1024 * GIB)
    bounds = count_nodes(MODEL, TARGET, node, rates).tiered.bounds
    model_bytes = 90e9 * (516 + HEADER_BYTES)
    assert bounds["DRAM share"] == pytest.approx(40 * a / total * model_bytes / (480 * GIB))
    room = (60 * a + 300 * b) / total * model_bytes / (1504 * GIB)
    assert bounds["DRAM and mapped share"] == pytest.approx(room)


def test_texts_of_nodes_and_rates():
    node = parse_node("480GiB:8TiB:1TiB")
    assert node == Node(dram_bytes=480 * GIB, ssd_bytes=8192 * GIB, mapped_bytes=1024 * GIB)
    assert parse_node("1GiB") == Node(dram_bytes=GIB)
    for wrong in ("0:8TiB", "480GiB:0", "much", "1GiB:1GiB:1GiB:1GiB", ""):
        with pytest.raises(ConfigError, match=r"--host: got .* give MEMORY:SSD"):
            parse_node(wrong)
    assert parse_node_rates("2e5:1e5:0.125").dram_share == 0.125
    for wrong in ("2e5", "2e5:1e5", "a:b:c"):
        with pytest.raises(ConfigError, match=r"--node-rates: got .* give ALL:TIERED:SHARE"):
            parse_node_rates(wrong)


def test_shape_of_tables():
    small, large = Table("a", 4, rows=100), Table("b", 8, rows=300)
    shape = build_model_shape((small, large))
    total = 100 * small.record_bytes + 300 * large.record_bytes
    assert (shape.rows, shape.record_bytes) == (400, pytest.approx(total / 400))
    with pytest.raises(ConfigError, match=r"got open tables, .* not known: c; give"):
        build_model_shape((small, Table("c", 4)))


def test_command_prints_the_run_and_published_models(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    command = ["plan", "--data", "synthetic", "--set", "data.options.cardinalities=[2000,50000]"]
    nodes = [*command, "--nodes", "--target", "400000", "--node-rates", "250000:155000:0.1"]
    assert app.run_command([*nodes, "--host", "64KiB:4MiB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "given by --node-rates: 250,000 samples/s" in text and "assumed: nodes" in text
    assert all(model.name in text for model in PUBLISHED)
    assert "4 to 8 times fewer nodes" in text
    assert app.run_command([*nodes, "--host", "64KiB:4MiB", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["nodes"]
    assert values["models"][0]["model"]["name"] == "your model"
    assert values["models"][0]["ratio"] >= 8 and values["rates"]["dram_share"] == 0.1
    rates = ["--node-rates", "1:1:1"]
    Path("own.yaml").write_text("data: {name: own}")
    for wrong, words in (
        ([*command, "--nodes"], "--nodes: got no --target"),
        ([*command, "--nodes", "--target", "1"], "--nodes: got no --dram for"),
        ([*command, "--nodes", "--target", "1", "--dram", "1GiB"], "--nodes: got --dram 1 GiB for"),
        ([*nodes, "--host", "1GiB"], "--nodes: got a node with DRAM only"),
        ([*nodes, "--world", "4x2"], "--nodes: got a world of 4 hosts"),
        ([*nodes, "--table", "C1"], "--table: got a table with --nodes"),
        ([*command, *rates], "--node-rates: got 1:1:1 without --nodes"),
        (["plan", "own.yaml", *nodes[5:]], "--nodes: got a model of your own"),
    ):
        assert app.run_command(wrong) == 2
        assert words in " ".join(capsys.readouterr().err.split())
