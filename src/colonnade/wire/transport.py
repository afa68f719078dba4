"""Transports of pooled values to the samples' ranks, and of gradients back.

Values are sent directly, summed inside a host first, or relayed through one rank per tower (SPTT of DMT, Luo et al.
2024; see `tower_transport.py`). They go hop by hop, in chunks; a hop's transport sends blocks and yields those that
arrive, and sends gradients back in the reverse direction. The last hop's transport adds what arrives to the samples'
columns.

Columns that every rank sends (of tables with rows on all ranks, and partials of operators of such fields) are sums over
ranks. Where there are several hosts of several ranks, the ranks of a host sum them first, so that a host sends one
block for each sample of another host, not one per rank. Bytes between hosts fall by a factor of the number of ranks of
a host; bytes inside a host grow by the same factor.

Legend: N ranks, H hosts, L ranks of a host, B samples of this rank, G of all, P columns of this rank or route, W of
all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from colonnade.comm.collectives import sum_blocks_in_order
from colonnade.comm.mesh import Mesh, PendingCall
from colonnade.lookup.fields import ColumnKey, ColumnRun, FieldColumns, find_runs
from colonnade.ops.memory import empty
from colonnade.wire.codec import (
    CODECS,
    Codec,
    RoundingKey,
    RowBlock,
    decode_elements,
    encode_elements,
)
from colonnade.wire.coding import Coding

NOTHING = torch.empty(0)


@dataclass(slots=True)
class PendingTransfer:
    """Pending message to this rank, or several of them."""

    received: Tensor  # flat, sender after sender
    call: PendingCall | None = None
    keep: Any = None  # objects that must live until it has arrived
    decode: Callable[[], None] | None = None  # called once it has
    parts: Sequence[PendingTransfer] = ()  # the messages, where there are several

    def wait(self) -> None:
        """Wait until it has arrived, and decode it."""
        for part in self.parts:
            part.wait()
        if self.call is not None:
            self.call.wait()
            self.call = self.keep = None
        if self.decode is not None:
            self.decode()
            self.decode = None


class LastTransport(Protocol):
    """Transport of the hop that ends at the samples' ranks, and of gradients from them. Methods except
    `add_received_values` are collective, in one order on all ranks. batch_sizes: samples by rank.

    A message may be on its way when a method returns: a `PendingTransfer` has its call, and `decode` is called
    once it has arrived. Its callers have waited before; `receive_gradients` waits itself.
    """

    routes: tuple[DirectRoute | HostRoute, ...]
    """Routes of columns between all ranks, which can replay messages from a checkpoint; () if there are none."""
    num_roundings: int
    """Number of times that a codec rounds a value on this hop."""

    def send_values(
        self, value_blocks: Iterable[Tensor], batch_sizes: Sequence[int], traffic_tag: str
    ) -> PendingTransfer:
        """Send a block for each chunk; the next one is taken from `value_blocks` once the previous one was sent."""
        ...

    def add_received_values(self, pending_transfer: PendingTransfer, sums_out: Tensor) -> None:
        """Write sums over senders to this transport's columns of `sums_out` (B, W), in a fixed order. Local. The
        columns need not be initialised."""
        ...

    def send_gradients(
        self, gradients: Tensor, batch_sizes: Sequence[int], step: int, batch_index: int
    ) -> PendingTransfer:
        """Send `gradients` (B, W) of the sums. step, batch_index: see `ExchangePart.begin_push`."""
        ...

    def receive_gradients(
        self, pending_transfer: PendingTransfer, batch_sizes: Sequence[int]
    ) -> Iterator[Tensor]:
        """Yield gradients of the blocks that this rank had sent, the last chunk first."""
        ...


def prepare_decoding(
    codec: Codec, coded_message: Tensor, row_blocks: Sequence[RowBlock], dtype: torch.dtype
) -> tuple[Tensor, Callable[[], None] | None]:
    """Return the elements (flat) of a message of these blocks, and the function to call once it has arrived, before
    they are read. coded_message: the message, which may be pending. Without a codec the elements are a view of it."""
    if codec.name == "exact":
        return coded_message.view(dtype), None
    values = empty(sum(block_elements(row_blocks)), dtype=dtype)
    return values, partial(decode_elements, codec, coded_message, row_blocks, values)


def decode_message(
    codec: Codec, coded_message: Tensor, row_blocks: Sequence[RowBlock], dtype: torch.dtype
) -> Tensor:
    """Return the elements (flat) of a message that has arrived."""
    values, finish = prepare_decoding(codec, coded_message, row_blocks, dtype)
    if finish is not None:
        finish()
    return values


class LocalTransport:
    """Transport of a world of one: values are on their samples' rank."""

    num_roundings = 1
    routes: tuple[DirectRoute | HostRoute, ...] = ()

    def __init__(self, sent: FieldColumns, whole: FieldColumns, dtype: torch.dtype) -> None:
        self.sent = sent
        self.dtype = dtype
        (self.runs,) = find_runs([sent.starts.items()], whole)
        self.is_whole = list(sent.dims.items()) == list(whole.dims.items())

    def send_values(
        self, value_blocks: Iterable[Tensor], batch_sizes: Sequence[int], traffic_tag: str
    ) -> PendingTransfer:
        (block,) = value_blocks
        return PendingTransfer(block)

    def add_received_values(self, pending_transfer: PendingTransfer, sums_out: Tensor) -> None:
        add_columns(pending_transfer.received, sums_out, self.runs)

    def send_gradients(
        self, gradients: Tensor, batch_sizes: Sequence[int], step: int, batch_index: int
    ) -> PendingTransfer:
        if self.is_whole:
            return PendingTransfer(gradients)
        block = empty(len(gradients), self.sent.width, dtype=self.dtype)
        extract_columns(gradients, block, self.runs)
        return PendingTransfer(block)

    def receive_gradients(
        self, pending_transfer: PendingTransfer, batch_sizes: Sequence[int]
    ) -> Iterator[Tensor]:
        yield pending_transfer.received


