#include "table_rows.h"

#include <algorithm>
#include <stdexcept>

#include "isa.h"

namespace colonnade {

namespace {

// Requests are walked in blocks: first every index bucket is fetched, then every slot's word, then they are
// read.
constexpr std::int64_t kBlock = 64;

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("dram: " + message);
}

}  // namespace

TableRows::TableRows(const TableSettings& settings, const RowFormat& format)
    : settings_(settings), num_ranks_(static_cast<std::uint64_t>(format.num_ranks)) {
  if (settings.state_elements < 0) refuse("state_elements " + std::to_string(settings.state_elements));
  std::int64_t dim = 0;
  for (const auto& part : settings.parts) {
    if (part.dim < 1) refuse("dim " + std::to_string(part.dim) + ", wanted 1 or more");
    if (part.state < 0 || part.initial_count < 0 ||
        part.initial_count > settings.state_elements - std::min(part.state, settings.state_elements)) {
      refuse("initial_count " + std::to_string(part.initial_count) + " from state element " +
             std::to_string(part.state) + " of " + std::to_string(settings.state_elements));
    }
    dim += part.dim;
  }
  if (dim < 1) refuse("a table without columns");
  if (format.is_split && format.dtype != Dtype::bfloat16)
    refuse("split rows of " + std::string(name_of(format.dtype)) + ", wanted bfloat16");
  if (settings.rows < 0) refuse("rows " + std::to_string(settings.rows) + ", wanted 0 (open) or more");
  if (settings.capacity_rows < 0 || settings.capacity_rows >= kNoSlot) {
    refuse("capacity_rows " + std::to_string(settings.capacity_rows) + ", wanted 0 .. 2^32 - 2");
  }
  // Most rows of a vocabulary table that one rank owns: ids come in runs of num_ranks, one for each.
  const std::int64_t share = settings.rows ? (settings.rows - 1) / format.num_ranks + 1 : 0;
  is_direct_ = settings.rows != 0 && share <= settings.capacity_rows;
  if (is_direct_) settings_.capacity_rows = share;

  const auto capacity = static_cast<std::size_t>(settings_.capacity_rows);
  const auto weights_stride =
      checked_bytes(static_cast<std::size_t>(item_bytes(format.dtype)), static_cast<std::size_t>(dim));
  const auto state_item = static_cast<std::size_t>(item_bytes(compute_dtype(format.dtype)));
  const auto lows_offset = checked_bytes(state_item, static_cast<std::size_t>(settings.state_elements));
  const auto state_bytes = lows_offset + (format.is_split ? 2 * static_cast<std::size_t>(dim) : 0);
  const auto state_stride = (state_bytes + 4 + state_item - 1) / state_item * state_item;
  weights_slab_ = Slab(checked_bytes(weights_stride, capacity));
  states_slab_ = Slab(checked_bytes(state_stride, capacity));
  words_slab_ = Slab(checked_bytes(sizeof(std::uint16_t), capacity));
  if (!is_direct_ || num_ranks_ > 1) ids_slab_ = Slab(checked_bytes(sizeof(std::int64_t), capacity));
  words_ = reinterpret_cast<std::uint16_t*>(words_slab_.data());
  ids_ = reinterpret_cast<std::int64_t*>(ids_slab_.data());
  layout_ = {.dtype = format.dtype,
             .is_split = format.is_split,
             .dim = dim,
             .state_elements = settings.state_elements,
             .weights = weights_slab_.data(),
             .weights_stride = static_cast<std::int64_t>(weights_stride),
             .states = states_slab_.data(),
             .state_stride = static_cast<std::int64_t>(state_stride),
             .lows_offset = static_cast<std::int64_t>(lows_offset),
             .clock_offset = static_cast<std::int64_t>(state_stride) - 4,
             .seed = settings.seed,
             .ids = reinterpret_cast<const std::byte*>(ids_),
             .ids_stride = 8,
             .num_ranks = num_ranks_,
             .rank = static_cast<std::uint64_t>(format.rank)};
  if (is_direct_) ask_for_huge_pages();  // rows are touched anywhere
}

void TableRows::ask_for_huge_pages() noexcept {
  for (const Slab* slab : {&weights_slab_, &states_slab_, &words_slab_, &ids_slab_})
    slab->ask_for_huge_pages();
  has_huge_pages_ = true;
}

std::int64_t TableRows::resident_bytes() const {
  const std::int64_t slot = layout_.weights_stride + layout_.state_stride + 2 + (ids_ ? 8 : 0);
  return num_rows_ * slot + (is_direct() ? 0 : index_.bytes());
}

std::int64_t TableRows::num_free() const {
  return is_direct() ? settings_.capacity_rows : settings_.capacity_rows - num_rows_;
}

