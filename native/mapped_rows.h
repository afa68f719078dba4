// Lookups in exported rows: from a batch's ids to pooled outputs in one pass. Plans nothing, pins nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "dram.h"
#include "kernels/kernels.h"
#include "row_cache.h"
#include "row_index.h"
#include "scalar.h"

namespace colonnade {

// Rows of one table in mapped memory, and the index from id to slot. A row's slot is its number in the file; rows that
// are newer than the file have slots behind it. Refers to memory of the caller. Any thread may read it.
struct MappedTable {
  static constexpr std::int64_t kDeleted = std::int64_t{1} << 40;  // in `newer`: the row has its first value again
  static constexpr std::uint32_t kAbsent = 0xffffffff;

  std::int64_t num_ids = 0;                  // size of the vocabulary; 0: any id
  std::int64_t num_rows = 0;                 // of the file
  std::span<const std::int32_t> slots_by_id;  // (num_ids,) -1: absent; or empty
  const RowIndex* hashed = nullptr;          // alternative. Neither: the file has all ids of the vocabulary
  const RowIndex* newer = nullptr;           // id -> slot or kDeleted, of rows that differ from the file; or null
  const std::byte* base = nullptr;           // slot 0
  std::int64_t stride = 0;                   // bytes of a row
  std::int64_t begin = 0;                    // byte of the file where slot 0 is
  int block_bits = 0;                        // the file's blocks have 2^block_bits bytes
  std::span<const std::uint8_t> checked;     // by block: 1 if its checksum was compared

  // Write the slot of each id, kAbsent for a row that has its first value. False if an id is outside the vocabulary, or
  // a row's block was not checked yet, or there is no base.
  bool find(std::span<const std::int64_t> ids, std::uint32_t* slots) const noexcept;
};

// One feature's lookups in a batch.
struct MappedColumn {
  std::int32_t table = 0;
  Divisor divisor = Divisor::one;
  bool is_sequence = false;            // one output row per lookup
  bool is_shared = false;              // one sample, which all samples of the batch share
  std::span<const std::int64_t> ids;   // (E,)
  const std::int64_t* offsets = nullptr;  // (samples + 1,) from 0 to E, ascending; null: one lookup per sample
  const void* weights = nullptr;       // (E,) elements of the type of computation, or null
};

// Columns of rows that one output takes.
struct MappedRead {
  std::int32_t column = 0;      // of lookups
  std::int64_t first_byte = 0;  // in a row
  std::int64_t dim = 0;
  std::byte* out = nullptr;     // output row 0
  std::int64_t out_stride = 0;  // bytes
};

// Pool rows to outputs; absent rows have the first values of `initial_rows`, by table. An output has num_samples rows, or for
// a sequence as many as lookups; num_samples times as many if it is shared. Returns false, with outputs undefined, where
// `MappedTable::find` or `RowCache::read` does. cache: has the files' rows, by table, which are then not read from their
// mapping; or null.
bool read_mapped(std::span<const MappedTable* const> tables, const Dram& initial_rows, std::span<const MappedColumn> columns,
                 std::span<const MappedRead> reads, std::int64_t num_samples, Dtype dtype, Dtype out_dtype,
                 RowCache* cache = nullptr);

}  // namespace colonnade
