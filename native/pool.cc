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

constexpr std::int64_t kLongestRun = 8192, kShortestRun = 1024;  // lookups
constexpr std::int64_t kRunsPerThread = 8;
constexpr std::int64_t kCheckedAlone = 1 << 17;  // one thread finishes these before a second one joins
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

std::string number(std::int64_t n) {
  return std::to_string(n);
}

void check_index(std::span<const std::uint32_t> index) {
  constexpr std::uint32_t kAbsent = 0xffffffff;
  std::atomic<bool> is_absent{false};
  for_each_run(static_cast<std::int64_t>(index.size()), kCheckedAlone, [&](std::int64_t begin, std::int64_t end) {
    std::uint32_t absent = 0;
    for (std::int64_t e = begin; e < end; ++e) absent |= index[e] == kAbsent ? kAbsent : 0;
    if (absent) is_absent.store(true, std::memory_order_relaxed);
  });
  if (is_absent) {
    refuse("lookup " + number(std::ranges::find(index, kAbsent) - index.begin()) +
           " has no row (index -1); acquire it first");
  }
}

void check_read(const Lookups& lookups, const Read& read, std::int64_t r, const PoolPlaces& places,
                Dtype dtype, Dtype out_dtype) {
  const auto name = [&] { return "read " + number(r); };
  const auto num_tables = static_cast<std::int64_t>(places.bases.size());
  if (read.feature >= lookups.num_features())
    refuse(name() + " is of feature " + number(read.feature) + " of " + number(lookups.num_features()));
  const std::int32_t f = read.feature, t = lookups.table(f);
  if (t >= num_tables)
    refuse("feature " + number(f) + " names table " + number(t) + " of " + number(num_tables));
  const std::int64_t end_bytes = (std::int64_t{read.column} + read.dim) * item_bytes(dtype);
  const bool counts_elements = places.strides[t] == item_bytes(dtype);  // rows of a message, of any widths
  if (lookups.first(f) != lookups.last(f) && end_bytes > places.strides[t] && !counts_elements) {
    refuse(name() + " ends at byte " + number(end_bytes) + " of rows that are " + number(places.strides[t]) +
           " bytes apart (table " + number(t) + ")");
  }
  const std::int64_t out_bytes = read.dim * item_bytes(out_dtype);
  if (lookups.num_outputs(f) > 1 && out_bytes > places.out_strides[r]) {
    refuse(name() + " writes " + number(out_bytes) + " bytes into output rows that are " +
           number(places.out_strides[r]) + " bytes apart");
  }
}

// Return whether all of order's entries are among lookups [first, last).
bool is_within(std::span<const std::int32_t> order, std::int64_t first, std::int64_t last) {
  const auto lo = static_cast<std::uint32_t>(first), length = static_cast<std::uint32_t>(last - first);
  int strangers = 0;
  for (const auto lookup : order) strangers |= static_cast<std::uint32_t>(lookup) - lo >= length;
  return !strangers;
}

}  // namespace

void check_pool(const Lookups& lookups, std::span<const std::uint32_t> index, const Reads& reads,
                const PoolPlaces& places, Dtype dtype, Dtype out_dtype) {
  want_length("index", index.size(), lookups.num_lookups(), "lookups");
  want_length("strides", places.strides.size(), static_cast<std::int64_t>(places.bases.size()), "tables");
  want_length("out_bases", places.out_bases.size(), reads.size(), "reads");
  want_length("out_strides", places.out_strides.size(), reads.size(), "reads");
  if (compute_dtype(out_dtype) != compute_dtype(dtype)) {
    refuse(std::string(name_of(dtype)) + " rows give " +
           (dtype == Dtype::float64 ? "float64" : "float32, bfloat16 or float16") + " outputs, not " +
           std::string(name_of(out_dtype)));
  }
  if (lookups.weights() && lookups.weights()->dtype != compute_dtype(dtype)) {
    refuse("weights are " + std::string(name_of(lookups.weights()->dtype)) + ", wanted " +
           std::string(name_of(compute_dtype(dtype))) + " for " + std::string(name_of(dtype)) + " rows");
  }
  for (std::int64_t r = 0; r < reads.size(); ++r) {
    check_read(lookups, reads.all()[r], r, places, dtype, out_dtype);
  }
  check_index(index);
}

Divisor divisor_of(Pooling pooling) noexcept {
  return pooling == Pooling::mean ? Divisor::n : pooling == Pooling::sqrtn ? Divisor::sqrt_n : Divisor::one;
}

Rounding rounding_to(Dtype dtype) noexcept {
  return dtype == Dtype::bfloat16  ? Rounding::bfloat16
         : dtype == Dtype::float16 ? Rounding::float16
                                   : Rounding::none;
}