TableRows::Found TableRows::pin_resident(std::span<const std::int64_t> ids,
                                         std::span<std::uint32_t> slots) noexcept {
  Found found;
  const auto n = static_cast<std::int64_t>(ids.size());
  for (std::int64_t i = 0; i < std::min(n, kBlock); ++i) prefetch(ids[i]);
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t end = std::min(n, begin + kBlock), next_end = std::min(n, end + kBlock);
    for (std::int64_t i = end; i < next_end; ++i) prefetch(ids[i]);
    if (!is_direct()) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::uint32_t* slot = index_.find(ids[i]);
        slots[i] = slot ? *slot : kNoSlot;
        if (slot) __builtin_prefetch(words_ + *slot, 1, 2);
      }
    }
    for (std::int64_t i = begin; i < end; ++i) {
      if (is_outside(ids[i])) {
        ++found.outside;
        slots[i] = kNoSlot;
        continue;
      }
      if (is_direct()) slots[i] = direct_slot(ids[i]);
      if (slots[i] == kNoSlot || !(words_[slots[i]] & kResident)) {
        ++found.missing;
        slots[i] = kNoSlot;
      } else if ((words_[slots[i]] & kPins) == kPins) {
        ++found.overpinned;
        slots[i] = kNoSlot;
      } else {
        found.newly_pinned += (words_[slots[i]]++ & kPins) == 0;
      }
    }
  }
  return found;
}

void TableRows::unpin(std::span<std::uint32_t> slots) noexcept {
  for (auto& slot : slots) {
    if (slot != kNoSlot) --words_[slot];
    slot = kNoSlot;
  }
}

void TableRows::reserve(const Found& found, Evicted& evicted) {
  const std::int64_t num_evictions = std::max<std::int64_t>(0, found.missing - num_free());
  evicted.dirty_ids.reserve(static_cast<std::size_t>(num_evictions));
  evicted.records = Buffer<std::byte>(static_cast<std::size_t>(num_evictions * layout_.record_bytes()));
  if (!is_direct()) index_.reserve(num_rows_ - num_evictions + found.missing);
  freed_.reserve(freed_.size() + static_cast<std::size_t>(num_evictions));
}

void TableRows::admit(std::span<const std::int64_t> ids, std::span<std::uint32_t> slots, const Found& found,
                      Evicted& evicted) noexcept {
  num_pinned_ += found.newly_pinned;
  if (found.missing == 0) return;
  evict(std::max<std::int64_t>(0, found.missing - num_free()), evicted);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (slots[i] != kNoSlot) continue;
    std::uint32_t slot = find(ids[i]);
    if (slot != kNoSlot) {  // the caller named it twice
      slots[i] = slot;
      ++words_[slot];
      continue;
    }
    ++num_rows_;
    ++num_pinned_;
    if (is_direct()) {
      slot = direct_slot(ids[i]);
      num_touched_ = std::max<std::int64_t>(num_touched_, slot + std::int64_t{1});
    } else {
      if (freed_.empty()) {
        slot = static_cast<std::uint32_t>(num_touched_++);
      } else {
        slot = freed_.back();
        freed_.pop_back();
      }
      index_.insert(ids[i], slot);
    }
    if (ids_) ids_[slot] = ids[i];
    words_[slot] = kResident | 1;
    slots[i] = slot;
  }
  // Slots fill up from the start: a table of few rows keeps to small pages.
  if (!has_huge_pages_ &&
      static_cast<std::size_t>(num_touched_ * layout_.weights_stride) >= 2 * kHugePageBytes) {
    ask_for_huge_pages();
  }
}

// Second chance: the hand passes over pinned rows, forgives a used row once, and takes the others.
void TableRows::evict(std::int64_t rows, Evicted& evicted) noexcept {
  std::byte* record = evicted.records.data();
  std::int64_t victims[kBlock];
  while (rows > 0) {
    std::int64_t n = 0;
    for (; n < std::min(rows, kBlock); hand_ = hand_ + 1 == num_touched_ ? 0 : hand_ + 1) {
      std::uint16_t& word = words_[hand_];
      if (!(word & kResident) || (word & kPins)) continue;
      if (word & kUsed) {
        word &= static_cast<std::uint16_t>(~kUsed);
        continue;
      }
      victims[n++] = hand_;
      index_.prefetch(ids_[hand_]);
      if (word & kDirty) {
        __builtin_prefetch(layout_.state_of(static_cast<std::uint32_t>(hand_)), 0, 2);
        __builtin_prefetch(layout_.weights_of(static_cast<std::uint32_t>(hand_)), 0, 2);
      }
      word &= static_cast<std::uint16_t>(~kResident);  // so that the hand does not take it twice
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const auto slot = static_cast<std::uint32_t>(victims[i]);
      if (is_newer(slot)) {
        layout_.pack(slot, record);
        record += layout_.record_bytes();
        evicted.dirty_ids.push_back(ids_[slot]);
      }
      words_[slot] = 0;
      index_.erase(ids_[slot]);
      freed_.push_back(slot);
    }
    rows -= n;
    num_rows_ -= n;
    evicted.num += n;
  }
  evicted.records.shrink(evicted.dirty_ids.size() * static_cast<std::size_t>(layout_.record_bytes()));
}

