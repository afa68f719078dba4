#include "retention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "hash.h"

namespace colonnade {

namespace {

constexpr std::uint32_t kOne = 256;  // count of one update: eight halvings until it is 0
constexpr std::uint64_t kBucketRows = 9;
constexpr std::size_t kAhead = 12;

// Score: four levels per doubling, ascending.
std::int64_t quarter_log(std::uint32_t count) {
  if (count == 0) return -1;
  const int high = std::bit_width(count) - 1;
  const std::uint32_t fraction = high >= 2 ? count >> (high - 2) & 3 : count << (2 - high) & 3;
  return 4 * high + fraction;
}

}  // namespace

Retention::Retention(const RetentionSettings& settings)
    : settings_(settings), index_(static_cast<std::uint64_t>(settings.num_shares)) {
  if (settings.max_age && settings.by != LeaveBy::recency)
    throw std::invalid_argument("Retention: max_age needs the order of recency");
}

std::int64_t Retention::score(std::uint32_t step, std::uint32_t value) const {
  switch (settings_.by) {
    case LeaveBy::frequency: {
      const std::int64_t halvings = settings_.halve_steps ? step / settings_.halve_steps : 0;
      return 4 * halvings + quarter_log(value);
    }
    case LeaveBy::norm:
      return value >> 21;  // exponent and two fraction bits of a non-negative number
    default:
      return 0;
  }
}

std::uint32_t Retention::count_of(const Entry* before, std::int64_t step) const {
  if (!before) return kOne;
  std::uint32_t count = before->value;
  if (settings_.halve_steps) {
    const std::int64_t halvings = step / settings_.halve_steps - before->step / settings_.halve_steps;
    count = halvings < 32 ? count >> halvings : 0;
  }
  return count > std::numeric_limits<std::uint32_t>::max() - kOne ? count : count + kOne;
}

std::vector<std::int64_t> Retention::record_updates(std::span<const std::int64_t> ids, std::span<const double> norms,
                                          std::int64_t step) {
  if (step < 0 || step > std::numeric_limits<std::uint32_t>::max())
    throw std::invalid_argument("Retention: got step " + std::to_string(step) + ", wanted 0 .. 2^32 - 1");
  const bool by_norm = settings_.by == LeaveBy::norm;
  if (by_norm != !norms.empty() && !ids.empty())
    throw std::invalid_argument("Retention: norms go with the order of norms, and with no other");
  if (num_rows_ + static_cast<std::int64_t>(ids.size()) >= kNone)
    throw std::invalid_argument("Retention: a rank remembers fewer than 2^32 - 1 rows of a table");
  const auto hash = [&](std::size_t k) { return mix64(static_cast<std::uint64_t>(ids[k])); };
  std::vector<std::uint32_t> order;  // empty: in the order of the arguments, which is the order of plans
  for (std::size_t k = 1; k < ids.size() && order.empty(); ++k) {
    if (hash(k) > hash(k - 1)) continue;
    order.resize(ids.size());
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::sort(order, {}, hash);
  }
  const std::scoped_lock lock(mutex_);
  index_.reserve(num_rows_ + static_cast<std::int64_t>(ids.size()));
  index_.grow(Ids{*this});
  // Search first, move then: neighbours in the lists are known and prefetched before they are changed.
  std::vector<std::uint32_t> slots(ids.size());
  std::vector<std::uint8_t> is_new(ids.size());
  index_.for_each(ids, Ids{*this}, [&](std::int64_t i, std::uint32_t slot) {
    const auto k = static_cast<std::size_t>(i);
    is_new[k] = slot == kNone;
    if (is_new[k]) {
      slot = new_slot();
      at(slot).id = ids[k];
      index_.insert(ids[k], slot);
      ++num_rows_;
    }
    slots[k] = slot;
  });
  for (std::size_t k = 0; k < ids.size(); ++k) {
    const std::size_t i = order.empty() ? k : order[k];
    if (order.empty() && i + kAhead < ids.size() && !is_new[i + kAhead]) {
      const Entry& coming = at(slots[i + kAhead]);
      if (coming.previous != kNone) __builtin_prefetch(&at(coming.previous), 1, 2);
      if (coming.next != kNone) __builtin_prefetch(&at(coming.next), 1, 2);
    }
    const std::uint32_t slot = slots[i];
    Entry& entry = at(slot);
    const std::uint32_t count =
        settings_.by == LeaveBy::frequency ? count_of(is_new[i] ? nullptr : &entry, step) : 0;
    if (!is_new[i]) {
      save(slot);
      unlink(slot);
    }
    entry.value = count;
    if (by_norm) {
      // NaN counts as the largest number, because nothing is known about it, so the row stays.
      const double norm = norms[i];
      entry.value = std::bit_cast<std::uint32_t>(
          norm >= 0 ? static_cast<float>(norm) : std::numeric_limits<float>::infinity());
    }
    entry.step = static_cast<std::uint32_t>(step);
    link(slot);
  }
  work_ += ids.size();
  std::vector<std::int64_t> left;
  const auto leave = [&](std::uint32_t slot) {
    const std::uint32_t next = at(slot).next;
    left.push_back(at(slot).id);
    if (next != kNone) {
      index_.prefetch(at(next).id);
      if (at(next).next != kNone) __builtin_prefetch(&at(at(next).next), 1, 2);
    }
    evict(slot);
  };
  if (settings_.max_age) {
    while (num_rows_ && at(lists_.begin()->second.first).step + settings_.max_age <= step)
      leave(lists_.begin()->second.first);
  }
  while (settings_.max_rows && num_rows_ > settings_.max_rows) leave(lists_.begin()->second.first);
  return left;
}

void Retention::remove(std::span<const std::int64_t> ids) {
  const std::scoped_lock lock(mutex_);
  for (const std::int64_t id : ids) {
    const std::uint32_t slot = index_.find(id, Ids{*this});
    if (slot != kNone) evict(slot);
  }
}

std::vector<RetainedRow> Retention::rows() const {
  std::vector<RetainedRow> result;
  result.reserve(static_cast<std::size_t>(num_rows_));
  for (const auto& [score, list] : lists_) {
    for (std::uint32_t slot = list.first; slot != kNone; slot = at(slot).next)
      result.push_back({at(slot).id, at(slot).step, at(slot).value});
  }
  return result;
}

void Retention::restore(std::vector<RetainedRow> rows) {
  std::ranges::sort(rows, {}, [](const RetainedRow& row) {
    return std::pair(row.step, mix64(static_cast<std::uint64_t>(row.id)));
  });
  lists_.clear();
  chunks_.clear();
  index_ = SlotIndex(static_cast<std::uint64_t>(settings_.num_shares));
  free_ = kNone;
  num_slots_ = 0;
  num_rows_ = 0;
  to_save_ = {};
  saved_ = {};
  for (const RetainedRow& row : rows) {
    index_.reserve(num_rows_ + 1);
    index_.grow(Ids{*this});
    if (index_.find(row.id, Ids{*this}) != kNone)
      throw std::invalid_argument("Retention: id " + std::to_string(row.id) + " is there twice");
    const std::uint32_t slot = new_slot();
    at(slot) = {row.id, kNone, kNone, row.step, row.value};
    index_.insert(row.id, slot);
    ++num_rows_;
    link(slot);
  }
}

void Retention::begin_snapshot() {
  const std::scoped_lock lock(mutex_);
  to_save_.assign((static_cast<std::size_t>(num_slots_) + 63) / 64, ~std::uint64_t{0});
  if (num_slots_ % 64) to_save_.back() = (std::uint64_t{1} << num_slots_ % 64) - 1;
  cursor_ = 0;
  saved_.clear();
}

std::vector<RetainedRow> Retention::save_some(std::int64_t most) {
  const std::scoped_lock lock(mutex_);
  std::vector<RetainedRow> result = std::exchange(saved_, {});
  const std::size_t end = std::min(to_save_.size(), cursor_ + static_cast<std::size_t>(most) / 64 + 1);
  // A run with only changed or deleted rows yields none: it is not the end.
  for (; cursor_ < to_save_.size() && (cursor_ < end || result.empty()); ++cursor_) {
    for (std::uint64_t left = std::exchange(to_save_[cursor_], 0); left; left &= left - 1) {
      const auto slot = static_cast<std::uint32_t>(cursor_ * 64 + static_cast<std::size_t>(std::countr_zero(left)));
      const Entry& entry = at(slot);
      if (entry.previous != slot) result.push_back({entry.id, entry.step, entry.value});
    }
  }
  if (cursor_ >= to_save_.size()) to_save_ = {};
  return result;
}

// Return whether the snapshot still needs the slot's row, and clear that.
bool Retention::take_save(std::uint32_t slot) noexcept {
  if (slot / 64 >= to_save_.size()) return false;
  std::uint64_t& word = to_save_[slot / 64];
  const std::uint64_t bit = std::uint64_t{1} << slot % 64;
  const bool is_to_save = word & bit;
  word &= ~bit;
  return is_to_save;
}

void Retention::save(std::uint32_t slot) {
  if (take_save(slot)) saved_.push_back({at(slot).id, at(slot).step, at(slot).value});
}

std::int64_t Retention::bytes() const {
  return static_cast<std::int64_t>(num_slots_ * sizeof(Entry)) + index_.bytes();
}

std::uint64_t Retention::work() const {
  return work_ + index_.num_moved() * kBucketRows;
}

std::uint32_t Retention::new_slot() {
  if (free_ != kNone) {
    const std::uint32_t slot = free_;
    free_ = at(slot).next;
    take_save(slot);  // it was free when the snapshot began, or its row has been saved
    return slot;
  }
  if (num_slots_ >> kChunkBits == chunks_.size())
    chunks_.push_back(std::make_unique_for_overwrite<Entry[]>(std::size_t{1} << kChunkBits));
  return num_slots_++;
}

void Retention::link(std::uint32_t slot) {
  Entry& entry = at(slot);
  List& list = lists_[score(entry.step, entry.value)];
  entry.previous = list.last;
  entry.next = kNone;
  (list.last == kNone ? list.first : at(list.last).next) = slot;
  list.last = slot;
}

void Retention::unlink(std::uint32_t slot) {
  const Entry& entry = at(slot);
  const auto list = lists_.find(score(entry.step, entry.value));
  (entry.previous == kNone ? list->second.first : at(entry.previous).next) = entry.next;
  (entry.next == kNone ? list->second.last : at(entry.next).previous) = entry.previous;
  if (list->second.first == kNone) lists_.erase(list);
}

void Retention::evict(std::uint32_t slot) {
  save(slot);
  unlink(slot);
  index_.erase(at(slot).id, slot);
  at(slot).previous = slot;
  at(slot).next = free_;
  free_ = slot;
  --num_rows_;
  ++work_;
}

}  // namespace colonnade
