// The lookups of one batch grouped by row.
#pragma once

#include <cstdint>
#include <span>

#include "buffer.h"
#include "lookups.h"

namespace colonnade {

// U unique rows of T tables, table t dealt to N_t owners; table-major, then by owner, then in an order that depends only
// on the ids.
struct Plan {
  Buffer<std::int64_t> unique_ids;     // (U,)
  Buffer<std::int64_t> block_offsets;  // (sum of N_t + 1,) unique rows by table and owner: a block for each
  Buffer<std::int32_t> inverse;        // (E,) unique row of each lookup
  Buffer<std::int32_t> segment_offsets;  // (U + 1,) into entries
  Buffer<std::int32_t> entries;          // (E,) lookups, ascending inside a row

  std::int64_t num_unique() const { return static_cast<std::int64_t>(unique_ids.size()); }
};

// table_rows (T,): 0 = open table; num_owners (T,). out_of_range for an id outside its vocabulary table.
Plan make_plan(const Lookups& lookups, std::span<const std::int64_t> table_rows, std::span<const std::int64_t> num_owners);

// rows 0: an open table. out_of_range for an id outside a vocabulary table.
void owner_of(std::span<const std::int64_t> ids, std::int64_t rows, std::int64_t num_owners,
              std::span<std::int32_t> out);

// out[i] = values[index[i]]; out_of_range if an index is not a position in values.
void take(std::span<const std::int32_t> values, std::span<const std::int32_t> index,
          std::span<std::int32_t> out);

}  // namespace colonnade
