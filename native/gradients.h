// Where the gradients of a batch lie, by entry: outputs' gradients by lookup, or sums that others made by
// row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "lookups.h"
#include "scalar.h"

namespace colonnade {

// Borrows everything. Use one of the two below.
class GradientSource {
 public:
  std::int64_t num_entries() const {
    return lookups_ ? lookups_->num_lookups() : static_cast<std::int64_t>(index_.size());
  }

 protected:
  explicit GradientSource(const Lookups& lookups) : lookups_(&lookups) {}
  GradientSource(std::int64_t base, std::span<const std::uint32_t> index) : base_(base), index_(index) {}

 private:
  friend class Summation;
  const Lookups* lookups_ = nullptr;
  std::vector<FeatureGradients> features_;  // by feature
  std::int64_t base_ = 0;
  std::span<const std::uint32_t> index_;

 protected:
  void add(const FeatureGradients& feature) { features_.push_back(feature); }
};

// Laid out as `pool` lays its outputs out: bases and strides (F,), in bytes. Entry: a lookup.
class OutputGradients final : public GradientSource {
 public:
  OutputGradients(const Lookups& lookups, std::span<const std::int64_t> bases,
                  std::span<const std::int64_t> strides);
};

// Entry e is the row of elements at base + index[e] elements.
class RowGradients final : public GradientSource {
 public:
  RowGradients(std::int64_t base, std::span<const std::uint32_t> index) : GradientSource(base, index) {}
};

}  // namespace colonnade
