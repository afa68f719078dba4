// Squared norms of rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scalar.h"

namespace colonnade {

// Return sums of squares of `dim` weights of the rows at base + slot * stride, in float64, in eight lanes and one fixed
// order.
std::vector<double> squared_norms(const std::byte* base, std::int64_t stride, std::int64_t dim, Dtype dtype,
                                  std::span<const std::uint32_t> slots);

}  // namespace colonnade
