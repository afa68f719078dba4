"""Rows beyond memory: a cache of rows and reads of the others give the bits of mapped rows, whatever was evicted, and a
damaged file gives the same error."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from served import samples, train
from torch import Tensor

from colonnade import Batch, Feature, Ids, Predictor, Table, _native
from colonnade.errors import ConfigError, CorruptionError
from colonnade.files.checksums import compute_checksums
from colonnade.lookup.layout import declare
from colonnade.lookup.row_access import MappedLookup
from colonnade.store.mapped import MappedRows, open_mapped

SHARED_MEMORY = Path("/dev/shm")


def write_rows(folder: Path, tables: list[Table], num_rows: int) -> list:
    """Write `num_rows` random rows of each table; return names and checksums of the files."""
    files = []
    for t, table in enumerate(tables):
        weights = torch.randn(num_rows, table.width).to(getattr(torch, table.dtype))
        path = folder / f"{t}.safetensors"
        save_file({"ids": torch.arange(num_rows), "weights": weights}, path)
        files.append((path.name, compute_checksums(path)))
    return files


def open_lookup(
    folder: Path, tables: list[Table], files: list, row_memory: int | None = None
) -> MappedLookup:
    """Open checked rows for one feature of each table."""
    features = [Feature(table.name, table.name, pooling="sequence") for table in tables]
    rows = open_mapped(tables, folder, files, seed=3, full=True, row_memory=row_memory)
    return MappedLookup(declare(tables, features, {}, None), rows)


def draw_batch(tables: list[Table], num_rows: int, size: int, generator: torch.Generator) -> Batch:
    """Draw ids of which a few are popular."""
    ids = {}
    for table in tables:
        skewed = (torch.rand(size, generator=generator) ** 4 * num_rows).long()
        ids[table.name] = Ids(skewed)
    return Batch(size, torch.zeros(size, 0), ids)


def read(lookup: MappedLookup, batch: Batch) -> list[Tensor]:
    """Read a batch by the native path, which may not give up."""
    outputs = lookup.rows.read(lookup.reader, batch.ids, batch.size, is_sharing=False)
    assert outputs is not None
    return [torch.as_tensor(output).clone() for output in outputs]


def read_counts(rows: MappedRows) -> tuple[int, int, int]:
    """Return rows from memory, rows from files, and reads."""
    assert rows.cache is not None
    return rows.cache.counts


def assert_equal_bits(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result.view(torch.uint8), wanted.view(torch.uint8))


@settings(max_examples=examples(12, 100))
@given(
    st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
    st.lists(st.sampled_from([1, 3, 13, 16, 127, 1031, 2048]), min_size=1, max_size=3),
    st.sampled_from([1, 2, 97, 1009]),
    st.floats(0.0, 1.2),
)
def test_cached_rows_have_the_bits_of_mapped_ones(tmp_path_factory, dtype, dims, num_rows, share):
    folder = tmp_path_factory.mktemp("rows")
    tables = [Table(f"t{t}", dim, rows=num_rows, dtype=dtype) for t, dim in enumerate(dims)]
    files = write_rows(folder, tables, num_rows)
    row_bytes = sum(num_rows * table.width * table.itemsize for table in tables)
    least = sum(16 * (table.width * table.itemsize + 4) for table in tables)
    mapped = open_lookup(folder, tables, files)
    cached = open_lookup(folder, tables, files, least + int(share * row_bytes))
    generator = torch.Generator().manual_seed(num_rows)
    for size in (1, 7, 300, 0, 301):
        batch = draw_batch(tables, num_rows, size, generator)
        assert_equal_bits(read(cached, batch), read(mapped, batch))
    hits, misses, reads = read_counts(cached.rows)
    assert hits + misses == len(tables) * (1 + 7 + 300 + 301) and 0 < reads <= misses


def test_a_cache_of_few_rows_evicts_and_one_of_all_reads_each_row_once(tmp_path):
    tables = [Table("t", 5, rows=1009)]
    files = write_rows(tmp_path, tables, 1009)
    small = open_lookup(tmp_path, tables, files, 5000)
    large = open_lookup(tmp_path, tables, files, 1 << 20)
    mapped = open_lookup(tmp_path, tables, files)
    for first in (0, 0, 500, 0):
        batch = Batch(509, torch.zeros(509, 0), {"t": Ids(torch.arange(first, first + 509))})
        for lookup in (small, large):
            assert_equal_bits(read(lookup, batch), read(mapped, batch))
    assert read_counts(large.rows)[1] == 1009
    assert read_counts(small.rows)[1] > 1500


def test_rows_that_were_used_again_outlast_rows_that_were_used_once(tmp_path):
    """A cache of 16 rows: rows used twice stay, and as many new ones as rows that were used once."""
    tables = [Table("t", 4, rows=97)]
    files = write_rows(tmp_path, tables, 97)
    cached = open_lookup(tmp_path, tables, files, 16 * (4 * 4 + 4))

    def count_hits(first: int, last: int) -> int:
        before = read_counts(cached.rows)[0]
        ids = torch.arange(first, last)
        read(cached, Batch(len(ids), torch.zeros(len(ids), 0), {"t": Ids(ids)}))
        return read_counts(cached.rows)[0] - before

    assert count_hits(0, 16) == 0
    assert count_hits(0, 8) == 8
    for first in range(16, 80, 8):
        assert count_hits(first, first + 8) == 0
        assert count_hits(0, 8) == 8
    assert count_hits(80, 88) == 0
    assert count_hits(80, 88) == 8


def test_rows_that_change_are_not_those_of_the_cache(tmp_path):
    tables = [Table("t", 4, rows=97)]
    files = write_rows(tmp_path, tables, 97)
    lookups = [open_lookup(tmp_path, tables, files, memory) for memory in (None, 2000)]
    batch = Batch(97, torch.zeros(97, 0), {"t": Ids(torch.arange(97))})
    assert_equal_bits(read(lookups[1], batch), read(lookups[0], batch))
    before = lookups[1].rows.fork(3)
    for lookup in lookups:
        lookup.rows.apply_delta(0, torch.tensor([5, 96]), torch.ones(2, 4), torch.tensor([7]))
    changed = read(lookups[1], batch)
    assert_equal_bits(changed, read(lookups[0], batch))
    assert changed[0][5].tolist() == [1.0] * 4
    forked = MappedLookup(lookups[1].declaration, before)
    original = read(open_lookup(tmp_path, tables, files), batch)
    assert_equal_bits(read(forked, batch), original)
    lookups[1].rows.close()
    assert_equal_bits(read(forked, batch), original)


def test_threads_share_a_cache(tmp_path):
    tables = [Table("a", 3, rows=1009), Table("b", 8, rows=1009)]
    files = write_rows(tmp_path, tables, 1009)
    mapped = open_lookup(tmp_path, tables, files)
    cached = open_lookup(tmp_path, tables, files, 8000)
    generator = torch.Generator().manual_seed(1)
    batches = [draw_batch(tables, 1009, 200, generator) for _ in range(12)]
    wanted = [read(mapped, batch) for batch in batches]
    wrong: list[int] = []

    def work(rows: MappedRows, start: int) -> None:
        lookup = MappedLookup(cached.declaration, rows)
        for i in [*range(start, 12), *range(start)] * 3:
            results = read(lookup, batches[i])
            if not all(map(torch.equal, results, wanted[i])):
                wrong.append(i)

    forks = [cached.rows.fork(3) for _ in range(3)]
    threads = [
        threading.Thread(target=work, args=(rows, 4 * number)) for number, rows in enumerate(forks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(
    not os.access(SHARED_MEMORY, os.W_OK),
    reason="needs a writable /dev/shm, the file system in memory",
)
def test_files_in_memory_are_read_too():
    tables = [Table("t", 13, rows=1009)]
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name:
        files = write_rows(Path(name), tables, 1009)
        mapped, cached = (open_lookup(Path(name), tables, files, memory) for memory in (None, 4000))
        batch = draw_batch(tables, 1009, 500, torch.Generator().manual_seed(2))
        for _ in range(2):
            assert_equal_bits(read(cached, batch), read(mapped, batch))


def test_a_file_that_is_cut_short_raises_the_error_of_mapped_rows(tmp_path):
    tables = [Table("t", 64, rows=1009)]
    for memory in (None, 20_000):
        files = write_rows(tmp_path, tables, 1009)
        lookup = open_lookup(tmp_path, tables, files, memory)
        first = Batch(3, torch.zeros(3, 0), {"t": Ids(torch.tensor([0, 1, 2]))})
        lookup.read(first, torch.device("cpu"))
        os.truncate(tmp_path / files[0][0], 8192)
        last = Batch(1, torch.zeros(1, 0), {"t": Ids(torch.tensor([1008]))})
        with pytest.raises(CorruptionError, match=r"0\.safetensors: got a file that was cut short"):
            lookup.read(last, torch.device("cpu"))
        assert isinstance(lookup.rows.problem, CorruptionError)
        (tmp_path / files[0][0]).unlink()


def test_rows_of_a_damaged_block_are_not_cached(tmp_path):
    tables = [Table("t", 64, rows=6007)]
    files = write_rows(tmp_path, tables, 6007)
    path = tmp_path / files[0][0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    rows = open_mapped(tables, tmp_path, files, seed=3, row_memory=20_000)
    features = [Feature("t", "t")]
    lookup = MappedLookup(declare(tables, features, {}, None), rows)
    batch = Batch(1, torch.zeros(1, 0), {"t": Ids(torch.tensor([6006]))})
    for _ in range(2):
        with pytest.raises(CorruptionError, match="got checksum"):
            lookup.read(batch, torch.device("cpu"))
    assert read_counts(rows) == (0, 0, 0)


def test_a_predictor_with_little_memory_has_the_same_scores(tmp_path):
    folder = tmp_path / "published"
    train(tmp_path / "run", folder)
    batches = samples()
    with (
        Predictor.open(folder, verify="full") as mapped,
        Predictor.open(folder, verify="full", row_memory="8KiB") as cached,
        cached.fork() as fork,
    ):
        for batch in batches:
            wanted = mapped(batch)
            assert torch.equal(cached(batch), wanted) and torch.equal(fork(batch), wanted)
        hits, misses, _ = read_counts(cached.rows)
        assert hits and misses and fork.rows.cache is cached.rows.cache
    with pytest.raises(ConfigError, match="row memory: got 16 bytes for rows, wanted at least"):
        Predictor.open(folder, row_memory=16)
    with pytest.raises(ConfigError, match="row_memory: got 'much'"):
        Predictor.open(folder, row_memory="much")


def test_a_cache_of_impossible_files_is_refused(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file:
        for begin, stride, num_rows in ((0, 0, 1), (-1, 4, 1), (0, 4, -1), (0, 4, 1 << 33)):
            with pytest.raises(ValueError, match="files: got one of"):
                _native.RowCache([(file.fileno(), begin, stride, num_rows)], 1 << 20)
    with pytest.raises(RuntimeError, match="could not open a file again"):
        _native.RowCache([(1 << 20, 0, 4, 1)], 1 << 20)