class WorldTransport:
    """Transport from every rank to every other: columns that all ranks send are summed by hosts, others sent
    directly."""

    def __init__(
        self,
        mesh: Mesh,
        messages: Sequence[FieldColumns],
        whole: FieldColumns,
        coding: Coding,
        dtype: torch.dtype,
    ) -> None:
        """Open the routes of the columns that each rank sends (messages). whole: all columns at the samples' ranks."""
        self.dtype = dtype
        self.sent = messages[mesh.rank]
        self.routes = tuple(_open_routes(mesh, messages, whole, coding, dtype))
        self.num_roundings = max((route.num_roundings for route in self.routes), default=1)
        self.runs = [
            find_runs([route.columns.starts.items()], self.sent)[0] for route in self.routes
        ]

    def send_values(
        self, value_blocks: Iterable[Tensor], batch_sizes: Sequence[int], traffic_tag: str
    ) -> PendingTransfer:
        """Implement the contract for one block (G, P)."""
        (block,) = value_blocks
        parts = []
        for route, runs in zip(self.routes, self.runs, strict=True):
            part = block
            if route.columns.width < self.sent.width:
                part = empty(sum(batch_sizes), route.columns.width, dtype=self.dtype)
                for run in runs:
                    part[:, run.block_columns] = block[:, run.whole_columns]
            parts.append(route.send_values(part, batch_sizes, traffic_tag))
        return combine_transfers(parts)

    def add_received_values(self, pending_transfer: PendingTransfer, sums_out: Tensor) -> None:
        for route, part in zip(self.routes, pending_transfer.parts, strict=True):
            route.add_received(part, sums_out)

    def send_gradients(
        self, gradients: Tensor, batch_sizes: Sequence[int], step: int, batch_index: int
    ) -> PendingTransfer:
        return combine_transfers(
            [
                route.send_gradients(gradients, batch_sizes, step, batch_index)
                for route in self.routes
            ]
        )

    def receive_gradients(
        self, pending_transfer: PendingTransfer, batch_sizes: Sequence[int]
    ) -> Iterator[Tensor]:
        """Implement the contract: yield one block (G, P)."""
        num_samples = sum(batch_sizes)
        received = empty(num_samples, self.sent.width, dtype=self.dtype)
        for route, part, runs in zip(self.routes, pending_transfer.parts, self.runs, strict=True):
            part.wait()
            block = part.received.view(num_samples, route.columns.width)
            if route.columns.width == self.sent.width:
                received = block
                continue
            for run in runs:
                received[:, run.whole_columns] = block[:, run.block_columns]
        yield received


