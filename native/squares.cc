#include "squares.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "pool.h"
#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kRunLookups = 1 << 10;

void check(const BagVectors& vectors) {
  if (vectors.bags.empty()) return;
  const auto& bags = vectors.bags;
  if (bags.front() != 0 || bags.back() != vectors.num_lookups || !std::ranges::is_sorted(bags)) {
    throw std::invalid_argument("offsets: wanted ascending ones from 0 to " + std::to_string(vectors.num_lookups));
  }
}

// Call run(begin, end) over all outputs, with about as many lookups each.
template <class Run>
void for_each_run_of_bags(const BagVectors& vectors, const Run& run) {
  const std::int64_t n = vectors.num_outputs();
  const std::int64_t length = std::max<std::int64_t>(vectors.num_lookups / std::max<std::int64_t>(n, 1), 1);
  for_each_run(n, std::max<std::int64_t>(kRunLookups / length, 1), run);
}

}  // namespace

void pool_squares(const BagVectors& vectors, std::byte* out, std::int64_t out_stride) {
  check(vectors);
  const auto kernel = vectors.dtype == Dtype::float32 ? kernels().float32.pool_squares : kernels().float64.pool_squares;
  for_each_run_of_bags(vectors, [&](std::int64_t begin, std::int64_t end) {
    kernel({.rows = vectors.rows,
            .weights = vectors.weights,
            .bags = vectors.bags.empty() ? nullptr : vectors.bags.data(),
            .divisor = divisor_of(vectors.pooling),
            .dim = vectors.dim,
            .out = out,
            .out_stride = out_stride,
            .begin = begin,
            .end = end});
  });
}

void square_gradients(const BagVectors& vectors, VectorPlace gradient, VectorPlace of_squares, void* out) {
  check(vectors);
  const auto kernel =
      vectors.dtype == Dtype::float32 ? kernels().float32.square_gradients : kernels().float64.square_gradients;
  for_each_run_of_bags(vectors, [&](std::int64_t begin, std::int64_t end) {
    kernel({.rows = vectors.rows,
            .weights = vectors.weights,
            .bags = vectors.bags.empty() ? nullptr : vectors.bags.data(),
            .divisor = divisor_of(vectors.pooling),
            .dim = vectors.dim,
            .gradient = gradient,
            .of_squares = of_squares,
            .out = out,
            .begin = begin,
            .end = end});
  });
}

}  // namespace colonnade
