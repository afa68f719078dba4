// Pass over all unique rows of a batch, divided into runs for threads.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels/kernels.h"
#include "threads.h"
#include "update.h"

namespace colonnade {

// Checks its inputs at construction, so that later steps cannot fail half-way. Borrows them.
class Summation {
 public:
  // dtype: of the sums. invalid_argument, with the mismatch.
  Summation(const Segments& segments, const GradientSource& source, const Parts& parts, Dtype dtype);

  std::int64_t num_rows() const { return static_cast<std::int64_t>(segments_.segment_offsets.size()) - 1; }

  // Call run(task, part number) for each part of each run of rows: a run's parts one after another on one thread.
  template <class Run>
  void for_each_task(const Run& run) const {
    const std::int64_t scratch_bytes = this->scratch_bytes();
    const bool is_shared = scratch_bytes > kStackScratch;
    Buffer<std::byte> shared(is_shared ? static_cast<std::size_t>(scratch_bytes) * runs_.size() : 0);
    for_each_unit(static_cast<std::int64_t>(runs_.size()), gradient_bytes(), [&](std::int64_t r) {
      alignas(64) std::byte stack[kStackScratch];
      for (std::int64_t p = parts_.first(runs_[r].table); p < parts_.first(runs_[r].table + 1); ++p) {
        SumTask task = this->task(runs_[r], p);
        task.scratch = is_shared ? shared.data() + r * scratch_bytes : stack;
        run(task, p);
      }
    });
  }

 private:
  static constexpr std::int64_t kStackScratch = 4096;  // bytes; rows that need more share one buffer

  struct Run {
    std::int64_t table, begin, end;
  };
  struct Interval {
    std::int64_t first, last;
  };

  void find_features();
  void cut();
  void check_entries() const;
  std::int64_t scratch_bytes() const;
  std::int64_t gradient_bytes() const;
  SumTask task(const Run& run, std::int64_t part) const;

  const Segments& segments_;
  const GradientSource& source_;
  const Parts& parts_;
  Dtype dtype_;
  std::vector<std::vector<FeatureGradients>> features_;  // by part: for all features of its table
  std::vector<std::vector<Interval>> intervals_;         // by table: its features' lookups
  std::vector<char> is_straddling_;                      // by part
  std::vector<Run> runs_;
};

}  // namespace colonnade
