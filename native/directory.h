// Directory of a rank's cached rows: id -> slot, age of each copy, pending gradients, eviction.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "buffer.h"
#include "index.h"
#include "slab.h"

namespace colonnade {

// Eviction score of a copy (32 bits; the lowest score is evicted first, among equal scores the smallest id):
//   lru        last batch that used it
//   lfu        number of uses; a count halves while as many rows are used as the cache holds, and scores of rows that
//              were not used for two million times as long may become equal
//   lookahead  batches until its next use, from hints; without a hint, the last batch that used it
enum class CachePolicy : std::uint8_t { lru, lfu, lookahead };

// When pending gradients are sent and copies read again: `RowClock` in `staleness.py`.
struct DirectoryClock {
  std::int64_t read_bound, write_bound;
  double write_share;
  std::int64_t step_bound;  // 0: no limit
};

struct DirectorySettings {
  std::int64_t capacity;
  DirectoryClock clock;
  CachePolicy policy;
};

// Request of a row: none, the row, or whether the copy is still current.
enum class Outcome : std::uint8_t { hit, miss, expired };

// Row of the directory in a checkpoint.
struct DirectoryRow {
  std::int64_t id;
  std::uint32_t slot, copied, ticks, uses, stamp, score;  // uses: as one byte encodes them; stamp: of the last use
};

// Decision for one batch, and what it changed, for `undo`.
struct DirectoryStep {
  std::int64_t number = 0;
  // (U,) for each row of the batch.
  Buffer<std::int32_t> slots, ages, ticks;
  Buffer<std::uint8_t> outcomes, pushed, leaving;
  // (E,) other rows evicted with pending gradients, by ascending id.
  Buffer<std::int64_t> evicted_ids;
  Buffer<std::int32_t> evicted_slots, evicted_ticks;

  struct Before {
    std::uint32_t copied, ticks, uses, stamp, score;
  };
  Buffer<Before> before;                     // (U,) state of rows that had a copy
  std::vector<DirectoryRow> evicted;            // all evicted rows, in the batch or not
  std::vector<std::pair<std::uint32_t, std::uint32_t>> changed_scores;  // of other rows: slot and score
  std::size_t num_expired_hints = 0;  // of these, changed before the batch's rows were searched
  std::uint64_t time = 0;
  std::int64_t num_slots = 0;
  std::uint32_t decrement = 0;  // amount by which all scores were lowered first
  std::vector<std::pair<std::uint32_t, std::uint32_t>> underflowed;  // slot and score of rows with a lower score than that
};

// Stored in flat arrays: 16 bytes for each copy, 4 for its score, 7.4 for the index, and 16 for each of about a
// sixteenth of the copies, those with the lowest scores. Only these are kept in order. A score only rises with use (or
// the row is inserted in that order again), so the lowest of them is the lowest of all; when none remains, all copies
// are scanned for the next.
//
// The contract is in `cache/directory.py`. One thread at a time.
class Directory {
 public:
  explicit Directory(const DirectorySettings& settings);

  // Decide the next batch: its unique rows, ascending. next_uses: batches until the next use of each row, 0: unknown;
  // or none. entering: ascending, rows of the batch `window` after this one. invalid_argument, NoRoom: nothing changed.
  DirectoryStep step(std::span<const std::int64_t> ids, std::span<const std::int32_t> next_uses,
                     std::span<const std::int64_t> entering, std::int64_t window);
  // Undo the newest step. ids: those of that step. invalid_argument for another step's.
  void undo(std::span<const std::int64_t> ids, const DirectoryStep& done);
  // Return the rows with more than `above` pending batches, ascending by id, and clear their pending counts.
  std::vector<DirectoryRow> flush(std::int64_t above);
  void set_clock(const DirectoryClock& clock) noexcept;

  std::vector<DirectoryRow> rows() const;  // by ascending id
  // Load rows into an empty directory. invalid_argument for a repeated id or slot.
  void load(std::span<const DirectoryRow> rows, std::int64_t number, std::uint64_t time);

  std::int64_t size() const { return num_rows_; }
  std::int64_t number() const { return number_; }
  std::uint64_t time() const { return time_; }
  std::int64_t num_slots() const { return num_slots_; }
  const DirectorySettings& settings() const { return settings_; }
  std::int64_t bytes() const;

  static constexpr std::int64_t kMostNumber = (std::int64_t{1} << 28) - 1;

