#include "row_index.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace colonnade {

void RowIndex::put(std::span<const std::int64_t> ids, std::span<const std::int64_t> values) {
  if (const auto at = std::ranges::find(values, kAbsent); at != values.end()) {
    throw std::invalid_argument("values: got -1 at position " + std::to_string(at - values.begin()) +
                                "; -1 means absent, use any other number");
  }
  std::int64_t num_new = 0;
  index_.for_each(ids, rows_, [&](std::int64_t, std::uint32_t slot) { num_new += slot == SlotIndex::kAbsent; });
  const std::int64_t wanted = size_ + num_new;
  if (wanted >= SlotIndex::kAbsent) throw NoRoom("more than 2^32 - 2 rows of a table on one rank");
  while (static_cast<std::int64_t>(rows_.blocks.size()) * Rows::kBlock < wanted)
    rows_.blocks.emplace_back(sizeof(Row) * Rows::kBlock);
  index_.reserve(wanted);
  index_.grow(rows_);
  index_.for_each(ids, rows_, [&](std::int64_t i, std::uint32_t slot) {
    if (slot != SlotIndex::kAbsent) {
      rows_.at(slot).value = values[i];
      return;
    }
    slot = first_free_;
    if (slot == SlotIndex::kAbsent) {
      slot = static_cast<std::uint32_t>(num_touched_++);
    } else {
      first_free_ = static_cast<std::uint32_t>(rows_(slot));
    }
    rows_.at(slot) = {ids[i], values[i]};
    index_.insert(ids[i], slot);
    ++size_;
  });
}

void RowIndex::get(std::span<const std::int64_t> ids, std::span<std::int64_t> out) const noexcept {
  index_.for_each(ids, rows_, [&](std::int64_t i, std::uint32_t slot) {
    out[i] = slot == SlotIndex::kAbsent ? kAbsent : rows_.at(slot).value;
  });
}

void RowIndex::erase(std::span<const std::int64_t> ids) noexcept {
  index_.for_each(ids, rows_, [&](std::int64_t i, std::uint32_t slot) {
    if (slot == SlotIndex::kAbsent) return;
    index_.erase(ids[i], slot);
    rows_.at(slot) = {first_free_, kAbsent};
    first_free_ = slot;
    --size_;
  });
}

std::vector<std::pair<std::int64_t, std::int64_t>> RowIndex::items() const {
  std::vector<std::pair<std::int64_t, std::int64_t>> all;
  all.reserve(static_cast<std::size_t>(size()));
  for (std::int64_t slot = 0; slot < num_touched_; ++slot) {
    const Row& row = rows_.at(static_cast<std::uint32_t>(slot));
    if (row.value != kAbsent) all.emplace_back(row.id, row.value);
  }
  std::ranges::sort(all);
  return all;
}

}  // namespace colonnade
