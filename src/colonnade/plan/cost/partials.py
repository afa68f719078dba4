"""What tables under `partials` cost together: partials belong to consumers, not to tables.

The cut is that of `exchange/operator_cut.py`, on numbers alone: a consumer whose fields' tables are all under
`partials`, none of them cut by columns, may have its partial travel, from every rank that has rows of one of them;
all other fields travel as under `pooled`. Where a consumer takes a sequence, partials come from where its rows lie, and
queries go there before. A partial's bytes are the tables' that have rows on the rank which sends it, by the widths of
the fields it stands for there: exact where all tables lie on the same ranks, and the truth in sum wherever they lie.

Legend: N ranks, T tables, F fields, C consumers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import ConfigError
from colonnade.exchange.operator_cut import sets
from colonnade.plan.cost.comm_volume import CHANNELS, row_seconds
from colonnade.plan.cost.consumers import ConsumerLoad, ModelLoad, split_bag
from colonnade.plan.cost.paths import Paths
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.measure.device import RowRate
from colonnade.topology.sharding import Sharding

Floats = NDArray[np.float64]

WIDTH = 16
"""Floats of a row whose rate is taken for each float of a partial."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Of all tables under `partials`, per sample."""

    consumers: tuple[int, ...]
    """Whose partials travel."""
    values: Floats
    """(N,) bytes that an owner sends."""
    gradients: Floats
    """(N,) bytes that it is sent back."""
    floats: Floats
    """(N,) that it sends."""
    evaluated: Floats
    """(N,) floats of fields that it takes partials of."""
    common: tuple[float, float]
    """Bytes of values that every rank has a share of, and that are added up inside a host before they leave it; and of
    their gradients. In none of the arrays before but `floats`."""
    added: Mapping[int, float]
    """By table, of a rank's batch, to all its owners: weights of lookups, where owners divide."""
    queries: Floats
    """(N,) bytes that an owner is sent before it evaluates, and sends back as gradients."""
    rounds: int = 0
    """Consumers that have such, one after the other."""
    split: tuple[str, int] | None = None
    """An operator that needs whole bags, and a field whose bags are split; None: this can be."""
    lone: int | None = None
    """A field of a sequence whose rows would have to travel, which they cannot here; None: this can be."""


@dataclass(frozen=True, slots=True)
class Share:
    """A table's, in bytes per sample."""

    straight: float
    """That all its owners send."""
    common: float
    """That every rank has a share of, and its host adds up."""


