"""Readers of one table's shards from another world, as one store; and the backing of a rank without rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import StorageError
from colonnade.store.contract import DeferredResult, Manifest, Pending, RowBatch
from colonnade.store.log.backing import LogBacking


class AbsentRows:
    """`Backing` of a rank without rows: it reads none. Checkpoints leave it out; writing a row to it or committing it
    raises StorageError."""

    def __init__(self, table_name: str, record_bytes: int) -> None:
        self.table_name = table_name
        self.record_bytes = record_bytes

    def __len__(self) -> int:
        return 0

    def read(self, ids: Tensor, records_out: Tensor) -> Pending:
        return DeferredResult(lambda: torch.zeros(len(ids), dtype=torch.bool))

    def write(
        self,
        ids: Tensor,
        records: Tensor,
        access_frequencies: Tensor | None = None,
        is_for_commit: bool = False,
    ) -> Pending:
        if len(ids):
            raise self._no_rows_error()
        return DeferredResult(lambda: torch.zeros(0, dtype=torch.bool))

    def delete(self, ids: Tensor) -> None:
        """Do nothing: no row exists."""

    def scan(self) -> Iterator[RowBatch]:
        return iter(())

    def freeze(self) -> None:
        """Do nothing: no row can change."""

    def commit(self, step: int) -> Manifest:
        raise self._no_rows_error()

    def thaw(self) -> None:
        """Do nothing: nothing is ever frozen."""

    def prune(self, retained_steps: Collection[int]) -> None:
        """Do nothing: no commit exists."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _no_rows_error(self) -> StorageError:
        return StorageError(
            f"table {self.table_name!r}: its sharding gives this rank no rows, wanted ids of the ranks that have them"
        )


class ReadOnly:
    """Base of read-only backings: refuses every change."""

    def write(
        self,
        ids: Tensor,
        records: Tensor,
        access_frequencies: Tensor | None = None,
        is_for_commit: bool = False,
    ) -> Pending:
        raise _read_only_error()

    def delete(self, ids: Tensor) -> None:
        raise _read_only_error()

    def freeze(self) -> None:
        raise _read_only_error()

    def commit(self, step: int) -> Manifest:
        raise _read_only_error()

    def thaw(self) -> None:
        """Do nothing: nothing is ever frozen."""

    def prune(self, retained_steps: Collection[int]) -> None:
        raise _read_only_error()


class ShardReader(ReadOnly):
    """`Backing` that only reads: each id from the shard of its owner rank."""

    def __init__(self, stores: Sequence[LogBacking], rows: int | None) -> None:
        """stores by rank; `rows` of the table, None for an open one."""
        self.stores = tuple(stores)
        self.rows = rows or 0
        self.record_bytes = stores[0].record_bytes

    def __len__(self) -> int:
        return sum(len(store) for store in self.stores)

    def read(self, ids: Tensor, records_out: Tensor) -> Pending:
        owner = torch.as_tensor(_native.owner_of(ids, self.rows, len(self.stores)))
        parts = []
        for rank, store in enumerate(self.stores):
            positions = (owner == rank).nonzero()[:, 0]
            records = torch.empty(len(positions), self.record_bytes, dtype=torch.uint8)
            parts.append((positions, records, store.read(ids[positions], records)))
        return join_shard_reads(parts, len(ids), records_out)

    def scan(self) -> Iterator[RowBatch]:
        for store in self.stores:
            yield from store.scan()

    def close(self) -> None:
        for store in self.stores:
            store.close()


def _read_only_error() -> StorageError:
    return StorageError(
        "rows of another world or sharding are open read-only; adopt them to go on training"
    )


def join_shard_reads(
    parts: Sequence[tuple[Tensor, Tensor, Pending]], num_ids: int, out: Tensor
) -> Pending:
    """Join reads of all shards into `out`: parts are positions in it, records read, and the read."""

    def finish() -> Tensor:
        exists = torch.zeros(num_ids, dtype=torch.bool)
        for positions, records, pending in parts:
            has_row = pending.wait()
            exists[positions] = has_row
            out[positions[has_row]] = records[has_row]
        return exists

    return DeferredResult(finish)
