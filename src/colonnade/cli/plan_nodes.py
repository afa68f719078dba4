"""Inputs of `colonnade plan --nodes`: the memory and the rates of a node, the size of the model's tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from colonnade.config.run import RunConfig
from colonnade.errors import ConfigError
from colonnade.plan.cost.nodes import (
    PUBLISHED,
    ModelShape,
    Node,
    NodeRates,
    NodesNeeded,
    count_nodes,
)
from colonnade.report.formatting import format_bytes
from colonnade.run.planning import PlanningResult
from colonnade.sizes import parse_positive_bytes
from colonnade.table import Table


def count_nodes_of_models(
    config: RunConfig,
    run: Path,
    ranks: int,
    target: float | None,
    host: str,
    rates_text: str | None,
    sample: int,
) -> tuple[list[NodesNeeded], Node, NodeRates, str]:
    """Count the nodes for `target` samples/s of the run's model and of published models. Return the counts, the node,
    its rates and their source.

    ranks: of a node. rates_text: `--node-rates`; None: the rates are measured from a sample. Raises ConfigError for
    input that is wrong, before anything is measured."""
    if target is None:
        raise ConfigError(
            "--nodes: got no --target, wanted the samples/s of the whole model; give it, e.g. --target 100000"
        )
    node = parse_node(host)
    rates = None if rates_text is None else parse_node_rates(rates_text)
    shape = build_model_shape(_list_tables(config))
    if rates is None:
        _check_budget(config, shape)
    # The first count checks all inputs; the rates are measured after that.
    probe = NodeRates(in_memory=1.0, tiered=1.0, dram_share=1.0)
    count_nodes(shape, target, node, rates or probe)
    rates_source = "given by --node-rates"
    if rates is None:
        rates, rates_source = _measure_rates(config, run, ranks, sample)
    results = [count_nodes(model, target, node, rates) for model in (shape, *PUBLISHED)]
    return results, node, rates, rates_source


def parse_node(host: str) -> Node:
    """Parse a node's memory from MEMORY:SSD or MEMORY:SSD:MAPPED. Raises ConfigError for other text."""
    sizes = host.split(":")
    try:
        if len(sizes) > 3:
            raise ValueError(f"got {host!r}, wanted two or three sizes")
        dram, ssd, mapped, *_ = [*map(_parse_size, sizes), 0.0, 0.0]
    except ValueError as error:
        raise ConfigError(
            f"--host: {error}; give MEMORY:SSD or MEMORY:SSD:MAPPED, e.g. 480GiB:8TiB:1TiB"
        ) from None
    return Node(dram_bytes=dram, ssd_bytes=ssd, mapped_bytes=mapped)


def _parse_size(text: str) -> float:
    return float(parse_positive_bytes(text))


def parse_node_rates(text: str) -> NodeRates:
    """Parse ALL:TIERED:SHARE, samples/s and a fraction. Raises ConfigError for other text."""
    try:
        in_memory, tiered, share = map(float, text.split(":"))
    except ValueError:
        raise ConfigError(
            f"--node-rates: got {text!r}, wanted samples/s in memory, samples/s tiered and the share of rows in DRAM; "
            "give ALL:TIERED:SHARE, e.g. 250000:155000:0.125"
        ) from None
    return NodeRates(in_memory=in_memory, tiered=tiered, dram_share=share)


def build_model_shape(tables: Sequence[Table]) -> ModelShape:
    """Build the shape of a model from its tables. Raises ConfigError for open tables, which have no size."""
    if open_tables := [table.name for table in tables if table.rows is None]:
        raise ConfigError(
            f"--nodes: got open tables, whose number of rows is not known: {', '.join(open_tables)}; give tables with "
            "a number of rows, or use --simulate with a number of parameters"
        )
    sizes = [(table.rows or 0, table.record_bytes) for table in tables]
    rows = sum(count for count, _ in sizes)
    total = sum(count * size for count, size in sizes)
    return ModelShape(name="your model", rows=rows, record_bytes=total / max(rows, 1))


def _list_tables(config: RunConfig) -> tuple[Table, ...]:
    from colonnade.config.run import OWN
    from colonnade.run.build import build_model
    from colonnade.run.defaults import open_data
    from colonnade.run.validation import find_collection

    if config.data.name == OWN:
        raise ConfigError(
            "--nodes: got a model of your own, wanted one of the settings, because its tables are not in them; give "
            "other data, or call colonnade.plan.cost.nodes.count_nodes with the size of your tables"
        )
    config, data, _ = open_data(config, None)
    return find_collection(build_model(data.train.schema, config)).tables


def _check_budget(config: RunConfig, shape: ModelShape) -> None:
    """Raise ConfigError for a budget that holds every row, with which no tiered rate can be measured."""
    dram = config.plan.memory.dram
    if dram is None or dram >= shape.memory_bytes:
        budget = "no --dram" if dram is None else f"--dram {format_bytes(dram)}"
        raise ConfigError(
            f"--nodes: got {budget} for {format_bytes(shape.memory_bytes)} of rows, wanted less, so that tiered "
            f"training is measured; give e.g. --dram {math.ceil(shape.memory_bytes / 8)}, or --node-rates"
        )


def _measure_rates(config: RunConfig, run: Path, ranks: int, sample: int) -> tuple[NodeRates, str]:
    """Predict a node's rates from a sample that is measured on one rank of this machine. Raises ConfigError if the run
    reads nothing from disks: too short a run would count as a fast tier."""
    from colonnade.plan.measure.links import build_planned_world
    from colonnade.run.run import plan_run

    planned, tables = plan_run(config, run, build_planned_world("1"), lookups=sample)
    rates = compute_node_rates(planned, tables)
    if not rates.reads_per_sample:
        share = rates.dram_share + rates.mapped_share
        raise ConfigError(
            f"--nodes: got a run that reads no row from disks: memory of {share:.1%} of the rows holds all that it "
            "uses; give a smaller --dram, a longer run (train.epochs), or --node-rates"
        )
    rates_source = "predicted from steps and disks measured here, on one rank"
    if ranks > 1:
        rates_source += f"; processors of {ranks} ranks assumed to add up"
    rates = replace(rates, in_memory=ranks * rates.in_memory, tiered=ranks * rates.tiered)
    return rates, rates_source


def compute_node_rates(planned: PlanningResult, tables: Sequence[Table]) -> NodeRates:
    """Compute the rates of a node of one rank from its plan. Disks count by themselves: their rate includes the writes
    that go with reads. Pure."""
    prediction = planned.prediction
    batch_size = prediction.samples_per_second * prediction.step_seconds
    seconds = max(prediction.processor_seconds, prediction.write_seconds)
    sizes = {table.name: table.record_bytes for table in tables}
    total = sum((table.rows or 0) * table.record_bytes for table in tables)
    tier_bytes = {"dram": 0, "mapped": 0}
    for table in prediction.tables:
        tier_bytes[table.tier] += table.rows_in_memory * sizes[table.name]
    tier_bytes["mapped"] += sum(
        table.mapped_rows * sizes[table.name] for table in planned.plan.tables
    )
    reads = prediction.reads_per_sample
    disk_seconds = prediction.device_seconds
    return NodeRates(
        in_memory=prediction.all_in_memory,
        tiered=min(prediction.all_in_memory, batch_size / seconds),
        dram_share=tier_bytes["dram"] / total,
        mapped_share=tier_bytes["mapped"] / total,
        reads_per_sample=reads,
        reads_per_second=batch_size * reads / disk_seconds if disk_seconds else 0.0,
    )