def _open_routes(
    mesh: Mesh,
    sent_columns: Sequence[FieldColumns],
    all_columns: FieldColumns,
    coding: Coding,
    dtype: torch.dtype,
) -> list[DirectRoute | HostRoute]:
    """Open routes for all columns, the same on every rank. Columns that every rank sends are summed by hosts."""
    world = mesh.world
    common = set[Any]()
    if world.num_hosts > 1 and world.ranks_per_host > 1:
        common = set.intersection(*(set(message.dims) for message in sent_columns))
    routes: list[DirectRoute | HostRoute] = []
    if any(set(message.dims) - common for message in sent_columns):
        others = [select_columns(message, set(message.dims) - common) for message in sent_columns]
        routes.append(DirectRoute(mesh, others, all_columns, coding, dtype))
    if common:
        routes.append(
            HostRoute(mesh, select_columns(sent_columns[0], common), all_columns, coding, dtype)
        )
    return routes


class DirectRoute:
    """Route of every rank's columns directly to every other rank."""

    num_roundings = 1

    def __init__(
        self,
        mesh: Mesh,
        messages: Sequence[FieldColumns],
        whole: FieldColumns,
        coding: Coding,
        dtype: torch.dtype,
    ) -> None:
        self.mesh = mesh
        self.coding = coding
        self.dtype = dtype
        self.messages = messages
        self.columns = messages[mesh.rank]
        self.widths = [message.width for message in messages]
        self.dims = [tuple(message.dims.values()) for message in messages]
        self.blocks = find_runs([message.starts.items() for message in messages], whole)

    def columns_of(self, rank: int) -> FieldColumns:
        return self.messages[rank]

    def join_blocks(self, blocks: Sequence[Tensor]) -> PendingTransfer:
        """Return blocks by sender as a message that has arrived."""
        return PendingTransfer(torch.cat([block.reshape(-1) for block in blocks]), None)

    def send_values(
        self, block: Tensor, batch_sizes: Sequence[int], traffic_tag: str
    ) -> PendingTransfer:
        codec = CODECS[self.coding.codecs.values]
        served = self._served_blocks(batch_sizes)
        wanted = self._own_blocks(batch_sizes)
        coded = encode_elements(codec, block.view(-1), served)
        data, call = self.mesh.all_to_all(
            "fetch",
            coded,
            [message_block.encoded_bytes(codec, self.dtype) for message_block in served],
            [message_block.encoded_bytes(codec, self.dtype) for message_block in wanted],
            wait=False,
            traffic_tag=traffic_tag,
        )
        received, finish = prepare_decoding(codec, data, wanted, self.dtype)
        return PendingTransfer(received, call, coded, finish)

    def add_received(self, pending: PendingTransfer, total: Tensor) -> None:
        parts = pending.received.split([len(total) * width for width in self.widths])
        for part, width, runs in zip(parts, self.widths, self.blocks, strict=True):
            add_columns(part.view(len(total), width), total, runs)

    def send_gradients(
        self, gradients: Tensor, batch_sizes: Sequence[int], step: int, batch_index: int
    ) -> PendingTransfer:
        codec = CODECS[self.coding.codecs.gradients]
        size = len(gradients)
        served = self._served_blocks(batch_sizes)
        wanted = self._own_blocks(batch_sizes)
        send = self.mesh.allocate_send_buffer(sum(block_elements(wanted)), self.dtype)
        for part, width, runs in zip(
            send.split(block_elements(wanted)), self.widths, self.blocks, strict=True
        ):
            extract_columns(gradients, part.view(size, width), runs)
        samples = torch.arange(size)
        rank = self.mesh.rank
        rounding_keys = [
            RoundingKey(
                samples, self.coding.gradient_seed(f"pooled by {owner}", rank, batch_index), step
            )
            for owner in range(self.mesh.num_ranks)
        ]
        coded = encode_elements(codec, send, wanted, rounding_keys)
        data, call = self.mesh.all_to_all(
            "push",
            coded,
            [message_block.encoded_bytes(codec, self.dtype) for message_block in wanted],
            [message_block.encoded_bytes(codec, self.dtype) for message_block in served],
            wait=False,
        )
        received, finish = prepare_decoding(codec, data, served, self.dtype)
        return PendingTransfer(received, call, coded, finish)

    def _served_blocks(self, sizes: Sequence[int]) -> list[RowBlock]:
        """Return by rank the block of its samples that this rank has."""
        return [RowBlock(size, self.dims[self.mesh.rank]) for size in sizes]

    def _own_blocks(self, sizes: Sequence[int]) -> list[RowBlock]:
        """Return by rank the block of this rank's samples that it has."""
        return [RowBlock(sizes[self.mesh.rank], dims) for dims in self.dims]


