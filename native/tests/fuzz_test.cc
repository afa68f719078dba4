// Random batches through plan, pool, sum_rows and update, every other one a little damaged: what is wrong is
// refused and nothing is written, what is accepted gives what plain loops give.
#include <optional>
#include <set>

#include "../dram.h"
#include "../plan.h"
#include "../pool.h"
#include "../update.h"
#include "fuzz.h"
#include "evicted_rows.h"

using namespace colonnade;

namespace {

// What is damaged.
enum Wrong : std::uint64_t {
  kIds,
  kFeatures,
  kTables,
  kPoolings,
  kBatchSize,
  kBags,
  kWeights,
  kRows,
  kOffsets,
  kCapacity,
  kReadOf,
  kReadColumns,
  kReadDims,
  kIndex,
  kPlaces,
  kParts,
  kPartDims,
  kSegments,
  kEntries,
  kTableOffsets,
  kOutIndex,
  kSlots,
  kOptimizers,
  kSettings_,
  kNothing
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  Fuzz fuzz;
  Wrong wrong;
  Dtype dtype = Dtype::float32, compute = Dtype::float32, out_dtype = Dtype::float32;
  bool is_split = false;
  // By table, by part.
  std::vector<std::int64_t> rows, widths, state_elements;
  std::vector<std::int32_t> part_tables, part_columns, part_dims, part_states, optimizers;
  std::vector<double> settings;
  // By feature, by lookup.
  std::int64_t batch_size = 0;
  std::vector<std::int64_t> ids, feature_offsets, bags;
  std::vector<std::int32_t> feature_tables;
  std::vector<std::uint8_t> poolings;
  std::optional<Block> weights;
  std::int64_t num_weights = 0;

  explicit Case(std::uint64_t seed) : fuzz(seed), wrong(static_cast<Wrong>(fuzz.below(2 * kNothing))) {
    run_anywhere(fuzz);
    dtype = fuzz.pick({Dtype::float32, Dtype::float64, Dtype::bfloat16, Dtype::float16});
    compute = compute_dtype(dtype);
    is_split = dtype == Dtype::bfloat16 && fuzz.one_in(2);
    out_dtype =
        dtype == Dtype::float64 ? dtype : fuzz.pick({Dtype::float32, Dtype::bfloat16, Dtype::float16});
    make_tables();
    make_lookups();
  }

  template <class T>
  void damage_if(Wrong what, std::vector<T>& values) {
    if (wrong == what) fuzz.damage(values);
    values = std::vector<T>(values.begin(), values.end());
  }

  void make_tables() {
    const auto num_tables = static_cast<std::int32_t>(1 + fuzz.below(3));
    for (std::int32_t t = 0; t < num_tables; ++t) {
      rows.push_back(fuzz.pick<std::int64_t>({0, 0, 1, 7, 97, std::numeric_limits<std::int64_t>::max()}));
      std::int64_t width = 0, state = 0;
      for (std::uint64_t n = 1 + fuzz.below(3); n > 0; --n) {
        const std::int32_t dim = fuzz.one_in(40) ? 1024 : fuzz.pick({1, 3, 16, 17, 64});
        const auto optimizer = static_cast<std::int32_t>(fuzz.below(optimizer_names().size()));
        part_tables.push_back(t);
        part_columns.push_back(static_cast<std::int32_t>(width));
        part_dims.push_back(dim);
        part_states.push_back(static_cast<std::int32_t>(state));
        optimizers.push_back(optimizer);
        const double plain = optimizer == 0;  // SGD alone has a model here
        settings.insert(settings.end(), {0.125, plain ? 0 : 0.01, 1e-8, 0.9, 0.99, 0, 0.01, 0.01, 1,
                                         plain ? kInfinity : 1, plain ? kInfinity : 0.1,
                                         plain ? kInfinity : 0.5, 1, 0, 0, 0});
        width += dim;
        state += optimizer_state_elements(optimizer, dim);
      }
      widths.push_back(width);
      state_elements.push_back(state);
    }
  }

