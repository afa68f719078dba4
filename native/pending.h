// Sums of gradients at copies of rows, of which their owners have yet to hear.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace colonnade {

// Of one table, by slot. Sums of a row whose ticks are 0 are none.
template <class T>
struct Pending {
  T* sums;  // rows of `width`
  std::int32_t* ticks;
  std::int64_t width, num_slots;
};

// Rows of a batch: block t is counts[t] rows of table t, each row once.
template <class T>
struct BatchSums {
  std::span<const std::int64_t> slots;
  std::span<const std::uint32_t> index;  // first element of each row's sum
  std::span<const T> elements;
};

// Of one table, by slot.
struct SlotNames {
  std::int64_t* ids;
  const std::int32_t* ticks;
  std::int64_t num_slots;
};

// Slots get other rows; 1 where something is pending there. Blocks as of `take_pending`. invalid_argument.
void name_slots(std::span<const SlotNames> tables, std::span<const std::int64_t> counts,
                std::span<const std::int64_t> slots, std::span<const std::int64_t> ids, std::span<std::uint8_t> has);

// One tick of each row that stays: its sum is added to what is pending. invalid_argument for slots and sums that are
// none.
template <class T>
void add_pending(std::span<const Pending<T>> tables, std::span<const std::int64_t> counts, const BatchSums<T>& batch,
                 std::span<const std::uint8_t> leaves);

// What is pending of rows, one after another in `out`, and is not from here on; with a batch's own sums, which are
// not in there. Rows are listed in blocks: block b is counts[b] rows of table b % T. origin: which of the batch's rows
// each is; -1: none of them.
template <class T>
void take_pending(std::span<const Pending<T>> tables, std::span<const std::int64_t> counts,
                  std::span<const std::int64_t> slots, std::span<const std::int64_t> origin, const BatchSums<T>& batch,
                  std::span<T> out);

}  // namespace colonnade
