#include "pool.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kRunLookups = 4096;  // long, so that few rows are not fetched ahead
constexpr std::int64_t kStreamedBytes = std::int64_t{1}
                                        << 20;  // smaller outputs are worth keeping in the cache

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("pool: " + message);
}

void want_length(const char* name, std::size_t got, std::int64_t wanted, const char* unit) {
  if (static_cast<std::int64_t>(got) != wanted) {
    refuse(std::string(name) + " has " + std::to_string(got) + " elements, wanted " + std::to_string(wanted) +
           " (" + unit + ")");
  }
}

}  // namespace

void pool(const Lookups& lookups, std::span<const std::uint32_t> index, const PoolPlaces& places,
          Dtype dtype) {
  const auto num_tables = static_cast<std::int64_t>(places.bases.size());
  want_length("index", index.size(), lookups.num_lookups(), "lookups");
  want_length("strides", places.strides.size(), num_tables, "tables");
  want_length("dims", places.dims.size(), num_tables, "tables");
  want_length("out_bases", places.out_bases.size(), lookups.num_features(), "features");
  want_length("out_strides", places.out_strides.size(), lookups.num_features(), "features");
  if (lookups.weights() && lookups.weights()->dtype != dtype) {
    refuse("weights are " + std::string(name_of(lookups.weights()->dtype)) + ", the tables " +
           std::string(name_of(dtype)));
  }
  std::uint32_t largest = 0;
  for (const auto row : index) largest = std::max(largest, row);
  if (largest == 0xffffffff) {
    refuse("lookup " + std::to_string(std::ranges::find(index, largest) - index.begin()) +
           " has no row (index -1); acquire it first");
  }

  std::int64_t out_bytes = 0;
  for (std::int64_t f = 0; f < lookups.num_features(); ++f) {
    const std::int32_t t = lookups.table(f);
    if (t >= num_tables)
      refuse("feature " + std::to_string(f) + " names table " + std::to_string(t) + " of " +
             std::to_string(num_tables));
    if (places.dims[t] < 1)
      refuse("table " + std::to_string(t) + " has dim " + std::to_string(places.dims[t]));
    out_bytes += lookups.num_outputs(f) * places.dims[t] * item_bytes(dtype);
  }
  std::vector<PoolTask> tasks;
  for (std::int64_t f = 0; f < lookups.num_features(); ++f) {
    const std::int32_t t = lookups.table(f);
    const std::int64_t num_outputs = lookups.num_outputs(f), num_lookups = lookups.last(f) - lookups.first(f);
    const auto is_whole_lines = [](std::int64_t n) { return n % 64 == 0; };
    PoolTask task{
        .rows = reinterpret_cast<const std::byte*>(places.bases[t]),
        .row_stride = places.strides[t],
        .dim = places.dims[t],
        .index = index.data(),
        .weights = lookups.weights() ? lookups.weights()->data : nullptr,
        .bags = lookups.bags(f),
        .first = lookups.first(f),
        .last = lookups.last(f),
        .is_mean = lookups.pooling(f) == Pooling::mean,
        .is_streamed = out_bytes >= kStreamedBytes && is_whole_lines(places.dims[t] * item_bytes(dtype)) &&
                       is_whole_lines(places.out_bases[f]) && is_whole_lines(places.out_strides[f]),
        .out = reinterpret_cast<std::byte*>(places.out_bases[f]),
        .out_stride = places.out_strides[f],
        .begin = 0,
        .end = 0,
    };
    const std::int64_t num_runs = std::max(num_outputs, num_lookups) / kRunLookups + 1;
    const std::int64_t run = num_outputs / num_runs + 1;
    for (task.begin = 0; task.begin < num_outputs; task.begin = task.end) {
      task.end = std::min(num_outputs, task.begin + run);
      tasks.push_back(task);
    }
  }
  const auto kernel = dtype == Dtype::float32 ? kernels().float32.pool : kernels().float64.pool;
  for_each_unit(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i) { kernel(tasks[i]); });
}

bool all_finite(const void* values, std::int64_t n, Dtype dtype) {
  constexpr std::int64_t kRun = 1 << 16;
  std::atomic<bool> is_finite{true};
  for_each_run(n, kRun, [&](std::int64_t begin, std::int64_t end) {
    if (!is_finite.load(std::memory_order_relaxed)) return;
    const bool is_run_finite =
        dtype == Dtype::float32
            ? kernels().float32.all_finite(static_cast<const float*>(values) + begin, end - begin)
            : kernels().float64.all_finite(static_cast<const double*>(values) + begin, end - begin);
    if (!is_run_finite) is_finite.store(false, std::memory_order_relaxed);
  });
  return is_finite;
}

}  // namespace colonnade
