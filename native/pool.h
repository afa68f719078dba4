// Pooling of rows to outputs, for each read of a feature: gather, weight, sum and divide.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/kernels.h"
#include "lookups.h"
#include "parts.h"
#include "scalar.h"

namespace colonnade {

// Addresses of rows and outputs. T tables, R reads; the caller owns all memory.
struct PoolPlaces {
  std::span<const std::int64_t> bases, strides;          // (T,) address of row 0; bytes between rows
  std::span<const std::int64_t> out_bases, out_strides;  // (R,) address of output row 0; bytes between
};

// Pool rows to outputs. index (E,): row of each lookup. invalid_argument, with nothing written, if lengths or types
// disagree, a read has an invalid feature or table or is wider than the strides, or a lookup has no row.
//
// order: (E,) all lookups, page by page, as PageOrder lists a batch's entries; or empty. A feature with one lookup per
// output, listed there at its own positions, is read in that order: each row once, followed by its neighbours. Outputs
// are the same.
void pool(const Lookups& lookups, std::span<const std::uint32_t> index, const Reads& reads,
          const PoolPlaces& places, Dtype dtype, Dtype out_dtype, std::span<const std::int32_t> order = {});

// Raise as `pool` does.
void check_pool(const Lookups& lookups, std::span<const std::uint32_t> index, const Reads& reads,
                const PoolPlaces& places, Dtype dtype, Dtype out_dtype);

Divisor divisor_of(Pooling pooling) noexcept;
Rounding rounding_to(Dtype dtype) noexcept;  // of outputs of this dtype

bool all_finite(const void* values, std::int64_t n, Dtype dtype);

}  // namespace colonnade
