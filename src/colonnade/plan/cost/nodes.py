"""Number of nodes that a model needs at a target rate: all rows in DRAM, or rows in tiers.

A number of nodes is enough if it satisfies every inequality:

| name | nodes x | at least | applies to |
|---|---|---|---|
| capacity | rows that one node can store | rows of the model | both |
| rate | samples/s of one node | target | both |
| reads | reads/s of one node's disks | target x reads per sample | tiers |
| DRAM share | DRAM of one node | share of the model's bytes at which the tiered rate holds | tiers |
| DRAM and mapped share | DRAM and mapped memory of one node | the same, with the share in mapped memory | tiers |

Rates of nodes add up: links between nodes, stragglers and uneven shards are left out. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from colonnade.errors import ConfigError
from colonnade.plan.cost.prediction import FRAME_BYTES, HEADER_BYTES, SPARE

MTRAINS = (
    "MTrainS's published result: 4 to 8 times fewer nodes at its target performance (arXiv 2305.01515, abstract); "
    "the sizes of its models are not in the abstract, so they are not among the published models"
)
ADAGRAD_BYTES = 4
"""Bytes of row-wise Adagrad's state of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Size of a model's tables."""

    name: str
    rows: float
    record_bytes: float
    """Mean bytes of a row with its optimizer state."""
    source: str = ""
    """Source of a published shape, and what of it is assumed."""

    @property
    def memory_bytes(self) -> float:
        """Bytes of all rows in DRAM."""
        return self.rows * (self.record_bytes + HEADER_BYTES)

    @property
    def file_bytes(self) -> float:
        """Bytes of all rows in files, with the space that compaction needs."""
        return self.rows * (self.record_bytes + FRAME_BYTES) * SPARE


PUBLISHED = (
    ModelShape(
        name="Criteo-1TB, 16 floats",
        rows=882_774_559,
        record_bytes=4 * 16 + 8 * 16,
        source="rows, width and Adam: MLKV's configuration of PERSIA for Criteo-1TB (ml-kv/mlkv-rust)",
    ),
    ModelShape(
        name="OpenEmbedding, production",
        rows=2.1e9,
        record_bytes=4 * 64 + ADAGRAD_BYTES,
        source="2.1 billion rows of 64 floats: OpenEmbedding, ICDE 2023, its production workload; row-wise Adagrad "
        "assumed",
    ),
    ModelShape(
        name="FBGEMM, rows on SSD",
        rows=1.5e9,
        record_bytes=4 * 128 + ADAGRAD_BYTES,
        source="1.5 billion rows of 128 floats, row-wise Adagrad: defaults of FBGEMM's SSD benchmark, commit 5e40a7086",
    ),
    ModelShape(
        name="12 trillion parameters",
        rows=12e12 / 128,
        record_bytes=4 * 128 + ADAGRAD_BYTES,
        source="12 trillion parameters, trained on 16 nodes: Mudigere et al., ISCA 2022, abstract; rows of 128 floats "
        "and row-wise Adagrad assumed",
    ),
)
"""Published model shapes. Only sizes are published: target, rates and reads are those of the caller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Memory of one node for rows."""

    dram_bytes: float
    ssd_bytes: float = 0.0
    mapped_bytes: float = 0.0
    """Bytes of byte-addressable memory, which stores rows in addition to DRAM and disks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRates:
    """Speed of one node."""

    in_memory: float
    """Samples/s with all rows in DRAM."""
    tiered: float
    """Samples/s with `dram_share` of the rows in DRAM, without waiting for disks if reads are known."""
    dram_share: float
    """Fraction of the rows' bytes that are in DRAM at the tiered rate."""
    mapped_share: float = 0.0
    """Fraction of the rows' bytes that are in mapped memory at the tiered rate."""
    reads_per_sample: float | None = None
    """Number of rows that a sample reads from disks. None: not known, `tiered` includes waiting for disks."""
    reads_per_second: float = 0.0
    """Number of rows that the disks of a node read per second."""


@dataclass(frozen=True, slots=True)
class NodeCount:
    """Number of nodes, and the inequality that needs the most."""

    nodes: int
    bounds: Mapping[str, float]
    """Nodes that each inequality needs, not rounded."""
    binding: str
    """Name of the inequality with the largest bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesNeeded:
    """Nodes that a model needs at a target rate, with all rows in DRAM and with tiers."""

    model: ModelShape
    target: float
    in_memory: NodeCount
    tiered: NodeCount
    ratio: float
    """Nodes without tiers, divided by nodes with tiers; 1 if tiers save nothing, because rows may stay in DRAM."""
    max_ratio: float
    """Largest ratio that disks of any size could reach: the bound of the other inequalities."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioNeeds:
    """Needs of each node, for tiers to save a ratio of the nodes."""

    nodes: int
    samples_per_second: float
    dram_share: float
    """Fraction of the model's bytes that the DRAM of these nodes holds."""
    file_bytes: float
    """Bytes of files on each node."""