class HostRoute:
    """Route of columns that all ranks send, summed by hosts. Rank l of a host sums its host's blocks for the samples of
    the ranks l of all hosts, and sends them the sums; gradients take the same route back. Codecs apply to the blocks
    inside a host and to the sums between hosts, so values are rounded twice."""

    num_roundings = 2

    def __init__(
        self,
        mesh: Mesh,
        columns: FieldColumns,
        whole: FieldColumns,
        coding: Coding,
        dtype: torch.dtype,
    ) -> None:
        self.mesh = mesh
        self.coding = coding
        self.columns = columns
        self.dtype = dtype
        self.dims = tuple(columns.dims.values())
        hosts = mesh.world.num_hosts
        self.blocks = find_runs([columns.starts.items() for _ in range(hosts)], whole)

    @property
    def local_rank_groups(self) -> list[list[int]]:
        """Ranks with the same local rank, which sum for each other, by local rank, (L, H)."""
        local = self.mesh.world.ranks_per_host
        ranks = range(self.mesh.num_ranks)
        return [list(ranks[local_rank::local]) for local_rank in range(local)]

    def columns_of(self, rank: int) -> FieldColumns:
        return self.columns

    def join_blocks(self, blocks: Sequence[Tensor]) -> PendingTransfer:
        """Return blocks by sender, summed by host, as a message that has arrived."""
        world = self.mesh.world
        by_rank = torch.stack([block.reshape(-1) for block in blocks])
        by_host = by_rank.view(world.num_hosts, 1, world.ranks_per_host, -1)
        return PendingTransfer(
            torch.cat([sum_blocks_in_order(host_blocks) for host_blocks in by_host]), None
        )

    def send_values(
        self, block: Tensor, batch_sizes: Sequence[int], traffic_tag: str
    ) -> PendingTransfer:
        """Sum inside the host, and begin to send sums between hosts."""
        codec = CODECS[self.coding.codecs.values]
        local = self.mesh.world.ranks_per_host
        blocks = block.split(list(batch_sizes))
        send = torch.cat([blocks[rank] for ranks in self.local_rank_groups for rank in ranks])
        own_sizes = [batch_sizes[rank] for rank in self.local_rank_groups[self.mesh.rank % local]]
        sent_blocks = [
            RowBlock(sum(batch_sizes[rank] for rank in ranks), self.dims)
            for ranks in self.local_rank_groups
        ]
        received_blocks = [RowBlock(sum(own_sizes), self.dims)] * local
        data, _ = self.mesh.all_to_all(
            "fetch",
            encode_elements(codec, send.view(-1), sent_blocks),
            self._lengths(codec, sent_blocks),
            self._lengths(codec, received_blocks),
            scope=self.mesh.host_scope,
            traffic_tag=traffic_tag,
        )
        received = decode_message(codec, data, received_blocks, self.dtype)
        host_sum = sum_blocks_in_order(received.view(1, local, -1))
        served = [RowBlock(n, self.dims) for n in own_sizes]
        wanted = self._own_blocks(batch_sizes)
        coded = encode_elements(codec, host_sum, served)
        data, call = self.mesh.all_to_all(
            "fetch",
            coded,
            self._lengths(codec, served),
            self._lengths(codec, wanted),
            scope=self.mesh.cross_host_scope,
            wait=False,
            traffic_tag=traffic_tag,
        )
        received, finish = prepare_decoding(codec, data, wanted, self.dtype)
        return PendingTransfer(received, call, coded, finish)

    def add_received(self, pending: PendingTransfer, total: Tensor) -> None:
        parts = pending.received.view(len(self.blocks), len(total), self.columns.width)
        for part, runs in zip(parts, self.blocks, strict=True):
            add_columns(part, total, runs)

    def send_gradients(
        self, gradients: Tensor, batch_sizes: Sequence[int], step: int, batch_index: int
    ) -> PendingTransfer:
        """Send gradients between hosts, then inside; they have arrived when it returns."""
        codec = CODECS[self.coding.codecs.gradients]
        world = self.mesh.world
        rank = self.mesh.rank
        block = empty(len(gradients), self.columns.width, dtype=self.dtype)
        extract_columns(gradients, block, self.blocks[0])
        blocks_by_rank = [RowBlock(size, self.dims) for size in batch_sizes]
        seed = self.coding.gradient_seed("pooled by hosts", rank, batch_index)
        rounding_keys = [RoundingKey(torch.arange(len(gradients)), seed, step)]
        data = encode_elements(codec, block.view(-1), [blocks_by_rank[rank]], rounding_keys)
        lengths = self._lengths(codec, blocks_by_rank)
        local = world.ranks_per_host
        hosts = world.num_hosts
        group_lengths = [[lengths[r] for r in ranks] for ranks in self.local_rank_groups]
        received, _ = self.mesh.all_to_all(
            "push",
            data.repeat(hosts),
            [len(data)] * hosts,
            group_lengths[rank % local],
            scope=self.mesh.cross_host_scope,
        )
        received, _ = self.mesh.all_to_all(
            "push",
            received.repeat(local),
            [len(received)] * local,
            list(map(sum, group_lengths)),
            scope=self.mesh.host_scope,
        )
        # Received local rank by local rank and, from each, host by host: reorder by rank.
        starts = dict(
            zip(
                [r for ranks in self.local_rank_groups for r in ranks],
                accumulate((n for counts in group_lengths for n in counts), initial=0),
                strict=False,
            )
        )
        data = torch.cat([received[starts[r] : starts[r] + n] for r, n in enumerate(lengths)])
        return PendingTransfer(decode_message(codec, data, blocks_by_rank, self.dtype), None)

    def _lengths(self, codec: Codec, blocks: Iterable[RowBlock]) -> list[int]:
        return [block.encoded_bytes(codec, self.dtype) for block in blocks]

    def _own_blocks(self, sizes: Sequence[int]) -> list[RowBlock]:
        """Return by host the block of this rank's samples."""
        return [RowBlock(sizes[self.mesh.rank], self.dims)] * len(self.blocks)


