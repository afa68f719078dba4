// Which rows a rank keeps copies of: id -> slot, how old each copy is, what is pending, and who leaves.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "buffer.h"
#include "index.h"
#include "slab.h"

namespace colonnade {

// What a copy is worth (32 bits; who is worth least leaves, of those alike the one with the smallest id):
//   lru        the last batch that used it
//   lfu        how often it was used; a count halves while as many rows are used as the cache holds, and those of rows
//              that were not used for two million times as long may become alike
//   lookahead  how soon it is used again, as told; of those not told, the last batch that used it
enum class CachePolicy : std::uint8_t { lru, lfu, lookahead };

struct DirectorySettings {
  std::int64_t capacity, read_bound, write_bound;
  CachePolicy policy;
};

// Nothing is said; the owner is asked for a row; it is asked whether the copy still is as it was.
enum class Asked : std::uint8_t { hit, miss, lease_over };

// A copy as commits hold it.
struct DirectoryRow {
  std::int64_t id;
  std::uint32_t slot, copied, ticks, worth;
};

// One batch's decision, and what it changed, as it was.
struct DirectoryStep {
  std::int64_t number = 0;
  // (U,) by row of the batch.
  Buffer<std::int32_t> slots, ages, ticks;
  Buffer<std::uint8_t> asked, pushed, leaving;
  // (E,) of other rows that leave with something pending, ascending by id.
  Buffer<std::int64_t> evicted_ids;
  Buffer<std::int32_t> evicted_slots, evicted_ticks;

  struct Before {
    std::uint32_t copied, ticks, worth;
  };
  Buffer<Before> before;                     // (U,) of those that had a copy
  std::vector<DirectoryRow> gone;            // all that left, of the batch or not
  std::vector<std::pair<std::uint32_t, std::uint32_t>> revalued;  // of others: slot and worth
  std::size_t num_forgiven = 0;  // of these, before the batch's rows were found
  std::uint64_t time = 0;
  std::int64_t num_slots = 0;
  std::uint32_t set_back = 0;  // by how much all worths were lowered before anything else
  std::vector<std::pair<std::uint32_t, std::uint32_t>> lapsed;  // slot and worth of those that were worth no more than that
};

// Flat arrays: 16 bytes of each copy, 4 of its worth, 7.4 of the index, and 16 for each of some sixteenth of the copies,
// those that are worth least: only they are kept in order. Worth rises with use (or a row is put in that order anew), so the
// least of them is the least of all, until none is left and all copies are looked at for the next.
//
// The contract is that of `cache/directory.py`; one thread at a time.
class Directory {
 public:
  explicit Directory(const DirectorySettings& settings);

  // The next batch's rows, ascending, each once. next_uses: batches from this one to the next that uses each, 0: not
  // known; or none. coming: ascending, rows of the batch `window` after this one. invalid_argument, NoRoom: nothing
  // changed.
  DirectoryStep step(std::span<const std::int64_t> ids, std::span<const std::int32_t> next_uses,
                     std::span<const std::int64_t> coming, std::int64_t window);
  // As if the newest step had not been. ids: its own. invalid_argument for another's.
  void undo(std::span<const std::int64_t> ids, const DirectoryStep& done);
  // Rows with more than so many batches pending are pushed: as they were, ascending by id.
  std::vector<DirectoryRow> flush(std::int64_t above);
  void set_bounds(std::int64_t read_bound, std::int64_t write_bound) noexcept;

  std::vector<DirectoryRow> rows() const;  // ascending by id
  // Into a directory without copies. invalid_argument for an id or a slot twice.
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
    std::uint32_t copied;       // the batch that read it
    std::uint32_t ticks : 24;   // pending; stops at its most
    std::uint32_t stamp : 8;    // of the last batch that used it
  };
  static_assert(sizeof(Row) == 16);
  struct Ids {
    const Row* rows;
    const std::uint32_t* worths;
    std::int64_t operator()(std::uint32_t slot) const { return rows[slot].id; }
    COLONNADE_INLINE_MEMBER void fetch(std::uint32_t slot) const {
      __builtin_prefetch(rows + slot, 1, 3);
      __builtin_prefetch(worths + slot, 1, 3);
    }
  };
  struct Entry {
    std::uint32_t worth, slot;
    std::int64_t id;
    // One number, in the order of (worth, id).
    unsigned __int128 key() const {
      return static_cast<unsigned __int128>(worth) << 64 | (static_cast<std::uint64_t>(id) ^ std::uint64_t{1} << 63);
    }
    friend bool operator>(const Entry& a, const Entry& b) { return a.key() > b.key(); }
  };

  Ids ids() const { return {rows_, worths_}; }
  void make_room(std::int64_t slots);
  void tick(std::size_t num_rows) noexcept;
  void set_back(DirectoryStep& done);
  void undo_set_back(const DirectoryStep& done);
  void forget_order() noexcept;
  std::uint32_t begun(std::int32_t next_use) const noexcept;
  std::uint32_t used(std::uint32_t worth, std::uint32_t now) const noexcept;  // now: what `begun` says
  std::uint32_t known(std::int64_t batches) const noexcept;
  void revalue(std::uint32_t slot, std::uint32_t worth, DirectoryStep& done);
  void restore(const DirectoryStep& done, std::size_t begin, std::size_t end);
  void foresee(std::span<const std::int64_t> coming, std::int64_t window, DirectoryStep& done);
  void forgive(DirectoryStep& done);
  void find(std::span<const std::int64_t> wanted, std::span<const std::int32_t> next_uses, DirectoryStep& done);
  void admit(std::span<const std::int64_t> wanted, std::span<const std::int32_t> next_uses, DirectoryStep& done);
  void evict(std::span<const std::int64_t> wanted, DirectoryStep& done);
  bool is_low(std::uint32_t worth, std::int64_t id) const { return std::pair(worth, id) <= threshold_; }
  void hear(std::uint32_t slot) {
    if (is_low(worths_[slot], rows_[slot].id)) add_late({worths_[slot], slot, rows_[slot].id});
  }
  void add_late(const Entry& entry);
  void look(std::int64_t wanted);
  void collect_low(std::vector<Entry>& low) const;
  Entry take_least(std::int64_t wanted);
  bool is_there(const Entry& entry) const {
    return worths_[entry.slot] == entry.worth && rows_[entry.slot].id == entry.id;
  }
  std::uint32_t take_slot() noexcept;
  void put(const DirectoryRow& row);
  void keep(const DirectoryRow& row);
  void remove(std::uint32_t slot) noexcept;

  DirectorySettings settings_;
  SlotIndex index_;
  Slab rows_slab_, worths_slab_;
  Row* rows_ = nullptr;
  std::uint32_t* worths_ = nullptr;  // 0: the slot is free
  std::int64_t room_ = 0;            // slots
  std::vector<std::uint64_t> free_;  // a bit each, below num_slots_
  std::size_t lowest_ = 0;           // no word of free_ below it has any
  std::int64_t num_slots_ = 0, num_rows_ = 0, num_free_ = 0;
  std::int64_t number_ = 0;
  std::uint64_t time_ = 0;  // of lfu: half-lives, in 2^-30
  // Every copy up to the threshold has an entry with its worth in one of these; others there mean nothing.
  std::pair<std::uint32_t, std::int64_t> threshold_{0, 0};
  std::vector<Entry> least_;  // descending
  std::vector<Entry> late_;   // a heap, the least on top
};

}  // namespace colonnade