  void make_lookups() {
    batch_size = fuzz.pick<std::int64_t>({0, 1, 2, 7, 31});
    const auto num_features = fuzz.below(5);
    const bool has_bags = fuzz.one_in(2);
    feature_offsets = {0};
    bags = {0};
    for (std::uint64_t f = 0; f < num_features; ++f) {
      const auto t = fuzz.below(rows.size());
      feature_tables.push_back(static_cast<std::int32_t>(t));
      poolings.push_back(static_cast<std::uint8_t>(fuzz.below(4)));
      const auto add = [&] {
        ids.push_back(rows[t] == 0 && fuzz.one_in(2)
                          ? fuzz.id()
                          : static_cast<std::int64_t>(fuzz.below(
                                static_cast<std::uint64_t>(std::clamp<std::int64_t>(rows[t], 1, 20)))));
      };
      for (std::int64_t b = 0; b < batch_size; ++b) {
        for (auto n = has_bags || poolings.back() == 2 ? fuzz.below(5) : 1; n > 0; --n) add();
        bags.push_back(static_cast<std::int64_t>(ids.size()));
      }
      feature_offsets.push_back(static_cast<std::int64_t>(ids.size()));
    }
    num_weights = static_cast<std::int64_t>(ids.size());
    if (fuzz.one_in(2)) {
      weights.emplace(static_cast<std::size_t>(num_weights * item_bytes(compute)));
      for (std::int64_t e = 0; e < num_weights; ++e) set_element(weights->data(), e, compute, fuzz);
    }
    damage_if(kIds, ids);
    damage_if(kFeatures, feature_offsets);
    damage_if(kTables, feature_tables);
    damage_if(kPoolings, poolings);
    damage_if(kBags, bags);
    if (wrong == kBatchSize) fuzz.change(batch_size, 2 + fuzz.below(5));
    if (wrong == kWeights) num_weights += fuzz.one_in(2) ? 1 : -1;
    if (!has_bags) bags.clear();
  }