class Partials:
    """Of one model. owners (T, N) of the methods: the part of a table's columns that a rank has rows of; 0 all over for
    tables that are not under `partials`."""

    def __init__(self, model: ModelLoad, num_tables: int, *, adds_in_host: bool = False) -> None:
        self.model, self.num_tables, self.adds_in_host = model, num_tables, adds_in_host
        self.tables = np.array([field.table for field in model.fields], dtype=np.int64)
        self.dims = np.array([field.dim for field in model.fields], dtype=np.float64)
        self.value_bytes = np.array([field.value_bytes for field in model.fields])
        self.gradient_bytes = np.array([field.gradient_bytes for field in model.fields])
        self.takes = np.zeros((len(model.consumers), len(model.fields)), dtype=bool)
        for c, consumer in enumerate(model.consumers):
            self.takes[c, list(consumer.fields)] = True
        # Of fields side by side as a consumer takes them, those that its partial stands for; and queries.
        self.meant, self.asks = self.takes.copy(), np.zeros_like(self.takes)
        for c, consumer in enumerate(model.consumers):
            if consumer.sequences:
                self.meant[c] = False
                self.meant[c, list(consumer.sequences)] = True
                self.asks[c] = self.takes[c] & ~self.meant[c]
        rows = [field.per_sample for field in model.fields]
        self.is_sequence = np.array([each is not None for each in rows], dtype=bool)
        self.rows = np.array([1.0 if each is None else each for each in rows])

    @cached_property
    def taken(self) -> NDArray[np.bool_]:
        """(F,) by some consumer."""
        return np.asarray(self.takes.any(0))

    def tables_of(self, consumer: ConsumerLoad) -> tuple[int, ...]:
        return tuple(sorted({self.model.fields[f].table for f in consumer.fields}))

    def senders(self, c: int) -> list[int]:
        """Tables where partials come from."""
        return sorted(set(self.tables[self.meant[c]].tolist()))

    @cached_property
    def attended(self) -> frozenset[int]:
        """Tables of sequences whose rows need not travel: all that takes them can be evaluated where they lie."""
        able = np.array([bool(each.sequences and each.width) for each in self.model.consumers])
        others = self.takes[~able].any(0) if len(able) else np.zeros_like(self.is_sequence)
        free = self.is_sequence & self.taken & ~others
        return frozenset(self.tables[free].tolist()) - frozenset(
            self.tables[self.is_sequence & ~free].tolist()
        )

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Tables that `partials` may pay for together: those of each consumer that is able, and of all of them."""
        each = [self.tables_of(consumer) for consumer in self.model.able]
        every = tuple(sorted({t for tables in each for t in tables}))
        return tuple(dict.fromkeys([*each, every])) if every else ()

    @cached_property
    def tables_of_bags(self) -> frozenset[int]:
        """Tables whose rows must lie on one rank for some partial."""
        fields = self.model.fields
        return frozenset(
            fields[f].table
            for consumer in self.model.able
            for f in consumer.fields
            if consumer.needs_bags and fields[f].has_bags
        )

    def cut(self, owners: Floats) -> tuple[int, ...]:
        """Indices of the consumers whose partials travel."""
        mine = ((owners > 0).any(1) & ~is_cut(owners))[self.tables]  # (F,)
        able = [
            c
            for c, each in enumerate(self.model.consumers)
            if each.width is not None and each.fields and mine[self.takes[c]].all()
        ]
        if not able:
            return ()
        field_floats = self.dims * self.rows * owners.sum(1)[self.tables]
        widths = {c: self.partial_floats(c, owners) for c in able}
        must = [c for c in able if self.model.consumers[c].sequences]

        def floats(some: Sequence[int]) -> float:
            needed = self.needed(some)
            return sum(widths[c] for c in some) + float(field_floats[needed].sum())

        best = tuple(must)
        least, names = floats(best), [str(c) for c in able if c not in must]
        for some in sets(names, lambda some: floats([*must, *map(int, some)])):
            chosen = tuple(sorted([*must, *map(int, some)]))
            if (found := floats(chosen)) < least:
                best, least = chosen, found
        return best

    def partial_floats(self, c: int, owners: Floats) -> float:
        """Of a sample, from all owners."""
        consumer = self.model.consumers[c]
        each = (consumer.width or 0) + consumer.query_floats
        return float((owners[self.senders(c)] > 0).any(0).sum()) * each

    def needed(self, some: Sequence[int]) -> NDArray[np.bool_]:
        """(F,) fields whose values travel where those consumers' partials do."""
        others = np.ones(len(self.takes), dtype=bool)
        others[list(some)] = False
        return ~self.taken | self.takes[others].any(0) | self.asks[list(some)].any(0)

    def joint(self, owners: Floats) -> Joint:
        some, model = self.cut(owners), self.model
        needed, common = self.needed(some), np.zeros(2)
        sums = self.common(owners)[self.tables]  # (F,)
        values = self._by_table(self.value_bytes * (needed & ~sums)) @ owners
        gradients = self._by_table(self.gradient_bytes * (needed & ~sums)) @ owners
        for b, of_fields in enumerate((self.value_bytes, self.gradient_bytes)):
            common[b] += float(of_fields[needed & sums].sum())
        floats = self._by_table(self.dims * needed) @ owners
        evaluated, queries = np.zeros(owners.shape[1]), np.zeros(owners.shape[1])
        mine = np.asarray((owners > 0).any(1))[self.tables]
        lone = np.flatnonzero(needed & self.is_sequence & mine)
        added: dict[int, float] = {}
        split, counts = None, (owners > 0).sum(1)
        weighed: dict[
            int, int
        ] = {}  # a feature, one of its fields: it is weighed once for all of them
        for c in some:
            consumer = model.consumers[c]
            there = (owners[self.senders(c)] > 0).any(0)
            queries = queries + consumer.query_bytes * there
            if self.adds_in_host and there.all() and not consumer.sequences:
                common += consumer.value_bytes, consumer.gradient_bytes
            else:
                values = values + consumer.value_bytes * there
                gradients = gradients + consumer.gradient_bytes * there
            floats = floats + (consumer.width or 0) * there
            evaluated += self._by_table(self.dims * self.rows * self.meant[c]) @ owners
            for f in consumer.fields:
                field = model.fields[f]
                is_split = counts[field.table] > 1
                if is_split and field.has_bags and consumer.needs_bags:
                    split = consumer.name, f
                if is_split and field.added_bytes:
                    weighed[field.feature] = f
        for f in weighed.values():
            field = model.fields[f]
            added[field.table] = added.get(field.table, 0.0) + field.added_bytes
        both = float(common[0]), float(common[1])
        rounds = sum(bool(model.consumers[c].sequences) for c in some)
        return Joint(
            some, values, gradients, floats, evaluated, both, added, queries, rounds, split,
            int(lone[0]) if len(lone) else None,
        )  # fmt: skip

    def _by_table(self, of_fields: Floats) -> Floats:
        found = np.bincount(self.tables, weights=of_fields, minlength=self.num_tables)
        return found.astype(np.float64)

    def common(self, owners: Floats) -> NDArray[np.bool_]:
        """(T,) tables whose values every rank has a share of, and that are added up inside a host."""
        return np.asarray((owners == 1).all(1) & self.adds_in_host)

    def shares(self, joint: Joint, owners: Floats, t: int) -> tuple[Share, Share]:
        """Of `joint.values` and `joint.gradients`, with queries and their gradients, and of `joint.common`, what is
        table t's."""
        needed, mine = self.needed(joint.consumers), self.tables == t
        has, found = owners[t], []
        for b, of_fields in enumerate((self.value_bytes, self.gradient_bytes)):
            size = float((of_fields * needed * mine).sum())
            is_common = bool(self.common(owners)[t])
            straight, common = (0.0, size) if is_common else (size * float(has.sum()), 0.0)
            for c in joint.consumers:
                consumer = self.model.consumers[c]
                size = (consumer.value_bytes, consumer.gradient_bytes)[b] + consumer.query_bytes
                by_table = self._by_table(self.dims * self.meant[c])
                share = by_table[t] * has / np.maximum(by_table @ owners, 1e-300)
                there = (owners[self.senders(c)] > 0).any(0)
                if self.adds_in_host and there.all() and not consumer.sequences:
                    common += size * float(share.mean())
                else:
                    straight += size * float(share.sum())
            found.append(Share(straight, common))
        return found[0], found[1]


