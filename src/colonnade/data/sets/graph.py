"""Graphs: pairs of nodes to learn from, each node with neighbours drawn for it, hop by hop (GraphSAGE's samples).

Legend: N nodes, E directed edges, B samples, P nodes asked for, f a fan-out, I items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.contract import START, Column, Position, Schema, Splits, rank_blocks
from colonnade.data.counter import Words, stream_key, words
from colonnade.data.sets.interactions import (
    LOG_Q,
    Held,
    Interactions,
    PairSource,
    QuerySource,
    join,
)
from colonnade.data.tensors import Columns, gather_ids
from colonnade.errors import ConfigError

NODE = "node"
ROLES = ("query", "item")
FAN_OUTS = (10, 5)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Nodes 0 .. N - 1 and who is beside whom, in both directions, once."""

    num_nodes: int
    offsets: Tensor  # (N + 1,) int64
    edges: Tensor  # (E,) int64, ascending: node * N + neighbour

    def draw(self, nodes_P: Tensor, words_Pf: Words, without_P: Tensor | None = None) -> Tensor:
        """(P * f,): for each node f of its neighbours, all alike and with repetition, word after word; a node that
        has none is drawn itself. `without_P`: a neighbour of each that is left out, where it is one; -1: nobody."""
        begins = self.offsets[nodes_P]
        degrees = self.offsets[nodes_P + 1] - begins
        drawn_from = degrees
        if without_P is not None:
            wanted = nodes_P * self.num_nodes + without_P
            place = torch.searchsorted(self.edges, wanted)
            is_left_out = torch.searchsorted(self.edges, wanted, right=True) > place
            is_left_out &= without_P >= 0  # else the edge of the node before to the last one
            drawn_from = degrees - is_left_out.long()
        divisors = drawn_from.clamp(min=1).numpy().astype(np.uint64)[:, None]
        step = torch.from_numpy((words_Pf % divisors).astype(np.int64))
        if without_P is not None:
            step += is_left_out[:, None] & (step >= (place - begins)[:, None])
        found = nodes_P[:, None].repeat(1, words_Pf.shape[1])
        some = drawn_from > 0
        found[some] = self.edges[(begins[:, None] + step)[some]] % self.num_nodes
        return found.flatten()


