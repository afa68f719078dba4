// Update of rows from gradients: sum the gradients of each unique row in entry order, and apply its parts' optimizers.
#pragma once

#include <cstdint>
#include <span>

#include "dram.h"
#include "gradients.h"
#include "parts.h"

namespace colonnade {

// Entries grouped by unique row, rows grouped by table, as in `Plan`.
struct Segments {
  std::span<const std::int64_t> table_offsets;    // (T + 1,) into unique rows
  std::span<const std::int32_t> segment_offsets;  // (U + 1,) into entries
  std::span<const std::int32_t> entries;          // (E,)
};

enum class Optimizer : std::int32_t {
  sgd = 0,
  rowwise_adagrad = 1,
  momentum = 2,
  adagrad = 3,
  adam = 4,
  rowwise_adam = 5,
  adamw = 6,
  ftrl = 7,
  lamb = 8,
};
inline constexpr std::int64_t kSettings = 16;  // numbers of a part's optimizer, see _native.pyi

// Write the sum of row u to base + out_index[u] elements. invalid_argument: nothing written.
void sum_rows(const Segments& segments, const GradientSource& source, const Parts& parts, std::int64_t out,
              std::span<const std::uint32_t> out_index, Dtype dtype);

// Update rows: row u is slots[u] of its table. optimizers (P,), settings (P, kSettings). invalid_argument: nothing
// changed.
void update(Dram& dram, std::span<const std::uint32_t> slots, const Segments& segments,
            const GradientSource& source, const Parts& parts, std::span<const std::int32_t> optimizers,
            std::span<const double> settings);

// Return the sum of squares in float64, in an order that depends only on n. float32 or float64, else invalid_argument.
double squared_norm(const void* values, std::int64_t n, Dtype dtype);

}  // namespace colonnade
