// Gradient sums of cached rows that were not sent to their owners yet.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace colonnade {

// Pending sums of one table, by slot. Sums of rows with a tick count of 0 are invalid.
template <class T>
struct Pending {
  T* sums;  // rows of `width`
  std::int32_t* ticks;
  std::int64_t width, num_slots;
};

// Rows of a batch: block t has counts[t] rows of table t, each row once.
template <class T>
struct BatchSums {
  std::span<const std::int64_t> slots;
  std::span<const std::uint32_t> index;  // first element of each row's sum
  std::span<const T> elements;
};

// Row names of one table, by slot.
struct SlotNames {
  std::int64_t* ids;
  const std::int32_t* ticks;
  std::int64_t num_slots;
};

// Assign slots to other rows; write 1 for slots with pending sums. Blocks as in `take_pending`. invalid_argument.
void name_slots(std::span<const SlotNames> tables, std::span<const std::int64_t> counts,
                std::span<const std::int64_t> slots, std::span<const std::int64_t> ids, std::span<std::uint8_t> has);

// Add a batch's sums to the pending sums of rows that remain in the cache, one tick each. invalid_argument for invalid
// slots and sums.
template <class T>
void add_pending(std::span<const Pending<T>> tables, std::span<const std::int64_t> counts, const BatchSums<T>& batch,
                 std::span<const std::uint8_t> leaves);

// Move the pending sums of rows to `out`, one after another, and add the batch's own sums, which are not pending yet.
// Rows are listed in blocks: block b has counts[b] rows of table b % T. origin: index of the row in the batch; -1: not
// in the batch.
template <class T>
void take_pending(std::span<const Pending<T>> tables, std::span<const std::int64_t> counts,
                  std::span<const std::int64_t> slots, std::span<const std::int64_t> origin, const BatchSums<T>& batch,
                  std::span<T> out);

}  // namespace colonnade
