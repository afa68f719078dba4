"""Cost of all tables under exchange `partials` together: partials belong to consumers, not to single tables.

The rules are those of `exchange/operator_cut.py` and `lookup/views.py`, on numbers alone. If all tables of a consumer's
fields are under `partials`, every rank with rows of one of them may send the consumer's partial. If it adds up, some of
these tables may be cut by columns or replicated: the samples' ranks add their fields. All other fields are sent as
under `pooled`. If a consumer reads a sequence, the owners of its rows compute partials, and first
receive the queries. The bytes of a partial are divided among the tables on the sending rank by the widths of the fields
that it replaces: exact for a table if all tables are on the same ranks; the sum over tables is always exact.

Legend: N ranks, T tables, F fields, C consumers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import ConfigError
from colonnade.exchange.operator_cut import choose_cheapest_set
from colonnade.hops.kinds import CHANNELS
from colonnade.hops.links import Links
from colonnade.hops.load import TableLoad
from colonnade.plan.cost.consumers import (
    ConsumerLoad,
    FieldLoad,
    ModelLoad,
    build_split_bag_error,
)
from colonnade.plan.cost.step_time import interpolate_row_seconds
from colonnade.plan.measure.device import RowRate
from colonnade.topology.sharding import Sharding

Floats = NDArray[np.float64]

WIDTH = 16
"""Width, in floats, of the rows with the gather rate that is assumed for the floats of a partial."""


@dataclass(frozen=True, slots=True)
class PartialsTraffic:
    """Bytes and floats that all tables under `partials` send together, per sample."""

    consumers: tuple[int, ...]
    """Indices of the consumers that owners evaluate."""
    values: Floats
    """Bytes that an owner sends, (N,)."""
    gradients: Floats
    """Bytes that an owner receives, (N,)."""
    floats: Floats
    """Number of floats that an owner sends, (N,)."""
    evaluated: Floats
    """Number of floats of fields that an owner computes partials of, (N,)."""
    host_summed: tuple[float, float]
    """Bytes of values, and of gradients, to which every rank contributes and that hosts sum before sending. Only
    `floats` includes them."""
    weight_bytes: Mapping[int, float]
    """Bytes of lookup weights that a rank's batch sends to all owners of a table that divide sums, by table."""
    queries: Floats
    """Bytes of queries that an owner receives before it evaluates; it returns as many bytes of gradients. (N,)."""
    query_rounds: int = 0
    """Number of consumers with queries; their rounds follow one another."""
    split_bag: tuple[str, int] | None = None
    """Operator that needs whole bags, and a field with bags on several ranks: invalid; None: no such operator."""
    unsendable_field: int | None = None
    """Sequence field with rows that would have to be sent, which `partials` cannot do: invalid; None: no such field."""


@dataclass(frozen=True, slots=True)
class TablePartialBytes:
    """Part of one table in the bytes under `partials`, per sample."""

    direct: float
    """Bytes that all its owners send."""
    host_summed: float
    """Bytes to which every rank contributes and that its host sums."""