  // Wrong arguments may be refused, all others must not be.
  template <class Call>
  bool accepts(const Call& call) const {
    const bool is_fine = is_accepted(call);
    CHECK(is_fine || wrong < kNothing);
    return is_fine;
  }
};

void check_plan(const Plan& plan, const Lookups& lookups, std::int64_t num_blocks) {
  const auto n = lookups.num_lookups();
  CHECK(static_cast<std::int64_t>(plan.entries.size()) == n &&
        static_cast<std::int64_t>(plan.inverse.size()) == n);
  CHECK(static_cast<std::int64_t>(plan.block_offsets.size()) == num_blocks + 1);
  CHECK(plan.block_offsets[0] == 0 && plan.block_offsets[num_blocks] == plan.num_unique());
  CHECK(plan.segment_offsets[0] == 0 && plan.segment_offsets[plan.num_unique()] == n);
  for (std::int64_t u = 0; u < plan.num_unique(); ++u) {
    CHECK(plan.segment_offsets[u] < plan.segment_offsets[u + 1]);
    for (std::int32_t i = plan.segment_offsets[u]; i < plan.segment_offsets[u + 1]; ++i) {
      const std::int32_t e = plan.entries[i];
      CHECK(lookups.ids()[e] == plan.unique_ids[u] && plan.inverse[e] == u);
      CHECK(i == plan.segment_offsets[u] || plan.entries[i - 1] < e);
    }
  }
}

// One output: its rows, and some bytes between them.
struct Output {
  Read read;
  std::int64_t num_rows, stride;
  Block block;
  std::byte* row(std::int64_t i) const { return block.data() + i * stride; }
};

std::vector<Output> outputs_of(const Case& c, const Lookups& lookups, const Reads& reads, Fuzz& fuzz) {
  std::vector<Output> outputs;
  for (const Read& read : reads.all()) {
    const std::int64_t n = read.feature < lookups.num_features() ? lookups.num_outputs(read.feature) : 0;
    const std::int64_t bytes = std::min<std::int64_t>(read.dim, 4096) * item_bytes(c.out_dtype);
    const std::int64_t stride = fuzz.one_in(2) ? (bytes + 63) / 64 * 64 : bytes + 3 * item_bytes(c.out_dtype);
    outputs.push_back({read, n, stride, Block(static_cast<std::size_t>(n ? (n - 1) * stride + bytes : 0))});
  }
  return outputs;
}

double weight_of(const Case& c, std::int64_t e) {
  return c.weights ? element(c.weights->data(), e, c.compute) : 1.0;
}
double divisor_of(const Lookups& lookups, std::int64_t f, std::int64_t b) {
  const auto* bags = lookups.bags(f);
  const double n = bags ? static_cast<double>(bags[b + 1] - bags[b]) : 1.0;
  return lookups.pooling(f) == Pooling::mean ? n : lookups.pooling(f) == Pooling::sqrtn ? std::sqrt(n) : 1.0;
}
bool is_close(double got, double wanted, double scale, Dtype dtype) {
  const double precision = dtype == Dtype::float64 ? 1e-13 : dtype == Dtype::float32 ? 1e-5 : 1e-2;
  return std::abs(got - wanted) <= precision * (scale + 1e-3);
}

void check_pooled(const Case& c, const Lookups& lookups, std::span<const std::uint32_t> index,
                  const RowLayout* layouts[], const std::vector<Output>& outputs) {
  for (const auto& output : outputs) {
    const std::int32_t f = output.read.feature;
    const RowLayout& layout = *layouts[lookups.table(f)];
    const auto* bags = lookups.bags(f);
    for (std::int64_t b = 0; b < output.num_rows; ++b) {
      const std::int64_t begin = bags ? bags[b] : lookups.first(f) + b, end = bags ? bags[b + 1] : begin + 1;
      for (std::int64_t j = 0; j < output.read.dim; ++j) {
        double sum = 0, scale = 0;
        for (std::int64_t e = begin; e < end; ++e) {
          const double term =
              element(layout.weights_of(index[e]), output.read.column + j, c.dtype) * weight_of(c, e);
          sum += term;
          scale += std::abs(term);
        }
        if (begin < end) sum /= divisor_of(lookups, f, b);
        CHECK(is_close(element(output.row(b), j, c.out_dtype), sum, scale, c.out_dtype));
      }
      const std::int64_t used = output.read.dim * item_bytes(c.out_dtype);
      for (std::int64_t i = used; b + 1 < output.num_rows && i < output.stride; ++i)
        CHECK(output.row(b)[i] == std::byte{0x5a});
    }
  }
}

// Columns of a row's sum by loops; scale: of the terms without their signs.
struct PlainSum {
  double sum = 0, scale = 0;
};
PlainSum plain_sum(const Case& c, const Lookups& lookups, const std::vector<Output>& outputs,
                   const Segments& segments, std::int64_t u, std::int64_t column) {
  PlainSum plain;
  for (std::int32_t i = segments.segment_offsets[u]; i < segments.segment_offsets[u + 1]; ++i) {
    const std::int64_t e = segments.entries[i];
    std::int64_t f = 0;
    while (!(lookups.first(f) <= e && e < lookups.last(f))) ++f;
    const auto* bags = lookups.bags(f);
    std::int64_t row = e - lookups.first(f);
    if (bags) row = std::upper_bound(bags, bags + c.batch_size + 1, e) - bags - 1;
    for (const auto& output : outputs) {
      const auto& [feature, first, dim] = output.read;
      if (feature != f || column < first || column >= first + dim) continue;
      const double term = element(output.row(row), column - first, c.out_dtype) * weight_of(c, e) /
                          divisor_of(lookups, f, row);
      plain.sum += term;
      plain.scale += std::abs(term);
    }
  }
  return plain;
}

std::vector<std::byte> planes_of(const Dram& dram) {
  std::vector<std::byte> all;
  for (std::int64_t t = 0; t < dram.num_tables(); ++t) {
    const RowLayout& layout = dram.layout(t);
    const auto n = dram.capacity_rows(t);
    all.insert(all.end(), layout.weights, layout.weights + n * layout.weights_stride);
    all.insert(all.end(), layout.states, layout.states + n * layout.state_stride);
  }
  return all;
}

void fuzz_batch(std::uint64_t seed) {
  Case c(seed);
  Fuzz& fuzz = c.fuzz;
  std::optional<Lookups> made;
  if (!c.accepts([&] {
        std::optional<std::span<const std::int64_t>> bags;
        if (!c.bags.empty()) bags = c.bags;
        std::optional<Weights> weights;
        if (c.weights) weights = Weights{c.weights->data(), c.num_weights, c.compute};
        made.emplace(c.ids, c.feature_offsets, c.feature_tables, c.poolings, c.batch_size, bags, weights);
      }))
    return;
  const Lookups& lookups = *made;

  auto rows = c.rows;
  c.damage_if(kRows, rows);
  std::vector<std::int64_t> num_owners(rows.size());
  std::int64_t num_blocks = 0;
  for (auto& owners : num_owners) num_blocks += owners = fuzz.pick<std::int64_t>({1, 2, 3, 64});
  if (c.wrong == kRows && fuzz.one_in(4) && !rows.empty())
    num_owners[fuzz.below(rows.size())] = fuzz.pick<std::int64_t>({0, -1, std::int64_t{1} << 31});
  if (!c.accepts([&] {
        const Plan plan = make_plan(lookups, rows, num_owners);
        check_plan(plan, lookups, num_blocks);
      }))
    return;
  if (c.wrong == kRows) return;
  const Plan plan = make_plan(lookups, rows, std::vector<std::int64_t>(rows.size(), 1));
  const std::int64_t num_tables = static_cast<std::int64_t>(rows.size()), num_unique = plan.num_unique();

  // Rows, all parts of a table born alike.
  std::vector<TableSettings> tables;
  std::vector<std::int64_t> offsets(plan.block_offsets.data(), plan.block_offsets.data() + num_tables + 1);
  for (std::int64_t t = 0; t < num_tables; ++t) {
    const std::int64_t spare = c.wrong == kCapacity ? -1 : static_cast<std::int64_t>(fuzz.below(5));
    tables.push_back({{},
                      c.state_elements[t],
                      rows[t],
                      std::max<std::int64_t>(0, offsets[t + 1] - offsets[t] + spare),
                      seed});
    for (std::size_t p = 0; p < c.part_dims.size(); ++p)
      if (c.part_tables[p] == t)
        tables.back().parts.push_back({.dim = c.part_dims[p], .state = 0, .init_scale = 1.0});
  }
  Dram dram(tables, {c.dtype, c.is_split});
  c.damage_if(kOffsets, offsets);
  std::vector<std::uint32_t> slots(num_unique);
  if (!c.accepts(
          [&] { dram.acquire({plan.unique_ids.data(), plan.unique_ids.size()}, offsets, {}, slots, true, nowhere); })) {
    for (std::int64_t t = 0; t < num_tables; ++t) CHECK(dram.num_rows(t) == 0);
    return;
  }
  std::vector<const RowLayout*> layouts;
  std::vector<std::int64_t> bases, strides;
  for (std::int64_t t = 0; t < num_tables; ++t) {
    layouts.push_back(&dram.layout(t));
    bases.push_back(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(layouts[t]->weights)));
    strides.push_back(layouts[t]->weights_stride);
  }

