// Rows of one table in this process's memory: index, slab, pins, dirty bits, eviction. No lock: see dram.h.
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
#include "clock.h"
#include "dirty_bits.h"
#include "index.h"
#include "row_bits.h"
#include "scalar.h"
#include "slab.h"
#include "slot_headers.h"
#include "slot_scores.h"
#include "vocabulary.h"

namespace colonnade {

// Initial values and optimizer state of one part of a row.
struct PartInitialValues {
  std::int64_t dim;           // columns, after those of earlier parts
  std::int64_t state = 0;     // first state element
  double init_scale = 0.0;    // values are uniform in [-init_scale, init_scale)
  double initial_state = 0.0; // first initial_count state elements; all others start at 0
  std::int64_t initial_count = 0;
};

struct TableSettings {
  std::vector<PartInitialValues> parts;  // adjacent
  std::int64_t state_elements;   // of all parts
  std::int64_t rows;             // 0: open table
  std::int64_t capacity_rows;
  std::uint64_t seed;
  bool can_evict = true;  // whether rows can be evicted: there is a backing for them
  std::string directory = {};  // folder of the mounted file for rows; empty: anonymous memory
  std::int64_t num_owners = 1, place = 0;  // number of owners, and this rank's number or VocabularyShare::kNone
  std::int64_t first_column = 0;  // first column in the whole row; random bits depend on it
  std::int64_t most_rows = 0;  // largest capacity of `resize`; 0: that of the start
};

// Row format that all tables of a rank share.
struct RowFormat {
  Dtype dtype;
  bool is_split = false;
};

// Memory layout of rows. Addresses never change.
struct RowLayout {
  Dtype dtype;
  bool is_split;  // bfloat16 rows are the high halves of float32 masters
  std::int64_t dim, state_elements;
  std::byte* weights;  // plane of dim elements per slot
  std::int64_t weights_stride;
  std::byte* states;  // plane of state elements of the compute dtype, low halves if split, clock
  std::int64_t state_stride;
  std::int64_t lows_offset, clock_offset;  // bytes, within a slot's state; the clock is a Clock
  std::uint64_t seed;
  const std::byte* ids;  // an unaligned int64 every ids_stride bytes, by slot; null: a slot's number is its local row
  std::int64_t ids_stride;
  std::uint64_t num_owners, place;  // of the vocabulary rows of this rank
  std::int64_t first_column;  // first column in the whole row

  std::int64_t weights_bytes() const { return dim * item_bytes(dtype); }
  std::int64_t state_bytes() const {
    return state_elements * item_bytes(compute_dtype(dtype)) + (is_split ? 2 * dim : 0);
  }
  std::int64_t record_bytes() const {
    return weights_bytes() + state_bytes() + 8;
  }  // weights | state | low halves | clock
  std::byte* weights_of(std::uint32_t slot) const { return weights + slot * weights_stride; }
  std::byte* state_of(std::uint32_t slot) const { return states + slot * state_stride; }
  Clock& clock_of(std::uint32_t slot) const {
    return *reinterpret_cast<Clock*>(state_of(slot) + clock_offset);
  }
  void pack(std::uint32_t slot, std::byte* record) const {
    const std::uint64_t clock = pack_clock(clock_of(slot));
    std::memcpy(record, weights_of(slot), weights_bytes());
    std::memcpy(record + weights_bytes(), state_of(slot), state_bytes());
    std::memcpy(record + weights_bytes() + state_bytes(), &clock, 8);
  }
  // Copy a row of a layout with the same columns and state.
  void copy(std::uint32_t slot, const RowLayout& other, std::uint32_t other_slot) const {
    std::memcpy(weights_of(slot), other.weights_of(other_slot), weights_bytes());
    std::memcpy(state_of(slot), other.state_of(other_slot), state_stride);
  }
  void unpack(std::uint32_t slot, const std::byte* record) const {
    std::uint64_t clock;
    std::memcpy(weights_of(slot), record, weights_bytes());
    std::memcpy(state_of(slot), record + weights_bytes(), state_bytes());
    std::memcpy(&clock, record + weights_bytes() + state_bytes(), 8);
    clock_of(slot) = unpack_clock(clock);
  }
};

inline constexpr std::uint32_t kNoSlot = SlotIndex::kAbsent;

// Rows of one table to be written to the tier below.
struct EvictedRows {
  std::span<const std::int64_t> ids;
  std::span<const std::uint8_t> frequencies;
  bool is_for_commit;  // with their content at the time of the snapshot
  std::span<const std::uint32_t> slots;
  const RowLayout* layout;
  const SlotScores* scores;  // null if the table never evicts