void pool(const Lookups& lookups, std::span<const std::uint32_t> index, const Reads& reads,
          const PoolPlaces& places, Dtype dtype, Dtype out_dtype, std::span<const std::int32_t> order) {
  check_pool(lookups, index, reads, places, dtype, out_dtype);
  if (!order.empty()) want_length("order", order.size(), lookups.num_lookups(), "lookups, or none");
  std::int64_t out_bytes = 0, read_lookups = 0, read_bytes = 0;
  for (const Read& read : reads.all()) {
    const std::int64_t num_lookups = lookups.last(read.feature) - lookups.first(read.feature);
    read_lookups += num_lookups;
    read_bytes += num_lookups * read.dim * item_bytes(dtype);
    out_bytes += lookups.num_outputs(read.feature) * read.dim * item_bytes(out_dtype);
  }
  // Long runs, because the first rows of a run are not prefetched; enough of them for all threads.
  const std::int64_t longest =
      std::clamp(read_lookups / (kRunsPerThread * num_threads()), kShortestRun, kLongestRun);
  std::vector<PoolTask> tasks;
  for (std::int64_t r = 0; r < reads.size(); ++r) {
    const Read& read = reads.all()[r];
    const std::int32_t f = read.feature, t = lookups.table(f);
    const std::int64_t num_outputs = lookups.num_outputs(f), num_lookups = lookups.last(f) - lookups.first(f);
    const auto is_whole_lines = [](std::int64_t n) { return n % 64 == 0; };
    const bool is_ordered = !order.empty() && !lookups.bags(f) &&
                            is_within(order.subspan(lookups.first(f), num_lookups), lookups.first(f), lookups.last(f));
    PoolTask task{
        .rows = reinterpret_cast<const std::byte*>(places.bases[t]) + read.column * item_bytes(dtype),
        .row_stride = places.strides[t],
        .dim = read.dim,
        .index = index.data(),
        .weights = lookups.weights() ? lookups.weights()->data : nullptr,
        .bags = lookups.bags(f),
        .first = lookups.first(f),
        .order = is_ordered ? order.data() + lookups.first(f) : nullptr,
        .divisor = divisor_of(lookups.pooling(f)),
        .rounding = rounding_to(out_dtype),
        .is_streamed = out_bytes >= kStreamedBytes && is_whole_lines(read.dim * item_bytes(out_dtype)) &&
                       is_whole_lines(places.out_bases[r]) && is_whole_lines(places.out_strides[r]),
        .out = reinterpret_cast<std::byte*>(places.out_bases[r]),
        .out_stride = places.out_strides[r],
        .begin = 0,
        .end = 0,
    };
    const std::int64_t num_runs = (std::max(num_outputs, num_lookups) + longest - 1) / longest;
    const std::int64_t run = num_runs ? (num_outputs + num_runs - 1) / num_runs : 0;
    for (; task.begin < num_outputs; task.begin = task.end) {
      task.end = std::min(num_outputs, task.begin + run);
      tasks.push_back(task);
    }
  }
  const auto kernel = kernels().pool[static_cast<int>(dtype)];
  for_each_unit(static_cast<std::int64_t>(tasks.size()), read_bytes, [&](std::int64_t i) { kernel(tasks[i]); });
}

namespace {

// Checks bits: a 16-bit number is infinite or NaN if its exponent is all ones.
bool all_finite(const std::uint16_t* values, std::int64_t n, Dtype dtype) {
  const std::uint16_t exponent = dtype == Dtype::bfloat16 ? 0x7f80 : 0x7c00;
  bool is_special = false;
  for (std::int64_t i = 0; i < n; ++i) is_special |= (values[i] & exponent) == exponent;
  return !is_special;
}

bool is_run_finite(const void* values, std::int64_t begin, std::int64_t end, Dtype dtype) {
  switch (dtype) {
    case Dtype::float32:
      return kernels().float32.all_finite(static_cast<const float*>(values) + begin, end - begin);
    case Dtype::float64:
      return kernels().float64.all_finite(static_cast<const double*>(values) + begin, end - begin);
    default:
      return all_finite(static_cast<const std::uint16_t*>(values) + begin, end - begin, dtype);
  }
}

}  // namespace

bool all_finite(const void* values, std::int64_t n, Dtype dtype) {
  constexpr std::int64_t kRun = 1 << 16;
  std::atomic<bool> is_finite{true};
  for_each_run(n, kRun, [&](std::int64_t begin, std::int64_t end) {
    if (!is_finite.load(std::memory_order_relaxed)) return;
    if (!is_run_finite(values, begin, end, dtype)) is_finite.store(false, std::memory_order_relaxed);
  });
  return is_finite;
}

}  // namespace colonnade
