#include "page_order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

#include "threads.h"

namespace colonnade {

namespace {

constexpr int kGroupBits = 11;         // groups of pages per table: its counters stay in the first-level cache
constexpr std::int64_t kFewRows = 64;  // of one table, in any order

bool is_sound(const Dram& dram, std::size_t num_slots, const Segments& segments) {
  const auto& offsets = segments.segment_offsets;
  const auto& tables = segments.table_offsets;
  const auto num_entries = static_cast<std::int64_t>(segments.entries.size());
  return offsets.size() == num_slots + 1 && static_cast<std::int64_t>(tables.size()) == dram.num_tables() + 1 &&
         tables.front() == 0 && tables.back() == static_cast<std::int64_t>(num_slots) &&
         std::ranges::is_sorted(tables) && std::ranges::is_sorted(offsets) && offsets.front() >= 0 &&
         offsets.back() <= num_entries;
}

}  // namespace

PageOrder::PageOrder(const Dram& dram, std::span<const std::uint32_t> slots, const Segments& segments)
    : slots_(slots), segments_(segments) {
  if (!is_sound(dram, slots.size(), segments)) return;
  const auto is_ordered = [&](std::int64_t t) {
    return !dram.layout(t).ids || segments.table_offsets[t + 1] - segments.table_offsets[t] < kFewRows;
  };
  bool is_all_ordered = true;
  for (std::int64_t t = 0; t < dram.num_tables(); ++t) is_all_ordered &= is_ordered(t);
  if (is_all_ordered) return;

  ordered_slots_ = Buffer<std::uint32_t>(slots.size());
  rows_ = Buffer<std::uint32_t>(slots.size());
  ordered_offsets_ = Buffer<std::int32_t>(slots.size() + 1);
  ordered_entries_ = Buffer<std::int32_t>(segments.entries.size());
  for_each_unit(dram.num_tables(), [&](std::int64_t t) {
    const std::int64_t begin = segments.table_offsets[t], end = segments.table_offsets[t + 1];
    if (!is_ordered(t)) return order(t, segments, slots);
    std::copy(slots.begin() + begin, slots.begin() + end, ordered_slots_.data() + begin);
    const auto* const offsets = segments.segment_offsets.data();
    std::copy(offsets + begin, offsets + end, ordered_offsets_.data() + begin);
    std::copy(segments.entries.begin() + offsets[begin], segments.entries.begin() + offsets[end],
              ordered_entries_.data() + offsets[begin]);
  });
  ordered_offsets_[slots.size()] = segments.segment_offsets.back();
  slots_ = {ordered_slots_.data(), ordered_slots_.size()};
  segments_.segment_offsets = {ordered_offsets_.data(), ordered_offsets_.size()};
  segments_.entries = {ordered_entries_.data(), ordered_entries_.size()};
}

// A stable counting sort by the high bits of slots.
void PageOrder::order(std::int64_t table, const Segments& given, std::span<const std::uint32_t> slots) {
  const std::int64_t begin = given.table_offsets[table], end = given.table_offsets[table + 1];
  std::uint32_t all = 0;
  for (std::int64_t u = begin; u < end; ++u) all |= slots[u];
  const int shift = std::max(0, static_cast<int>(std::bit_width(all)) - kGroupBits);
  std::array<std::uint32_t, (1 << kGroupBits) + 1> starts{};
  for (std::int64_t u = begin; u < end; ++u) ++starts[(slots[u] >> shift) + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  for (std::int64_t u = begin; u < end; ++u)
    rows_[begin + starts[slots[u] >> shift]++] = static_cast<std::uint32_t>(u);

  const auto* const offsets = given.segment_offsets.data();
  std::int32_t next = offsets[begin];
  for (std::int64_t i = begin; i < end; ++i) {
    const std::uint32_t u = rows_[i];
    ordered_slots_[i] = slots[u];
    ordered_offsets_[i] = next;
    for (std::int32_t e = offsets[u]; e < offsets[u + 1]; ++e) ordered_entries_[next++] = given.entries[e];
  }
}

}  // namespace colonnade