def graph_of(ones_n: Tensor, others_n: Tensor, num_nodes: int) -> Graph:
    """Of edges (n,), (n,) in any order and direction; one that is there twice counts once."""
    edges = torch.cat([ones_n * num_nodes + others_n, others_n * num_nodes + ones_n]).unique()
    offsets = torch.zeros(num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(edges // num_nodes, minlength=num_nodes), 0, out=offsets[1:])
    return Graph(num_nodes, offsets, edges)


def around(
    name: str,
    nodes_P: Tensor,
    graph: Graph,
    fan_outs: Sequence[int],
    key: int,
    first: int = 0,
    without_P: Tensor | None = None,
) -> dict[str, Ids]:
    """Columns `name`, the nodes themselves, and `name`_hop1, `name`_hop2 ...: for each node of the hop before, in its
    order, so many neighbours as the fan-out says. Draws depend on `key`, the hop and the node's number, from `first`
    on. `without_P`: a node for each, whose edge with it no hop goes, either way."""
    found, size, at = {name: Ids(nodes_P)}, 1, nodes_P
    for hop, fan_out in enumerate(fan_outs, 1):
        apart = None
        if without_P is not None:
            one, other = nodes_P.repeat_interleave(size), without_P.repeat_interleave(size)
            apart = torch.where(at == one, other, torch.where(at == other, one, -1))
        size *= fan_out
        drawn = words(stream_key(key, hop), first * size, (first + len(nodes_P)) * size)
        at = graph.draw(at, drawn.reshape(len(at), fan_out), apart)
        found[f"{name}_hop{hop}"] = Ids(at, torch.arange(len(nodes_P) + 1) * size)
    return found


def open_graph(
    found: Interactions,
    *,
    first_item: int,
    seed: int = 0,
    fan_outs: Sequence[int] = FAN_OUTS,
    max_pairs: int | None = None,
) -> Splits:
    """A sample per training pair of a query and an item, which are nodes of one table, "node": query q is node q, item
    i is node `first_item` + i. The graph is of the training pairs alone. `first_item` 0: queries and items are the same
    nodes, the pairs are there in both directions, and none is ranked for itself.

    fan_outs   neighbours drawn for each node, by hop: as many as a model has layers
    max_pairs  most pairs of a query that an epoch brings, others each epoch; default: all

    Raises ConfigError for fan-outs that are none, and items that begin among queries.
    """
    fan_outs = tuple(fan_outs)
    if not fan_outs or not all(isinstance(f, int) and f >= 1 for f in fan_outs):
        raise ConfigError(
            f"got fan_outs={list(fan_outs)}, wanted a number of neighbours for each hop, e.g. [10, 5]"
        )
    num_queries = len(found.train.counts)
    if first_item and first_item < num_queries:
        raise ConfigError(
            f"got first_item={first_item}, wanted 0, where queries and items are the same nodes, or {num_queries} or "
            "more, where they are not"
        )
    num_nodes = max(num_queries, first_item + found.num_items)
    queries = torch.arange(num_queries)
    pairs = found.train.samples, found.train.values + first_item
    graph = graph_of(*pairs, num_nodes)
    columns = []
    for role in ROLES:
        hops = [f"{role}_hop{hop}" for hop in range(1, len(fan_outs) + 1)]
        columns += [Column(role, num_nodes, table=NODE)]
        columns += [Column(name, num_nodes, "sequence", table=NODE) for name in hops]
    schema = Schema((LOG_Q,), tuple(columns), labels=())
    seen = found.train
    if first_item == 0:
        seen = join(seen, Ids(queries, torch.arange(num_queries + 1)))
    of_queries, of_items = (
        around(role, nodes, graph, fan_outs, stream_key(seed, 4, number))
        for number, (role, nodes) in enumerate(
            zip(ROLES, (queries, torch.arange(found.num_items) + first_item), strict=True)
        )
    )
    catalogue = Columns(dense=found.log_shares()[:, None], ids=of_items)

    def ranked(truth: Ids, beside: Ids) -> QuerySource:
        return QuerySource(schema, of_queries, None, truth, beside, catalogue, 0)

    samples = PairSource(schema, found, 0, max_pairs, "shuffled", seed)
    return Splits(
        train=NeighbourSource(schema, samples, graph, first_item, seen, fan_outs),
        validation=ranked(found.validation, seen),
        test=ranked(found.test, join(seen, found.validation)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class NeighbourSource:
    """A sample per pair: its two nodes, what `around` draws about each, and as `key` what the query took, which is
    no candidate of it. No hop goes from one of them to the other: a pair that is to be foretold is no edge."""

    schema: Schema
    pairs: PairSource
    graph: Graph
    first_item: int
    taken: Ids  # (queries,) bags of items
    fan_outs: tuple[int, ...]

    @property
    def found(self) -> Interactions:
        return self.pairs.found

    @property
    def num_samples(self) -> int:
        return self.pairs.num_samples

    def batches(
        self, batch_size: int, *, rank: int = 0, num_ranks: int = 1, start: Position = START
    ) -> Iterator[Batch]:
        pairs = self.pairs.batches(batch_size, rank=rank, num_ranks=num_ranks, start=start)
        blocks = rank_blocks(
            self.num_samples, batch_size, rank=rank, num_ranks=num_ranks, start=start
        )
        return (
            self._with_neighbours(batch, begin, start.epoch)
            for batch, (begin, _) in zip(pairs, blocks, strict=True)
        )

    def _with_neighbours(self, batch: Batch, begin: int, epoch: int) -> Batch:
        queries, items = batch.ids["user"].values, batch.ids["item"].values
        nodes = (queries, items + self.first_item)
        ids: dict[str, Ids] = {}
        for number, role in enumerate(ROLES):
            key = stream_key(self.pairs.shuffle_key, epoch, 3, number)
            ids |= around(
                role, nodes[number], self.graph, self.fan_outs, key, begin, nodes[1 - number]
            )
        truth = Ids(items, torch.arange(batch.size + 1))
        return replace(batch, ids=ids, key=Held(truth, gather_ids(self.taken, queries)))
