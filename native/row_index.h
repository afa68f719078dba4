// Where rows at rest lie: any 64-bit id -> a 64-bit place. Batch at a time, one thread at a time.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "index.h"

namespace colonnade {

class RowIndex {
 public:
  static constexpr std::int64_t kAbsent = -1;

  // A later value of the same id replaces the earlier one. No value may be kAbsent (invalid_argument).
  void put(std::span<const std::int64_t> ids, std::span<const std::int64_t> values);
  void get(std::span<const std::int64_t> ids, std::span<std::int64_t> out) const noexcept;
  void erase(std::span<const std::int64_t> ids) noexcept;
  std::vector<std::pair<std::int64_t, std::int64_t>> items() const;  // ascending id
  std::int64_t size() const { return index_.size(); }

 private:
  HashIndex<std::uint64_t> index_;
};

}  // namespace colonnade
