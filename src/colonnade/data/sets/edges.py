"""Graph of your own: a file of edges between nodes of one kind, to predict neighbours.

Users and items are nodes of two kinds: `sets/interactions.py` opens them as a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from colonnade.data.contract import Splits
from colonnade.data.counter import stream_key
from colonnade.data.graph import FAN_OUTS, open_edge_parts
from colonnade.data.interactions.columns import ITEM, USER
from colonnade.data.interactions.files import NAMES, match_columns
from colonnade.data.names import draw_parts, number_names, read_name_columns
from colonnade.errors import ConfigError

NODES = {
    "source": ("source", "src", "from", "head", "u", "node1", "id1", "follower", *NAMES[USER]),
    "target": ("target", "dst", "to", "tail", "v", "node2", "id2", "followee", "followed", "friend",
               *NAMES[ITEM]),
}  # fmt: skip
"""Columns of an edge, with their usual names in headers."""
SPLIT_KEY = stream_key(0, 41)

PRESET = {
    "model": {"name": "graphsage", "dim": 64, "temperature": 0.1},
    "embedding": {"optimizer": "adam", "lr": 0.005, "init_scale": 0.1},
    "dense": {"lr": 2e-3},
    "train": {"batch_size": 1024, "epochs": 10, "patience": 3},
}


def open_edges(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    seed: int = 0,
    fan_outs: Sequence[int] = FAN_OUTS,
    max_pairs: int | None = None,
    node_digest: str | None = None,
) -> Splits:
    """Open a graph from files of edges; the task is to predict a node's neighbours. Edges have no direction.

    path         CSV, TSV, text with tabs, blanks or any of , ; | or Parquet, with or without a header
    validation_fraction, test_fraction
                 share of the edges, drawn by `split_seed`. An edge whose node would have no training edge stays in
                 training
    columns, delimiter   as in `triples`, for the columns source and target

    `graph.open_graph` describes the other options. A repeated edge counts once, in either direction, and an edge from a
    node to itself is dropped. `Splits.notes` has the counts. Raises DataError naming file and line, and ConfigError for
    a header of users and items.
    """
    arrays, headers, notes = read_name_columns(path, NODES, columns, delimiter)
    if columns is None and len(match_columns(headers, {r: NAMES[r] for r in (USER, ITEM)}, {})) > 1:
        raise ConfigError(
            f"{path}: got the columns {' and '.join(headers)}, wanted two columns of one kind of nodes, because user 5 "
            "and item 5 would be one node. Users and items are: --data interactions --set model.name=graphsage. If "
            f"both columns name the same nodes: --set 'data.options.columns=[{','.join(headers)}]'"
        )
    names, numbers = number_names(arrays)
    num_shared = len(np.intersect1d(numbers[0], numbers[1]))
    pairs = np.sort(np.stack(numbers, 1), axis=1)
    num_rows = len(pairs)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    num_loops = num_rows - len(pairs)
    keys = pairs[:, 0] * len(names) + pairs[:, 1]
    pairs = pairs[np.sort(np.unique(keys, return_index=True)[1])]
    part_n, num_moved = draw_parts(
        [[pairs[:, 0], pairs[:, 1]]],
        (validation_fraction, test_fraction),
        stream_key(SPLIT_KEY, split_seed),
    )
    used, rows = np.unique(pairs, return_inverse=True)
    pairs = rows.reshape(-1, 2)
    parts = [torch.from_numpy(pairs[part_n == part]) for part in range(3)]
    notes.append(
        f"edges: {len(parts[0]):,} train, {len(parts[1]):,} validation, {len(parts[2]):,} test; {len(used):,} "
        f"nodes, of which {num_shared:,} are in both columns; removed {num_rows - num_loops - len(pairs):,} repeated "
        f"and {num_loops:,} from a node to itself; {num_moved:,} drawn for validation or test stay in train as the "
        "last edge of a node"
    )
    opened = open_edge_parts(
        parts,
        len(used),
        pa.array(names).to_numpy(zero_copy_only=False)[used],
        seed=seed,
        fan_outs=fan_outs,
        max_pairs=max_pairs,
        node_digest=node_digest,
    )
    return replace(opened, notes=tuple(notes))
