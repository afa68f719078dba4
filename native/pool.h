// Rows -> outputs: gather, weigh, sum and divide, per read of a feature.
#pragma once

#include <cstdint>
#include <span>

#include "lookups.h"
#include "parts.h"
#include "scalar.h"

namespace colonnade {

// Where rows and outputs lie. T tables, R reads; all addresses belong to the caller.
struct PoolPlaces {
  std::span<const std::int64_t> bases, strides;          // (T,) address of row 0; bytes between rows
  std::span<const std::int64_t> out_bases, out_strides;  // (R,) address of output row 0; bytes between
};

// index (E,): row of each lookup. invalid_argument, nothing written, if lengths or types disagree, a read
// names a feature or table that is not there or is wider than the strides, or a lookup has no row.
//
// order: (E,) all lookups, as a batch's entries are listed page by page (PageOrder), or empty. A feature of one lookup
// an output whose lookups stand in their own places there, among themselves, is read in that order: each row once,
// its neighbours next. Outputs are the same.
void pool(const Lookups& lookups, std::span<const std::uint32_t> index, const Reads& reads,
          const PoolPlaces& places, Dtype dtype, Dtype out_dtype, std::span<const std::int32_t> order = {});

bool all_finite(const void* values, std::int64_t n, Dtype dtype);

}  // namespace colonnade