class Partials:
    """Cost model of `partials` for one model.

    Arguments of the methods: owners (T, N), part of a table's columns that a rank owns rows of; all 0 for tables that
    are not under `partials`. apart (T,): tables whose fields only the samples' ranks can evaluate, under any exchange
    (`is_merged_at_samples`); None: those of `owners` that are cut by columns."""

    def __init__(self, model: ModelLoad, num_tables: int, *, adds_in_host: bool = False) -> None:
        self.model = model
        self.num_tables = num_tables
        self.adds_in_host = adds_in_host
        self.tables = np.array([field.table for field in model.fields], dtype=np.int64)
        self.dims = np.array([field.dim for field in model.fields], dtype=np.float64)
        self.value_bytes = np.array([field.value_bytes for field in model.fields])
        self.gradient_bytes = np.array([field.gradient_bytes for field in model.fields])
        self.reads = np.zeros((len(model.consumers), len(model.fields)), dtype=bool)
        for c, consumer in enumerate(model.consumers):
            self.reads[c, list(consumer.fields)] = True
        # Fields that a consumer's partial replaces, and fields that are its queries.
        self.replaces = self.reads.copy()
        self.is_query = np.zeros_like(self.reads)
        for c, consumer in enumerate(model.consumers):
            if consumer.sequences:
                self.replaces[c] = False
                self.replaces[c, list(consumer.sequences)] = True
                self.is_query[c] = self.reads[c] & ~self.replaces[c]
        rows = [field.per_sample for field in model.fields]
        self.is_sequence = np.array([count is not None for count in rows], dtype=bool)
        self.rows = np.array([1.0 if count is None else count for count in rows])

    @cached_property
    def is_read(self) -> NDArray[np.bool_]:
        """Fields that any consumer reads, (F,)."""
        return np.asarray(self.reads.any(0))

    def tables_of(self, consumer: ConsumerLoad) -> tuple[int, ...]:
        """Return the tables that a consumer reads, ascending."""
        return tuple(sorted({self.model.fields[f].table for f in consumer.fields}))

    def mark_remote_fields(self, owners: Floats) -> NDArray[np.bool_]:
        """Return the fields that owners have whole values or rows of, (F,)."""
        return np.asarray(((owners > 0).any(1) & ~is_cut(owners))[self.tables])

    def find_evaluators(self, c: int, owners: Floats) -> NDArray[np.bool_]:
        """Return the ranks that compute the partials of consumer c, (N,)."""
        fields = self.replaces[c] & self.mark_remote_fields(owners)
        return np.asarray((owners[sorted(set(self.tables[fields].tolist()))] > 0).any(0))

    @cached_property
    def attention_tables(self) -> frozenset[int]:
        """Sequence tables with rows that need not be sent, because owners can evaluate all their consumers."""
        is_remote = np.array([bool(c.sequences and c.width) for c in self.model.consumers])
        others = (
            self.reads[~is_remote].any(0) if len(is_remote) else np.zeros_like(self.is_sequence)
        )
        free = self.is_sequence & self.is_read & ~others
        return frozenset(self.tables[free].tolist()) - frozenset(
            self.tables[self.is_sequence & ~free].tolist()
        )

    @cached_property
    def table_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of tables that may gain from `partials` together: those of each candidate consumer, and all these."""
        groups = [self.tables_of(consumer) for consumer in self.model.partial_candidates]
        union = tuple(sorted({t for tables in groups for t in tables}))
        return tuple(dict.fromkeys([*groups, union])) if union else ()

    @cached_property
    def whole_bag_tables(self) -> frozenset[int]:
        """Tables with rows that must be on one rank for the partial of a consumer."""
        fields = self.model.fields
        return frozenset(
            fields[f].table
            for consumer in self.model.partial_candidates
            for f in consumer.fields
            if f in consumer.whole_bags and fields[f].has_bags
        )

    def select_remote_consumers(
        self, owner_shares: Floats, is_sample_side: NDArray[np.bool_] | None = None
    ) -> tuple[int, ...]:
        """Return the indices of the consumers that owners should evaluate, so that the fewest floats are sent."""
        can_be_remote = self.mark_remote_fields(owner_shares)
        can_be_apart = (is_cut(owner_shares) if is_sample_side is None else is_sample_side)[
            self.tables
        ]
        candidates = [
            c
            for c, consumer in enumerate(self.model.consumers)
            if consumer.width is not None
            and can_be_remote[self.reads[c]].any()
            and (can_be_remote | (can_be_apart & consumer.can_be_split))[self.reads[c]].all()
        ]
        # A sequence counts as one row: whether it is sent does not depend on the choice.
        field_floats = self.dims * owner_shares.sum(1)[self.tables]
        widths = {c: self.partial_floats(c, owner_shares) for c in candidates}

        def count_floats(consumers: Sequence[int]) -> float:
            is_sent = self.mark_sent_fields(consumers, owner_shares)
            return sum(widths[c] for c in consumers) + float(field_floats[is_sent].sum())

        required = [c for c in candidates if self.model.consumers[c].sequences]
        return choose_cheapest_set(candidates, count_floats, required)

    def partial_floats(self, c: int, owners: Floats) -> float:
        """Return the floats of consumer c's partials and queries of a sample, over all owners."""
        consumer = self.model.consumers[c]
        floats = (consumer.width or 0) + consumer.query_floats
        return float(self.find_evaluators(c, owners).sum()) * floats

    def mark_sent_fields(
        self, remote_consumers: Sequence[int], owner_shares: Floats
    ) -> NDArray[np.bool_]:
        """Return the fields with values that are still sent if owners evaluate these consumers, (F,)."""
        others = np.ones(len(self.reads), dtype=bool)
        others[list(remote_consumers)] = False
        is_query = self.is_query[list(remote_consumers)].any(0)
        is_added_later = self.reads[list(remote_consumers)].any(0) & ~self.mark_remote_fields(
            owner_shares
        )
        return ~self.is_read | self.reads[others].any(0) | is_query | is_added_later

    def predict_traffic(
        self, owner_shares: Floats, is_sample_side: NDArray[np.bool_] | None = None
    ) -> PartialsTraffic:
        """Predict what all tables under `partials` send together, per sample."""
        remote = self.select_remote_consumers(owner_shares, is_sample_side)
        model = self.model
        is_sent = self.mark_sent_fields(remote, owner_shares)
        is_remote = self.mark_remote_fields(owner_shares)
        is_summed = self.mark_host_summed_tables(owner_shares)[self.tables]  # (F,)
        values = self._sum_by_table(self.value_bytes * (is_sent & ~is_summed)) @ owner_shares
        gradients = self._sum_by_table(self.gradient_bytes * (is_sent & ~is_summed)) @ owner_shares
        by_field = np.stack([self.value_bytes, self.gradient_bytes])
        host_summed = by_field[:, is_sent & is_summed].sum(1)
        floats = self._sum_by_table(self.dims * is_sent) @ owner_shares
        evaluated = np.zeros(owner_shares.shape[1])
        queries = np.zeros(owner_shares.shape[1])
        is_owned = np.asarray((owner_shares > 0).any(1))[self.tables]
        unsendable = np.flatnonzero(is_sent & self.is_sequence & is_owned)
        weight_bytes: dict[int, float] = {}
        split_bag = None
        num_owners = (owner_shares > 0).sum(1)
        weighted: dict[
            int, FieldLoad
        ] = {}  # by feature: its weights are sent once for all its fields
        for c in remote:
            consumer = model.consumers[c]
            evaluates = self.find_evaluators(c, owner_shares)
            queries = queries + consumer.query_bytes * evaluates
            if self.is_host_summed(c, owner_shares):
                host_summed += consumer.value_bytes, consumer.gradient_bytes
            else:
                values = values + consumer.value_bytes * evaluates
                gradients = gradients + consumer.gradient_bytes * evaluates
            floats = floats + (consumer.width or 0) * evaluates
            evaluated += (
                self._sum_by_table(self.dims * self.rows * (self.replaces[c] & is_remote))
                @ owner_shares
            )
            for f in filter(is_remote.__getitem__, consumer.fields):
                field = model.fields[f]
                is_split = num_owners[field.table] > 1
                if is_split and field.has_bags and f in consumer.whole_bags:
                    split_bag = consumer.name, f
                if is_split and field.added_bytes:
                    weighted[field.feature] = field
        for field in weighted.values():
            weight_bytes[field.table] = weight_bytes.get(field.table, 0.0) + field.added_bytes
        query_rounds = sum(bool(model.consumers[c].sequences) for c in remote)
        return PartialsTraffic(
            remote,
            values,
            gradients,
            floats,
            evaluated,
            (float(host_summed[0]), float(host_summed[1])),
            weight_bytes,
            queries,
            query_rounds,
            split_bag,
            int(unsendable[0]) if len(unsendable) else None,
        )

    def _sum_by_table(self, by_field: Floats) -> Floats:
        sums = np.bincount(self.tables, weights=by_field, minlength=self.num_tables)
        return sums.astype(np.float64)

    def mark_host_summed_tables(self, owners: Floats) -> NDArray[np.bool_]:
        """Return the tables with values to which every rank contributes and that hosts sum, (T,)."""
        return np.asarray((owners == 1).all(1) & self.adds_in_host)

    def predict_table_bytes(
        self, partials_traffic: PartialsTraffic, owner_shares: Floats, table_index: int
    ) -> tuple[TablePartialBytes, TablePartialBytes]:
        """Return table t's part in the bytes of values and of gradients, queries included."""
        is_sent = self.mark_sent_fields(partials_traffic.consumers, owner_shares) & (
            self.tables == table_index
        )
        is_remote = self.mark_remote_fields(owner_shares)
        own_bytes = np.array([self.value_bytes[is_sent].sum(), self.gradient_bytes[is_sent].sum()])
        is_summed = bool(self.mark_host_summed_tables(owner_shares)[table_index])
        summed = own_bytes * is_summed
        direct = own_bytes * (not is_summed) * owner_shares[table_index].sum()
        for c in partials_traffic.consumers:
            consumer = self.model.consumers[c]
            widths = self._sum_by_table(self.dims * (self.replaces[c] & is_remote))
            share = (
                widths[table_index]
                * owner_shares[table_index]
                / np.maximum(widths @ owner_shares, 1e-300)
            )
            sizes = np.array([consumer.value_bytes, consumer.gradient_bytes]) + consumer.query_bytes
            if self.is_host_summed(c, owner_shares):
                summed = summed + sizes * share.mean()
            else:
                direct = direct + sizes * share.sum()
        values, gradients = zip(direct.tolist(), summed.tolist(), strict=True)
        return TablePartialBytes(*values), TablePartialBytes(*gradients)

    def is_host_summed(self, c: int, owners: Floats) -> bool:
        """Return whether every rank contributes to the partials of consumer c and hosts sum them before sending."""
        is_attention = bool(self.model.consumers[c].sequences)
        return (
            self.adds_in_host and not is_attention and bool(self.find_evaluators(c, owners).all())
        )


