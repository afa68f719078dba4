// Which rows of a table stay: what is remembered of each to say who leaves first.
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
  std::int64_t max_rows;     // 0: any number
  std::int64_t max_age;      // steps without an update after which a row leaves; 0: never. Recency only
  std::int64_t halve_steps;  // frequency: counts are halved at every multiple of it; 0: never
  std::int64_t num_shares;   // ranks among which the ids are dealt by hash, see SlotIndex; 0: ids are any
};

// A row's state, as a commit has it.
struct RetainedRow {
  std::int64_t id;
  std::uint32_t step;   // of its newest update
  std::uint32_t value;  // frequency: count in 1/256, as of `step`; norm: bits of the squared norm as a float
};

// Rows stand in lists, one for each score, a list in order of the rows' newest update, those of one step by mix64 of
// their ids, which is the order of a plan; the first of the lowest list leaves first. Recency is one list. Scores of frequencies and norms are floating point numbers of two bits of
// fraction, so there are four to a doubling. Counts are halved by standing still: a score is that of the count times
// 2 to the number of halvings before the newest update, and grows with the steps for those that go on to be updated.
//
// Each update costs one search and one move between lists, each row that is new five moves in the index, and no step
// evicts more rows than came, or than were last updated in one step: there is no pause, whatever the size. Nor is there
// one when a commit begins: a snapshot is a bit for each row, and rows are saved when they change or by `save_some`.
// 24 bytes a row and 6.8 in the index. Another thread may call save_some; all else is one thread at a time.
class Retention {
 public:
  explicit Retention(const RetentionSettings& settings);

  // These rows (unique ids) were updated in `step`, which never descends; norms (N,) squared, or empty where the order is
  // another. Returns the rows that leave, some of these perhaps among them.
  std::vector<std::int64_t> hear(std::span<const std::int64_t> ids, std::span<const double> norms, std::int64_t step);
  void remove(std::span<const std::int64_t> ids);  // those that are absent are passed over

  std::vector<RetainedRow> rows() const;  // first who leaves first
  // Instead of what is there, in any order.
  void restore(std::vector<RetainedRow> rows);

  // From here on save_some gives the rows as they are now, each once; a snapshot before this one is over.
  void begin_snapshot();
  // Some rows of the snapshot, about `most` and those that changed meanwhile; empty: it is over.
  std::vector<RetainedRow> save_some(std::int64_t most);

  std::int64_t size() const { return num_rows_; }
  std::int64_t bytes() const;
  std::uint64_t work() const;  // rows touched, ever

 private:
  static constexpr std::uint32_t kNone = SlotIndex::kAbsent;
  static constexpr int kChunkBits = 16;

  struct Entry {
    std::int64_t id;
    std::uint32_t previous, next;  // in its list; of a free one, itself and the next free one
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
  // A snapshot's: slots still to save, by bit; up to where save_some has looked; rows that changed before it came.
  std::vector<std::uint64_t> to_save_;
  std::size_t cursor_ = 0;
  std::vector<RetainedRow> saved_;
  std::mutex mutex_;
};

}  // namespace colonnade