def combine_transfers(parts: Sequence[PendingTransfer]) -> PendingTransfer:
    """Combine several pending messages into one."""
    return PendingTransfer(NOTHING, parts=parts)


def select_columns(columns: FieldColumns, keys: Iterable[Any]) -> FieldColumns:
    """Return the columns with these keys, in their order."""
    wanted = set(keys)
    return FieldColumns({key: dim for key, dim in columns.dims.items() if key in wanted})


def block_elements(blocks: Iterable[RowBlock]) -> list[int]:
    """Return the number of elements of each block."""
    return [block.rows * sum(block.dims) for block in blocks]


ColumnStarts = tuple[tuple[ColumnKey, int], ...]
"""Keys of a block's columns, and the first column of each."""


@lru_cache(maxsize=256)
def _plan_column_assembly(
    blocks: tuple[ColumnStarts, ...], dims: ColumnStarts
) -> tuple[list[list[ColumnRun]], int]:
    """Return by block its runs, and the number of columns of the whole that they fill, for `assemble_columns`. Cached
    between steps, because computing it takes as long as a copy of a megabyte."""
    runs_by_block = find_runs(blocks, FieldColumns(dict(dims)))
    return runs_by_block, sum(run.width for runs in runs_by_block for run in runs if run.is_first)


def assemble_columns(
    column_blocks: Sequence[tuple[Tensor, ColumnStarts]], column_dims: Mapping[ColumnKey, int]
) -> Tensor:
    """Return columns of `column_dims` from blocks (R, any) of one dtype: (R, W), contiguous. Columns in several
    blocks are summed, in order of the blocks; columns in none are 0. Read only: it is a block itself where that is the
    whole."""
    runs_by_block, num_filled = _plan_column_assembly(
        tuple([starts for _, starts in column_blocks]), tuple(column_dims.items())
    )
    width = sum(column_dims.values())
    num_rows = len(column_blocks[0][0])
    taken = [
        (block, runs) for (block, _), runs in zip(column_blocks, runs_by_block, strict=True) if runs
    ]
    if len(taken) == 1 and len(taken[0][1]) == 1 and num_filled == width == taken[0][0].shape[1]:
        return taken[0][0].contiguous()
    result = empty(num_rows, width, dtype=column_blocks[0][0].dtype)
    if num_filled < width:
        result.zero_()
    for block, runs in taken:
        add_columns(block, result, runs)
    return result


def add_columns(block: Tensor, total: Tensor, runs: Sequence[ColumnRun]) -> None:
    """Add columns of the block to their columns of the total; the first block of a column is copied instead."""
    for run in runs:
        target = total[:, run.whole_columns]
        source = block[:, run.block_columns]
        target.copy_(source) if run.is_first else target.add_(source)


def extract_columns(total: Tensor, block: Tensor, runs: Sequence[ColumnRun]) -> None:
    """Copy columns of the block from their columns of the total."""
    for run in runs:
        block[:, run.block_columns] = total[:, run.whole_columns]
