#include "table_rows.h"

#include <algorithm>
#include <stdexcept>

#include "isa.h"

namespace colonnade {

namespace {

constexpr std::int64_t kVictims = 256;  // rows evicted together, with their cache lines prefetched
constexpr std::int64_t kLeft = 256;     // rows passed to the sink at a time

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("dram: " + message);
}

}  // namespace

TableRows::TableRows(const TableSettings& settings, const RowFormat& format)
    : settings_(settings),
      share_(settings.rows, settings.num_owners, settings.place),
      index_(static_cast<std::uint64_t>(settings.num_owners)) {
  if (settings.state_elements < 0) refuse("state_elements " + std::to_string(settings.state_elements));
  std::int64_t dim = 0;
  for (const auto& part : settings.parts) {
    if (part.dim < 1 || part.dim >> 31) refuse("dim " + std::to_string(part.dim) + ", wanted 1 .. 2^31 - 1");
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
  is_direct_ = settings.rows != 0 && share_.has_rows() && share_.num_places() <= settings.capacity_rows;
  if (is_direct_) settings_.capacity_rows = share_.num_places();
  if (!share_.has_rows()) settings_.capacity_rows = 0;
  const bool can_grow = can_evict() && share_.has_rows() && settings.directory.empty() && settings.most_rows < kNoSlot;
  settings_.most_rows = can_grow ? std::max(settings_.capacity_rows, settings.most_rows) : settings_.capacity_rows;

  const auto capacity = static_cast<std::size_t>(settings_.most_rows);
  const auto weights_stride =
      checked_bytes(static_cast<std::size_t>(item_bytes(format.dtype)), static_cast<std::size_t>(dim));
  const auto state_item = static_cast<std::size_t>(item_bytes(compute_dtype(format.dtype)));
  const auto lows_offset = checked_bytes(state_item, static_cast<std::size_t>(settings.state_elements));
  const auto state_bytes = lows_offset + (format.is_split ? 2 * static_cast<std::size_t>(dim) : 0);
  const auto state_stride = (state_bytes + 4 + state_item - 1) / state_item * state_item;
  const auto slab = [&](std::size_t bytes) {
    return settings.directory.empty() ? Slab(bytes) : Slab(bytes, settings.directory);
  };
  weights_slab_ = slab(checked_bytes(weights_stride, capacity));
  states_slab_ = slab(checked_bytes(state_stride, capacity));
  bits_ = DirtyBits(settings_.most_rows);
  if (is_direct_) {
    initialised_ = RowBits(settings_.capacity_rows);
  } else {
    headers_ = SlotHeaders(settings_.most_rows);
    headers_.set_limit(settings_.capacity_rows);
    if (settings_.can_evict) {
      scores_ = SlotScores(settings_.most_rows);
      scores_.set_slots(settings_.capacity_rows);
    }
  }
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
             .ids = headers_.slab().data(),
             .ids_stride = SlotHeaders::kStride,
             .num_owners = static_cast<std::uint64_t>(settings.num_owners),
             .place = static_cast<std::uint64_t>(settings.place),
             .first_column = settings.first_column};
  if (is_direct_) {  // rows are touched at random positions
    weights_slab_.ask_for_huge_pages();
    states_slab_.ask_for_huge_pages();
    initialised_.slab().ask_for_huge_pages();
  }
}

// Slots fill up from the start, so a table with few rows stays on small pages.
void TableRows::ask_for_huge_pages(std::int64_t num_slots) noexcept {
  const auto filled = [](const Slab& slab, std::int64_t bytes) {  // including what precedes it in its huge page
    return reinterpret_cast<std::uintptr_t>(slab.data()) % kHugePageBytes + static_cast<std::size_t>(bytes);
  };
  if (!has_huge_rows_ && filled(weights_slab_, num_slots * layout_.weights_stride) >= 3 * kHugePageBytes) {
    const std::int64_t touched = headers_.num_touched();
    weights_slab_.ask_for_huge_pages(static_cast<std::size_t>(touched * layout_.weights_stride));
    states_slab_.ask_for_huge_pages(static_cast<std::size_t>(touched * layout_.state_stride));
    has_huge_rows_ = true;
  }
  if (!has_huge_headers_ && filled(headers_.slab(), num_slots * SlotHeaders::kStride) >= 2 * kHugePageBytes) {
    headers_.slab().ask_for_huge_pages(static_cast<std::size_t>(headers_.num_touched() * SlotHeaders::kStride));
    has_huge_headers_ = true;
  }
}

