// Lookups of a batch grouped by unique row.
#pragma once

#include <cstdint>
#include <span>

#include "buffer.h"
#include "lookups.h"

namespace colonnade {

// U unique rows of T tables; table t has N_t owners. Ordered by table, then by owner, then in an order that depends
// only on the ids.
struct Plan {
  Buffer<std::int64_t> unique_ids;     // (U,)
  Buffer<std::int64_t> block_offsets;  // (sum of N_t + 1,) bounds of unique rows by table and owner: one block for each
  Buffer<std::int32_t> inverse;        // (E,) unique row of each lookup
  Buffer<std::int32_t> segment_offsets;  // (U + 1,) into entries
  Buffer<std::int32_t> entries;          // (E,) lookups, ascending within a row

  std::int64_t num_unique() const { return static_cast<std::int64_t>(unique_ids.size()); }
};

// Sort and deduplicate lookups. table_rows (T,): 0 = open table; num_owners (T,). out_of_range for an id outside its
// vocabulary table.
Plan make_plan(const Lookups& lookups, std::span<const std::int64_t> table_rows, std::span<const std::int64_t> num_owners);

// Return the owner of each id. rows 0: open table. out_of_range for an id outside a vocabulary table.
void owner_of(std::span<const std::int64_t> ids, std::int64_t rows, std::int64_t num_owners,
              std::span<std::int32_t> out);

// Gather out[i] = values[index[i]]; out_of_range if an index is not a position in values.
void take(std::span<const std::int32_t> values, std::span<const std::int32_t> index,
          std::span<std::int32_t> out);

}  // namespace colonnade
