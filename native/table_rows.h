// One table's rows in this process's memory: index, slab, pins, dirty bits, eviction. No lock: see dram.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "dirty_bits.h"
#include "index.h"
#include "row_bits.h"
#include "scalar.h"
#include "slab.h"
#include "slot_headers.h"
#include "slot_worth.h"
#include "vocabulary.h"

namespace colonnade {

// How rows begin: the values and state of some of their columns.
struct PartBirth {
  std::int64_t dim;           // columns, after those of the parts before
  std::int64_t state = 0;     // first state element
  double init_scale = 0.0;    // values are uniform in [-init_scale, init_scale)
  double initial_state = 0.0; // of the first initial_count state elements; all others begin at 0
  std::int64_t initial_count = 0;
};

struct TableSettings {
  std::vector<PartBirth> parts;  // side by side
  std::int64_t state_elements;   // of all parts
  std::int64_t rows;             // 0: open table
  std::int64_t capacity_rows;
  std::uint64_t seed;
  bool can_evict = true;  // whether rows may leave: there is somewhere else for them to be
  std::string directory = {};  // where rows are memory mounted as files; empty: anonymous memory
  std::int64_t num_owners = 1, place = 0;  // rows are dealt to so many; this rank's among them, or VocabularyShare::kNone
  std::int64_t first_column = 0;  // of the rows that these are a slice of: random bits are drawn by it
};

// What all tables of a rank share.
struct RowFormat {
  Dtype dtype;
  bool is_split = false;
};

// Where rows lie. Addresses never change.
struct RowLayout {
  Dtype dtype;
  bool is_split;  // bfloat16 rows are the high halves of float32 masters
  std::int64_t dim, state_elements;
  std::byte* weights;  // plane of dim elements a slot
  std::int64_t weights_stride;
  std::byte* states;  // plane of state elements of the compute dtype, low halves if split, clock
  std::int64_t state_stride;
  std::int64_t lows_offset, clock_offset;  // bytes, inside a slot's state; the clock is a uint32
  std::uint64_t seed;
  const std::byte* ids;  // an unaligned int64 every ids_stride bytes, by slot; null: a slot's number is its row's place
  std::int64_t ids_stride;
  std::uint64_t num_owners, place;  // of the vocabulary rows that this rank has
  std::int64_t first_column;  // of the rows that these are a slice of

  std::int64_t weights_bytes() const { return dim * item_bytes(dtype); }
  std::int64_t state_bytes() const {
    return state_elements * item_bytes(compute_dtype(dtype)) + (is_split ? 2 * dim : 0);
  }
  std::int64_t record_bytes() const {
    return weights_bytes() + state_bytes() + 8;
  }  // weights | state | low halves | clock
  std::byte* weights_of(std::uint32_t slot) const { return weights + slot * weights_stride; }
  std::byte* state_of(std::uint32_t slot) const { return states + slot * state_stride; }
  std::uint32_t& clock_of(std::uint32_t slot) const {
    return *reinterpret_cast<std::uint32_t*>(state_of(slot) + clock_offset);
  }
  // A record's clock is a uint64; here it stops at its largest value.
  void pack(std::uint32_t slot, std::byte* record) const {
    const std::uint64_t clock = clock_of(slot);
    std::memcpy(record, weights_of(slot), weights_bytes());
    std::memcpy(record + weights_bytes(), state_of(slot), state_bytes());
    std::memcpy(record + weights_bytes() + state_bytes(), &clock, 8);
  }
  void unpack(std::uint32_t slot, const std::byte* record) const {
    std::uint64_t clock;
    std::memcpy(weights_of(slot), record, weights_bytes());
    std::memcpy(state_of(slot), record + weights_bytes(), state_bytes());
    std::memcpy(&clock, record + weights_bytes() + state_bytes(), 8);
    clock_of(slot) = static_cast<std::uint32_t>(std::min<std::uint64_t>(clock, 0xffffffff));
  }
};

inline constexpr std::uint32_t kNoSlot = SlotIndex::kAbsent;

// Rows of one table that are to be kept below.
struct LeftRows {
  std::span<const std::int64_t> ids;
  std::span<const std::uint8_t> heats;
  bool is_for_commit;  // as they were when the snapshot was taken
  std::span<const std::uint32_t> slots;
  const RowLayout* layout;

