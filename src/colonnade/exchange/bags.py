"""Exchanges of bags: lookups are sent to the ranks that own their rows, which pool them for the samples of all ranks.

Sums, or results of operators on them, are sent to the samples' ranks hop by hop; gradients take the same hops back.

    pooled      owners' sums to the samples' ranks
    partials    owners evaluate the model's first operators on the rows they have; partial results are sent, which the
                samples' ranks add up and combine (DES, Rong et al. 2020)
    towers      sums to one rank of the owners' tower, which evaluates operators of fields that the tower has whole;
                the results are sent between towers once (DMT, Luo et al. 2024)
    tower_rows  lookups go to the samples' peer in the rows' tower; it requests the rows of all its peers' lookups from
                the owners inside the tower, each row once, as ranks of a small world under `rows`, pools them and
                continues as `towers`. A row that many samples use is sent once inside a tower, not a bag for each

Per rank and step: an id per lookup out, a block of (its samples, a sender's columns) in from every sender, and such a
block of gradients out. Blocks are added in a fixed order. A requester divides by the bags' lengths for features that
pool means, so an owner need not know the bag's rows on other ranks.

Where rows are read ahead, sums are gathered inside a tower early and stored there. Operators are evaluated, and their
results sent between towers, in the step that uses them, with the weights of that step.

Legend: B samples of this rank, G samples of all ranks, M of a rank's peers, W columns of what arrives, W_o of what this
rank pools.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.errors import WorldError
from colonnade.exchange.bag_layout import (
    BagLayout,
    BagReads,
    BagsLookup,
    EvaluatedBatch,
    LastHop,
    collect_weighed_lookups,
)
from colonnade.exchange.contract import ExchangePart, LookupRequest
from colonnade.exchange.operators import RemoteEvaluation
from colonnade.exchange.prefetched import (
    export_gathered_sums,
    export_operator_inputs,
    export_sums,
    restore_gathered_sums,
    restore_operator_inputs,
    restore_prefetched_sums,
)
from colonnade.exchange.row_owner import RowOwner, gather_int32, owned_rows, reduce_next_use_codes
from colonnade.exchange.rows import RowsExchange
from colonnade.hops.message_bytes import NUM_SAMPLES
from colonnade.lookup.contract import (
    NO_TENSORS,
    REASSOCIATED,
    BatchInfo,
    Caller,
    PinnedRows,
    RowGradients,
    RowSource,
)
from colonnade.lookup.layout import (
    build_lookup_columns,
    collect_next_use,
    explain_range_error,
    list_lookup_outputs,
)
from colonnade.lookup.outputs import CPU
from colonnade.ops.memory import empty
from colonnade.store.contract import RowView
from colonnade.wire.coding import Coding
from colonnade.wire.id_distribution import exchange_messages, traffic_tag_of
from colonnade.wire.owner_map import OwnerMap
from colonnade.wire.packing import ReceivedBags, pack_bag_lookups, unpack_bag_lookups
from colonnade.wire.tower_transport import PeerTransport, TowerTransport
from colonnade.wire.transport import PendingTransfer


@dataclass(frozen=True, slots=True)
class BagHops:
    """Hops of values from the ranks that pool rows to the samples' ranks."""

    last: LastHop
    """Hop before which operators are evaluated."""
    inner: Sequence[TowerTransport] = ()
    """Earlier hops, in this order."""
    rows_in_tower: RowsExchange | None = None
    """Exchange inside the tower, for rows that this rank pools for `peers`."""
    peers: Sequence[int] = ()