std::int64_t TableRows::row_bytes() const {
  return (is_direct_ ? num_rows_ : headers_.num_touched()) * (layout_.weights_stride + layout_.state_stride);
}

std::int64_t TableRows::resident_bytes() const {
  const std::int64_t bits = bits_.bytes(num_slots());
  if (is_direct_) return row_bytes() + settings_.capacity_rows / 8 + bits;
  return row_bytes() + headers_.num_touched() * SlotHeaders::kStride + index_.bytes() + bits +
         (can_evict() ? scores_.bytes(headers_.num_touched()) : 0);
}

TableRows::LookupCounts TableRows::pin_resident(std::span<const std::int64_t> ids,
                                                std::span<const std::uint8_t> next_use,
                                                std::span<std::uint32_t> slots) noexcept {
  return is_direct_ ? pin_direct(ids, slots) : pin_hashed(ids, next_use, slots);
}

TableRows::LookupCounts TableRows::pin_direct(std::span<const std::int64_t> ids,
                                              std::span<std::uint32_t> slots) const noexcept {
  LookupCounts counts;
  const std::size_t n = ids.size();
  const VocabularyShare share = share_;  // copies, so that the compiler knows that writing slots does not change them
  const RowBits::View bits = initialised_.view();
  std::int64_t num_outside = 0, num_foreign = 0, num_resident = 0;
  if (share.is_whole()) {
    for (std::size_t i = 0; i < n; ++i) {
      const bool is_outside = share.is_outside(ids[i]);
      const auto place = is_outside ? 0 : static_cast<std::uint64_t>(ids[i]);
      const bool is_resident = bits.is_initialised(place) & !is_outside;
      slots[i] = is_resident ? static_cast<std::uint32_t>(place) : kNoSlot;
      num_outside += is_outside;
      num_resident += is_resident;
    }
  } else {
    for (std::size_t i = 0; i < n; ++i) {
      const bool is_outside = share.is_outside(ids[i]);
      const auto place = is_outside ? 0 : share.place_of(ids[i]);
      const bool is_foreign = !is_outside & !share.owns(ids[i]);
      const bool is_resident = bits.is_initialised(place) & !is_outside & !is_foreign;
      slots[i] = is_resident ? static_cast<std::uint32_t>(place) : kNoSlot;
      num_outside += is_outside;
      num_foreign += is_foreign;
      num_resident += is_resident;
    }
  }
  counts.outside = num_outside;
  counts.foreign = num_foreign;
  counts.newly_pinned = num_resident;
  counts.missing = static_cast<std::int64_t>(n) - num_resident;
  return counts;
}

TableRows::LookupCounts TableRows::pin_hashed(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
                                              std::span<std::uint32_t> slots) noexcept {
  LookupCounts counts;
  const bool has_scores = can_evict();
  const Fetched fetched{headers_, has_scores ? &scores_ : nullptr};
  index_.for_each(ids, fetched, [&](std::int64_t i, std::uint32_t slot) {
    slots[i] = slot;
    if (slot == kNoSlot) {
      ++counts.missing;
      if (settings_.rows == 0) {
        counts.foreign += !share_.has_rows();
      } else if (share_.is_outside(ids[i])) {
        ++counts.outside;
      } else {
        counts.foreign += !share_.owns(ids[i]);
      }
      return;
    }
    if (has_scores) scores_.use(slot, next_use.empty() ? next_use::kUnknown : next_use[i]);
    switch (headers_.pin(slot)) {
      case SlotHeaders::Pin::first:
        ++counts.newly_pinned;
        break;
      case SlotHeaders::Pin::again:
        break;
      case SlotHeaders::Pin::failed:
        ++counts.overpinned;
        slots[i] = kNoSlot;
        break;
    }
  });
  return counts;
}

void TableRows::unpin(std::span<std::uint32_t> slots, const LookupCounts& counts) noexcept {
  std::int64_t unpinned = 0;
  for (auto& slot : slots) {
    if (slot != kNoSlot && !is_direct_) unpinned += headers_.unpin(slot);
    slot = kNoSlot;
  }
  num_pinned_ -= is_direct_ ? counts.newly_pinned : unpinned;
}

void TableRows::drop(std::int64_t id) noexcept {
  const std::uint32_t slot = find(id);
  if (slot == kNoSlot) return;
  if (!is_direct_) return free_slot(slot);
  --num_rows_;
  initialised_.forget(slot);
  bits_.clean(slot);
}