def is_cut(owners: Floats) -> NDArray[np.bool_]:
    """(T,) tables whose rows are, by columns."""
    return np.asarray(((owners > 0) & (owners < 1)).any(1))


def burden(
    joint: Joint, owners: Floats, samples: float, paths: Paths, rates: Sequence[RowRate]
) -> tuple[Floats, Floats]:
    """For so many samples of a rank: (3, R) seconds of links by channel, and (N,) of processors."""
    world, asks = paths.world, paths.asks
    links = np.zeros((len(CHANNELS), 2 * (world.num_ranks + world.num_hosts)))
    links[1] = samples * paths.of(asks, joint.values)[1]
    links[2] = samples * paths.of(asks, joint.gradients)[0]
    if joint.rounds:
        there, back, _ = paths.of(asks, joint.queries)
        links[1] += samples * there
        links[2] += samples * back
    if any(joint.common):
        links[1] += samples * joint.common[0] * paths.added[1]
        links[2] += samples * joint.common[1] * paths.added[0]
    for t, size in joint.added.items():
        links[0] += size * paths.asked(asks, owners[t] / owners[t].sum()).there
    others = 1.0 if world.has_servers else (world.num_ranks - 1) / world.num_ranks
    moved = (
        (joint.values + joint.gradients + 2 * joint.queries + sum(joint.common))
        * world.byte_processor_seconds
        * others
    )
    asker, owner = float(moved.sum()), world.num_trainers * moved
    if rates:  # blocks are added up; partials are taken, and gradients of them, for all samples
        each = row_seconds(rates, WIDTH)[0] / WIDTH
        asker += each * float(joint.floats.sum() + joint.floats.max())
        owner = owner + 2 * each * world.num_trainers * joint.evaluated
    return links, samples * (asker * asks + owner)


def check_joint(
    joint: Joint | None,
    model: ModelLoad,
    loads: Sequence[TableLoad],
    chosen: Sequence[tuple[str, Sharding]],
) -> None:
    """chosen: by table. Raises ConfigError for what tables under `partials` cannot be."""
    if joint is None:
        return
    if joint.split is not None:
        consumer, f = joint.split
        field = model.fields[f]
        kind = chosen[field.table][1].kind
        raise split_bag(loads[field.table].name, kind, field.name, consumer)
    if joint.lone is not None:
        field = model.fields[joint.lone]
        raise ConfigError(
            f"table {loads[field.table].name!r}: got exchange partials for {field.name!r}, a sequence whose rows "
            "would have to travel one by one: what takes it is evaluated where they lie only if the tables of its "
            "queries are under partials, too, and none of them is cut by columns; set their exchange as well, or "
            "this one's to rows"
        )
