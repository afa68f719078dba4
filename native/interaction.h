// First operators of models over vectors that lie anywhere: dots of all pairs (DLRM), factorization machine,
// cross layer (DCN-v2).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "scalar.h"

namespace colonnade {

// Vectors of `dim` elements, V of each of B samples. float32 or float64.
struct Vectors {
  std::vector<VectorPlace> places;  // (V,)
  std::int64_t num_samples;         // B
  std::int64_t dim;
  Dtype dtype;

  std::int64_t num_vectors() const { return static_cast<std::int64_t>(places.size()); }
};

// Elements of a sample's output.
std::int64_t dots_width(const Vectors& vectors, std::int64_t num_kept);

// Every kept vector is named once; invalid_argument otherwise. out: (B, dots_width), contiguous.
void dots(const Vectors& vectors, std::span<const std::int32_t> kept, void* out);
// gradient: as `out` of dots. out (V,).
void dots_gradient(const Vectors& vectors, std::span<const std::int32_t> kept, const void* gradient,
                   std::span<const TargetPlace> out);

// out, gradient: (B,).
void fm(const Vectors& vectors, void* out);
void fm_gradient(const Vectors& vectors, const void* gradient, std::span<const TargetPlace> out);

// n elements each: out = first * factor + input; and what `first` and `factor` receive.
void cross(const void* first, const void* factor, const void* input, void* out, std::int64_t n, Dtype dtype);
void cross_gradient(const void* first, const void* factor, const void* gradient, void* of_first,
                    void* of_factor, std::int64_t n, Dtype dtype);

}  // namespace colonnade