  void pack(std::size_t i, std::byte* record) const {
    if (i + 8 < slots.size()) {
      __builtin_prefetch(layout->state_of(slots[i + 8]), 0, 2);
      __builtin_prefetch(layout->weights_of(slots[i + 8]), 0, 2);
    }
    layout->pack(slots[i], record);
  }
};
// Receives some rows at a time; must not call back. If it throws, the rows stay unchanged.
using RowSink = std::function<void(const EvictedRows&)>;

// A vocabulary table with capacity for all its local rows is direct: a row's local number is its slot, bits store
// whether it is initialised and dirty, and nothing is evicted. It has one pin count for the whole table. All other
// tables are hashed: an index finds a slot, and its header has id and pins. A table without rows on this rank takes no
// memory and refuses all ids.
class TableRows {
 public:
  // Counts of pinning the resident rows of a request, summed over its runs.
  struct LookupCounts {
    std::int64_t missing = 0;
    std::int64_t newly_pinned = 0;
    std::int64_t outside = 0;     // ids outside the vocabulary
    std::int64_t foreign = 0;     // ids of other owners
    std::int64_t overpinned = 0;  // rows that cannot be pinned once more
    LookupCounts& operator+=(const LookupCounts& other) {
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
  // Slots with an address; a resize may leave pinned rows in slots beyond the capacity.
  std::int64_t num_addresses() const { return settings_.most_rows; }
  bool is_direct() const { return is_direct_; }
  bool can_evict() const { return !is_direct_ && settings_.can_evict; }
  std::uint64_t num_slots_examined() const { return scores_.num_slots_examined(); }
  std::int64_t num_rows() const { return num_rows_; }
  std::int64_t num_pinned() const { return num_pinned_; }  // rows; pins in a direct table
  std::int64_t resident_bytes() const;
  bool is_mapped() const { return !settings_.directory.empty(); }
  std::int64_t mapped_bytes() const { return is_mapped() ? row_bytes() : 0; }  // of resident_bytes

  // Steps of an acquire of unique ids. next_use: by id, codes of access_frequency.h; empty: no hints. Runs of step 2 may be on
  // different threads.
  void tick(std::int64_t rows, bool is_hinted) noexcept {  // 1
    if (can_evict()) scores_.tick(rows, headers_.num_touched(), is_hinted);
  }
  LookupCounts pin_resident(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
                            std::span<std::uint32_t> slots) noexcept;  // 2: kNoSlot if absent
  void pinned(std::int64_t rows) noexcept { num_pinned_ += rows; }           // by step 2, before other threads see it
  // Undo step 2; slots become kNoSlot.
  void unpin(std::span<std::uint32_t> slots, const LookupCounts& counts) noexcept;
  // 3: rows that cannot be evicted for the `wanted` new ones, other than these.
  std::int64_t num_others(const LookupCounts& counts, std::int64_t wanted) const {
    return (can_evict() ? num_pinned_ : num_rows_) - (wanted - counts.missing);
  }
  bool has_room(const LookupCounts& counts, std::int64_t wanted) const {
    return is_direct_ || num_others(counts, wanted) + wanted <= settings_.capacity_rows;
  }
  void reserve(const LookupCounts& counts);  // 4: memory for step 6. NoRoom: nothing changed
  // 5: evict rows for the missing ones, dirty ones to the sink, trained clean ones to `clean_sink` unless it is empty.
  // Returns their number, and how many were dirty.
  std::pair<std::int64_t, std::int64_t> evict(const LookupCounts& counts, const RowSink& sink,
                                              const RowSink& clean_sink);
  // Change the capacity of a table that evicts, to at least its pinned rows and at most `most_rows`; returns it. Evicts
  // rows that do not fit, dirty ones to the sink, moves unpinned rows to the slots that stay, and frees the memory of
  // the others. Must not be called between the steps of an acquire. Rows that a snapshot still needs go to the sink
  // before they move. If the sink throws, some rows were evicted and the capacity is unchanged.
  std::int64_t resize(std::int64_t capacity, const RowSink& sink);
  // 6: give every missing row a pinned slot.
  void admit(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
             std::span<std::uint32_t> slots, const LookupCounts& counts) noexcept;
  // Restore the access frequency of rows just admitted that had been resident before.
  void resume(std::span<const std::uint32_t> slots, std::span<const std::uint8_t> frequencies) noexcept;
  // Estimate the access frequency of rows just read that this process has not used: their clocks count the uses of
  // earlier processes, in `steps` steps.
  void recall(std::span<const std::uint32_t> slots, std::int64_t steps) noexcept;

  // Unpin slots. A slot without a pinned row is skipped and reported; a direct table, with initialised but unpinned
  // rows, then releases none. `pins` ended: decrease of num_pinned. Runs may be on different threads; for a direct
  // table, pass all slots at once.
  struct ReleaseResult {
    std::int64_t pins = 0;
    bool has_unpinned_slots = false;
  };
  ReleaseResult release(std::span<const std::uint32_t> slots, bool is_dirty) noexcept;
  void unpinned(std::int64_t pins) noexcept { num_pinned_ -= pins; }

  // Call visit(i, slot) for all ids in order; kNoSlot if absent. Prefetches the slots' index entries.
  template <class Visit>
  void for_each_slot(std::span<const std::int64_t> ids, const Visit& visit) const {
    if (!is_direct_) return index_.for_each(ids, headers_, visit);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(ids.size()); ++i) visit(i, find(ids[i]));
  }
  std::uint32_t find(std::int64_t id) const noexcept;  // kNoSlot if absent
  void initial_values(std::int64_t id, std::byte* weights) const noexcept { initial_values(id, weights, nullptr); }
  void initialise(std::int64_t id, std::uint32_t slot) const noexcept;