void TableRows::reserve(const LookupCounts& counts) {
  if (!is_direct_) index_.reserve(num_rows_ - num_evictions(counts) + counts.missing);
}

void TableRows::admit(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
                      std::span<std::uint32_t> slots, const LookupCounts& counts) noexcept {
  if (counts.missing == 0) return;
  if (!is_direct_) {
    index_.grow(headers_);
    ask_for_huge_pages(std::min(settings_.capacity_rows, headers_.num_touched() + counts.missing));
    admit_hashed(ids, next_use, slots);
    return;
  }
  num_pinned_ += counts.missing;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (slots[i] != kNoSlot) continue;
    const std::uint64_t place = share_.place_of(ids[i]);
    num_rows_ += !initialised_.is_initialised(place);  // not if the id is repeated
    initialised_.mark_initialised(place);
    slots[i] = static_cast<std::uint32_t>(place);
  }
}

void TableRows::admit_hashed(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
                             std::span<std::uint32_t> slots) noexcept {
  std::int64_t missing[SlotIndex::kBlock];  // positions
  std::int64_t absent[SlotIndex::kBlock];   // their ids
  std::int64_t n = 0;
  const bool has_scores = can_evict();
  const auto admit_missing = [&] {
    index_.for_each({absent, static_cast<std::size_t>(n)}, headers_, [&](std::int64_t i, std::uint32_t slot) {
      if (slot == kNoSlot) {
        slot = headers_.take(absent[i]);
        index_.insert(absent[i], slot);
        ++num_rows_;
        ++num_pinned_;
        if (has_scores) scores_.begin(slot, next_use.empty() ? next_use::kUnknown : next_use[missing[i]]);
      } else {  // repeated id
        headers_.pin(slot);
      }
      slots[missing[i]] = slot;
    });
    n = 0;
  };
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (slots[i] != kNoSlot) continue;
    missing[n] = static_cast<std::int64_t>(i);
    absent[n++] = ids[i];
    if (n == SlotIndex::kBlock) admit_missing();
  }
  admit_missing();
}

void TableRows::resume(std::span<const std::uint32_t> slots, std::span<const std::uint8_t> frequencies) noexcept {
  if (!can_evict()) return;
  for (std::size_t i = 0; i < slots.size(); ++i) scores_.resume(slots[i], frequencies[i]);
}

void TableRows::recall(std::span<const std::uint32_t> slots, std::int64_t steps) noexcept {
  if (!can_evict()) return;
  for (const auto slot : slots) scores_.recall(slot, count_updates(layout_.clock_of(slot)), steps);
}

// Pass rows to the sink, a run at a time.
void TableRows::hand_over(std::span<const std::uint32_t> slots, bool is_for_commit, const RowSink& sink) const {
  std::int64_t ids[kLeft];
  std::uint8_t frequencies[kLeft];
  for (std::size_t begin = 0; begin < slots.size(); begin += kLeft) {
    const auto run = slots.subspan(begin, std::min<std::size_t>(kLeft, slots.size() - begin));
    for (std::size_t i = 0; i < run.size(); ++i) {
      ids[i] = id_of(run[i]);
      frequencies[i] = can_evict() ? scores_.stored_frequency(run[i]) : 0;
    }
    sink({{ids, run.size()}, {frequencies, run.size()}, is_for_commit, run, &layout_, can_evict() ? &scores_ : nullptr});
  }
}

std::pair<std::int64_t, std::int64_t> TableRows::evict(const LookupCounts& counts, const RowSink& sink,
                                                       const RowSink& clean_sink) {
  return evict_rows(num_evictions(counts), sink, clean_sink);
}

