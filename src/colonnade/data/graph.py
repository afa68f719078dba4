"""Graph samples: pairs of nodes, each node with neighbours sampled hop by hop (as in GraphSAGE).

Legend: N nodes, E directed edges, B samples, P requested nodes, f a fan-out, I items.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.contract import Block, BlockSource, Column, Schema, Splits
from colonnade.data.counter import Words, random_words, stream_key
from colonnade.data.interactions.samples import (
    LOG_Q,
    HeldOutItems,
    PairSource,
    QuerySource,
    concat_bags,
    group_items_by_user,
)
from colonnade.data.interactions.splits import InteractionSplit
from colonnade.data.tensors import TensorColumns
from colonnade.errors import ConfigError, DataError

NODE = "node"
ROLES = ("query", "item")
FAN_OUTS = (10, 5)


def has_neighbours(schema: Schema) -> bool:
    """Return whether samples have the sampled neighbours of queries and items: records of these have no columns."""
    return f"{ROLES[0]}_hop1" in {column.name for column in schema.categorical}


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Adjacency of nodes 0 .. N - 1: each edge in both directions, without repetition."""

    num_nodes: int
    offsets: Tensor  # (N + 1,) int64
    edges: Tensor  # (E,) int64, ascending: node * N + neighbour

    def sample_neighbours(
        self, nodes_P: Tensor, words_Pf: Words, excluded_P: Tensor | None = None
    ) -> Tensor:
        """Sample f neighbours of each node uniformly with replacement, one per random word. Returns (P * f,).

        A node without neighbours is sampled itself. `excluded_P`: a neighbour of each node that is not sampled; -1 or
        a node that is no neighbour: none.
        """
        begins = self.offsets[nodes_P]
        degrees = self.offsets[nodes_P + 1] - begins
        num_choices = degrees
        if excluded_P is not None:
            edge = nodes_P * self.num_nodes + excluded_P
            position = torch.searchsorted(self.edges, edge)
            is_excluded = torch.searchsorted(self.edges, edge, right=True) > position
            is_excluded &= (
                excluded_P >= 0
            )  # -1 would match the previous node's edge to the last node
            num_choices = degrees - is_excluded.long()
        divisors = num_choices.clamp(min=1).numpy().astype(np.uint64)[:, None]
        step = torch.from_numpy((words_Pf % divisors).astype(np.int64))
        if excluded_P is not None:
            step += is_excluded[:, None] & (step >= (position - begins)[:, None])
        sampled = nodes_P[:, None].repeat(1, words_Pf.shape[1])
        has_choice = num_choices > 0
        sampled[has_choice] = self.edges[(begins[:, None] + step)[has_choice]] % self.num_nodes
        return sampled.flatten()


