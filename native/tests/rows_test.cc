// pool, sum_rows and update against loops that a reader can check, on every path, bit for bit.
#include <cmath>
#include <cstring>
#include <limits>

#include "../dram.h"
#include "../plan.h"
#include "../pool.h"
#include "../update.h"
#include "check.h"
#include "evicted_rows.h"

using namespace colonnade;

namespace {

template <class T>
constexpr Dtype kDtype = sizeof(T) == 4 ? Dtype::float32 : Dtype::float64;

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Two features over one open table: "sum" or "mean" bags of 0 .. 4 lookups, and one with a lookup per sample.
template <class T>
struct Batch {
  std::int64_t batch_size, dim;
  std::vector<std::int64_t> ids, feature_offsets, bags{0};
  std::vector<std::int32_t> tables{0, 0};
  std::vector<std::uint8_t> poolings;
  std::vector<T> weights;

  Batch(std::int64_t batch_size, std::int64_t dim, bool is_mean, Random& random)
      : batch_size(batch_size), dim(dim), poolings{static_cast<std::uint8_t>(is_mean), 0} {
    for (std::int64_t b = 0; b < 2 * batch_size; ++b) {
      bags.push_back(bags.back() + (b < batch_size ? static_cast<std::int64_t>(random.below(5)) : 1));
    }
    feature_offsets = {0, bags[batch_size], bags[2 * batch_size]};
    for (std::int64_t e = 0; e < bags.back(); ++e) {
      ids.push_back(static_cast<std::int64_t>(random.below(20)));
      weights.push_back(static_cast<T>(random.real()));
    }
  }

  Lookups lookups(bool is_weighted) const {
    std::optional<Weights> factors;
    if (is_weighted) factors = Weights{weights.data(), static_cast<std::int64_t>(weights.size()), kDtype<T>};
    return Lookups(ids, feature_offsets, tables, poolings, batch_size, bags, factors);
  }
};

template <class T>
std::int64_t address(std::vector<T>& values, std::int64_t element) {
  return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(values.data() + element));
}