  void pack(std::size_t i, std::byte* record) const {
    if (i + 8 < slots.size()) {
      __builtin_prefetch(layout->state_of(slots[i + 8]), 0, 2);
      __builtin_prefetch(layout->weights_of(slots[i + 8]), 0, 2);
    }
    layout->pack(slots[i], record);
  }
};
// Called with some rows at a time; must not call back. What it throws leaves the rows where and as they were.
using RowSink = std::function<void(const LeftRows&)>;

// A vocabulary table whose share of rows fits the capacity is direct: a row's place is its slot, bits say whether
// it was born and is dirty, and nothing is ever evicted. Its pins are one number for the whole table. All other
// tables are hashed: an index finds a slot, whose header has id and pins. A table of which this rank has no rows takes no
// memory and refuses all ids.
class TableRows {
 public:
  // What pinning the rows of a request that are here has found; sums over the runs of a request.
  struct Found {
    std::int64_t missing = 0;
    std::int64_t newly_pinned = 0;
    std::int64_t outside = 0;     // ids outside the vocabulary
    std::int64_t foreign = 0;     // ids of other owners
    std::int64_t overpinned = 0;  // no memory for one more pin
    Found& operator+=(const Found& other) {
      missing += other.missing;
      newly_pinned += other.newly_pinned;
      outside += other.outside;
      foreign += other.foreign;
      overpinned += other.overpinned;
      return *this;
    }
  };
  TableRows(const TableSettings& settings, const RowFormat& format);  // invalid_argument, NoRoom

  const RowLayout& layout() const { return layout_; }
  const TableSettings& settings() const { return settings_; }
  const VocabularyShare& share() const { return share_; }
  bool is_direct() const { return is_direct_; }
  bool can_evict() const { return !is_direct_ && settings_.can_evict; }
  std::uint64_t num_looked() const { return worth_.num_looked(); }
  std::int64_t num_rows() const { return num_rows_; }
  std::int64_t num_pinned() const { return num_pinned_; }  // rows; of a direct table, pins
  std::int64_t resident_bytes() const;

  // The steps of an acquire, of unique ids. next_use: by id, codes of heat.h; empty: nothing is said. Runs of step 2
  // may be on different threads.
  void tick(std::int64_t rows, bool is_hinted) noexcept {  // 1
    if (can_evict()) worth_.tick(rows, headers_.num_touched(), is_hinted);
  }
  Found pin_resident(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
                     std::span<std::uint32_t> slots) noexcept;  // 2: kNoSlot where absent
  void pinned(std::int64_t rows) noexcept { num_pinned_ += rows; }           // newly, by step 2: before others see it
  void unpin(std::span<std::uint32_t> slots, const Found& found) noexcept;  // undoes step 2; slots become kNoSlot
  // 3: rows that cannot leave for the `wanted` ones to come, and are not among these.
  std::int64_t num_others(const Found& found, std::int64_t wanted) const {
    return (can_evict() ? num_pinned_ : num_rows_) - (wanted - found.missing);
  }
  bool has_room(const Found& found, std::int64_t wanted) const {
    return is_direct_ || num_others(found, wanted) + wanted <= settings_.capacity_rows;
  }
  void reserve(const Found& found);  // 4: memory for step 6. NoRoom: nothing changed
  // 5: rows leave for those missing; dirty ones to the sink. Returns how many, and how many of them were dirty.
  std::pair<std::int64_t, std::int64_t> evict(const Found& found, const RowSink& sink);
  void admit(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
             std::span<std::uint32_t> slots, const Found& found) noexcept;  // 6: a pinned slot for every missing row
  // Of rows just admitted that had been here before.
  void resume(std::span<const std::uint32_t> slots, std::span<const std::uint8_t> heats) noexcept;
  // Of rows just read that this process did not use before: their clocks say how often others did, in `steps` steps.
  void recall(std::span<const std::uint32_t> slots, std::int64_t steps) noexcept;

  // A slot that is not one of a pinned row is passed over, and told; a direct table, where rows are born and not
  // pinned, then releases none. `pins` ended: by so many num_pinned falls. Runs may be on different threads; of a
  // direct table all slots at once.
  struct Released {
    std::int64_t pins = 0;
    bool has_strangers = false;
  };
  Released release(std::span<const std::uint32_t> slots, bool is_dirty) noexcept;
  void unpinned(std::int64_t pins) noexcept { num_pinned_ -= pins; }