// `num`: at most the number of unpinned rows.
std::pair<std::int64_t, std::int64_t> TableRows::evict_rows(std::int64_t num, const RowSink& sink,
                                                            const RowSink& clean_sink) {
  std::int64_t left = num, num_evicted = 0, num_dirty = 0;
  std::uint32_t victims[kVictims], dirty[kVictims], to_save[kVictims], clean[kVictims];
  while (left > 0) {
    const std::int64_t n =
        scores_.choose({victims, static_cast<std::size_t>(std::min(left, kVictims))}, left, headers_);
    for (std::int64_t i = 0; i < n; ++i) {
      index_.prefetch(headers_(victims[i]));
      __builtin_prefetch(layout_.state_of(victims[i]) + layout_.clock_offset, 0, 2);
    }
    std::size_t num_newer = 0, num_saves = 0, num_clean = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      if (layout_.clock_of(victims[i]) == 0) continue;
      if (bits_.is_to_save(victims[i])) {
        to_save[num_saves++] = victims[i];
      } else if (bits_.is_dirty(victims[i])) {
        dirty[num_newer++] = victims[i];
      } else {
        clean[num_clean++] = victims[i];
      }
    }
    try {
      if (clean_sink) hand_over({clean, num_clean}, false, clean_sink);
      hand_over({to_save, num_saves}, true, sink);
      hand_over({dirty, num_newer}, false, sink);
    } catch (...) {
      for (std::int64_t i = 0; i < n; ++i) headers_.undo_eviction(victims[i]);
      throw;
    }
    for (std::int64_t i = 0; i < n; ++i) free_slot(victims[i]);
    left -= n;
    num_evicted += n;
    num_dirty += static_cast<std::int64_t>(num_newer + num_saves);
  }
  return {num_evicted, num_dirty};
}

std::int64_t TableRows::resize(std::int64_t capacity, const RowSink& sink) {
  if (!can_evict() || capacity == settings_.capacity_rows) return settings_.capacity_rows;
  capacity = std::min(std::max({capacity, num_pinned_, std::int64_t{1}}), settings_.most_rows);
  evict_rows(std::max<std::int64_t>(0, num_rows_ - capacity), sink, {});
  const std::int64_t touched = headers_.num_touched();
  std::vector<std::uint32_t> moving;
  for (std::int64_t s = capacity; s < touched; ++s) {
    const auto slot = static_cast<std::uint32_t>(s);
    if (headers_.is_resident(slot) && !headers_.is_pinned(slot)) moving.push_back(slot);
  }
  save(moving, sink);  // a snapshot looks for rows slot by slot, and would miss those that move
  settings_.capacity_rows = capacity;
  std::int64_t to = 0;  // at most `capacity` rows: while one is beyond, a slot before is free
  for (const auto slot : moving) {
    while (headers_.is_resident(static_cast<std::uint32_t>(to))) ++to;
    move_row(slot, static_cast<std::uint32_t>(to));
  }
  headers_.set_limit(capacity);
  scores_.set_slots(capacity);
  scores_.forget_candidates();
  for (std::int64_t begin = capacity, slot = capacity; slot <= touched; ++slot) {
    if (slot < touched && !headers_.is_resident(static_cast<std::uint32_t>(slot))) continue;
    weights_slab_.give_back(begin * layout_.weights_stride, slot * layout_.weights_stride);
    states_slab_.give_back(begin * layout_.state_stride, slot * layout_.state_stride);
    begin = slot + 1;
  }
  return capacity;
}

void TableRows::move_row(std::uint32_t from, std::uint32_t to) noexcept {
  std::memcpy(layout_.weights_of(to), layout_.weights_of(from), static_cast<std::size_t>(layout_.weights_stride));
  std::memcpy(layout_.state_of(to), layout_.state_of(from), static_cast<std::size_t>(layout_.state_stride));
  index_.move(headers_(from), from, to);
  headers_.move(from, to);
  scores_.move(from, to);
  bits_.move(from, to);
}

// For a row that is not pinned.
void TableRows::free_slot(std::uint32_t slot) noexcept {
  bits_.clean(slot);
  bits_.saved(slot);
  index_.erase(headers_(slot), slot);
  headers_.give(slot);
  --num_rows_;
}

template <class Fill>
std::size_t TableRows::insert_new(std::span<const std::int64_t> ids, const RowSink& sink, const Fill& fill) {
  ids = ids.first(std::min<std::size_t>(ids.size(), static_cast<std::size_t>(settings_.capacity_rows)));
  if (ids.empty()) return 0;
  std::vector<std::uint32_t> slots(ids.size(), kNoSlot);
  const LookupCounts counts{.missing = static_cast<std::int64_t>(ids.size())};
  reserve(counts);
  evict(counts, sink, {});
  admit(ids, {}, slots, counts);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    fill(i, slots[i]);
    headers_.unpin(slots[i]);
    scores_.released(slots[i]);
  }
  num_pinned_ = 0;
  return ids.size();
}

