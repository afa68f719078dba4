// Eviction of a table's rows: state of each row that determines the order of eviction.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "index.h"

namespace colonnade {

enum class LeaveBy : std::uint8_t { recency, frequency, norm };

struct RetentionSettings {
  LeaveBy by;
  std::int64_t max_rows;     // 0: unlimited
  std::int64_t max_age;      // steps without an update after which a row is evicted; 0: never. Recency only
  std::int64_t halve_steps;  // frequency: counts are halved at every multiple of it; 0: never
  std::int64_t num_shares;   // ranks that ids are hashed to, see SlotIndex; 0: any ids
};

// State of a row in a checkpoint.
struct RetainedRow {
  std::int64_t id;
  std::uint32_t step;   // of its last update
  std::uint32_t value;  // frequency: count in 1/256, as of `step`; norm: bits of the squared norm as a float
};

// Rows are in lists, one for each score. A list is ordered by the rows' last update, and within a step by mix64 of
// their ids, which is the order of a plan. The first row of the lowest list is evicted first. Recency has one list.
// Scores of frequencies and norms are floating-point numbers with two fraction bits: four for each doubling. Halving
// changes no stored score: a score is the count times 2 to the number of halvings before the last update, so it grows
// with the steps for rows that are still updated.
//
// Each update takes one search and one move between lists, each new row five moves in the index. No step evicts more
// rows than it added, or than were last updated in one step, so there is no pause at any size. A checkpoint causes none
// either: a snapshot is one bit per row, and rows are saved when they change or by `save_some`. Memory: 24 bytes a row
// and 6.8 in the index. Another thread may call save_some; all other calls are from one thread at a time.
class Retention {
 public:
  explicit Retention(const RetentionSettings& settings);

  // Record updates of unique ids in `step`, and return the ids to evict, possibly some of the updated ones. Steps never
  // decrease. norms (N,): squared, or empty for other orders.
  std::vector<std::int64_t> record_updates(std::span<const std::int64_t> ids, std::span<const double> norms, std::int64_t step);
  void remove(std::span<const std::int64_t> ids);  // absent ids are ignored

  std::vector<RetainedRow> rows() const;  // in the order of eviction
  // Replace the state, in any order.
  void restore(std::vector<RetainedRow> rows);

  // Begin a snapshot of the current rows for save_some, which returns each once; ends an earlier snapshot.
  void begin_snapshot();
  // Return rows of the snapshot: about `most`, and those that changed meanwhile; empty: it is complete.
  std::vector<RetainedRow> save_some(std::int64_t most);

  std::int64_t size() const { return num_rows_; }
  std::int64_t bytes() const;
  std::uint64_t work() const;  // rows touched so far

 private:
  static constexpr std::uint32_t kNone = SlotIndex::kAbsent;
  static constexpr int kChunkBits = 16;

  struct Entry {
    std::int64_t id;
    std::uint32_t previous, next;  // in its list; for a free slot: itself and the next free one
    std::uint32_t step, value;
  };
  struct List {
    std::uint32_t first = kNone, last = kNone;
  };
  struct Ids {
    const Retention& of;
    std::int64_t operator()(std::uint32_t slot) const { return of.at(slot).id; }
    COLONNADE_INLINE_MEMBER void fetch(std::uint32_t slot) const { __builtin_prefetch(&of.at(slot), 1, 2); }
  };

  Entry& at(std::uint32_t slot) { return chunks_[slot >> kChunkBits][slot & ((1u << kChunkBits) - 1)]; }
  const Entry& at(std::uint32_t slot) const { return const_cast<Retention&>(*this).at(slot); }
  std::int64_t score(std::uint32_t step, std::uint32_t value) const;
  std::uint32_t count_of(const Entry* before, std::int64_t step) const;
  std::uint32_t new_slot();
  void link(std::uint32_t slot);
  void unlink(std::uint32_t slot);
  void evict(std::uint32_t slot);
  void save(std::uint32_t slot);
  bool take_save(std::uint32_t slot) noexcept;

  RetentionSettings settings_;
  SlotIndex index_;
  std::vector<std::unique_ptr<Entry[]>> chunks_;
  std::map<std::int64_t, List> lists_;  // by score; none is empty
  std::uint32_t free_ = kNone, num_slots_ = 0;
  std::int64_t num_rows_ = 0;
  std::uint64_t work_ = 0;
  // Snapshot: bits of slots still to save; position of save_some; rows that changed before it reached them.
  std::vector<std::uint64_t> to_save_;
  std::size_t cursor_ = 0;
  std::vector<RetainedRow> saved_;
  std::mutex mutex_;
};

}  // namespace colonnade