  // visit(i, slot) for all ids in order; kNoSlot if absent. The slots' index entries are fetched ahead.
  template <class Visit>
  void for_each_slot(std::span<const std::int64_t> ids, const Visit& visit) const {
    if (!is_direct_) return index_.for_each(ids, headers_, visit);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(ids.size()); ++i) visit(i, find(ids[i]));
  }
  std::uint32_t find(std::int64_t id) const noexcept;  // kNoSlot if absent
  void birth_values(std::int64_t id, std::byte* weights) const noexcept { birth_values(id, weights, nullptr); }
  void birth(std::int64_t id, std::uint32_t slot) const noexcept;

  std::vector<std::pair<std::int64_t, std::uint32_t>> resident(bool only_dirty) const;  // ascending id
  void clean(std::span<const std::uint32_t> slots) noexcept;
  // At most `most` dirty rows to the sink; they are clean.
  void write_dirty(std::int64_t most, const RowSink& sink);
  std::int64_t num_slots() const { return is_direct_ ? settings_.capacity_rows : headers_.num_touched(); }

  // What a commit has to save: rows dirty now, as they are now.
  void begin_snapshot() noexcept {
    snapshot_cursor_ = 0;
    bits_.take_snapshot(num_slots());
  }
  void end_snapshot() noexcept { bits_.end_snapshot(num_slots()); }  // rows not saved are dirty again
  // Of these slots, those still to save, before their rows change.
  void save(std::span<const std::uint32_t> slots, const RowSink& sink);
  bool save_some(std::int64_t most, const RowSink& sink);  // any; false: none is left

  void drop(std::int64_t id) noexcept;  // a row that is not pinned and holds nothing, if it is here
  // An unpinned row gives its slot back, a pinned one is born again; in a direct table, where any are pinned.
  // One that a commit has yet to save goes to the sink first.
  void erase(std::int64_t id, const RowSink& sink);

 private:
  // lows: where a split row's go, or null.
  void birth_values(std::int64_t id, std::byte* weights, std::uint16_t* lows) const noexcept;

  bool is_newer(std::uint32_t slot) const {  // than what lies below: a row never updated has nothing to keep
    return (bits_.is_dirty(slot) || bits_.is_to_save(slot)) && layout_.clock_of(slot) != 0;
  }
  std::int64_t id_of(std::uint32_t slot) const { return is_direct_ ? share_.id_of(slot) : headers_(slot); }
  void hand_over(std::span<const std::uint32_t> slots, bool is_for_commit, const RowSink& sink) const;
  Found pin_direct(std::span<const std::int64_t> ids, std::span<std::uint32_t> slots) const noexcept;
  Found pin_hashed(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
                   std::span<std::uint32_t> slots) noexcept;
  void admit_hashed(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
                    std::span<std::uint32_t> slots) noexcept;
  std::int64_t num_evictions(const Found& found) const {
    return can_evict() ? std::max<std::int64_t>(0, num_rows_ + found.missing - settings_.capacity_rows) : 0;
  }
  // How the index finds ids, with what a use of the row will touch fetched alongside.
  struct Fetched {
    const SlotHeaders& headers;
    const SlotWorth* worth;
    std::int64_t operator()(std::uint32_t slot) const { return headers(slot); }
    COLONNADE_INLINE_MEMBER void fetch(std::uint32_t slot) const {
      headers.fetch(slot);
      if (worth) worth->fetch(slot);
    }
  };
  void free_slot(std::uint32_t slot) noexcept;
  void ask_for_huge_pages(std::int64_t slots) noexcept;  // that will have been used soon

  TableSettings settings_;
  VocabularyShare share_;
  bool is_direct_;
  RowLayout layout_;
  Slab weights_slab_, states_slab_;
  DirtyBits bits_;
  RowBits born_;         // direct
  SlotHeaders headers_;  // hashed, as all that follows but the counts
  SlotIndex index_;
  SlotWorth worth_;  // where rows may leave
  std::int64_t snapshot_cursor_ = 0;
  bool has_huge_rows_ = false, has_huge_headers_ = false;
  std::int64_t num_rows_ = 0;
  std::int64_t num_pinned_ = 0;
};

}  // namespace colonnade
