// Update of rows from gradients: sum the gradients of each unique row in entry order, and apply its parts' optimizers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

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

inline constexpr std::int64_t kSettings = 16;  // numbers of a part's optimizer, see _native.pyi

// Write the sum of row u to base + out_index[u] elements. invalid_argument: nothing written.
void sum_rows(const Segments& segments, const GradientSource& source, const Parts& parts, std::int64_t out,
              std::span<const std::uint32_t> out_index, Dtype dtype);

// Names of the optimizers by kind.
std::vector<std::string> optimizer_names();

// Return the number of state elements of a row's part that an optimizer has. invalid_argument: no such kind.
std::int64_t optimizer_state_elements(std::int32_t kind, std::int64_t dim);

// Update rows: row u is slots[u] of its table. optimizers (P,) kinds, settings (P, kSettings). invalid_argument:
// nothing changed.
void update(Dram& dram, std::span<const std::uint32_t> slots, const Segments& segments,
            const GradientSource& source, const Parts& parts, std::span<const std::int32_t> optimizers,
            std::span<const double> settings);

// Return the sum of squares in float64, in an order that depends only on n. float32 or float64, else invalid_argument.
double squared_norm(const void* values, std::int64_t n, Dtype dtype);

}  // namespace colonnade
