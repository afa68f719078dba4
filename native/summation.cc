#include "summation.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace colonnade {

namespace {

constexpr std::int64_t kRunEntries = 2048;
constexpr std::int64_t kCheckedAlone = 1 << 17;  // entries; one thread finishes these before a second one joins

std::string number(std::int64_t n) {
  return std::to_string(n);
}
[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("gradients: " + message);
}
std::string columns(std::int64_t first, std::int64_t dim) {
  return "columns " + number(first) + " .. " + number(first + dim - 1);
}

}  // namespace

OutputGradients::OutputGradients(const Lookups& lookups, const Reads& reads,
                                 std::span<const std::int64_t> bases, std::span<const std::int64_t> strides,
                                 Dtype dtype)
    : GradientSource(lookups, dtype) {
  if (static_cast<std::int64_t>(bases.size()) != reads.size() || strides.size() != bases.size()) {
    refuse(number(static_cast<std::int64_t>(bases.size())) + " bases and " +
           number(static_cast<std::int64_t>(strides.size())) + " strides for " + number(reads.size()) +
           " reads");
  }
  for (std::int64_t r = 0; r < reads.size(); ++r) {
    const Read& read = reads.all()[r];
    if (read.feature >= lookups.num_features()) {
      refuse("read " + number(r) + " is of feature " + number(read.feature) + " of " +
             number(lookups.num_features()));
    }
    for (std::int64_t q = 0; q < r; ++q) {
      const Read& other = reads.all()[q];
      if (other.feature == read.feature && other.column == read.column) {
        refuse("reads " + number(q) + " and " + number(r) + " are both of feature " + number(read.feature) +
               ", column " + number(read.column) + "; sum their gradients first");
      }
    }
    add({read, bases[r], strides[r]});
  }
}

RowGradients::RowGradients(std::int64_t base, std::span<const std::uint32_t> index, Dtype dtype)
    : GradientSource(base, index, dtype) {
  if (compute_dtype(dtype) != dtype) {
    refuse("sums of rows are " + std::string(name_of(dtype)) + ", wanted float32 or float64");
  }
}

Summation::Summation(const Segments& segments, const GradientSource& source, const Parts& parts, Dtype dtype)
    : segments_(segments), source_(source), parts_(parts), dtype_(dtype) {
  const auto& offsets = segments.segment_offsets;
  const auto num_entries = static_cast<std::int64_t>(segments.entries.size());
  if (compute_dtype(source.dtype_) != dtype) {
    refuse("gradients are " + std::string(name_of(source.dtype_)) + ", their sums " +
           std::string(name_of(dtype)) + "; float64 goes with float64 and nothing else");
  }
  if (offsets.empty()) refuse("segment_offsets is empty, wanted unique rows + 1 elements");
  // The checks are plain reductions over numbers, which compilers vectorise.
  int descents = 0;
  for (std::size_t u = 0; u + 1 < offsets.size(); ++u) descents |= offsets[u + 1] < offsets[u];
  const bool ascends = !descents;
  if (!ascends || offsets.front() < 0 || offsets.back() > num_entries) {
    refuse("segment_offsets must ascend inside 0 .. " + number(num_entries) + ", got " +
           number(offsets.front()) + " .. " + number(offsets.back()) +
           (ascends ? "" : ", decreasing in between"));
  }
  check_parts(segments.table_offsets, parts.num_tables(), num_rows(), "unique rows");
  if (source.lookups_) {
    const auto& weights = source.lookups_->weights();
    if (weights && weights->dtype != dtype) {
      refuse("weights are " + std::string(name_of(weights->dtype)) + ", the sums " +
             std::string(name_of(dtype)));
    }
    find_features();
  } else {
    is_straddling_.assign(parts.all().size(), true);
    intervals_.assign(static_cast<std::size_t>(parts.num_tables()), {{0, source.num_entries()}});
  }
  cut();
  check_entries();
}

void Summation::find_features() {
  const Lookups& lookups = *source_.lookups_;
  const auto by_table = lookups.by_table(parts_.num_tables());
  features_.resize(parts_.all().size());
  is_straddling_.assign(parts_.all().size(), false);
  for (std::int64_t t = 0; t < parts_.num_tables(); ++t) {
    auto& intervals = intervals_.emplace_back();
    for (std::int64_t i = by_table.first[t]; i < by_table.first[t + 1]; ++i) {
      const std::int64_t f = by_table.features[i];
      if (intervals.empty() || intervals.back().last != lookups.first(f)) {
        intervals.push_back({lookups.first(f), lookups.last(f)});
      } else {
        intervals.back().last = lookups.last(f);
      }
      const auto pooling = lookups.pooling(f);
      const std::int64_t* bags = lookups.bags(f);
      for (std::int64_t p = parts_.first(t); p < parts_.first(t + 1); ++p) {
        features_[p].push_back({lookups.first(f), lookups.last(f), nullptr, 0,
                                bags ? lookups.output_rows() : nullptr,
                                pooling == Pooling::mean || pooling == Pooling::sqrtn ? bags : nullptr,
                                pooling == Pooling::sqrtn});
      }
    }
  }
  // A read covers one part or several adjacent ones: each takes its columns of the read's gradients.
  for (const auto& [read, base, stride] : source_.outputs_) {
    const std::int64_t t = lookups.table(read.feature), end = std::int64_t{read.column} + read.dim;
    const auto& mine = by_table.features;
    const std::int64_t place =
        std::find(mine.begin() + by_table.first[t], mine.begin() + by_table.first[t + 1], read.feature) -
        (mine.begin() + by_table.first[t]);
    std::int64_t covered = read.column;
    for (std::int64_t p = parts_.first(t); p < parts_.first(t + 1); ++p) {
      const Part& part = parts_.all()[p];
      if (part.column != covered || covered >= end) continue;
      covered += part.dim;
      auto& feature = features_[p][place];
      if (feature.base) {
        refuse("two reads of feature " + number(read.feature) + " hold " + columns(part.column, part.dim) +
               "; sum their gradients first");
      }
      feature.base = reinterpret_cast<const std::byte*>(base) +
                     (part.column - read.column) * item_bytes(source_.dtype_);
      feature.stride = stride;
      const auto address = reinterpret_cast<std::uintptr_t>(feature.base);
      if (address % 64 || stride % 64 || part.dim * item_bytes(source_.dtype_) % 64) is_straddling_[p] = true;
    }
    if (covered != end) {
      refuse("feature " + number(read.feature) + " reads " + columns(read.column, read.dim) + " of table " +
             number(t) + ", which are not whole parts of it");
    }
  }
}