std::size_t TableRows::insert(const EvictedRows& rows, bool is_dirty, const RowSink& sink) {
  const RowLayout& upper = *rows.layout;
  if (rows.scores) scores_.follow_clock(*rows.scores, headers_.num_touched());
  return insert_new(rows.ids, sink, [&](std::size_t i, std::uint32_t slot) {
    if (i + 8 < rows.slots.size()) {
      __builtin_prefetch(upper.state_of(rows.slots[i + 8]), 0, 2);
      __builtin_prefetch(upper.weights_of(rows.slots[i + 8]), 0, 2);
    }
    layout_.copy(slot, upper, rows.slots[i]);
    if (is_dirty) bits_.mark_dirty(slot);
    if (rows.scores) scores_.begin_at(slot, rows.scores->score(rows.slots[i]));
  });
}

std::size_t TableRows::insert(std::span<const std::int64_t> ids, const std::byte* records, const RowSink& sink) {
  return insert_new(ids, sink, [&](std::size_t i, std::uint32_t slot) {
    layout_.unpack(slot, records + static_cast<std::int64_t>(i) * layout_.record_bytes());
    bits_.mark_dirty(slot);
  });
}

void TableRows::copy_up(std::span<const std::int64_t> ids, const RowLayout& upper,
                        std::span<const std::uint32_t> upper_slots, std::span<std::uint32_t> own_slots,
                        const RowSink& sink) {
  std::vector<std::uint32_t> to_save;
  for_each_slot(ids, [&](std::int64_t i, std::uint32_t slot) {
    own_slots[i] = slot;
    if (slot != kNoSlot && bits_.is_to_save(slot)) to_save.push_back(slot);
  });
  save(to_save, sink);
  constexpr std::size_t kAhead = 16;  // rows being fetched: this memory is slow
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size() && own_slots[i + kAhead] != kNoSlot) {
      const std::uint32_t next = own_slots[i + kAhead];
      for (std::int64_t b = 0; b < layout_.weights_bytes(); b += 64) __builtin_prefetch(layout_.weights_of(next) + b, 0, 2);
      for (std::int64_t b = 0; b < layout_.state_stride; b += 64) __builtin_prefetch(layout_.state_of(next) + b, 0, 2);
    }
    if (own_slots[i] != kNoSlot) upper.copy(upper_slots[i], layout_, own_slots[i]);
  }
}

void TableRows::move_up(std::span<const std::uint32_t> own_slots, TableRows& upper,
                        std::span<const std::uint32_t> upper_slots) noexcept {
  if (upper.can_evict()) scores_.follow_clock(upper.scores_, headers_.num_touched());
  for (std::size_t i = 0; i < own_slots.size(); ++i) {
    if (own_slots[i] == kNoSlot) continue;
    if (bits_.is_dirty(own_slots[i])) upper.bits_.mark_dirty(upper_slots[i]);
    if (upper.can_evict()) upper.scores_.resume_at(upper_slots[i], scores_.score(own_slots[i]));
    free_slot(own_slots[i]);
  }
}

void TableRows::write_dirty(std::int64_t most, const RowSink& sink) {
  std::vector<std::uint32_t> slots;
  bits_.for_each_dirty(0, num_slots(), [&](std::uint32_t slot) {
    if (layout_.clock_of(slot) != 0) slots.push_back(slot);
    return static_cast<std::int64_t>(slots.size()) < most;
  });
  hand_over(slots, false, sink);
  clean(slots);
}

void TableRows::save(std::span<const std::uint32_t> slots, const RowSink& sink) {
  std::vector<std::uint32_t> to_save;
  for (const auto slot : slots) {
    if (bits_.is_to_save(slot) && layout_.clock_of(slot) != 0) to_save.push_back(slot);
  }
  hand_over(to_save, true, sink);
  // Also the others: a row that was never updated, or was deleted and reinitialised, is not part of the snapshot, and a
  // later update must not add it.
  for (const auto slot : slots) bits_.saved(slot);
}

bool TableRows::save_some(std::int64_t most, const RowSink& sink) {
  std::vector<std::uint32_t> slots;
  const std::int64_t next = bits_.for_each_to_save(snapshot_cursor_, num_slots(), [&](std::uint32_t slot) {
    slots.push_back(slot);
    return static_cast<std::int64_t>(slots.size()) < most;
  });
  save(slots, sink);
  snapshot_cursor_ = next;
  return next < num_slots();
}

