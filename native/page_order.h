// Sort of a batch's rows by their position in memory.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "buffer.h"
#include "update.h"

namespace colonnade {

// Rows of hashed tables are listed in the order of their ids' hashes, so each is on another page than the previous one.
// Here they are grouped by the pages of their slots. Visiting a page's rows together halves the time of an update if
// address translation dominates (virtual machines, small pages). Each row keeps its entries and their order, so results
// have the same bits. Rows that are in order already are not moved: those of directly indexed tables, and of batches
// that were sorted ahead of their update.
class PageOrder {
 public:
  // Accepts anything: what `Summation` would reject is left unchanged and rejected there.
  PageOrder(std::span<const std::uint32_t> slots, const Segments& segments);

  bool is_moved() const { return ordered_slots_.size() > 0; }

  std::span<const std::uint32_t> slots() const { return slots_; }
  const Segments& segments() const { return segments_; }
  // Arrays of a batch that was sorted; moved out.
  Buffer<std::int32_t> take_slots() { return std::move(ordered_slots_); }
  Buffer<std::int32_t> take_offsets() { return std::move(ordered_offsets_); }
  Buffer<std::int32_t> take_entries() { return std::move(ordered_entries_); }

 private:
  void order(std::int64_t table, const Segments& segments, std::span<const std::uint32_t> slots);
  void copy(std::int64_t table, const Segments& segments, std::span<const std::uint32_t> slots);

  std::span<const std::uint32_t> slots_;
  Segments segments_;
  Buffer<std::uint32_t> rows_;  // original index of each row
  Buffer<std::int32_t> ordered_slots_, ordered_offsets_, ordered_entries_;
};

}  // namespace colonnade
