"""The backing of a table of which this rank has no rows: there is nothing at rest, and nothing may be put there."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from colonnade.errors import StorageError
from colonnade.store.contract import Manifest, Pending, RowBatch


class AbsentRows:
    """A `Backing` without a file. Commits pass it over."""

    def __init__(self, table_name: str, record_bytes: int) -> None:
        self.table_name, self.record_bytes = table_name, record_bytes

    def __len__(self) -> int:
        return 0

    def read(self, ids: Tensor, out: Tensor) -> Pending:
        return _Nothing(len(ids))

    def write(
        self, ids: Tensor, records: Tensor, heat: Tensor | None = None, for_commit: bool = False
    ) -> Pending:
        if len(ids):
            raise self._refused()
        return _Nothing(0)

    def delete(self, ids: Tensor) -> None:
        """There is none of them."""

    def scan(self) -> Iterator[RowBatch]:
        return iter(())

    def freeze(self) -> None:
        """There is nothing to change."""

    def commit(self, step: int) -> Manifest:
        raise self._refused()

    def thaw(self) -> None:
        """Nothing is ever frozen."""

    def prune(self, keep_steps: Collection[int]) -> None:
        """There is no commit."""

    def close(self) -> None:
        """Nothing is open."""

    def _refused(self) -> StorageError:
        return StorageError(
            f"table {self.table_name!r}: its sharding gives this rank no rows, wanted ids of the ranks that have them"
        )


class _Nothing(Pending):
    def __init__(self, num_ids: int) -> None:
        self._num_ids = num_ids

    def wait(self) -> Tensor:
        return torch.zeros(self._num_ids, dtype=torch.bool)
