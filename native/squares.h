// Squares of the vectors of bags (factorization machines over ids), and gradients of lookups whose vectors and squares
// were pooled.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/kernels.h"
#include "lookups.h"
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

// Compute, for each output, the sum over its lookups of (x v)^2, x being what pooling multiplies a vector by.
// invalid_argument if the bags are not as above. out: output b at out + b * out_stride bytes.
void pool_squares(const BagVectors& vectors, std::byte* out, std::int64_t out_stride);
// Compute the gradient of each lookup, (E, dim), from those of the outputs that pooled its vector, and its square; base
// null: none did. invalid_argument as above.
void square_gradients(const BagVectors& vectors, VectorPlace gradient, VectorPlace of_squares, void* out);

}  // namespace colonnade
