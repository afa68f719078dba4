"""RocksDB through rocksdict, set up as the open code behind MTrainS sets it up: no compression, no log, bloom filters,
direct reads and writes, universal compaction, big memtables. Its caches get the budget: a quarter memtables, where
the rows of the last batches lie, a quarter a cache of rows, half a cache of blocks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workers.tiers_loop import Case, serve
from workers.tiers_peer import PeerTraining, first_records
from workers.tiers_shards import ShardedTraining, Shards, shard_of

RUN = 65536
MEMTABLES = 4
BLOOM_BITS = 10
WARM_ROWS = 200_000


class RocksStore:
    def __init__(self, database, rocksdict, dim: int) -> None:
        self.database, self.dim = database, dim
        self._batch = lambda: rocksdict.WriteBatch(raw_mode=True)

    def get(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read rows by a MultiGet. Keys are big-endian, so that their order is that of the rows."""
        values = self.database.get(keys_of(rows))
        if None in values:
            raise RuntimeError(f"{values.count(None)} of {len(rows)} rows are not in the database")
        return np.frombuffer(b"".join(values), np.float32).reshape(-1, self.dim + 1).copy()

    def put(self, rows: NDArray[np.int64], records: NDArray[np.float32]) -> None:
        batch = self._batch()
        put = batch.put
        for key, value in zip(keys_of(rows), values_of(records), strict=True):
            put(key, value)
        self.database.write(batch)

    def counts(self) -> Mapping[str, float]:
        return {}


def keys_of(rows: NDArray[np.int64]) -> list[bytes]:
    data = rows.astype(">u8").tobytes()
    return [data[i : i + 8] for i in range(0, len(data), 8)]


def values_of(records: NDArray[np.float32]) -> list[bytes]:
    data, width = records.tobytes(), 4 * records.shape[1]
    return [data[i : i + width] for i in range(0, len(data), width)]


def open_system(case: Case) -> tuple[PeerTraining | ShardedTraining, dict[str, float | str]]:
    sys.path.append(case.site)
    stream = case.open_stream()
    start = time.perf_counter()
    if case.shards > 1:
        shards = Shards(case.shards, stream.shape.lookups, case.dim + 1)
        shards.open(lambda number: open_store(case, number))
        return ShardedTraining(case, shards), {"ready_seconds": time.perf_counter() - start}
    store = open_store(case, 0)
    seconds = time.perf_counter() - start
    return PeerTraining(case, store), {"rocksdict": "0.3.29", "ready_seconds": seconds}


def open_store(case: Case, shard: int) -> RocksStore:
    """Open the database of a shard, filled, with its most frequent rows in its caches."""
    import rocksdict

    assert case.dram_bytes is not None, "the database has a budget"
    stream, folder = case.open_stream(), Path(case.store) / f"shard-{shard}"
    folder.mkdir()
    options = options_of(rocksdict, case.dram_bytes // case.shards)
    database = rocksdict.Rdict(str(folder / "database"), options)
    unlogged = rocksdict.WriteOptions()
    unlogged.disable_wal = True
    database.set_write_options(unlogged)
    rows = rows_of(shard, case.shards, stream.shape.num_rows)
    fill(database, rocksdict, options, rows, case.dim, folder)
    store = RocksStore(database, rocksdict, case.dim)
    count = np.asarray(stream.state("count"))[rows]
    warm_rows = min(WARM_ROWS // case.shards, len(count) - 1)
    store.get(rows[np.sort(np.argpartition(-count, warm_rows)[:warm_rows])])
    return store


def rows_of(shard: int, num_shards: int, num_rows: int) -> NDArray[np.int64]:
    """Return the rows of a shard, ascending. Eight processes do so at once, so none has all rows in memory."""
    parts = (np.arange(first, min(first + RUN, num_rows)) for first in range(0, num_rows, RUN))
    return np.concatenate([part[shard_of(part, num_shards) == shard] for part in parts])


def options_of(rocksdict, budget: int):
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(rocksdict.Cache(budget // 2))
    blocks.set_block_size(4096)
    blocks.set_bloom_filter(BLOOM_BITS, False)
    blocks.set_cache_index_and_filter_blocks(False)
    blocks.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
    blocks.set_data_block_hash_ratio(0.75)
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_block_based_table_factory(blocks)
    options.set_row_cache(rocksdict.Cache(budget // 4))
    options.set_write_buffer_size(max(1 << 20, budget // 4 // MEMTABLES))
    options.set_max_write_buffer_number(MEMTABLES)
    options.set_min_write_buffer_number_to_merge(2)
    options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
    options.set_use_direct_reads(True)
    options.set_use_direct_io_for_flush_and_compaction(True)
    options.set_level_zero_slowdown_writes_trigger(32)
    options.set_level_zero_stop_writes_trigger(64)
    options.set_max_background_jobs(2)
    return options


def fill(database, rocksdict, options, rows: NDArray[np.int64], dim: int, folder: Path) -> None:
    """Write every row as sorted tables: what compacting all of them would leave."""
    values = values_of(first_records(min(RUN, len(rows)), dim))
    per_file = 64 * RUN
    for start in range(0, len(rows), per_file):
        path = folder / f"fill-{start}.sst"
        writer = rocksdict.SstFileWriter(options)
        writer.open(str(path))
        for first in range(start, min(start + per_file, len(rows)), RUN):
            ids = rows[first : min(first + RUN, start + per_file)]
            for key, value in zip(keys_of(ids), values, strict=False):
                writer[key] = value
        writer.finish()
        move = rocksdict.IngestExternalFileOptions()
        move.set_move_files(True)
        database.ingest_external_file([str(path)], move)


if __name__ == "__main__":
    serve(open_system)
