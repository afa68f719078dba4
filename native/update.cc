#include "update.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kRunEntries = 2048;
constexpr std::int64_t kStackScratch = 4096;  // bytes; rows that need more share one buffer, a part per run

std::string number(std::int64_t n) {
  return std::to_string(n);
}
[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("gradients: " + message);
}

}  // namespace

OutputGradients::OutputGradients(const Lookups& lookups, std::span<const std::int64_t> bases,
                                 std::span<const std::int64_t> strides)
    : GradientSource(lookups) {
  const std::int64_t num_features = lookups.num_features();
  if (static_cast<std::int64_t>(bases.size()) != num_features ||
      static_cast<std::int64_t>(strides.size()) != num_features) {
    refuse(number(static_cast<std::int64_t>(bases.size())) + " bases and " +
           number(static_cast<std::int64_t>(strides.size())) + " strides for " + number(num_features) +
           " features");
  }
  for (std::int64_t f = 0; f < num_features; ++f) {
    const std::int64_t* bags = lookups.bags(f);
    add({lookups.first(f), lookups.last(f), reinterpret_cast<const std::byte*>(bases[f]), strides[f],
         bags ? lookups.output_rows() : nullptr,
         bags && lookups.pooling(f) == Pooling::mean ? bags : nullptr});
  }
}

// One pass over all unique rows of a batch, cut into runs of one table each.
class Summation {
 public:
  Summation(const Segments& segments, const GradientSource& source, Dtype dtype)
      : segments_(segments), source_(source), dtype_(dtype) {
    const auto& offsets = segments.segment_offsets;
    const auto num_entries = static_cast<std::int64_t>(segments.entries.size());
    if (offsets.empty()) refuse("segment_offsets is empty, wanted unique rows + 1 elements");
    bool ascends = true;
    for (std::size_t u = 0; u + 1 < offsets.size(); ++u) ascends &= offsets[u] <= offsets[u + 1];
    if (!ascends || offsets.front() < 0 || offsets.back() > num_entries) {
      refuse("segment_offsets must ascend inside 0 .. " + number(num_entries) + ", got " +
             number(offsets.front()) + " .. " + number(offsets.back()) +
             (ascends ? "" : ", decreasing in between"));
    }
    num_tables_ = static_cast<std::int64_t>(segments.table_offsets.size()) - 1;
    check_parts(segments.table_offsets, num_tables_, static_cast<std::int64_t>(offsets.size()) - 1,
                "unique rows");
    if (source.lookups_) {
      if (source.lookups_->weights() && source.lookups_->weights()->dtype != dtype) {
        refuse("weights are " + std::string(name_of(source.lookups_->weights()->dtype)) + ", the tables " +
               std::string(name_of(dtype)));
      }
      const auto by_table = source.lookups_->by_table(num_tables_);
      first_feature_ = by_table.first;
      for (const auto f : by_table.features) features_.push_back(source.features_[f]);
    }
    cut();
    check_entries();
  }

  std::int64_t num_tables() const { return num_tables_; }

  // run(task, table) on some thread, with the task's rows, sources and scratch filled in.
  template <class Dims, class Run>
  void for_each_task(const Dims& dim_of, const Run& run) {
    std::int64_t scratch_bytes = 0;
    for (std::int64_t t = 0; t < num_tables_; ++t) {
      scratch_bytes = std::max(scratch_bytes, (dim_of(t) * item_bytes(dtype_) + 63) / 64 * 64);
    }
    Buffer<std::byte> shared(scratch_bytes > kStackScratch ? scratch_bytes * runs_.size() : 0);
    for_each_unit(static_cast<std::int64_t>(runs_.size()), [&](std::int64_t r) {
      alignas(64) std::byte stack[kStackScratch];
      const auto& [t, begin, end] = runs_[r];
      SumTask task{};
      task.segment_offsets = segments_.segment_offsets.data();
      task.entries = segments_.entries.data();
      task.begin = begin;
      task.end = end;
      task.dim = dim_of(t);
      if (source_.lookups_) {
        task.features = features_.data() + first_feature_[t];
        task.weights = source_.lookups_->weights() ? source_.lookups_->weights()->data : nullptr;
      } else {
        task.index = source_.index_.data();
        task.base = reinterpret_cast<const std::byte*>(source_.base_);
      }
      task.scratch = scratch_bytes > kStackScratch ? shared.data() + r * scratch_bytes : stack;
      run(task, t);
    });
  }

 private:
  struct Run {
    std::int64_t table, begin, end;
  };

  // A run ends where it has kRunEntries entries; a row that has more is a run of its own.
  void cut() {
    const auto* offsets = segments_.segment_offsets.data();
    for (std::int64_t t = 0; t < num_tables_; ++t) {
      const std::int64_t table_end = segments_.table_offsets[t + 1];
      for (std::int64_t begin = segments_.table_offsets[t], end; begin < table_end; begin = end) {
        end = std::upper_bound(offsets + begin + 1, offsets + table_end, offsets[begin] + kRunEntries,
                               [](std::int64_t limit, std::int32_t offset) { return limit < offset; }) -
              offsets;
        runs_.push_back({t, begin, end});
      }
    }
  }