TableRows::ReleaseResult TableRows::release(std::span<const std::uint32_t> slots, bool is_dirty) noexcept {
  const auto n = static_cast<std::int64_t>(slots.size());
  const auto capacity = static_cast<std::uint64_t>(settings_.most_rows);
  if (is_direct_) {
    const RowBits::View bits = initialised_.view();
    bool is_known = n <= num_pinned_;
    for (const auto slot : slots) {
      const bool is_slot = slot < capacity;
      is_known &= is_slot & bits.is_initialised(is_slot ? slot : 0);
    }
    if (!is_known) return {0, true};
    for (std::int64_t i = 0; is_dirty && i < n; ++i) bits_.mark_dirty(slots[i]);
    return {n, false};
  }
  ReleaseResult result;
  const bool has_scores = can_evict();
  constexpr std::int64_t kAhead = 32;
  const auto fetch = [&](std::int64_t i) COLONNADE_INLINE_LAMBDA {
    if (i >= n || slots[i] >= capacity) return;
    headers_.fetch(slots[i]);
    if (has_scores) scores_.fetch(slots[i]);
  };
  for (std::int64_t i = 0; i < kAhead; ++i) fetch(i);
  for (std::int64_t i = 0; i < n; ++i) {
    fetch(i + kAhead);
    const std::uint32_t slot = slots[i];
    if (slot >= capacity || !headers_.is_pinned(slot)) {
      result.has_unpinned_slots = true;
      continue;
    }
    if (is_dirty) bits_.mark_dirty(slot);
    if (!headers_.unpin(slot)) continue;
    ++result.pins;
    if (has_scores) scores_.released(slot);
  }
  return result;
}

std::uint32_t TableRows::find(std::int64_t id) const noexcept {
  if (!is_direct_) return index_.find(id, headers_);
  if (share_.is_outside(id) || !share_.owns(id)) return kNoSlot;
  const std::uint64_t place = share_.place_of(id);
  return initialised_.is_initialised(place) ? static_cast<std::uint32_t>(place) : kNoSlot;
}

void TableRows::initial_values(std::int64_t id, std::byte* weights, std::uint16_t* lows) const noexcept {
  std::int64_t column = 0;
  for (const auto& part : settings_.parts) {
    const InitialValuesTask task{settings_.seed, part.init_scale, layout_.first_column + column, part.dim};
    std::byte* const out = weights + column * item_bytes(layout_.dtype);
    switch (layout_.dtype) {
      case Dtype::float32:
        kernels().float32.initial_values(task, id, reinterpret_cast<float*>(out));
        break;
      case Dtype::float64:
        kernels().float64.initial_values(task, id, reinterpret_cast<double*>(out));
        break;
      case Dtype::bfloat16:
        if (layout_.is_split) {
          kernels().initial_values_split(task, id, reinterpret_cast<std::uint16_t*>(out), lows ? lows + column : lows);
        } else {
          kernels().initial_values_bfloat16(task, id, reinterpret_cast<std::uint16_t*>(out));
        }
        break;
      case Dtype::float16:
        kernels().initial_values_float16(task, id, reinterpret_cast<std::uint16_t*>(out));
        break;
    }
    column += part.dim;
  }
}

void TableRows::initialise(std::int64_t id, std::uint32_t slot) const noexcept {
  std::byte* const state = layout_.state_of(slot);
  auto* const lows = reinterpret_cast<std::uint16_t*>(state + layout_.lows_offset);
  initial_values(id, layout_.weights_of(slot), lows);
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
  if (!only_dirty) rows.reserve(static_cast<std::size_t>(num_rows_));
  if (is_direct_) {
    initialised_.for_each_initialised(settings_.capacity_rows, [&](std::uint64_t place) {
      const auto slot = static_cast<std::uint32_t>(place);
      if (!only_dirty || is_newer(slot)) rows.emplace_back(share_.id_of(place), slot);
    });
    return rows;
  }
  for (std::int64_t s = 0; s < headers_.num_touched(); ++s) {
    const auto slot = static_cast<std::uint32_t>(s);
    if (headers_.is_resident(slot) && (!only_dirty || is_newer(slot))) rows.emplace_back(headers_(slot), slot);
  }
  std::ranges::sort(rows);
  return rows;
}

void TableRows::clean(std::span<const std::uint32_t> slots) noexcept {
  for (const auto slot : slots) bits_.clean(slot);
}

void TableRows::erase(std::int64_t id, const RowSink& sink) {
  const std::uint32_t slot = find(id);
  if (slot == kNoSlot) return;
  if (bits_.is_to_save(slot)) save({&slot, 1}, sink);
  if (is_direct_ ? num_pinned_ > 0 : headers_.is_pinned(slot)) {
    initialise(id, slot);
    return;
  }
  if (!is_direct_) return free_slot(slot);
  --num_rows_;
  initialised_.forget(slot);
  bits_.clean(slot);
}

}  // namespace colonnade