template <class T>
void check_batch(std::int64_t batch_size, std::int64_t dim, bool is_mean, bool is_weighted) {
  Random random(static_cast<std::uint64_t>(dim * 1000 + batch_size));
  Batch<T> batch(batch_size, dim, is_mean, random);
  const Lookups lookups = batch.lookups(is_weighted);
  const std::int64_t rows = 0;
  const Plan plan = make_plan(lookups, {&rows, 1}, std::vector<std::int64_t>{1});
  const std::int64_t offsets[] = {0, plan.num_unique()};
  const auto num_lookups = lookups.num_lookups();

  // Outputs of the two features side by side, with one element between rows that nobody may touch.
  const std::int64_t width = 2 * dim + 1;
  std::vector<T> gradients(batch_size * width);
  for (auto& value : gradients) value = static_cast<T>(random.real());

  const auto coefficient = [&](std::int64_t bag, std::int64_t e) {
    T c = is_weighted ? batch.weights[e] : T{1};
    if (is_mean && bag < batch_size) c *= T{1} / static_cast<T>(batch.bags[bag + 1] - batch.bags[bag]);
    return c;
  };
  std::vector<T> wanted_sums(plan.num_unique() * dim);
  std::vector<std::int64_t> bag_of(num_lookups);
  for (std::int64_t bag = 0; bag < 2 * batch_size; ++bag) {
    for (std::int64_t e = batch.bags[bag]; e < batch.bags[bag + 1]; ++e) bag_of[e] = bag;
  }
  for (std::int64_t u = 0; u < plan.num_unique(); ++u) {
    for (std::int32_t i = plan.segment_offsets[u]; i < plan.segment_offsets[u + 1]; ++i) {
      const std::int64_t e = plan.entries[i], bag = bag_of[e];
      const T* gradient = gradients.data() + bag % batch_size * width + (bag < batch_size ? 0 : dim);
      for (std::int64_t j = 0; j < dim; ++j) {
        const T term = gradient[j] * coefficient(bag, e);
        T& sum = wanted_sums[u * dim + j];
        sum = i == plan.segment_offsets[u] ? term : sum + term;
      }
    }
  }

  std::vector<T> wanted_out, wanted_rows;
  everywhere([&] {
    const TableSettings settings{
        .parts = {{.dim = dim, .init_scale = 1.0, .initial_state = 0.5, .initial_count = 1}},
        .state_elements = 1,
        .rows = 0,
        .capacity_rows = 64,
        .seed = 9};
    Dram dram({&settings, 1}, {kDtype<T>});
    std::vector<std::uint32_t> slots(plan.num_unique());
    dram.acquire({plan.unique_ids.data(), plan.unique_ids.size()}, offsets, {}, slots, true, nowhere);
    const RowLayout& layout = dram.layout(0);
    const auto row = [&](std::int64_t u) { return reinterpret_cast<T*>(layout.weights_of(slots[u])); };

    std::vector<std::uint32_t> index(num_lookups);
    for (std::int64_t e = 0; e < num_lookups; ++e) index[e] = slots[plan.inverse[e]];
    std::vector<T> out(batch_size * width, T{77});
    const std::int64_t base = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(layout.weights));
    const auto width32 = static_cast<std::int32_t>(dim);
    const std::int64_t out_bases[] = {address(out, 0), address(out, dim)};
    const auto out_stride = width * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t out_strides[] = {out_stride, out_stride};
    const std::int32_t features[] = {0, 1}, columns[] = {0, 0}, read_dims[] = {width32, width32};
    pool(lookups, index, Reads(features, columns, read_dims),
         {{&base, 1}, {&layout.weights_stride, 1}, out_bases, out_strides}, kDtype<T>, kDtype<T>);
    if (wanted_out.empty()) {
      wanted_out.assign(out.size(), T{77});
      for (std::int64_t bag = 0; bag < 2 * batch_size; ++bag) {
        T* const mine = wanted_out.data() + bag % batch_size * width + (bag < batch_size ? 0 : dim);
        std::fill_n(mine, dim, T{0});
        for (std::int64_t e = batch.bags[bag]; e < batch.bags[bag + 1]; ++e) {
          for (std::int64_t j = 0; j < dim; ++j) {
            const T term = is_weighted ? row(plan.inverse[e])[j] * batch.weights[e] : row(plan.inverse[e])[j];
            mine[j] = e == batch.bags[bag] ? term : mine[j] + term;
          }
        }
        const std::int64_t length = batch.bags[bag + 1] - batch.bags[bag];
        for (std::int64_t j = 0; is_mean && bag < batch_size && length && j < dim; ++j)
          mine[j] /= static_cast<T>(length);
      }
    }
    CHECK(same_bits(out, wanted_out));

    const std::int64_t bases[] = {address(gradients, 0), address(gradients, dim)};
    const std::int32_t both[] = {0, 1}, zeros[] = {0, 0}, widths[] = {width32, width32};
    const OutputGradients source(lookups, Reads(both, zeros, widths), bases, out_strides, kDtype<T>);
    const Parts parts({zeros, 1}, {zeros, 1}, {widths, 1}, {zeros, 1});
    const Segments segments{offsets,
                            {plan.segment_offsets.data(), plan.segment_offsets.size()},
                            {plan.entries.data(), plan.entries.size()}};
    std::vector<T> sums(wanted_sums.size());
    std::vector<std::uint32_t> places(plan.num_unique());
    for (std::int64_t u = 0; u < plan.num_unique(); ++u) places[u] = static_cast<std::uint32_t>(u * dim);
    sum_rows(segments, source, parts, address(sums, 0), places, kDtype<T>);
    CHECK(same_bits(sums, wanted_sums));

    const std::int32_t optimizer = 1;
    constexpr double kNone = std::numeric_limits<double>::infinity();
    const double numbers[kSettings] = {0.1, 0.01, 1e-6, 0, 0, 0, 0, 0, 0, kNone, kNone, kNone, 1};
    std::vector<T> wanted;
    for (std::int64_t u = 0; u < plan.num_unique(); ++u) {
      constexpr std::int64_t kLanes = 64 / sizeof(T);
      T lanes[kLanes] = {};
      std::vector<T> g(dim);
      for (std::int64_t j = 0; j < dim; ++j) {
        g[j] = wanted_sums[u * dim + j] + row(u)[j] * static_cast<T>(numbers[1]);
        lanes[j % kLanes] += g[j] * g[j];
      }
      for (std::int64_t half = kLanes / 2; half; half /= 2) {
        for (std::int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
      }
      const T accumulator = static_cast<T>(0.5) + lanes[0] / static_cast<T>(dim);
      const T step = static_cast<T>(numbers[0]) / (std::sqrt(accumulator) + static_cast<T>(numbers[2]));
      for (std::int64_t j = 0; j < dim; ++j) wanted.push_back(row(u)[j] - g[j] * step);
    }
    update(dram, slots, segments, source, parts, {&optimizer, 1}, numbers);
    std::vector<T> trained;
    for (std::int64_t u = 0; u < plan.num_unique(); ++u) {
      trained.insert(trained.end(), row(u), row(u) + dim);
      CHECK(layout.clock_of(slots[u]) == 1);
    }
    CHECK(same_bits(trained, wanted));
  });
}

}  // namespace

int main() {
  for (const std::int64_t dim : {1, 3, 8, 16, 17, 32, 64, 100, 128, 1100}) {
    for (const bool is_mean : {false, true}) {
      for (const bool is_weighted : {false, true}) {
        check_batch<float>(37, dim, is_mean, is_weighted);
        check_batch<double>(37, dim, is_mean, is_weighted);
      }
    }
    check_batch<float>(1, dim, true, true);
    check_batch<float>(700, dim, false, false);
  }
}