 private:
  struct Row {
    std::int64_t id;
    std::uint64_t copied : 28;  // batch that read it
    std::uint64_t ticks : 20;   // pending batches
    std::uint64_t uses : 8;     // batches that used it before those, encoded
    std::uint64_t stamp : 8;    // of the last batch that used it
  };
  static_assert(sizeof(Row) == 16);
  struct Ids {
    const Row* rows;
    const std::uint32_t* scores;
    std::int64_t operator()(std::uint32_t slot) const { return rows[slot].id; }
    COLONNADE_INLINE_MEMBER void fetch(std::uint32_t slot) const {
      __builtin_prefetch(rows + slot, 1, 3);
      __builtin_prefetch(scores + slot, 1, 3);
    }
  };
  struct Entry {
    std::uint32_t score, slot;
    std::int64_t id;
    // Sort key: (score, id) as one number.
    unsigned __int128 key() const {
      return static_cast<unsigned __int128>(score) << 64 | (static_cast<std::uint64_t>(id) ^ std::uint64_t{1} << 63);
    }
    friend bool operator>(const Entry& a, const Entry& b) { return a.key() > b.key(); }
  };

  Ids ids() const { return {rows_, scores_}; }
  void make_room(std::int64_t slots);
  void tick(std::size_t num_rows) noexcept;
  void lower_scores(DirectoryStep& done);
  void restore_lowered_scores(const DirectoryStep& done);
  void forget_order() noexcept;
  std::uint32_t initial_score(std::int32_t next_use) const noexcept;
  std::uint32_t score_after_use(std::uint32_t score, std::uint32_t now) const noexcept;  // now: result of `initial_score`
  std::uint32_t encode_next_use(std::int64_t batches) const noexcept;
  void change_score(std::uint32_t slot, std::uint32_t score, DirectoryStep& done);
  void restore_scores(const DirectoryStep& done, std::size_t begin, std::size_t end);
  void apply_hints(std::span<const std::int64_t> entering, std::int64_t window, DirectoryStep& done);
  void expire_hints(DirectoryStep& done);
  void find(std::span<const std::int64_t> wanted, std::span<const std::int32_t> next_uses, DirectoryStep& done);
  void admit(std::span<const std::int64_t> wanted, std::span<const std::int32_t> next_uses, DirectoryStep& done);
  void evict(std::span<const std::int64_t> wanted, DirectoryStep& done);
  DirectoryRow row_at(std::uint32_t slot) const noexcept;
  bool exceeds_step_bound(std::uint64_t steps, std::uint32_t gap) const noexcept;
  bool is_due(std::uint32_t ticks, std::uint32_t uses, std::uint32_t gap) const noexcept;
  bool is_low(std::uint32_t score, std::int64_t id) const { return std::pair(score, id) <= threshold_; }
  void note_score_changed(std::uint32_t slot) {
    if (is_low(scores_[slot], rows_[slot].id)) add_late({scores_[slot], slot, rows_[slot].id});
  }
  void add_late(const Entry& entry);
  void refill_candidates(std::int64_t wanted);
  void collect_low(std::vector<Entry>& low) const;
  Entry take_least(std::int64_t wanted);
  bool is_current(const Entry& entry) const {
    return scores_[entry.slot] == entry.score && rows_[entry.slot].id == entry.id;
  }
  std::uint32_t take_slot() noexcept;
  void reinsert(const DirectoryRow& row);
  void insert(const DirectoryRow& row);
  void remove(std::uint32_t slot) noexcept;

  DirectorySettings settings_;
  SlotIndex index_;
  Slab rows_slab_, scores_slab_;
  Row* rows_ = nullptr;
  std::uint32_t* scores_ = nullptr;  // 0: free slot
  std::int64_t room_ = 0;            // number of slots
  std::vector<std::uint64_t> free_;  // one bit per slot below num_slots_
  std::size_t lowest_ = 0;           // words of free_ below it are 0
  std::int64_t num_slots_ = 0, num_rows_ = 0, num_free_ = 0;
  std::int64_t number_ = 0;
  std::uint64_t time_ = 0;  // lfu: half-lives, in 2^-30
  // Each copy with a score up to the threshold has an entry with its score in one of these; other entries are stale.
  std::pair<std::uint32_t, std::int64_t> threshold_{0, 0};
  std::vector<Entry> least_;  // descending
  std::vector<Entry> late_;   // heap with the lowest on top
};

}  // namespace colonnade