  // Every entry must be one of the source's, and of a feature of the row's table.
  void check_entries() const {
    std::vector<char> is_wrong(runs_.size(), 0);
    for_each_unit(static_cast<std::int64_t>(runs_.size()), [&](std::int64_t r) {
      const auto& [t, begin, end] = runs_[r];
      const std::int32_t* const entries = segments_.entries.data();
      const std::int64_t lo = segments_.segment_offsets[begin], hi = segments_.segment_offsets[end];
      if (lo == hi) return;
      const auto all_within = [&](std::int64_t first, std::int64_t last) {
        bool within = true;
        for (std::int64_t i = lo; i < hi; ++i) within &= entries[i] >= first && entries[i] < last;
        return within;
      };
      bool is_right = false;
      if (!source_.lookups_) {
        is_right = all_within(0, source_.num_entries());
      } else if (first_feature_[t + 1] - first_feature_[t] == 1) {
        is_right = all_within(features_[first_feature_[t]].first, features_[first_feature_[t]].last);
      } else {
        is_right = std::all_of(entries + lo, entries + hi, [&](std::int32_t e) {
          return std::any_of(features_.begin() + first_feature_[t], features_.begin() + first_feature_[t + 1],
                             [e](const auto& feature) { return feature.first <= e && e < feature.last; });
        });
      }
      is_wrong[r] = !is_right;
    });
    for (std::size_t r = 0; r < runs_.size(); ++r) {
      if (is_wrong[r]) {
        refuse("entries " + number(segments_.segment_offsets[runs_[r].begin]) + " .. " +
               number(segments_.segment_offsets[runs_[r].end]) + " of table " + number(runs_[r].table) +
               " name one that is not among the table's " + (source_.lookups_ ? "lookups" : "gradients"));
      }
    }
  }

  const Segments& segments_;
  const GradientSource& source_;
  Dtype dtype_;
  std::int64_t num_tables_ = 0;
  std::vector<std::int64_t> first_feature_;  // by table, into features_
  std::vector<FeatureGradients> features_;
  std::vector<Run> runs_;
};

void sum_rows(const Segments& segments, const GradientSource& source, std::span<const std::int32_t> dims,
              std::int64_t out, std::span<const std::uint32_t> out_index, Dtype dtype) {
  Summation summation(segments, source, dtype);
  if (static_cast<std::int64_t>(dims.size()) != summation.num_tables() ||
      out_index.size() + 1 != segments.segment_offsets.size() ||
      std::ranges::any_of(dims, [](auto d) { return d < 1; })) {
    refuse("dims must have one positive number for each of " + number(summation.num_tables()) +
           " tables, out_index one for each of " +
           number(static_cast<std::int64_t>(segments.segment_offsets.size()) - 1) + " rows");
  }
  const auto kernel = dtype == Dtype::float32 ? kernels().float32.sum : kernels().float64.sum;
  summation.for_each_task([&](std::int64_t t) { return std::int64_t{dims[t]}; },
                          [&](SumTask& task, std::int64_t) {
                            task.sums = reinterpret_cast<void*>(out);
                            task.sum_index = out_index.data();
                            kernel(task);
                          });
}

namespace {

template <class T>
void (*update_kernel(Optimizer optimizer))(const SumTask&) {
  return optimizer == Optimizer::sgd ? row_kernels<T>().update_sgd : row_kernels<T>().update_rowwise_adagrad;
}

}  // namespace

void update(Dram& dram, std::span<const std::uint32_t> slots, const Segments& segments,
            const GradientSource& source, std::span<const std::int32_t> optimizers,
            std::span<const double> settings) {
  Summation summation(segments, source, dram.dtype());
  const std::int64_t num_tables = summation.num_tables();
  if (num_tables != dram.num_tables() || static_cast<std::int64_t>(optimizers.size()) != num_tables ||
      static_cast<std::int64_t>(settings.size()) != num_tables * kSettings) {
    refuse("offsets, optimizers and settings speak of " + number(num_tables) + ", " +
           number(static_cast<std::int64_t>(optimizers.size())) + " and " +
           number(static_cast<std::int64_t>(settings.size()) / kSettings) + " tables; dram has " +
           number(dram.num_tables()));
  }
  if (slots.size() + 1 != segments.segment_offsets.size()) {
    refuse(number(static_cast<std::int64_t>(slots.size())) + " slots for " +
           number(static_cast<std::int64_t>(segments.segment_offsets.size()) - 1) + " unique rows");
  }
  for (std::int64_t t = 0; t < num_tables; ++t) {
    const auto optimizer = static_cast<Optimizer>(optimizers[t]);
    if (optimizer != Optimizer::sgd && optimizer != Optimizer::rowwise_adagrad) {
      refuse("table " + number(t) + " has optimizer " + number(optimizers[t]) +
             ", wanted 0 SGD or 1 row-wise Adagrad");
    }
    if (optimizer == Optimizer::rowwise_adagrad && dram.layout(t).state_elements < 1) {
      refuse("table " + number(t) + " has no state elements; row-wise Adagrad needs one");
    }
    const auto capacity = static_cast<std::uint64_t>(dram.capacity_rows(t));
    bool is_slot = true;
    for (std::int64_t u = segments.table_offsets[t]; u < segments.table_offsets[t + 1]; ++u)
      is_slot &= slots[u] < capacity;
    if (!is_slot)
      refuse("a slot of table " + number(t) + " is not in 0 .. " +
             number(static_cast<std::int64_t>(capacity) - 1));
  }
  summation.for_each_task(
      [&](std::int64_t t) { return dram.layout(t).dim; },
      [&](SumTask& task, std::int64_t t) {
        const RowLayout& layout = dram.layout(t);
        const auto optimizer = static_cast<Optimizer>(optimizers[t]);
        task.slots = slots.data();
        task.rows = layout.weights;
        task.row_stride = layout.weights_stride;
        task.states = layout.states;
        task.state_stride = layout.state_stride;
        task.learning_rate = settings[t * kSettings];
        task.weight_decay = settings[t * kSettings + 1];
        task.eps = settings[t * kSettings + 2];
        (layout.dtype == Dtype::float32 ? update_kernel<float> : update_kernel<double>)(optimizer)(task);
      });
}

}  // namespace colonnade
