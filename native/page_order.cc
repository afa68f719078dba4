#include "page_order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <vector>

#include "threads.h"

namespace colonnade {

namespace {

constexpr int kGroupBits = 11;         // groups of pages per table: its counters fit in the first-level cache
constexpr std::int64_t kFewRows = 64;  // rows of one table; any order

bool is_sound(std::size_t num_slots, const Segments& segments) {
  const auto& offsets = segments.segment_offsets;
  const auto& tables = segments.table_offsets;
  const auto num_entries = static_cast<std::int64_t>(segments.entries.size());
  return offsets.size() == num_slots + 1 && !tables.empty() && tables.front() == 0 &&
         tables.back() == static_cast<std::int64_t>(num_slots) && std::ranges::is_sorted(tables) &&
         std::ranges::is_sorted(offsets) && offsets.front() >= 0 && offsets.back() <= num_entries;
}

// Shift from a slot to its group.
int group_shift(std::span<const std::uint32_t> slots) {
  std::uint32_t all = 0;
  for (const auto slot : slots) all |= slot;
  return std::max(0, static_cast<int>(std::bit_width(all)) - kGroupBits);
}

bool is_in_order(std::span<const std::uint32_t> slots) {
  if (static_cast<std::int64_t>(slots.size()) < kFewRows) return true;
  const int shift = group_shift(slots);
  bool ascends = true;
  for (std::size_t u = 1; u < slots.size(); ++u) ascends &= slots[u - 1] >> shift <= slots[u] >> shift;
  return ascends;
}

}  // namespace

PageOrder::PageOrder(std::span<const std::uint32_t> slots, const Segments& segments)
    : slots_(slots), segments_(segments) {
  if (!is_sound(slots.size(), segments)) return;
  const auto num_tables = static_cast<std::int64_t>(segments.table_offsets.size()) - 1;
  std::vector<char> is_ordered(static_cast<std::size_t>(num_tables));
  for (std::int64_t t = 0; t < num_tables; ++t) {
    const std::int64_t begin = segments.table_offsets[t], end = segments.table_offsets[t + 1];
    is_ordered[t] = is_in_order(slots.subspan(begin, end - begin));
  }
  if (std::ranges::all_of(is_ordered, [](char is) { return is; })) return;

  ordered_slots_ = Buffer<std::int32_t>(slots.size());
  rows_ = Buffer<std::uint32_t>(slots.size());
  ordered_offsets_ = Buffer<std::int32_t>(slots.size() + 1);
  ordered_entries_ = Buffer<std::int32_t>(segments.entries.size());
  for_each_unit(num_tables, [&](std::int64_t t) {
    is_ordered[t] ? copy(t, segments, slots) : order(t, segments, slots);
  });
  ordered_offsets_[slots.size()] = segments.segment_offsets.back();
  slots_ = {reinterpret_cast<const std::uint32_t*>(ordered_slots_.data()), ordered_slots_.size()};
  segments_.segment_offsets = {ordered_offsets_.data(), ordered_offsets_.size()};
  segments_.entries = {ordered_entries_.data(), ordered_entries_.size()};
}

void PageOrder::copy(std::int64_t table, const Segments& segments, std::span<const std::uint32_t> slots) {
  const std::int64_t begin = segments.table_offsets[table], end = segments.table_offsets[table + 1];
  const auto* const offsets = segments.segment_offsets.data();
  std::copy(slots.begin() + begin, slots.begin() + end, ordered_slots_.data() + begin);
  std::copy(offsets + begin, offsets + end, ordered_offsets_.data() + begin);
  std::copy(segments.entries.begin() + offsets[begin], segments.entries.begin() + offsets[end],
            ordered_entries_.data() + offsets[begin]);
}

// Stable counting sort by the high bits of slots.
void PageOrder::order(std::int64_t table, const Segments& segments, std::span<const std::uint32_t> slots) {
  const std::int64_t begin = segments.table_offsets[table], end = segments.table_offsets[table + 1];
  const int shift = group_shift(slots.subspan(begin, end - begin));
  std::array<std::uint32_t, (1 << kGroupBits) + 1> starts{};
  for (std::int64_t u = begin; u < end; ++u) ++starts[(slots[u] >> shift) + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  for (std::int64_t u = begin; u < end; ++u)
    rows_[begin + starts[slots[u] >> shift]++] = static_cast<std::uint32_t>(u);

  const auto* const offsets = segments.segment_offsets.data();
  std::int32_t next = offsets[begin];
  for (std::int64_t i = begin; i < end; ++i) {
    const std::uint32_t u = rows_[i];
    ordered_slots_[i] = static_cast<std::int32_t>(slots[u]);
    ordered_offsets_[i] = next;
    for (std::int32_t e = offsets[u]; e < offsets[u + 1]; ++e) ordered_entries_[next++] = segments.entries[e];
  }
}

}  // namespace colonnade