  std::vector<std::pair<std::int64_t, std::uint32_t>> resident(bool only_dirty) const;  // ascending by id
  void clean(std::span<const std::uint32_t> slots) noexcept;
  // Write at most `most` dirty rows to the sink; they become clean.
  void write_dirty(std::int64_t most, const RowSink& sink);
  std::int64_t num_slots() const { return is_direct_ ? settings_.capacity_rows : headers_.num_touched(); }

  // Begin a snapshot of dirty rows for a checkpoint.
  void begin_snapshot() noexcept {
    snapshot_cursor_ = 0;
    bits_.take_snapshot(num_slots());
  }
  void end_snapshot() noexcept { bits_.end_snapshot(num_slots()); }  // rows not saved are dirty again
  // Save those of these slots that are still to be saved, before their rows change.
  void save(std::span<const std::uint32_t> slots, const RowSink& sink);
  bool save_some(std::int64_t most, const RowSink& sink);  // any rows; false: none is left

  // As a cache below another tier with the same layout, where nothing is pinned between calls:
  // Insert rows of that tier, none of which is here, at their scores; `sink` gets rows evicted for them. Returns the
  // number inserted: the first ones, at most the capacity. If it throws, nothing was inserted.
  std::size_t insert(const EvictedRows& rows, bool is_dirty, const RowSink& sink);
  // Insert records as dirty rows that were just used; else as above.
  std::size_t insert(std::span<const std::int64_t> ids, const std::byte* records, const RowSink& sink);
  // Copy rows to slots of the tier above; own_slots (N,) output: slots of this tier, kNoSlot if absent. Those that a
  // checkpoint must still save go to the sink.
  void copy_up(std::span<const std::int64_t> ids, const RowLayout& upper, std::span<const std::uint32_t> upper_slots,
               std::span<std::uint32_t> own_slots, const RowSink& sink);
  // Complete the move of rows copied by `copy_up`: free their slots. They remain dirty above if they were here.
  void move_up(std::span<const std::uint32_t> own_slots, TableRows& upper,
               std::span<const std::uint32_t> upper_slots) noexcept;