  // Rows -> outputs: a feature reads nothing, all of a row, or each part.
  std::vector<std::int32_t> read_of, read_columns, read_dims;
  for (std::int32_t f = 0; f < lookups.num_features(); ++f) {
    const auto how = fuzz.below(5);
    for (std::size_t p = 0; how > 0 && p < c.part_dims.size(); ++p) {
      if (c.part_tables[p] != lookups.table(f) || (how < 3 && c.part_columns[p] > 0)) continue;
      read_of.push_back(f);
      read_columns.push_back(c.part_columns[p]);
      read_dims.push_back(how < 3 ? static_cast<std::int32_t>(c.widths[lookups.table(f)]) : c.part_dims[p]);
    }
  }
  c.damage_if(kReadOf, read_of);
  c.damage_if(kReadColumns, read_columns);
  c.damage_if(kReadDims, read_dims);
  std::optional<Reads> read;
  if (!c.accepts([&] { read.emplace(read_of, read_columns, read_dims); })) return;
  const Reads& reads = *read;
  std::vector<Output> outputs = outputs_of(c, lookups, reads, fuzz);
  for (const auto& [read, num_rows, stride, block] : outputs) {
    if (read.feature >= lookups.num_features()) continue;
    // Where nothing is read nobody knows the width, and rows one element apart may have any.
    const std::int32_t t = lookups.table(read.feature);
    const bool is_empty = lookups.first(read.feature) == lookups.last(read.feature);
    if (num_rows && is_empty && read.dim > 4096) return;
    if (num_rows && c.widths[t] == 1 && read.column + std::int64_t{read.dim} > 1) return;
  }
  std::vector<std::int64_t> out_bases, out_strides;
  for (const auto& output : outputs) {
    out_bases.push_back(output.block.address());
    out_strides.push_back(output.stride);
  }
  std::vector<std::uint32_t> index(lookups.num_lookups());
  for (std::size_t e = 0; e < index.size(); ++e) index[e] = slots[plan.inverse[e]];
  if (c.wrong == kIndex) {
    if (index.empty() || fuzz.one_in(2)) {
      index.push_back(0);
    } else {
      index[fuzz.below(index.size())] = kNoSlot;
    }
  }
  if (c.wrong == kPlaces) {
    auto& which = *fuzz.pick({&bases, &strides, &out_bases, &out_strides});
    fuzz.one_in(2) || which.empty() ? which.push_back(64) : which.pop_back();
  }
  if (!c.accepts([&] {
        pool(lookups, index, reads, {bases, strides, out_bases, out_strides}, c.dtype, c.out_dtype);
      })) {
    for (const auto& output : outputs) CHECK(output.block.is_untouched());
    return;
  }
  check_pooled(c, lookups, index, layouts.data(), outputs);

