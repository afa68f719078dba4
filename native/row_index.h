// Index of stored rows: any 64-bit id -> a 64-bit place. Batched, one thread at a time.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "index.h"
#include "slab.h"

namespace colonnade {

// 23 bytes a row at any time; grows without a pause. Up to 2^32 - 2 rows.
class RowIndex {
 public:
  static constexpr std::int64_t kAbsent = -1;

  // Insert values; a later value of the same id replaces the earlier one. No value may be kAbsent (invalid_argument).
  // NoRoom: nothing changed.
  void put(std::span<const std::int64_t> ids, std::span<const std::int64_t> values);
  void get(std::span<const std::int64_t> ids, std::span<std::int64_t> out) const noexcept;
  void erase(std::span<const std::int64_t> ids) noexcept;
  std::vector<std::pair<std::int64_t, std::int64_t>> items() const;  // ascending by id
  std::int64_t size() const { return size_; }
  std::int64_t bytes() const { return num_touched_ * static_cast<std::int64_t>(sizeof(Row)) + index_.bytes(); }

 private:
  struct Row {
    std::int64_t id;     // free slot: the next free one
    std::int64_t value;  // free slot: kAbsent
  };
  // Rows in blocks of 2 MiB.
  struct Rows {
    static constexpr std::uint32_t kBlock = 1u << 17;
    std::vector<Slab> blocks;

    Row& at(std::uint32_t slot) const {
      return reinterpret_cast<Row*>(blocks[slot / kBlock].data())[slot % kBlock];
    }
    std::int64_t operator()(std::uint32_t slot) const { return at(slot).id; }
    COLONNADE_INLINE_MEMBER void fetch(std::uint32_t slot) const { __builtin_prefetch(&at(slot), 1, 2); }
  };

  Rows rows_;
  SlotIndex index_{0};
  std::int64_t size_ = 0, num_touched_ = 0;
  std::uint32_t first_free_ = SlotIndex::kAbsent;
};

}  // namespace colonnade
