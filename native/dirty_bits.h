// Two bits for each slot: row is newer than the backing; row must still be saved by a checkpoint.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>

#include "slab.h"

namespace colonnade {

// A snapshot takes all dirty bits at once, a word at a time; after it a row is dirty only if it has changed since.
// Threads may set dirty bits concurrently; all other calls are from one thread at a time.
class DirtyBits {
 public:
  DirtyBits() = default;
  explicit DirtyBits(std::int64_t slots)
      : dirty_slab_(checked_bytes(8, num_words(slots))), saves_slab_(checked_bytes(8, num_words(slots))) {}

  bool is_dirty(std::uint32_t slot) const { return dirty()[slot / 64] & bit(slot); }
  void mark_dirty(std::uint32_t slot) noexcept {
    std::uint64_t& word = dirty()[slot / 64];
    if (!(std::atomic_ref(word).load(std::memory_order_relaxed) & bit(slot)))
      std::atomic_ref(word).fetch_or(bit(slot), std::memory_order_relaxed);
  }
  void clean(std::uint32_t slot) noexcept { dirty()[slot / 64] &= ~bit(slot); }

  void move(std::uint32_t from, std::uint32_t to) noexcept {  // of a row that no snapshot needs
    if (!is_dirty(from)) return;
    mark_dirty(to);
    clean(from);
  }

  bool is_to_save(std::uint32_t slot) const { return has_snapshot_ && saves()[slot / 64] & bit(slot); }
  void saved(std::uint32_t slot) noexcept {
    if (has_snapshot_) saves()[slot / 64] &= ~bit(slot);
  }

  // Bytes in memory for the first `slots`.
  std::int64_t bytes(std::int64_t slots) const { return slots / 8 * (has_snapshot_ ? 2 : 1); }

  // Begin a snapshot of the first `slots`: dirty rows are marked to be saved, and become clean.
  void take_snapshot(std::int64_t slots) noexcept {
    has_snapshot_ = true;
    for (std::size_t w = 0; w < num_words(slots); ++w) {
      if (dirty()[w] == 0) continue;
      saves()[w] = dirty()[w];
      dirty()[w] = 0;
    }
  }
  // End the snapshot: rows not saved are dirty again. Frees the bits to save.
  void end_snapshot(std::int64_t slots) noexcept {
    for (std::size_t w = 0; w < num_words(slots); ++w) {
      if (saves()[w] == 0) continue;
      dirty()[w] |= saves()[w];
      saves()[w] = 0;
    }
    saves_slab_.give_back(0, saves_slab_.size());
    has_snapshot_ = false;
  }
  // Visit slots to save from `slot` on, ascending, until visit(slot) returns false; return where to continue.
  template <class Visit>
  std::int64_t for_each_to_save(std::int64_t slot, std::int64_t slots, const Visit& visit) const {
    return for_each(saves(), slot, slots, visit);
  }
  template <class Visit>
  std::int64_t for_each_dirty(std::int64_t slot, std::int64_t slots, const Visit& visit) const {
    return for_each(dirty(), slot, slots, visit);
  }

 private:
  static std::size_t num_words(std::int64_t slots) { return (static_cast<std::size_t>(slots) + 63) / 64; }
  static std::uint64_t bit(std::uint32_t slot) { return std::uint64_t{1} << (slot % 64); }
  std::uint64_t* dirty() const { return reinterpret_cast<std::uint64_t*>(dirty_slab_.data()); }
  std::uint64_t* saves() const { return reinterpret_cast<std::uint64_t*>(saves_slab_.data()); }

  template <class Visit>
  static std::int64_t for_each(const std::uint64_t* words, std::int64_t slot, std::int64_t slots,
                               const Visit& visit) {
    for (std::int64_t w = slot / 64; w * 64 < slots; ++w) {
      std::uint64_t left = words[w];
      if (w == slot / 64) left &= ~std::uint64_t{0} << (slot % 64);
      for (; left; left &= left - 1) {
        const std::int64_t bit = w * 64 + std::countr_zero(left);
        if (!visit(static_cast<std::uint32_t>(bit))) return bit + 1;
      }
    }
    return slots;
  }

  Slab dirty_slab_, saves_slab_;
  bool has_snapshot_ = false;
};

}  // namespace colonnade