  // Gradients -> sums.
  for (const auto& output : outputs) {
    for (std::int64_t i = 0; i < output.num_rows; ++i)
      for (std::int64_t j = 0; j < output.read.dim; ++j) set_element(output.row(i), j, c.out_dtype, fuzz);
  }
  std::optional<OutputGradients> gradients;
  if (!c.accepts([&] { gradients.emplace(lookups, reads, out_bases, out_strides, c.out_dtype); })) return;
  c.damage_if(kParts, *fuzz.pick({&c.part_tables, &c.part_columns, &c.part_states}));
  c.damage_if(kPartDims, c.part_dims);
  std::optional<Parts> made_parts;
  if (!c.accepts([&] { made_parts.emplace(c.part_tables, c.part_columns, c.part_dims, c.part_states); }))
    return;
  const Parts& parts = *made_parts;
  std::vector<std::int32_t> segment_offsets(plan.segment_offsets.data(),
                                            plan.segment_offsets.data() + num_unique + 1);
  std::vector<std::int32_t> entries(plan.entries.data(), plan.entries.data() + plan.entries.size());
  c.damage_if(kSegments, segment_offsets);
  c.damage_if(kEntries, entries);
  c.damage_if(kTableOffsets, offsets);
  Segments segments{offsets, segment_offsets, entries};
  std::vector<std::uint32_t> places;
  std::int64_t width = 0;
  for (std::int64_t t = 0; t < parts.num_tables(); ++t) width = std::max(width, parts.width(t));
  if (width > 5000) return;  // as with outputs
  for (std::int64_t u = 0; u < num_unique; ++u) places.push_back(static_cast<std::uint32_t>(u * width));
  if (c.wrong == kOutIndex) fuzz.one_in(2) || places.empty() ? places.push_back(0) : places.pop_back();
  Block sums(static_cast<std::size_t>(num_unique * width * item_bytes(c.compute)));
  if (!c.accepts([&] { sum_rows(segments, *gradients, parts, sums.address(), places, c.compute); })) {
    CHECK(sums.is_untouched());
    return;
  }
  const auto for_each_column = [&](const auto& visit) {
    for (std::int64_t t = 0; t < num_tables; ++t)
      for (std::int64_t u = offsets[t]; u < offsets[t + 1]; ++u)
        for (std::int64_t j = 0; j < parts.width(t); ++j) visit(t, u, j);
  };
  for_each_column([&](std::int64_t, std::int64_t u, std::int64_t j) {
    const PlainSum plain = plain_sum(c, lookups, outputs, segments, u, j);
    CHECK(is_close(element(sums.data(), u * width + j, c.compute), plain.sum, plain.scale, c.compute));
  });
  const auto num_numbers = num_unique * width;
  double squares = 0;
  for (std::int64_t i = 0; i < num_numbers; ++i) {  // what lies between rows of different widths counts too
    if (element(sums.data(), i, c.compute) != element(sums.data(), i, c.compute)) squares = kInfinity;
    squares += std::pow(element(sums.data(), i, c.compute), 2);
  }
  if (squares < 1e30)
    CHECK(is_close(squared_norm(sums.data(), num_numbers, c.compute), squares, squares, c.compute));
  if (squares < 1e30) CHECK(all_finite(sums.data(), num_numbers, c.compute));

