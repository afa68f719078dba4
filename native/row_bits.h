// Two bits for each row of a table that indexes directly: whether it was born, and whether it is dirty.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "slab.h"

namespace colonnade {

// Bits of 64 rows side by side in two words: one cache line has both bits of 256 rows. Threads may set bits at once.
class RowBits {
 public:
  RowBits() = default;
  explicit RowBits(std::int64_t rows)
      : slab_(checked_bytes(16, static_cast<std::size_t>((rows + 63) / 64))),
        words_(reinterpret_cast<std::uint64_t*>(slab_.data())) {}

  const Slab& slab() const { return slab_; }
  void prefetch(std::uint64_t row) const { __builtin_prefetch(words_ + row / 64 * 2, 0, 2); }

  bool is_born(std::uint64_t row) const { return test(row / 64 * 2, row); }
  bool is_dirty(std::uint64_t row) const { return test(row / 64 * 2 + 1, row); }
  void bear(std::uint64_t row) { set(row / 64 * 2, row); }
  void soil(std::uint64_t row) { set(row / 64 * 2 + 1, row); }
  void clean(std::uint64_t row) { clear(row / 64 * 2 + 1, row); }
  void forget(std::uint64_t row) {
    clear(row / 64 * 2, row);
    clean(row);
  }

  template <class Visit>  // visit(row) for every row that was born, ascending
  void for_each_born(std::int64_t rows, const Visit& visit) const {
    for (std::int64_t w = 0; w < (rows + 63) / 64; ++w) {
      for (std::uint64_t left = words_[2 * w]; left; left &= left - 1)
        visit(static_cast<std::uint64_t>(w * 64 + std::countr_zero(left)));
    }
  }

 private:
  static std::uint64_t bit(std::uint64_t row) { return std::uint64_t{1} << (row % 64); }
  std::atomic_ref<std::uint64_t> word(std::uint64_t w) const { return std::atomic_ref<std::uint64_t>(words_[w]); }
  bool test(std::uint64_t w, std::uint64_t row) const {
    return word(w).load(std::memory_order_relaxed) >> (row % 64) & 1;
  }
  // A bit is most often set already, and reading is cheaper.
  void set(std::uint64_t w, std::uint64_t row) {
    if (!test(w, row)) word(w).fetch_or(bit(row), std::memory_order_relaxed);
  }
  void clear(std::uint64_t w, std::uint64_t row) { word(w).fetch_and(~bit(row), std::memory_order_relaxed); }

  Slab slab_;
  std::uint64_t* words_ = nullptr;
};

}  // namespace colonnade
