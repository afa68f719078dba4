// The rows of a batch in the order in which they lie in memory.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "buffer.h"
#include "update.h"

namespace colonnade {

// Rows of hashed tables come in the order of their ids' hashes, so each would be on another page than the one
// before; here they are grouped by the pages of their slots. Walking a page's rows together halves the time of an
// update where address translation is what costs (virtual machines, small pages). Each row keeps its entries and
// their order, so results are the same to the bit. Rows in order already, as of tables that index directly and of
// batches that were put in order ahead of their update, are looked at and not moved.
class PageOrder {
 public:
  // Takes anything: what `Summation` would refuse is left as it is, to be refused there.
  PageOrder(std::span<const std::uint32_t> slots, const Segments& segments);

  bool is_moved() const { return ordered_slots_.size() > 0; }

  std::span<const std::uint32_t> slots() const { return slots_; }
  const Segments& segments() const { return segments_; }
  // Those of a batch that was moved; given away.
  Buffer<std::int32_t> take_slots() { return std::move(ordered_slots_); }
  Buffer<std::int32_t> take_offsets() { return std::move(ordered_offsets_); }
  Buffer<std::int32_t> take_entries() { return std::move(ordered_entries_); }

 private:
  void order(std::int64_t table, const Segments& given, std::span<const std::uint32_t> slots);
  void copy(std::int64_t table, const Segments& given, std::span<const std::uint32_t> slots);

  std::span<const std::uint32_t> slots_;
  Segments segments_;
  Buffer<std::uint32_t> rows_;  // the given number of each row
  Buffer<std::int32_t> ordered_slots_, ordered_offsets_, ordered_entries_;
};

}  // namespace colonnade
