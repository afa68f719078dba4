// Lookups of a batch for all features, feature-major: input of every operation on a batch.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "buffer.h"
#include "scalar.h"

namespace colonnade {

enum class Pooling : std::uint8_t { sum = 0, mean = 1, sequence = 2, sqrtn = 3 };

struct Weights {
  const void* data;
  std::int64_t size;
  Dtype dtype;
};

// Borrows the arrays for its lifetime. Immutable: any thread may read it.
class Lookups {
 public:
  // invalid_argument, with feature and position, if offsets decrease, overrun or have the wrong length.
  Lookups(std::span<const std::int64_t> ids, std::span<const std::int64_t> feature_offsets,
          std::span<const std::int32_t> feature_tables, std::span<const std::uint8_t> poolings,
          std::int64_t batch_size, std::optional<std::span<const std::int64_t>> bag_offsets,
          std::optional<Weights> weights);

  std::span<const std::int64_t> ids() const { return ids_; }
  std::int64_t num_lookups() const { return static_cast<std::int64_t>(ids_.size()); }
  std::int64_t batch_size() const { return batch_size_; }
  std::int64_t num_features() const { return static_cast<std::int64_t>(tables_.size()); }
  std::int64_t first(std::int64_t f) const { return feature_offsets_[f]; }
  std::int64_t last(std::int64_t f) const { return feature_offsets_[f + 1]; }
  std::int32_t table(std::int64_t f) const { return tables_[f]; }
  Pooling pooling(std::int64_t f) const { return static_cast<Pooling>(poolings_[f]); }

  // Bounds (B + 1,) of a pooled feature's bags; null: lookup first(f) + b is bag b. Always null for a sequence.
  const std::int64_t* bags(std::int64_t f) const {
    return bag_offsets_ && pooling(f) != Pooling::sequence ? bag_offsets_ + f * batch_size_ : nullptr;
  }
  std::int64_t num_outputs(std::int64_t f) const { return bags(f) ? batch_size_ : last(f) - first(f); }

  const std::optional<Weights>& weights() const { return weights_; }

  // Output row of each lookup, (E,), for features with bags; null without bags. Computed at the first call.
  const std::int32_t* output_rows() const;

  // Features of each table, ascending: features[first[t] .. first[t + 1]).
  struct ByTable {
    std::vector<std::int32_t> features;
    std::vector<std::int64_t> first;
  };
  // invalid_argument if a feature has a table outside [0, num_tables).
  ByTable by_table(std::int64_t num_tables) const;

 private:
  std::span<const std::int64_t> ids_;
  std::span<const std::int64_t> feature_offsets_;
  std::span<const std::int32_t> tables_;
  std::span<const std::uint8_t> poolings_;
  std::int64_t batch_size_;
  const std::int64_t* bag_offsets_ = nullptr;
  std::optional<Weights> weights_;
  mutable std::once_flag output_rows_made_;
  mutable Buffer<std::int32_t> output_rows_;
};

// Check ids against their tables' vocabularies; out_of_range, with the first invalid lookup.
void check_inside(const Lookups& lookups, std::span<const std::int32_t> features, std::int64_t table, std::int64_t rows);

}  // namespace colonnade
