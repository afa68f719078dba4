// Pooling of bags with squares (factorization machines over ids), and gradients of lookups whose vectors and squares
// were pooled.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/kernels.h"
#include "lookups.h"
#include "pool.h"
#include "scalar.h"

namespace colonnade {

// Vectors of the lookups of one feature, adjacent, and the bags that they are in.
struct BagVectors {
  const void* rows;     // (E, dim)
  const void* weights;  // (E,), or null
  std::span<const std::int64_t> bags;  // (B + 1,) ascending from 0 to E; empty: one lookup per output
  Pooling pooling;
  std::int64_t num_lookups, dim;
  Dtype dtype;  // float32 or float64, also of weights and results

  std::int64_t num_outputs() const {
    return bags.empty() ? num_lookups : static_cast<std::int64_t>(bags.size()) - 1;
  }
};

// Addresses that one read writes to: sums of its rows, sums of their squares, and copies; base 0: not wanted.
struct SquarePlaces {
  std::int64_t sums_base, sums_stride, adds_sums, squares_base, squares_stride, adds_squares, copies_base;
};

// Pool rows, their squares (x v)^2, x being what pooling multiplies a row v by, and copy them, in one pass over the rows
// in order of the reads. Outputs are of the type of computation. places: by read. `pool` has the other arguments;
// invalid_argument likewise, and for a sequence.
void pool_squares(const Lookups& lookups, std::span<const std::uint32_t> index, const Reads& reads, PoolPlaces rows,
                  std::span<const SquarePlaces> places, Dtype dtype);
// Compute the gradient of each lookup, (E, dim), from those of the outputs that pooled its vector, and its square; base
// null: none did. invalid_argument as above.
void square_gradients(const BagVectors& vectors, VectorPlace gradient, VectorPlace of_squares, void* out);

}  // namespace colonnade