// A run ends at kRunEntries entries; a row with more is a run of its own. Such rows come first, the longest at the
// beginning, so that no thread still has one at the end.
void Summation::cut() {
  const auto* offsets = segments_.segment_offsets.data();
  for (std::int64_t t = 0; t < parts_.num_tables(); ++t) {
    const std::int64_t table_end = segments_.table_offsets[t + 1];
    for (std::int64_t begin = segments_.table_offsets[t], end; begin < table_end; begin = end) {
      end = std::upper_bound(offsets + begin + 1, offsets + table_end, offsets[begin] + kRunEntries,
                             [](std::int64_t limit, std::int32_t offset) { return limit < offset; }) -
            offsets;
      runs_.push_back({t, begin, end});
    }
  }
  const auto length = [&](const Run& run) { return offsets[run.end] - offsets[run.begin]; };
  const auto others = std::stable_partition(runs_.begin(), runs_.end(),
                                            [&](const Run& run) { return length(run) > kRunEntries; });
  std::stable_sort(runs_.begin(), others, [&](const Run& a, const Run& b) { return length(a) > length(b); });
}

// Check that every entry belongs to the source, and to a feature of the row's table.
void Summation::check_entries() const {
  std::vector<char> is_wrong(runs_.size(), 0);
  const auto check = [&](std::int64_t r) {
    const auto& [t, begin, end] = runs_[r];
    const std::int32_t* const entries = segments_.entries.data();
    const std::int64_t lo = segments_.segment_offsets[begin], hi = segments_.segment_offsets[end];
    const auto& intervals = intervals_[t];
    if (intervals.size() == 1) {
      // Outside an interval one of the two differences is negative, also as a 32-bit number.
      const auto first = static_cast<std::uint32_t>(intervals[0].first);
      const auto last = static_cast<std::uint32_t>(intervals[0].last - 1);
      std::uint32_t signs = 0;
      for (std::int64_t i = lo; i < hi; ++i) {
        const auto entry = static_cast<std::uint32_t>(entries[i]);
        signs |= (entry - first) | (last - entry);
      }
      is_wrong[r] = signs >> 31;
    } else {
      is_wrong[r] = !std::all_of(entries + lo, entries + hi, [&](std::int32_t e) {
        return std::ranges::any_of(intervals, [e](const auto& i) { return i.first <= e && e < i.last; });
      });
    }
  };
  const auto num_runs = static_cast<std::int64_t>(runs_.size());
  if (static_cast<std::int64_t>(segments_.entries.size()) > kCheckedAlone) {
    for_each_unit(num_runs, check);
  } else {
    for (std::int64_t r = 0; r < num_runs; ++r) check(r);
  }
  for (std::size_t r = 0; r < runs_.size(); ++r) {
    if (is_wrong[r]) {
      refuse("entries " + number(segments_.segment_offsets[runs_[r].begin]) + " .. " +
             number(segments_.segment_offsets[runs_[r].end]) + " of table " + number(runs_[r].table) +
             " name one that is not among the table's " + (source_.lookups_ ? "lookups" : "gradients"));
    }
  }
}

std::int64_t Summation::scratch_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& part : parts_.all()) {
    bytes = std::max(bytes, 2 * ((part.dim * item_bytes(dtype_) + 63) / 64 * 64));
  }
  return bytes;
}

std::int64_t Summation::gradient_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& run : runs_) {
    const std::int64_t num_entries = segments_.segment_offsets[run.end] - segments_.segment_offsets[run.begin];
    bytes += num_entries * parts_.width(run.table) * item_bytes(dtype_);
  }
  return bytes;
}

SumTask Summation::task(const Run& run, std::int64_t p) const {
  const Part& part = parts_.all()[p];
  SumTask task{};
  task.segment_offsets = segments_.segment_offsets.data();
  task.entries = segments_.entries.data();
  task.begin = run.begin;
  task.end = run.end;
  task.dim = part.dim;
  task.gradient_dtype = source_.dtype_;
  task.is_straddling = is_straddling_[p];
  if (source_.lookups_) {
    task.features = features_[p].data();
    for (const auto& feature : features_[p]) {
      if (feature.output_rows) task.output_rows = feature.output_rows;
    }
    task.weights = source_.lookups_->weights() ? source_.lookups_->weights()->data : nullptr;
    task.is_plain = features_[p].size() == 1 && task.features->base && !task.output_rows && !task.weights;
  } else {
    task.index = source_.index_.data();
    task.base = reinterpret_cast<const std::byte*>(source_.base_) + part.column * item_bytes(source_.dtype_);
  }
  return task;
}

}  // namespace colonnade
