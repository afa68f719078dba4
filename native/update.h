// Gradients -> rows: sum what each unique row received, in entry order, and apply the optimizer.
#pragma once

#include <cstdint>
#include <span>

#include "dram.h"
#include "gradients.h"

namespace colonnade {

// Entries grouped by unique row, rows grouped by table, as `Plan` has them.
struct Segments {
  std::span<const std::int64_t> table_offsets;    // (T + 1,) into unique rows
  std::span<const std::int32_t> segment_offsets;  // (U + 1,) into entries
  std::span<const std::int32_t> entries;          // (E,)
};

enum class Optimizer : std::int32_t { sgd = 0, rowwise_adagrad = 1 };
inline constexpr std::int64_t kSettings = 8;  // learning rate, weight decay, eps, 0 ...

// Sum of row u to base out + out_index[u] elements. invalid_argument: nothing written.
void sum_rows(const Segments& segments, const GradientSource& source, std::span<const std::int32_t> dims,
              std::int64_t out, std::span<const std::uint32_t> out_index, Dtype dtype);

// Row u is slots[u] of its table. optimizers (T,), settings (T, kSettings). invalid_argument: nothing
// changed.
void update(Dram& dram, std::span<const std::uint32_t> slots, const Segments& segments,
            const GradientSource& source, std::span<const std::int32_t> optimizers,
            std::span<const double> settings);

}  // namespace colonnade
