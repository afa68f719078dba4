// Bitmap of the rows of a directly indexed table: whether a row is initialised.
#pragma once

#include <bit>
#include <cstdint>

#include "slab.h"

namespace colonnade {

// Only one thread may set bits.
class RowBits {
 public:
  RowBits() = default;
  explicit RowBits(std::int64_t rows)
      : slab_(checked_bytes(8, static_cast<std::size_t>((rows + 63) / 64))),
        words_(reinterpret_cast<std::uint64_t*>(slab_.data())) {}

  const Slab& slab() const { return slab_; }

  struct View {
    const std::uint64_t* words;
    bool is_initialised(std::uint64_t row) const { return words[row / 64] >> (row % 64) & 1; }
  };
  View view() const { return {words_}; }

  bool is_initialised(std::uint64_t row) const { return view().is_initialised(row); }
  void mark_initialised(std::uint64_t row) { words_[row / 64] |= bit(row); }
  void forget(std::uint64_t row) { words_[row / 64] &= ~bit(row); }

  template <class Visit>  // calls visit(row) for every initialised row, ascending
  void for_each_initialised(std::int64_t rows, const Visit& visit) const {
    for (std::int64_t w = 0; w < (rows + 63) / 64; ++w) {
      for (std::uint64_t left = words_[w]; left; left &= left - 1)
        visit(static_cast<std::uint64_t>(w * 64 + std::countr_zero(left)));
    }
  }

 private:
  static std::uint64_t bit(std::uint64_t row) { return std::uint64_t{1} << (row % 64); }

  Slab slab_;
  std::uint64_t* words_ = nullptr;
};

}  // namespace colonnade
