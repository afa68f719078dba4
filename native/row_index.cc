#include "row_index.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace colonnade {

namespace {

// visit(i) for every id, its bucket already on the way.
template <class Index, class Visit>
void for_each_fetched(const Index& index, std::span<const std::int64_t> ids, Visit visit) {
  const auto n = static_cast<std::int64_t>(ids.size());
  for (std::int64_t i = 0; i < std::min(n, Index::kBlock); ++i) index.prefetch(ids[i]);
  for (std::int64_t i = 0; i < n; ++i) {
    if (i + Index::kBlock < n) index.prefetch(ids[i + Index::kBlock]);
    visit(i);
  }
}

}  // namespace

void RowIndex::put(std::span<const std::int64_t> ids, std::span<const std::int64_t> values) {
  if (const auto at = std::ranges::find(values, kAbsent); at != values.end()) {
    throw std::invalid_argument("values: got -1 at position " + std::to_string(at - values.begin()) +
                                "; -1 means absent, use any other number");
  }
  index_.reserve(index_.size() + static_cast<std::int64_t>(ids.size()));
  for_each_fetched(index_, ids, [&](std::int64_t i) {
    const auto value = static_cast<std::uint64_t>(values[i]);
    if (auto* place = index_.find(ids[i])) {
      *place = value;
    } else {
      index_.insert(ids[i], value);
    }
  });
}

void RowIndex::get(std::span<const std::int64_t> ids, std::span<std::int64_t> out) const noexcept {
  for_each_fetched(index_, ids, [&](std::int64_t i) {
    const auto* place = index_.find(ids[i]);
    out[i] = place ? static_cast<std::int64_t>(*place) : kAbsent;
  });
}

void RowIndex::erase(std::span<const std::int64_t> ids) noexcept {
  for_each_fetched(index_, ids, [&](std::int64_t i) { index_.erase(ids[i]); });
}

std::vector<std::pair<std::int64_t, std::int64_t>> RowIndex::items() const {
  std::vector<std::pair<std::int64_t, std::int64_t>> all;
  all.reserve(static_cast<std::size_t>(size()));
  index_.for_each(
      [&](std::int64_t id, std::uint64_t value) { all.emplace_back(id, static_cast<std::int64_t>(value)); });
  std::ranges::sort(all);
  return all;
}

}  // namespace colonnade