def is_cut(owners: Floats) -> NDArray[np.bool_]:
    """Return the tables with rows that are cut by columns, (T,)."""
    return np.asarray(((owners > 0) & (owners < 1)).any(1))


def predict_operator_partials_seconds(
    partials_traffic: PartialsTraffic,
    column_shares: Floats,
    samples_per_rank: float,
    links: Links,
    row_rates: Sequence[RowRate],
) -> tuple[Floats, Floats]:
    """Predict the seconds of links by channel, (3, R), and of processors, (N,), for `samples_per_rank` samples of a
    rank."""
    world = links.world
    is_trainer = links.is_trainer
    link_seconds = np.zeros((len(CHANNELS), 2 * (world.num_ranks + world.num_hosts)))
    link_seconds[1] = (
        samples_per_rank * links.compute_load(is_trainer, partials_traffic.values).reverse
    )
    link_seconds[2] = (
        samples_per_rank * links.compute_load(is_trainer, partials_traffic.gradients).forward
    )
    if partials_traffic.query_rounds:
        queries = links.compute_load(is_trainer, partials_traffic.queries)
        link_seconds[1] += samples_per_rank * queries.forward
        link_seconds[2] += samples_per_rank * queries.reverse
    if any(partials_traffic.host_summed):
        sums = links.load("host_sums")
        link_seconds[1] += samples_per_rank * partials_traffic.host_summed[0] * sums.reverse
        link_seconds[2] += samples_per_rank * partials_traffic.host_summed[1] * sums.forward
    for t, size in partials_traffic.weight_bytes.items():
        owner_shares = column_shares[t] / column_shares[t].sum()
        link_seconds[0] += size * links.compute_load(is_trainer, owner_shares).forward
    remote_part = 1.0 if world.has_servers else (world.num_ranks - 1) / world.num_ranks
    transfer = (
        (
            partials_traffic.values
            + partials_traffic.gradients
            + 2 * partials_traffic.queries
            + sum(partials_traffic.host_summed)
        )
        * world.byte_processor_seconds
        * remote_part
    )
    trainer = float(transfer.sum())
    owner = world.num_trainers * transfer
    if (
        row_rates
    ):  # Trainers sum blocks; owners compute partials and their gradients for all samples.
        float_seconds = interpolate_row_seconds(row_rates, WIDTH)[0] / WIDTH
        trainer += float_seconds * float(
            partials_traffic.floats.sum() + partials_traffic.floats.max()
        )
        owner = owner + 2 * float_seconds * world.num_trainers * partials_traffic.evaluated
    return link_seconds, samples_per_rank * (trainer * is_trainer + owner)


def check_tables_with_partials(
    partials_traffic: PartialsTraffic | None,
    model_load: ModelLoad,
    table_loads: Sequence[TableLoad],
    table_choices: Sequence[tuple[str, Sharding]],
) -> None:
    """Raise ConfigError for tables that cannot be under `partials`. table_choices: (exchange, sharding) by table."""
    if partials_traffic is None:
        return
    if partials_traffic.split_bag is not None:
        consumer, f = partials_traffic.split_bag
        field = model_load.fields[f]
        kind = table_choices[field.table][1].kind
        raise build_split_bag_error(table_loads[field.table].name, kind, field.name, consumer)
    if partials_traffic.unsendable_field is not None:
        field = model_load.fields[partials_traffic.unsendable_field]
        raise ConfigError(
            f"table {table_loads[field.table].name!r}: got exchange partials for {field.name!r}, a sequence "
            "with rows that "
            "would have to be sent one by one: owners evaluate its consumer only if the tables of its queries are "
            "under partials, too, and none of them is cut by columns; set their exchange as well, or this one's to "
            "rows"
        )