def build_graph(sources_n: Tensor, targets_n: Tensor, num_nodes: int) -> Graph:
    """Build an undirected graph from edges (n,), (n,) in any order and direction; repeated edges count once."""
    edges = torch.cat(
        [sources_n * num_nodes + targets_n, targets_n * num_nodes + sources_n]
    ).unique()
    offsets = torch.zeros(num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(edges // num_nodes, minlength=num_nodes), 0, out=offsets[1:])
    return Graph(num_nodes, offsets, edges)


def sample_hops(
    column_name: str,
    nodes_P: Tensor,
    graph: Graph,
    fan_outs: Sequence[int],
    random_key: int,
    first_sample: int = 0,
    excluded_P: Tensor | None = None,
) -> dict[str, Ids]:
    """Sample the neighbourhood of nodes: column `column_name`, the nodes, and one column for each hop, such as
    `column_name`_hop1.

    A hop has `fan_out` neighbours of every node of the previous hop, in its order. Draws depend on `random_key`, the
    hop and the node's index, counted from `first_sample`. `excluded_P`: one node for each; no hop uses the edge
    between the two, in either direction.
    """
    columns = {column_name: Ids(nodes_P)}
    size = 1
    frontier = nodes_P
    for hop, fan_out in enumerate(fan_outs, 1):
        excluded = None
        if excluded_P is not None:
            one = nodes_P.repeat_interleave(size)
            other = excluded_P.repeat_interleave(size)
            excluded = torch.where(frontier == one, other, torch.where(frontier == other, one, -1))
        size *= fan_out
        drawn = random_words(
            stream_key(random_key, hop), first_sample * size, (first_sample + len(nodes_P)) * size
        )
        frontier = graph.sample_neighbours(
            frontier, drawn.reshape(len(frontier), fan_out), excluded
        )
        columns[f"{column_name}_hop{hop}"] = Ids(frontier, torch.arange(len(nodes_P) + 1) * size)
    return columns


def open_graph(
    interactions: InteractionSplit,
    *,
    first_item: int,
    seed: int = 0,
    fan_outs: Sequence[int] = FAN_OUTS,
    max_pairs: int | None = None,
    node_digest: str | None = None,
) -> Splits:
    """Open samples of training pairs (query, item) with sampled neighbours of both.

    Queries and items are nodes of one table, "node": query q is node q, item i is node `first_item` + i. The graph has
    the training pairs only. `first_item` 0: queries and items are the same nodes, pairs exist in both directions, and
    no node is ranked for itself.

    fan_outs     neighbours sampled for each node, by hop: one number for each layer of the model
    max_pairs    maximal pairs of a query in an epoch, different ones each epoch; default: all
    node_digest  digest of the keys of queries and items that a run recorded, because their numbers are rows of its
                 table: `Splits.options` has it

    Raises ConfigError for invalid fan-outs, and for a `first_item` among the queries; DataError for other keys than the
    run had.
    """
    fan_outs = tuple(fan_outs)
    if not fan_outs or not all(isinstance(f, int) and f >= 1 for f in fan_outs):
        raise ConfigError(
            f"got fan_outs={list(fan_outs)}, wanted a number of neighbours for each hop, e.g. [10, 5]"
        )
    num_queries = len(interactions.train.counts)
    if first_item and first_item < num_queries:
        raise ConfigError(
            f"got first_item={first_item}, wanted 0, where queries and items are the same nodes, or {num_queries} or "
            "more, where they are not"
        )
    num_nodes = max(num_queries, first_item + interactions.num_items)
    queries = torch.arange(num_queries)
    pairs = interactions.train.samples, interactions.train.values.long() + first_item
    graph = build_graph(*pairs, num_nodes)
    columns = []
    for role in ROLES:
        hops = [f"{role}_hop{hop}" for hop in range(1, len(fan_outs) + 1)]
        columns += [Column(role, num_nodes, table=NODE)]
        columns += [Column(name, num_nodes, "sequence", table=NODE) for name in hops]
    schema = Schema((LOG_Q,), tuple(columns), labels=())
    excluded = [interactions.train]
    if first_item == 0:
        excluded.append(Ids(queries, torch.arange(num_queries + 1)))
    query_columns, item_columns = (
        sample_hops(role, nodes, graph, fan_outs, stream_key(seed, 4, i))
        for i, (role, nodes) in enumerate(
            zip(ROLES, (queries, torch.arange(interactions.num_items) + first_item), strict=True)
        )
    )
    catalogue = TensorColumns(dense=interactions.log_shares()[:, None], ids=item_columns)

    popularity = interactions.popularity

    def build_queries(truth: Ids, *known: Ids) -> QuerySource:
        bags = (*excluded, *known)
        return QuerySource(
            schema, interactions, query_columns, (), truth, bags, catalogue, popularity=popularity
        )

    samples = PairSource(schema, interactions, 0, max_pairs, seed)
    return Splits(
        train=NeighbourSource(schema, samples, graph, first_item, fan_outs),
        validation=build_queries(interactions.validation),
        test=build_queries(interactions.test, interactions.validation),
        options=_digest_nodes(interactions, node_digest),
    )


def _digest_nodes(interactions: InteractionSplit, recorded: str | None) -> dict[str, str]:
    """Return the option by which a run records the keys of queries and items; none if they are numbers. Raises
    DataError for other keys than those of the digest that a run recorded."""
    if interactions.user_keys is None or interactions.item_keys is None:
        return {}
    keys = json.dumps([interactions.user_keys.tolist(), interactions.item_keys.tolist()])
    digest = hashlib.sha256(keys.encode()).hexdigest()
    if recorded not in (None, digest):
        raise DataError(
            "the nodes of the graph are not those that the run was trained on, because the files were changed. Restore "
            "them, or train on them in another folder (--run)"
        )
    return {"node_digest": digest}


def open_edge_parts(
    parts: Sequence[Tensor], num_nodes: int, keys: NDArray | None = None, **options: Any
) -> Splits:
    """Open a graph of nodes of one kind from the edges (n, 2) that train, validate and test, which have no direction.

    keys: names of the nodes (N,), ascending; None: they are numbered. `options` are those of `open_graph`.
    """
    nodes = Ids(torch.arange(num_nodes))
    both_ways = [torch.cat([edges, edges.flip(1)]) for edges in parts]
    train, validation, test = (
        group_items_by_user(edges[:, 0], edges[:, 1], num_nodes) for edges in both_ways
    )
    interactions = InteractionSplit(
        train,
        validation,
        test,
        {"user": nodes},
        {"item": nodes},
        (Column("user", num_nodes), Column("item", num_nodes)),
        user_keys=keys,
        item_keys=keys,
    )
    return open_graph(interactions, first_item=0, **options)


@dataclass(frozen=True, slots=True, eq=False)
class NeighbourSource(BlockSource):
    """Source with one sample per pair: its two nodes and the hops of both.

    `Batch.key` has the items of the query, which are not its negatives. No hop uses the edge between the two nodes of
    a pair, because the model predicts this edge.
    """

    schema: Schema
    pairs: PairSource
    graph: Graph
    first_item: int
    fan_outs: tuple[int, ...]

    @property
    def interactions(self) -> InteractionSplit:
        return self.pairs.interactions

    @property
    def num_samples(self) -> int:
        return self.pairs.num_samples

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        blocks, pair_blocks = tee(blocks)
        pairs = self.pairs.read_epoch(epoch, pair_blocks)
        return (
            self._add_neighbour_columns(batch, begin, epoch)
            for batch, (begin, _) in zip(pairs, blocks, strict=True)
        )

    def _add_neighbour_columns(self, batch: Batch, first_sample: int, epoch: int) -> Batch:
        assert isinstance(batch.key, HeldOutItems) and batch.group is not None
        nodes = (batch.group, batch.key.truth.values + self.first_item)
        ids: dict[str, Ids] = {}
        for i, role in enumerate(ROLES):
            key = stream_key(self.pairs.shuffle_key, epoch, 3, i)
            ids |= sample_hops(
                role, nodes[i], self.graph, self.fan_outs, key, first_sample, nodes[1 - i]
            )
        if self.first_item:
            return replace(batch, ids=ids)
        itself = Ids(batch.group, torch.arange(batch.size + 1))
        excluded = concat_bags(batch.key.excluded, itself)
        return replace(batch, ids=ids, key=replace(batch.key, excluded=excluded))