  void drop(std::int64_t id) noexcept;  // an unpinned row without content, if resident
  // Delete rows: an unpinned row frees its slot, a pinned one is reinitialised; in a direct table, if any are pinned. A
  // row that a checkpoint must still save goes to the sink first.
  void erase(std::int64_t id, const RowSink& sink);

 private:
  std::int64_t row_bytes() const;  // of rows and state in use
  // lows: target of a split row's low halves, or null.
  void initial_values(std::int64_t id, std::byte* weights, std::uint16_t* lows) const noexcept;

  bool is_newer(std::uint32_t slot) const {  // than the backing: a row that was never updated has nothing to save
    return (bits_.is_dirty(slot) || bits_.is_to_save(slot)) && layout_.clock_of(slot) != 0;
  }
  std::int64_t id_of(std::uint32_t slot) const { return is_direct_ ? share_.id_of(slot) : headers_(slot); }
  void hand_over(std::span<const std::uint32_t> slots, bool is_for_commit, const RowSink& sink) const;
  LookupCounts pin_direct(std::span<const std::int64_t> ids, std::span<std::uint32_t> slots) const noexcept;
  LookupCounts pin_hashed(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
                          std::span<std::uint32_t> slots) noexcept;
  void admit_hashed(std::span<const std::int64_t> ids, std::span<const std::uint8_t> next_use,
                    std::span<std::uint32_t> slots) noexcept;
  std::int64_t num_evictions(const LookupCounts& counts) const {
    return can_evict() ? std::max<std::int64_t>(0, num_rows_ + counts.missing - settings_.capacity_rows) : 0;
  }
  // Id lookup for the index, which also prefetches what a use of the row touches.
  struct Fetched {
    const SlotHeaders& headers;
    const SlotScores* scores;
    std::int64_t operator()(std::uint32_t slot) const { return headers(slot); }
    COLONNADE_INLINE_MEMBER void fetch(std::uint32_t slot) const {
      headers.fetch(slot);
      if (scores) scores->fetch(slot);
    }
  };
  // Evict for `ids`, all absent, as many as fit; then call fill(i, slot) for each, which must not throw.
  template <class Fill>
  std::size_t insert_new(std::span<const std::int64_t> ids, const RowSink& sink, const Fill& fill);
  std::pair<std::int64_t, std::int64_t> evict_rows(std::int64_t num, const RowSink& sink, const RowSink& clean_sink);
  void move_row(std::uint32_t from, std::uint32_t to) noexcept;
  void free_slot(std::uint32_t slot) noexcept;
  void ask_for_huge_pages(std::int64_t num_slots) noexcept;  // number of slots that will soon have been used

  TableSettings settings_;
  VocabularyShare share_;
  bool is_direct_;
  RowLayout layout_;
  Slab weights_slab_, states_slab_;
  DirtyBits bits_;
  RowBits initialised_;         // direct tables
  SlotHeaders headers_;  // hashed tables, as all that follows except the counts
  SlotIndex index_;
  SlotScores scores_;  // if rows can be evicted
  std::int64_t snapshot_cursor_ = 0;
  bool has_huge_rows_ = false, has_huge_headers_ = false;
  std::int64_t num_rows_ = 0;
  std::int64_t num_pinned_ = 0;
};

}  // namespace colonnade
