#include "squares.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "pool.h"
#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kRunLookups = 1 << 10, kRunSamples = 256;

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

void pool_squares(const Lookups& lookups, std::span<const std::uint32_t> index, const Reads& reads, PoolPlaces rows,
                  std::span<const SquarePlaces> places, Dtype dtype) {
  std::vector<std::int64_t> bases, strides;
  for (const auto& place : places) {
    bases.push_back(place.sums_base ? place.sums_base : place.squares_base);
    strides.push_back(!place.sums_base      ? place.squares_stride
                      : !place.squares_base ? place.sums_stride
                                            : std::min(place.sums_stride, place.squares_stride));
  }
  rows.out_bases = bases;
  rows.out_strides = strides;
  check_pool(lookups, index, reads, rows, dtype, compute_dtype(dtype));
  std::vector<PoolSquaresTask> tasks;
  std::int64_t num_bytes = 0;
  for (std::int64_t r = 0; r < reads.size(); ++r) {
    const Read& read = reads.all()[r];
    const SquarePlaces& place = places[r];
    const std::int32_t f = read.feature, t = lookups.table(f);
    if (lookups.num_outputs(f) != lookups.batch_size()) {
      throw std::invalid_argument("pool_squares: feature " + std::to_string(f) + " is a sequence, wanted bags");
    }
    num_bytes += (lookups.last(f) - lookups.first(f)) * read.dim * item_bytes(dtype);
    tasks.push_back({
        .rows = reinterpret_cast<const std::byte*>(rows.bases[t]) + read.column * item_bytes(dtype),
        .row_stride = rows.strides[t],
        .dim = read.dim,
        .index = index.data(),
        .weights = lookups.weights() ? lookups.weights()->data : nullptr,
        .bags = lookups.bags(f),
        .first = lookups.first(f),
        .divisor = divisor_of(lookups.pooling(f)),
        .sums = {reinterpret_cast<std::byte*>(place.sums_base), place.sums_stride},
        .squares = {reinterpret_cast<std::byte*>(place.squares_base), place.squares_stride},
        .adds_sums = place.adds_sums != 0,
        .adds_squares = place.adds_squares != 0,
        .copies = reinterpret_cast<void*>(place.copies_base),
        .begin = 0,
        .end = 0,
    });
  }
  // Outputs that several reads add to are one thread's.
  const auto kernel = kernels().pool_squares[static_cast<int>(dtype)];
  const std::int64_t num_runs = (lookups.batch_size() + kRunSamples - 1) / kRunSamples;
  for_each_unit(num_runs, num_bytes, [&](std::int64_t i) {
    for (PoolSquaresTask task : tasks) {
      task.begin = i * kRunSamples;
      task.end = std::min(task.begin + kRunSamples, lookups.batch_size());
      kernel(task);
    }
  });
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