class BagsExchange(ExchangePart[BagsLookup]):
    """Exchange of bags, on one rank."""

    def __init__(
        self,
        layout: BagLayout,
        owner_map: OwnerMap,
        mesh: Mesh,
        hops: BagHops,
        coding: Coding,
        evaluation: RemoteEvaluation,
    ) -> None:
        """owner_map: ranks that pool each table's lookups."""
        self.layout = layout
        self.owner_map = owner_map
        self.mesh = mesh
        self.declaration = layout.declaration
        self.outputs = layout.outputs
        self.inner_hops = hops.inner
        self.last_hop = hops.last
        self.operators = evaluation.operators
        self.attention = evaluation.attention
        self.keeps_pooled = evaluation.keeps_pooled
        self.waits_in_tower = evaluation.waits_in_tower
        self.tower = hops.rows_in_tower
        self.peers = hops.peers
        self.num_ranks = mesh.num_ranks
        self.share = layout.shares[mesh.rank]
        sums = layout.pooled_declaration(mesh.rank)
        self.owner = RowOwner(sums, build_lookup_columns(sums), list_lookup_outputs(sums), mesh)
        self.dtype = self.declaration.compute_dtype
        exact = coding.describe_exactness(REASSOCIATED, self.declaration.dtype, self.num_ranks)
        num_roundings = self.last_hop.transport.num_roundings
        self.exactness = replace(exact, max_error=num_roundings * exact.max_error)
        used = {key for output in self.outputs for key, _ in output.column_starts}
        self._only_queries = [
            layout.arriving.slice_of(i) for i in layout.evaluated.queries if i not in used
        ]

    # ---- ids

    def build_requests(self, batch: Batch, caller: Caller) -> LookupRequest:
        layout = self.layout
        owner = self.owner
        lookups = collect_weighed_lookups(batch, layout)
        codes = None
        if batch.next_use is not None:
            codes = collect_next_use(batch, self.declaration, layout.requested)
        try:
            if self.num_ranks == 1:
                plan = _native.make_plan(lookups.native, owner.table_rows, owner.one_owner)
                next_use = None if codes is None else reduce_next_use_codes(codes, plan)
                return LookupRequest([], lookups, plan, next_use)
            messages = pack_bag_lookups(lookups, owner.table_rows, self.owner_map, codes)
        except IndexError as error:
            raise explain_range_error(error, self.declaration, layout.requested.features) from None
        if self.tower is not None:  # other ranks than peers need the number of samples alone
            size = np.frombuffer(NUM_SAMPLES.pack(batch.size), np.uint8)
            messages = [
                message if rank in self.peers else size for rank, message in enumerate(messages)
            ]
        return LookupRequest(messages, lookups, None)

    def serve_requests(
        self, request: LookupRequest, received_requests: Sequence[np.ndarray], batch: BatchInfo
    ) -> BagsLookup:
        """Implement the contract. Collective inside the tower where rows are requested once a tower."""
        if self.tower is not None:
            return self._request_rows_for_peers(self.tower, request, received_requests, batch)
        plan = request.plan
        next_use = request.codes
        lookups = request.lookups
        sizes = [batch.size]
        if self.num_ranks > 1:
            received_bags = self._unpack_lookups(received_requests)
            lookups = received_bags.lookups
            sizes = received_bags.sizes
            plan = self.owner.plan_lookups(lookups, self.owner.one_owner)
            codes = received_bags.codes
            next_use = None if codes is None else reduce_next_use_codes(codes, plan)
        assert plan is not None
        owned = owned_rows(plan, next_use)
        return BagsLookup(batch, lookups, plan, owned, plan, sizes=sizes, requested=request.lookups)

    def _request_rows_for_peers(
        self,
        tower_exchange: RowsExchange,
        request: LookupRequest,
        received_requests: Sequence[np.ndarray],
        batch: BatchInfo,
    ) -> BagsLookup:
        """Request the rows of all peers' lookups inside the tower. Collective there."""
        received_bags = self._unpack_lookups([received_requests[rank] for rank in self.peers])
        size_by_peer = dict(zip(self.peers, received_bags.sizes, strict=True))
        sizes = [
            size_by_peer[rank] if rank in size_by_peer else _read_batch_size(rank, message)
            for rank, message in enumerate(received_requests)
        ]
        plan = self.owner.plan_lookups(received_bags.lookups, tower_exchange.owner_map.num_owners)
        codes = (
            None
            if received_bags.codes is None
            else reduce_next_use_codes(received_bags.codes, plan)
        )
        messages: list[np.ndarray] = []
        if tower_exchange.num_ranks > 1:
            requests = tower_exchange.pack_row_requests(plan, codes)
            (messages,), _ = exchange_messages([requests], tower_exchange.mesh, 0.0, batch.channel)
        inner = tower_exchange.serve_requests(
            LookupRequest(messages, received_bags.lookups, plan, codes),
            messages,
            replace(batch, size=sum(received_bags.sizes)),
        )
        return BagsLookup(
            batch,
            received_bags.lookups,
            plan,
            inner.owned,
            inner.owner_plan,
            sizes=sizes,
            requested=request.lookups,
            inner=inner,
        )

    def _unpack_lookups(self, rank_messages: Sequence[np.ndarray]) -> ReceivedBags:
        """Join received lookups into one batch. Raises WorldError."""
        owner = self.owner
        return unpack_bag_lookups(
            rank_messages,
            owner.lookup_columns,
            owner.table_rows,
            self.owner_map,
            self.mesh.rank,
            self.dtype,
        )

    def resolve_slots(self, lookup: BagsLookup, row_views: Sequence[RowView]) -> None:
        """Find the slot of each lookup, or of each row requested from this rank. Local, any thread."""
        if self.tower is not None and lookup.inner is not None:
            lookup.inner.pinned = lookup.pinned
            self.tower.resolve_slots(lookup.inner, row_views)
            return
        slots = lookup.slots
        lookup.pinned = PinnedRows(slots, gather_int32(slots, lookup.owner_plan.inverse))

    # ---- values

    def fetch(self, lookup: BagsLookup, row_source: RowSource) -> None:
        """Begin to send values. Rows are pooled before it returns; results of attention have arrived and are merged by
        then."""
        evaluation = lookup.evaluation
        if self.operators is not None:
            self.operators.check_output_shapes()
            lookup.weight_versions = self.operators.versions()
        block = empty(sum(lookup.sizes), 0, dtype=self.dtype)
        if self.share.order:
            pooled = self._pool_own_rows(lookup, row_source)
            block = pooled.pop(0) if self.share.columns.dims else block
            evaluation.sequence_rows = pooled
        if self.keeps_pooled and not lookup.batch.is_evaluated:
            evaluation.pooled = block
        self._send_pooled_sums(lookup, block)
        if self.attention:
            self._attend_to_sequences(lookup)

    def _pool_own_rows(self, lookup: BagsLookup, row_source: RowSource) -> list[Tensor]:
        """Return, for the samples that this rank serves, sums of its fields (G, W_o) if it has any, and the rows of
        each sequence."""
        if self.tower is not None and lookup.inner is not None:
            lookup.inner.pinned = lookup.inner.pinned or lookup.pinned
            self.tower.fetch(lookup.inner, row_source)
            return [tensor.to(CPU) for tensor in self.tower.pooled(lookup.inner)]
        by_request = lookup.request_slots(row_source)
        if by_request is None:
            by_request = gather_int32(row_source.rows, lookup.owner_plan.inverse)
        kernels = self.owner.select_kernels(row_source.views)
        locations = kernels.locate_rows(lookup.lookups, row_source.views, by_request)
        into = {}
        if kernels is self.owner.native and self.share.columns.dims:
            shape = sum(lookup.sizes), self.share.columns.width
            into = {0: self.mesh.allocate_send_buffer(math.prod(shape), self.dtype).view(shape)}
        return [tensor.to(CPU) for tensor in kernels.pool(lookup.lookups, locations, into)]

    def _send_pooled_sums(self, lookup: BagsLookup, pooled_sums: Tensor) -> None:
        """Send this rank's block of sums over all hops, or only up to the last one where values wait for their use."""
        sizes = lookup.sizes
        tag = traffic_tag_of(lookup.batch.channel, "fetch")
        blocks: Iterable[Tensor] = [pooled_sums]
        if isinstance(self.last_hop.transport, PeerTransport) and not self.inner_hops:
            blocks = self.last_hop.transport.split_by_chunk(pooled_sums, sizes)
        for hop in self.inner_hops:
            blocks = hop.receive_values(hop.send_values(blocks, sizes, tag), sizes)
        if self.waits_in_tower and not lookup.batch.is_evaluated:
            lookup.evaluation.gathered = list(blocks)
            return
        self._begin_last_hop(lookup, blocks)

    def _begin_last_hop(self, lookup: BagsLookup, pooled_blocks: Iterable[Tensor]) -> None:
        """Evaluate operators, and send their results over the last hop."""
        last = self.last_hop
        tag = traffic_tag_of(lookup.batch.channel, "fetch")
        if self.operators is not None:
            lookup.evaluation.partials = []
            record = None if lookup.batch.is_evaluated else lookup.evaluation.partials
            pooled_blocks = self.operators.build_partial_messages(
                pooled_blocks, last.columns, last.sent, record
            )
        lookup.reads = BagReads(last.transport.send_values(pooled_blocks, lookup.sizes, tag))

    def _attend_to_sequences(self, lookup: BagsLookup) -> None:
        """Attend to sequences on the ranks of their rows. Collective; waits for the queries, which are sent there."""
        sizes = lookup.sizes
        evaluation = lookup.evaluation
        tag = traffic_tag_of(lookup.batch.channel, "fetch")
        is_trained = not lookup.batch.is_evaluated
        total = self.receive_pooled_sums(lookup)
        arriving = self.layout.arriving
        evaluation.attended = {}
        for name, attention in self.attention.items():
            dim = self.declaration.fields[attention.sequence].dim
            rows = total.new_zeros(0, dim)
            lengths = torch.zeros(0, dtype=torch.int64)
            if attention.has_rows:
                number = self.share.sequences.index(attention.sequence)
                rows = evaluation.sequence_rows[number].detach()
                feature = self.declaration.fields[attention.sequence].feature
                offsets = lookup.lookups.bags[self.share.features.index(feature)]
                lengths = (
                    torch.ones(sum(sizes), dtype=torch.int64) if offsets is None else offsets.diff()
                )
            query = total[:, arriving.slice_of(attention.query)].contiguous()
            attended = attention.attend_to_remote_rows(query, rows, lengths, sizes, tag, is_trained)
            total[:, arriving.slice_of(name)] = attended.merged.detach()
            if is_trained:
                evaluation.attended[name] = attended
        lookup.reads = BagReads(total=total)

    def receive_pooled_sums(self, lookup: BagsLookup) -> Tensor:
        """Return sums over senders, (B, W) of the compute dtype, in a tensor that the caller may change. Collective,
        the first time, where values waited in a tower."""
        if lookup.reads is None:
            assert self.operators is not None and lookup.evaluation.gathered is not None
            lookup.weight_versions = self.operators.versions()
            self._begin_last_hop(lookup, lookup.evaluation.gathered)
        reads = lookup.reads
        assert reads is not None
        if reads.total is not None:
            return reads.total.clone()
        assert reads.pending is not None
        reads.pending.wait()
        total = empty(lookup.batch.size, self.layout.arriving.width, dtype=self.dtype)
        self.last_hop.transport.add_received_values(reads.pending, total)
        return total

    def pooled(
        self, lookup: BagsLookup, out_tensors: Mapping[int, Tensor] = NO_TENSORS
    ) -> list[Tensor]:
        total = self.receive_pooled_sums(lookup)
        self._divide_by_bag_lengths(lookup, total)
        dtype = self.declaration.output_dtype
        tensors = []
        for i, (output, runs) in enumerate(zip(self.outputs, self.layout.runs, strict=True)):
            is_all = len(runs) == 1 and runs[0].width == total.shape[1] and len(self.outputs) == 1
            if is_all and i not in out_tensors:
                tensors.append(total.to(dtype))
                continue
            tensor = (
                out_tensors[i] if i in out_tensors else empty(len(total), output.width, dtype=dtype)
            )
            for run in runs:
                tensor[:, run.block_columns] = total[:, run.whole_columns]
            tensors.append(tensor)
        return tensors

    def _divide_by_bag_lengths(self, lookup: BagsLookup, pooled_sums: Tensor) -> None:
        """Divide sums by the lengths of their bags, in place, where the samples' rank does that."""
        requested = lookup.requested
        assert requested is not None
        for division in self.layout.divisions:
            if (offsets := requested.bags[division.column]) is not None:
                pooled_sums[:, division.columns] /= division.compute_divisors(
                    offsets, pooled_sums.dtype
                )

    # ---- gradients

    def begin_push(
        self, lookup: BagsLookup, output_gradients: list[Tensor] | None, step: int, batch_index: int
    ) -> Callable[[], RowGradients]:
        total = self._compute_gradients_of_sums(lookup, output_gradients)
        last = self.last_hop.transport
        pending = last.send_gradients(total, lookup.sizes, step, batch_index)
        return partial(self._receive_own_row_gradients, lookup, pending, step, batch_index)

    def _receive_own_row_gradients(
        self, lookup: BagsLookup, pending_transfer: PendingTransfer, step: int, batch_index: int
    ) -> RowGradients:
        """Receive gradients over all hops and through the operators; return those of the rows that this rank pooled."""
        last = self.last_hop
        sizes = lookup.sizes
        evaluation = lookup.evaluation
        blocks: Iterable[Tensor] = last.transport.receive_gradients(pending_transfer, sizes)
        if self.operators is not None:
            blocks = self.operators.backpropagate_messages(
                blocks, last.sent, last.columns, evaluation.partials
            )
        for hop in reversed(self.inner_hops):
            blocks = hop.receive_gradients(hop.send_gradients(blocks, sizes), sizes)
        received, *others = blocks  # several where rows are pooled for peers, the last chunk first
        if others:
            received = torch.cat([received, *others][::-1])
        if not self.share.order:
            none = torch.empty(0, dtype=torch.int32)
            source = _native.RowGradients(received.data_ptr(), none, self.owner.native.compute)
            ends = torch.zeros(1, dtype=torch.int32)
            return RowGradients(lookup.slots, lookup.owned.offsets, ends, none, source)
        if self.tower is not None and lookup.inner is not None:
            return self.tower.begin_push(lookup.inner, [received], step, batch_index)()
        sequence_gradients = [
            evaluation.row_gradients[i].contiguous() for i in self.share.sequences
        ]
        pooled = [received] if self.share.columns.dims else []
        return self.owner.native.gradients_from_outputs(lookup, [*pooled, *sequence_gradients])

    def _compute_gradients_of_sums(
        self, lookup: BagsLookup, output_gradients: list[Tensor] | None
    ) -> Tensor:
        """Return gradients of the sums, (B, W) of the compute dtype. Collective where there is attention."""
        total = empty(lookup.batch.size, self.layout.arriving.width, dtype=self.dtype)
        if output_gradients is None:
            total.zero_()
        else:
            for gradient, runs in zip(output_gradients, self.layout.runs, strict=True):
                for run in runs:
                    target = total[:, run.whole_columns]
                    source = gradient[:, run.block_columns]
                    target.copy_(source) if run.is_first else target.add_(source)
        requested = lookup.requested
        assert requested is not None
        for division in self.layout.divisions:
            if (offsets := requested.bags[division.column]) is not None:
                divisors = division.compute_divisors(offsets, self.dtype)
                total[:, division.columns] *= 1 / divisors
        self._add_attention_gradients(lookup, total)
        return total

    def _add_attention_gradients(self, lookup: BagsLookup, sum_gradients: Tensor) -> None:
        """Add gradients of queries to `sum_gradients` (B, W); store those of this rank's rows. Collective if there is
        attention."""
        evaluation = lookup.evaluation
        arriving = self.layout.arriving
        for columns in self._only_queries:
            sum_gradients[:, columns] = 0.0
        evaluation.row_gradients = {}
        for name, attention in self.attention.items():
            gradient = sum_gradients[:, arriving.slice_of(name)].contiguous()
            query_gradient, sequence_gradients = attention.exchange_gradients(
                evaluation.attended[name], gradient, lookup.sizes
            )
            sum_gradients[:, arriving.slice_of(attention.query)] += query_gradient
            before = evaluation.row_gradients.get(attention.sequence)
            evaluation.row_gradients[attention.sequence] = (
                sequence_gradients if before is None else before + sequence_gradients
            )

    def drop(self, lookup: BagsLookup) -> None:
        if lookup.reads is not None and lookup.reads.pending is not None:
            lookup.reads.pending.wait()
        lookup.reads = None
        lookup.evaluation = EvaluatedBatch()
        if self.tower is not None and lookup.inner is not None:
            self.tower.drop(lookup.inner)

    # ---- checkpoints

    def has_values(self, lookup: BagsLookup) -> bool:
        return lookup.reads is not None or lookup.evaluation.gathered is not None

    def prefetched(self, lookup: BagsLookup) -> dict[str, Tensor]:
        layout = self.layout
        rank = self.mesh.rank
        if self.keeps_pooled:
            return export_operator_inputs(lookup, layout, rank)
        if self.waits_in_tower:
            return export_gathered_sums(lookup, layout, self.last_hop.columns, self.peers)
        return export_sums(self.receive_pooled_sums(lookup), layout)

    def restore(
        self, lookup: BagsLookup, rank_prefetched_values: Sequence[Mapping[str, Tensor]]
    ) -> None:
        layout = self.layout
        rank = self.mesh.rank
        if self.keeps_pooled:
            assert self.operators is not None
            restore_operator_inputs(
                lookup, layout, rank, self.operators, self.last_hop, rank_prefetched_values
            )
        elif self.waits_in_tower:
            restore_gathered_sums(lookup, layout, self.last_hop, self.peers, rank_prefetched_values)
        else:
            widths = self.owner.widths
            lookup.reads = BagReads(
                total=restore_prefetched_sums(lookup, layout, rank, widths, rank_prefetched_values)
            )


def _read_batch_size(rank: int, message: np.ndarray) -> int:
    """Return the size of the batch of a rank that is no peer. Raises WorldError."""
    if len(message) != NUM_SAMPLES.size:
        raise WorldError(
            f"rank {rank} sent {len(message)} bytes, wanted {NUM_SAMPLES.size} that tell the size of its batch; all "
            "ranks must run one version of Colonnade on one model"
        )
    return int(NUM_SAMPLES.unpack(message.tobytes())[0])
