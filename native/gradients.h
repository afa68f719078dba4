// Sources of a batch's gradients by entry: outputs' gradients by lookup, or row sums from other ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lookups.h"
#include "parts.h"
#include "scalar.h"

namespace colonnade {

// Base of the two sources below; borrows lookups and gradients.
class GradientSource {
 public:
  std::int64_t num_entries() const {
    return lookups_ ? lookups_->num_lookups() : static_cast<std::int64_t>(index_.size());
  }
  Dtype dtype() const { return dtype_; }

 protected:
  // One output: its read, and the address of its gradients.
  struct Output {
    Read read;
    std::int64_t base, stride;  // bytes
  };
  GradientSource(const Lookups& lookups, Dtype dtype) : lookups_(&lookups), dtype_(dtype) {}
  GradientSource(std::int64_t base, std::span<const std::uint32_t> index, Dtype dtype)
      : base_(base), index_(index), dtype_(dtype) {}
  void add(const Output& output) { outputs_.push_back(output); }

 private:
  friend class Summation;
  const Lookups* lookups_ = nullptr;
  std::vector<Output> outputs_;
  std::int64_t base_ = 0;
  std::span<const std::uint32_t> index_;
  Dtype dtype_;
};

// Gradients in the layout of `pool`'s outputs: bases and strides (R,), in bytes. An entry is a lookup.
class OutputGradients final : public GradientSource {
 public:
  // invalid_argument if lengths differ, a read has an invalid feature, or two reads have the same feature and column.
  OutputGradients(const Lookups& lookups, const Reads& reads, std::span<const std::int64_t> bases,
                  std::span<const std::int64_t> strides, Dtype dtype);
};

// Row sums: entry e is the row of elements, with all parts, at base + index[e] elements.
class RowGradients final : public GradientSource {
 public:
  RowGradients(std::int64_t base, std::span<const std::uint32_t> index, Dtype dtype);  // invalid_argument
};

}  // namespace colonnade
