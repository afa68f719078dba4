// Rows -> outputs: gather, weigh, sum or average, per feature.
#pragma once

#include <cstdint>
#include <span>

#include "lookups.h"
#include "scalar.h"

namespace colonnade {

// Where rows and outputs lie. T tables, F features; all addresses belong to the caller.
struct PoolPlaces {
  std::span<const std::int64_t> bases, strides;  // (T,) address of row 0; bytes between rows
  std::span<const std::int32_t> dims;            // (T,)
  std::span<const std::int64_t> out_bases,
      out_strides;  // (F,) address of output row 0; bytes between output rows
};

// index (E,): row of each lookup. invalid_argument if lengths or types disagree or a lookup has no row.
void pool(const Lookups& lookups, std::span<const std::uint32_t> index, const PoolPlaces& places,
          Dtype dtype);

bool all_finite(const void* values, std::int64_t n, Dtype dtype);

}  // namespace colonnade