bool TableRows::can_release(std::span<const std::uint32_t> slots) const noexcept {
  bool can = true;
  const auto n = static_cast<std::int64_t>(slots.size());
  for (std::int64_t i = 0; i < n; ++i) {
    if (i + kBlock < n && slots[i + kBlock] < settings_.capacity_rows)
      __builtin_prefetch(words_ + slots[i + kBlock], 1, 2);
    can = can && slots[i] < settings_.capacity_rows && (words_[slots[i]] & kPins);
  }
  return can;
}

std::int64_t TableRows::release(std::span<const std::uint32_t> slots, bool is_dirty) noexcept {
  std::int64_t unpinned = 0;
  const std::uint16_t flags = kUsed | (is_dirty ? kDirty : 0);
  for (const auto slot : slots) {
    if (!(words_[slot] & kPins)) continue;  // the same slot twice: pinned once, released once
    unpinned += (--words_[slot] & kPins) == 0;
    words_[slot] |= flags;
  }
  return unpinned;
}

std::uint32_t TableRows::find(std::int64_t id) const noexcept {
  if (is_outside(id)) return kNoSlot;
  if (is_direct()) {
    const std::uint32_t slot = direct_slot(id);
    return words_[slot] & kResident ? slot : kNoSlot;
  }
  const std::uint32_t* slot = index_.find(id);
  return slot ? *slot : kNoSlot;
}

void TableRows::birth_values(std::int64_t id, std::byte* weights, std::uint16_t* lows) const noexcept {
  std::int64_t column = 0;
  for (const auto& part : settings_.parts) {
    const BirthTask task{settings_.seed, part.init_scale, column, part.dim};
    std::byte* const out = weights + column * item_bytes(layout_.dtype);
    switch (layout_.dtype) {
      case Dtype::float32:
        kernels().float32.birth(task, id, reinterpret_cast<float*>(out));
        break;
      case Dtype::float64:
        kernels().float64.birth(task, id, reinterpret_cast<double*>(out));
        break;
      case Dtype::bfloat16:
        if (layout_.is_split) {
          kernels().birth_split(task, id, reinterpret_cast<std::uint16_t*>(out), lows ? lows + column : lows);
        } else {
          kernels().birth_bfloat16(task, id, reinterpret_cast<std::uint16_t*>(out));
        }
        break;
      case Dtype::float16:
        kernels().birth_float16(task, id, reinterpret_cast<std::uint16_t*>(out));
        break;
    }
    column += part.dim;
  }
}

void TableRows::birth(std::int64_t id, std::uint32_t slot) const noexcept {
  std::byte* const state = layout_.state_of(slot);
  auto* const lows = reinterpret_cast<std::uint16_t*>(state + layout_.lows_offset);
  birth_values(id, layout_.weights_of(slot), lows);
  std::memset(state, 0, static_cast<std::size_t>(layout_.lows_offset));
  for (const auto& part : settings_.parts) {
    if (compute_dtype(layout_.dtype) == Dtype::float32) {
      std::fill_n(reinterpret_cast<float*>(state) + part.state, part.initial_count,
                  static_cast<float>(part.initial_state));
    } else {
      std::fill_n(reinterpret_cast<double*>(state) + part.state, part.initial_count, part.initial_state);
    }
  }
  layout_.clock_of(slot) = 0;
}

std::vector<std::pair<std::int64_t, std::uint32_t>> TableRows::resident(bool only_dirty) const {
  std::vector<std::pair<std::int64_t, std::uint32_t>> rows;
  for (std::int64_t s = 0; s < num_touched_; ++s) {
    const auto slot = static_cast<std::uint32_t>(s);
    if ((words_[s] & kResident) && (!only_dirty || is_newer(slot))) rows.emplace_back(id_of(slot), slot);
  }
  if (!is_direct()) std::ranges::sort(rows);
  return rows;
}

void TableRows::clean(std::span<const std::uint32_t> slots) noexcept {
  for (const auto slot : slots) words_[slot] &= static_cast<std::uint16_t>(~kDirty);
}

bool TableRows::is_pinned(std::int64_t id) const noexcept {
  const std::uint32_t slot = find(id);
  return slot != kNoSlot && (words_[slot] & kPins);
}

void TableRows::erase(std::int64_t id) noexcept {
  const std::uint32_t slot = find(id);
  if (slot == kNoSlot) return;
  words_[slot] = 0;
  --num_rows_;
  if (is_direct()) return;
  index_.erase(id);
  freed_.push_back(slot);
}

}  // namespace colonnade
