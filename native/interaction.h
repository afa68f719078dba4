// First operators of models, over vectors at any addresses: dot products of all pairs (DLRM), factorization machine,
// cross layer (DCN-v2).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "scalar.h"

namespace colonnade {

// V vectors of `dim` elements for each of B samples. float32 or float64.
struct Vectors {
  std::vector<VectorPlace> places;  // (V,)
  std::int64_t num_samples;         // B
  std::int64_t dim;
  Dtype dtype;

  std::int64_t num_vectors() const { return static_cast<std::int64_t>(places.size()); }
};

// Number of output elements of a sample.
std::int64_t dots_width(const Vectors& vectors, std::int64_t num_copied);

// Compute the dot products of all pairs, after copying the vectors in `copied`, which must be unique (else
// invalid_argument). out: (B, dots_width), contiguous.
void dots(const Vectors& vectors, std::span<const std::int32_t> copied, void* out);
// Compute the gradients of `dots`. gradient: as its `out`. out (V,).
void dots_gradient(const Vectors& vectors, std::span<const std::int32_t> copied, const void* gradient,
                   std::span<const TargetPlace> out);

// Compute the factorization machine and its gradients. terms: by vector; empty: all are `both`. out, gradient: (B,).
void fm(const Vectors& vectors, std::span<const Term> terms, void* out);
void fm_gradient(const Vectors& vectors, std::span<const Term> terms, const void* gradient,
                 std::span<const TargetPlace> out);

// Compute out = first * factor + input for n elements, and the gradients of `first` and `factor`.
void cross(const void* first, const void* factor, const void* input, void* out, std::int64_t n, Dtype dtype);
void cross_gradient(const void* first, const void* factor, const void* gradient, void* of_first,
                    void* of_factor, std::int64_t n, Dtype dtype);

}  // namespace colonnade
