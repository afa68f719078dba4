// The rows of a batch in the order in which they lie in memory.
#pragma once

#include <cstdint>
#include <span>

#include "buffer.h"
#include "dram.h"
#include "update.h"

namespace colonnade {

// Rows of hashed tables come in the order of their ids' hashes, so each would be on another page than the one
// before; here they are grouped by the pages of their slots. Walking a page's rows together halves the time of an
// update where address translation is what costs (virtual machines, small pages). Each row keeps its entries and
// their order, so results are the same to the bit. Tables that index directly are in order already.
class PageOrder {
 public:
  // Takes anything: what `Summation` would refuse is left as it is, to be refused there.
  PageOrder(const Dram& dram, std::span<const std::uint32_t> slots, const Segments& segments);

  std::span<const std::uint32_t> slots() const { return slots_; }
  const Segments& segments() const { return segments_; }

 private:
  void order(std::int64_t table, const Segments& given, std::span<const std::uint32_t> slots);

  std::span<const std::uint32_t> slots_;
  Segments segments_;
  Buffer<std::uint32_t> ordered_slots_, rows_;  // rows_: the given number of each row
  Buffer<std::int32_t> ordered_offsets_, ordered_entries_;
};

}  // namespace colonnade
