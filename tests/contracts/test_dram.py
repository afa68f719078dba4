from __future__ import annotations

import contextlib
import gc
import resource
import shutil
from pathlib import Path

import pytest
import torch
from logs import open_test_log
from resident import TABLES, ResidentContract

from colonnade import Feature, Table, _native
from colonnade.errors import StorageError
from colonnade.lookup.layout import declare
from colonnade.store.dram import MappedTier, open_dram_store
from colonnade.store.log.writer import LogWriter


def open_logs(place, step=None):
    """One by table; they share a reader and a writer."""
    reader, writer = _native.PageReader(), LogWriter()
    return [
        open_test_log(
            place / table.name,
            table_name=table.name,
            record_bytes=table.record_bytes,
            identity="contract",
            step=step,
            rows=table.rows,
            reader=reader,
            writer=writer,
            segment_bytes=4096,
            chunk_bytes=4096,
        )
        for table in TABLES
    ]


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """Let this process write no larger file meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def add_one(store, slots, offsets):
    """SGD with lr 1 on a gradient of -1."""
    num_rows, dims = len(slots), [table.dim for table in TABLES]
    gradients = torch.full((num_rows * max(dims),), -1.0)
    index = torch.zeros(num_rows, dtype=torch.int32)
    source = _native.RowGradients(gradients.data_ptr(), index, "float32")
    _native.update(
        store.native,
        slots,
        offsets,
        torch.arange(num_rows + 1, dtype=torch.int32),
        torch.arange(num_rows, dtype=torch.int32),
        source,
        declare(TABLES, [Feature(t.name, t.name) for t in TABLES], {}).native_parts,
        torch.zeros(len(TABLES), dtype=torch.int32),
        torch.tensor(
            [[1.0] + [0.0] * 8 + [torch.inf] * 3 + [1.0] + [0.0] * 3] * len(TABLES),
            dtype=torch.float64,
        ),
    )


class TestDramOverFiles(ResidentContract):
    def mapped(self, place):
        return None

    def train(self, store, slots, offsets):
        add_one(store, slots, offsets)

    def open(self, place, capacity_rows):
        return open_dram_store(
            TABLES,
            capacity_rows or [97, 97],
            seed=1,
            backings=open_logs(place),
            mapped=self.mapped(place),
        )


class TestDramOverCache(TestDramOverFiles):
    """Evicted rows in files mapped from a directory, above the logs."""

    rows = 11

    def mapped(self, place):
        return MappedTier(place / "mapped", cache_rows=[self.rows] * len(TABLES))

    def test_a_directory_that_cannot_hold_them_is_refused(self, tmp_path):
        (tmp_path / "mapped").write_text("a file")
        with pytest.raises(StorageError, match=r"mapped files: .*mapped.*set another directory"):
            self.open(tmp_path, [9, 9])
        with files_of_at_most(2**20):
            with pytest.raises(StorageError, match=r"could not map a file of .* bytes for rows"):
                open_dram_store(
                    TABLES,
                    [9, 9],
                    seed=1,
                    backings=open_logs(tmp_path / "logs"),
                    mapped=MappedTier(tmp_path, cache_rows=[2**20, 0]),
                )


class TestDramOverCacheOfOneRow(TestDramOverCache):
    rows = 1


class TestMappedOverFiles(TestDramOverFiles):
    """Rows in files mapped from a directory, in place."""

    def mapped(self, place):
        return MappedTier(place / "mapped", range(len(TABLES)))

    def test_files_have_no_names_and_go_with_the_store(self, tmp_path):
        store = self.open(tmp_path, None)
        assert list((tmp_path / "mapped").iterdir()) == []
        mapped = str(tmp_path / "mapped")
        assert sum(mapped in line for line in Path("/proc/self/maps").read_text().splitlines()) >= 2
        del store
        gc.collect()
        assert mapped not in Path("/proc/self/maps").read_text()

    def test_a_directory_that_cannot_hold_them_is_refused(self, tmp_path):
        (tmp_path / "mapped").write_text("a file")
        with pytest.raises(StorageError, match=r"mapped files: .*mapped.*set another directory"):
            self.open(tmp_path, None)
        full = MappedTier(Path("/dev/full/no"), [0])
        with pytest.raises(StorageError, match="mapped files"):
            open_dram_store(TABLES, [97, 97], seed=1, mapped=full)
        huge = [Table("huge", 2**16)]  # a petabyte
        with files_of_at_most(2**20), pytest.raises(StorageError, match="No space left"):
            open_dram_store(huge, [2**32 - 2], seed=1, mapped=MappedTier(tmp_path, [0]))

    def test_more_than_the_disk_has_is_refused_before_any_of_it_is_taken(self, tmp_path):
        """Each table's rows fit, together they do not. A file that is written would be refused for its size."""
        tables = [Table("first", 2**16), Table("second", 2**16)]
        num_rows = int(0.6 * shutil.disk_usage(tmp_path).free) // (tables[0].dim * 4)
        mapped = MappedTier(tmp_path, [0, 1])
        with files_of_at_most(2**20), pytest.raises(StorageError, match="No space left"):
            open_dram_store(tables, [num_rows, num_rows], seed=1, mapped=mapped)


class TestDramOnItsOwn(ResidentContract):
    """Without a backing nothing is evicted, so what needs eviction is refused."""

    test_rows_are_those_of_a_dictionary = None
    test_too_many_rows_are_refused_and_nothing_changes = None

    def open(self, place, capacity_rows):
        return open_dram_store(TABLES, [97, 97], seed=1)
