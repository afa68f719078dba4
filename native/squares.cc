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

// Complete a kernel's task with the vectors, and call it on runs of outputs with about as many lookups each.
template <class Task>
void run_kernel(void (*kernel)(const Task&), Task task, const BagVectors& vectors) {
  check(vectors);
  task.rows = vectors.rows;
  task.weights = vectors.weights;
  task.bags = vectors.bags.empty() ? nullptr : vectors.bags.data();
  task.divisor = divisor_of(vectors.pooling);
  task.dim = vectors.dim;
  const std::int64_t n = vectors.num_outputs();
  const std::int64_t length = std::max<std::int64_t>(vectors.num_lookups / std::max<std::int64_t>(n, 1), 1);
  for_each_run(n, std::max<std::int64_t>(kRunLookups / length, 1), [&](std::int64_t begin, std::int64_t end) {
    Task run = task;
    run.begin = begin;
    run.end = end;
    kernel(run);
  });
}

}  // namespace

void pool_squares(const BagVectors& vectors, std::byte* out, std::int64_t out_stride) {
  const auto kernel = vectors.dtype == Dtype::float32 ? kernels().float32.pool_squares : kernels().float64.pool_squares;
  SquaresTask task{};
  task.out = out;
  task.out_stride = out_stride;
  run_kernel(kernel, task, vectors);
}

void square_gradients(const BagVectors& vectors, VectorPlace gradient, VectorPlace of_squares, void* out) {
  const auto kernel =
      vectors.dtype == Dtype::float32 ? kernels().float32.square_gradients : kernels().float64.square_gradients;
  SquareGradientTask task{};
  task.gradient = gradient;
  task.of_squares = of_squares;
  task.out = out;
  run_kernel(kernel, task, vectors);
}

}  // namespace colonnade