  // Sums -> rows, from either kind of gradients.
  c.damage_if(kSlots, slots);
  c.damage_if(kOptimizers, c.optimizers);
  if (c.wrong == kSettings_) {
    if (fuzz.one_in(4)) {
      c.settings.pop_back();
    } else {
      c.settings[fuzz.below(c.settings.size())] = fuzz.pick({-1.0, kInfinity, -kInfinity, std::nan(""), 0.0});
    }
  }
  c.settings = std::vector<double>(c.settings.begin(), c.settings.end());
  const RowGradients from_rows(sums.address(), places, c.compute);
  std::vector<std::int32_t> ordinals(num_unique + 1), same(num_unique);
  for (std::int32_t u = 0; u < num_unique; ++u) ordinals[u + 1] = (same[u] = u) + 1;
  const Segments of_rows{offsets, ordinals, same};
  const auto before = planes_of(dram);
  if (!c.accepts([&] {
        if (fuzz.one_in(2)) {
          update(dram, slots, segments, *gradients, parts, c.optimizers, c.settings);
        } else {
          update(dram, slots, of_rows, from_rows, parts, c.optimizers, c.settings);
        }
      })) {
    CHECK(planes_of(dram) == before);
    return;
  }
  if (c.wrong < kNothing) return;
  const std::byte* was = before.data();  // of the table's weights
  for (std::int64_t t = 0; t < num_tables; ++t) {
    const RowLayout& layout = *layouts[t];
    const std::set<std::uint32_t> mine(slots.begin() + offsets[t], slots.begin() + offsets[t + 1]);
    const std::byte* states_were = was + dram.capacity_rows(t) * layout.weights_stride;
    for (std::uint32_t slot = 0; slot < dram.capacity_rows(t); ++slot) {
      if (mine.count(slot)) {
        CHECK(layout.clock_of(slot) == 1);
        continue;
      }
      CHECK(std::memcmp(was + slot * layout.weights_stride, layout.weights_of(slot), layout.weights_stride) ==
            0);
      CHECK(std::memcmp(states_were + slot * layout.state_stride, layout.state_of(slot),
                        layout.state_stride) == 0);
    }
    for (std::int64_t u = offsets[t]; u < offsets[t + 1]; ++u) {
      for (std::int64_t p = parts.first(t); p < parts.first(t + 1); ++p) {
        const Part& part = parts.all()[p];
        for (std::int64_t j = part.column; j < part.column + part.dim; ++j) {
          const double now = element(layout.weights_of(slots[u]), j, c.dtype);
          CHECK(std::isfinite(now));
          if (c.optimizers[p] != 0 || c.is_split) continue;
          const double then = element(was + slots[u] * layout.weights_stride, j, c.dtype);
          const double sum = element(sums.data(), u * width + j, c.compute);
          CHECK(is_close(now, then - 0.125 * sum, std::abs(then) + std::abs(sum), c.dtype));
        }
      }
    }
    was = states_were + dram.capacity_rows(t) * layout.state_stride;
  }
}

}  // namespace

int main(int argc, char** argv) {
  for_each_seed(argc, argv, 4000, fuzz_batch);
}
