"""Graph of your own: a file of edges between nodes, or between users and items, to predict neighbours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from colonnade.data.contract import Splits
from colonnade.data.counter import stream_key
from colonnade.data.graph import FAN_OUTS, open_edge_parts
from colonnade.data.interactions.columns import ITEM, USER
from colonnade.data.interactions.files import NAMES
from colonnade.data.names import assign_rows, draw_parts, number_names, read_name_columns

NODES = {
    "source": ("source", "src", "from", "head", "u", "node1", "id1", "follower"),
    "target": ("target", "dst", "to", "tail", "v", "node2", "id2", "followee", "followed"),
}
USERS = {
    "user": (*NAMES[USER], "source", "u", "from"),
    "item": (*NAMES[ITEM], "i", "v", "to"),
}
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
    bipartite: bool = False,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    seed: int = 0,
    fan_outs: Sequence[int] = FAN_OUTS,
    max_pairs: int | None = None,
    node_names: str | None = None,
    item_names: str | None = None,
) -> Splits:
    """Open a graph from files of edges; the task is to predict a node's neighbours.

    path         CSV, TSV, text with tabs, blanks or any of , ; | or Parquet, with or without a header
    bipartite    False: both columns are nodes of one kind, source and target, and edges have no direction; True: users
                 and items
    validation_fraction, test_fraction
                 share of the edges, drawn by `split_seed`. An edge whose node would have no training edge stays in
                 training
    columns, delimiter   as in `triples`, for these two columns
    node_names, item_names
                 recorded by a run: names in the order of their numbers, as JSON. Default: sorted

    `graph.open_graph` describes the other options. A repeated edge counts once (between nodes of one kind, in either
    direction), and an edge from a node to itself is dropped. `Splits.notes` has the counts. Raises DataError naming
    file and line.
    """
    roles = USERS if bipartite else NODES
    arrays, notes = read_name_columns(path, roles, columns, delimiter)
    groups = [[arrays[0]], [arrays[1]]] if bipartite else [arrays]
    names, numbers = zip(*(number_names(group) for group in groups), strict=True)
    pairs = np.stack([column for group in numbers for column in group], 1)
    num_rows = len(pairs)
    if not bipartite:
        pairs = np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1)
    num_loops = num_rows - len(pairs)
    keys = pairs[:, 0] * (pairs[:, 1].max(initial=0) + 1) + pairs[:, 1]
    pairs = pairs[np.sort(np.unique(keys, return_index=True)[1])]
    groups = [[pairs[:, 0]], [pairs[:, 1]]] if bipartite else [[pairs[:, 0], pairs[:, 1]]]
    part_n, num_moved = draw_parts(
        groups, (validation_fraction, test_fraction), stream_key(SPLIT_KEY, split_seed)
    )
    row_names = []
    for recorded, group, columns_of_group in zip(
        (node_names, item_names), names, groups, strict=False
    ):
        rows, table = assign_rows(group, np.concatenate(columns_of_group), recorded, path)
        row_names.append(rows)
        for column in columns_of_group:
            column[:] = table[column]
    parts = [torch.from_numpy(pairs[part_n == part]) for part in range(3)]
    kinds = f"{len(row_names[0]):,} {'users' if bipartite else 'nodes'}"
    if bipartite:
        kinds += f", {len(row_names[1]):,} items"
    notes.append(
        f"edges: {len(parts[0]):,} train, {len(parts[1]):,} validation, {len(parts[2]):,} test; {kinds}; removed "
        f"{num_rows - num_loops - len(pairs):,} repeated and {num_loops:,} from a node to itself; {num_moved:,} drawn "
        "for validation or test stay in train as the last edge of a node"
    )
    opened = open_edge_parts(
        parts,
        len(row_names[0]),
        num_items=len(row_names[1]) if bipartite else None,
        seed=seed,
        fan_outs=fan_outs,
        max_pairs=max_pairs,
    )
    recorded_names = dict(zip(("node_names", "item_names"), row_names, strict=False))
    options = {
        name: json.dumps(value, ensure_ascii=False) for name, value in recorded_names.items()
    }
    return replace(opened, notes=tuple(notes), options=options)
