// Headers of nine bytes for the slots of a hashed table: id, pin count, whether it has a row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>

#include "hash.h"
#include "slab.h"

namespace colonnade {

// Free slots are linked through their ids. Threads may pin and release different slots concurrently.
class SlotHeaders {
 public:
  static constexpr std::int64_t kStride = 9;
  static constexpr std::uint32_t kNone = 0xffffffff;
  enum class Pin { first, again, failed };

  SlotHeaders() = default;
  explicit SlotHeaders(std::int64_t slots)
      : slab_(checked_bytes(kStride, static_cast<std::size_t>(slots))),
        bytes_(slab_.data()),
        limit_(slots),
        many_(std::make_unique<ManyPins>()) {}

  const Slab& slab() const { return slab_; }
  std::int64_t num_touched() const { return num_touched_; }  // later slots were never used

  std::int64_t operator()(std::uint32_t slot) const {  // id of a slot
    std::int64_t id;
    std::memcpy(&id, at(slot), 8);
    return id;
  }
  // One header in eight crosses cache lines.
  COLONNADE_INLINE_MEMBER void fetch(std::uint32_t slot) const {
    __builtin_prefetch(at(slot), 1, 2);
    __builtin_prefetch(at(slot) + 8, 1, 2);
  }

  bool is_resident(std::uint32_t slot) const { return flags(slot) & kResident; }
  bool is_pinned(std::uint32_t slot) const { return flags(slot) & kPins; }

  // Assign a free slot to a row, pinned once.
  std::uint32_t take(std::int64_t id) noexcept {
    std::uint32_t slot = first_free_;
    if (slot == kNone) {
      slot = static_cast<std::uint32_t>(num_touched_++);
    } else {
      first_free_ = static_cast<std::uint32_t>((*this)(slot));
    }
    std::memcpy(at(slot), &id, 8);
    flags(slot) = kResident | 1;
    return slot;
  }
  void give(std::uint32_t slot) noexcept {  // must not be pinned
    if (slot >= limit_) {
      flags(slot) = 0;
      return;
    }
    const std::int64_t next = first_free_;
    std::memcpy(at(slot), &next, 8);
    flags(slot) = 0;
    first_free_ = slot;
  }

  // Move an unpinned row to a free slot. The list of free slots is then wrong until `set_limit`.
  void move(std::uint32_t from, std::uint32_t to) noexcept {
    std::memcpy(at(to), at(from), kStride);
    flags(from) = 0;
  }
  // Use no slot from `limit` on for new rows; at most `limit` rows may be resident. Lists the free slots anew.
  void set_limit(std::int64_t limit) noexcept {
    limit_ = limit;
    while (num_touched_ > 0 && !is_resident(static_cast<std::uint32_t>(num_touched_ - 1))) --num_touched_;
    first_free_ = kNone;
    for (std::int64_t slot = std::min(limit, num_touched_) - 1; slot >= 0; --slot) {
      if (!is_resident(static_cast<std::uint32_t>(slot))) give(static_cast<std::uint32_t>(slot));
    }
  }

  Pin pin(std::uint32_t slot) noexcept {
    const auto pins = flags(slot) & kPins;
    if (pins >= kMany - 1) return pin_once_more(slot) ? Pin::again : Pin::failed;
    ++flags(slot);
    return pins == 0 ? Pin::first : Pin::again;
  }
  bool unpin(std::uint32_t slot) noexcept {  // true if that was the last pin
    const auto pins = flags(slot) & kPins;
    if (pins == kMany) {
      unpin_of_many(slot);
      return false;
    }
    --flags(slot);
    return pins == 1;
  }

  // Give up an unpinned row: false for pinned rows and free slots; after true the slot is not returned again.
  bool begin_eviction(std::uint32_t slot) noexcept {
    std::uint8_t& word = flags(slot);
    if (!(word & kResident) || (word & kPins)) return false;
    word &= static_cast<std::uint8_t>(~kResident);
    return true;
  }
  void undo_eviction(std::uint32_t slot) noexcept { flags(slot) |= kResident; }

 private:
  static constexpr std::uint8_t kPins = 0x1f, kMany = 31, kResident = 0x80;

  // Slots with pin count kMany, and their number of pins.
  struct ManyPins {
    std::mutex mutex;
    std::unordered_map<std::uint32_t, std::uint32_t> by_slot;
  };

  std::byte* at(std::uint32_t slot) const { return bytes_ + kStride * slot; }
  std::uint8_t& flags(std::uint32_t slot) { return reinterpret_cast<std::uint8_t&>(at(slot)[8]); }
  std::uint8_t flags(std::uint32_t slot) const { return static_cast<std::uint8_t>(at(slot)[8]); }

  bool pin_once_more(std::uint32_t slot) noexcept {
    const std::scoped_lock lock(many_->mutex);
    try {
      std::uint32_t& pins = many_->by_slot.try_emplace(slot, kMany - 1).first->second;
      if (pins == 0xffffffff) return false;
      ++pins;
    } catch (const std::bad_alloc&) {
      return false;
    }
    flags(slot) |= kMany;
    return true;
  }
  void unpin_of_many(std::uint32_t slot) noexcept {
    const std::scoped_lock lock(many_->mutex);
    const auto entry = many_->by_slot.find(slot);
    if (--entry->second == kMany - 1) {
      many_->by_slot.erase(entry);
      --flags(slot);
    }
  }

  Slab slab_;
  std::byte* bytes_ = nullptr;
  std::int64_t num_touched_ = 0;
  std::int64_t limit_ = 0;
  std::uint32_t first_free_ = kNone;
  std::unique_ptr<ManyPins> many_;
};

}  // namespace colonnade