def count_nodes(model: ModelShape, target: float, node: Node, rates: NodeRates) -> NodesNeeded:
    """Count the nodes for `target` samples/s, with all rows in DRAM and with tiers.

    More memory of any kind never needs more nodes. Raises ConfigError for sizes and rates that are not positive, for a
    node without tiers, for rates that contradict each other, and for numbers of nodes that are not finite."""
    _check_inputs(model, target, node, rates)
    dram_rows = node.dram_bytes * model.rows / model.memory_bytes
    # DRAM caches rows of the disks, so its own rows do not add to theirs.
    tiered_rows = max(dram_rows, node.ssd_bytes * model.rows / model.file_bytes)
    tiered_rows += node.mapped_bytes * model.rows / model.memory_bytes
    in_memory = _count({"capacity": model.rows / dram_rows, "rate": target / rates.in_memory})
    others = {
        "DRAM share": rates.dram_share * model.memory_bytes / node.dram_bytes,
        "rate": target / rates.tiered,
    }
    if rates.mapped_share:
        # DRAM serves rows of mapped memory as fast or faster.
        share = min(1.0, rates.dram_share + rates.mapped_share)
        room = node.dram_bytes + node.mapped_bytes
        others["DRAM and mapped share"] = share * model.memory_bytes / room
    if rates.reads_per_sample is not None:
        reads = target * rates.reads_per_sample
        others["reads"] = reads / rates.reads_per_second if reads else 0.0
    tiered = _count({"capacity": model.rows / tiered_rows, **others})
    return NodesNeeded(
        model=model,
        target=target,
        in_memory=in_memory,
        tiered=tiered,
        ratio=max(1.0, in_memory.nodes / tiered.nodes),
        max_ratio=max(1.0, in_memory.nodes / _count(others).nodes),
    )


def compute_ratio_needs(needed: NodesNeeded, node: Node, ratio: float) -> RatioNeeds | None:
    """Compute what each node must do for tiers to need `ratio` times fewer nodes. None if no tiers can: fewer than
    one node, or a higher rate than with all rows in DRAM."""
    nodes = math.floor(needed.in_memory.nodes / ratio)
    if nodes < max(1.0, needed.in_memory.bounds["rate"]):
        return None
    return RatioNeeds(
        nodes=nodes,
        samples_per_second=needed.target / nodes,
        dram_share=min(1.0, nodes * node.dram_bytes / needed.model.memory_bytes),
        file_bytes=needed.model.file_bytes / nodes,
    )


def _count(bounds: Mapping[str, float]) -> NodeCount:
    for name, bound in bounds.items():
        if not math.isfinite(bound):
            raise ConfigError(
                f"--nodes: got {bound} nodes by {name}, wanted a finite number; give a lower --target, or higher rates"
            )
    binding = max(bounds, key=lambda name: bounds[name])
    # Rounding removes the error of a division that should be whole.
    return NodeCount(max(1, math.ceil(round(bounds[binding], 9))), dict(bounds), binding)


def _check_inputs(model: ModelShape, target: float, node: Node, rates: NodeRates) -> None:
    """Raise ConfigError for the first input that is not possible."""
    for what, value, action in (
        ("a target in samples/s", target, "give --target, e.g. 100000"),
        (f"a number of rows of {model.name}", model.rows, "give a model with tables"),
        (f"bytes of a row of {model.name}", model.record_bytes, "give a model with tables"),
        ("bytes of DRAM of a node", node.dram_bytes, "give --host MEMORY:SSD, e.g. 480GiB:8TiB"),
        ("samples/s in memory", rates.in_memory, "give the rate of one node"),
        ("tiered samples/s", rates.tiered, "give the rate of one node"),
        ("a share of rows in DRAM", rates.dram_share, "give a fraction, e.g. 0.125"),
    ):
        if not 0 < value < math.inf:
            raise ConfigError(f"--nodes: got {value}, wanted {what} more than 0; {action}")
    for what, value in (
        ("bytes of disks", node.ssd_bytes),
        ("bytes of mapped memory", node.mapped_bytes),
        ("a share of rows in mapped memory", rates.mapped_share),
        ("reads per sample", rates.reads_per_sample or 0.0),
        ("reads/s of disks", rates.reads_per_second),
    ):
        if not 0 <= value < math.inf:
            raise ConfigError(f"--nodes: got {value}, wanted {what} of 0 or more; correct it")
    if not node.ssd_bytes + node.mapped_bytes:
        raise ConfigError(
            "--nodes: got a node with DRAM only, wanted disks or mapped memory to compare it with; give --host "
            "MEMORY:SSD, e.g. 480GiB:8TiB"
        )
    if rates.dram_share > 1:
        raise ConfigError(
            f"--nodes: got {rates.dram_share} of the rows in DRAM, wanted at most 1; give a fraction, e.g. 0.125"
        )
    if rates.tiered > rates.in_memory:
        raise ConfigError(
            f"--nodes: got {rates.tiered:,.0f} samples/s tiered and {rates.in_memory:,.0f} in memory, wanted tiers "
            "that are not faster; measure both on one machine"
        )
    if rates.reads_per_sample and not rates.reads_per_second:
        raise ConfigError(
            f"--nodes: got {rates.reads_per_sample} reads a sample from disks of 0 reads/s, wanted a measured disk; "
            "give --dram less than the rows need, so that a disk is measured"
        )
