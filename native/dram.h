// Rows of all tables in this process's memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "table_rows.h"

namespace colonnade {

// What an acquire did beyond pinning.
struct Acquired {
  std::vector<std::int32_t> missing;               // positions in ids, ascending: slot assigned
  std::int64_t num_evicted = 0;        // rows that lost their slot
  std::int64_t num_evicted_dirty = 0;  // of these, those that went to the sink
};

// Called with rows of a table that leave or are saved, under the Dram's lock: it must not call back.
using TableSink = std::function<void(std::int64_t table, const LeftRows& rows)>;

// Thread-safe: a lock for each table around its index, pins and bits; one acquire at a time. Row contents are not locked: a pinned row does not
// move, and who reads or writes it is the caller's order of things.
class Dram {
 public:
  Dram(std::span<const TableSettings> tables, const RowFormat& format);

  // ids (U,) unique inside each table's part; next_use (U,) codes of heat.h, or empty; slots (U,) out. A full table
  // evicts unpinned rows, those that are newer than below to the sink. NoRoom, out_of_range and invalid_argument leave
  // everything as it was (slots are all kNoSlot then); so does what the sink throws, but rows may have left.
  Acquired acquire(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets,
                   std::span<const std::uint8_t> next_use, std::span<std::uint32_t> slots, bool is_birth,
                   const TableSink& sink);
  // Rows just acquired that had been here before, and their heat then (heat.h).
  void resume(std::int64_t table, std::span<const std::uint32_t> slots, std::span<const std::uint8_t> heats);
  // Rows just acquired and read that were used before only by processes that ended, in so many steps: their clocks say
  // how often.
  void recall(std::int64_t table, std::span<const std::uint32_t> slots, std::int64_t steps);
  // invalid_argument if a row is not pinned, once the others are released; of a table that indexes directly none are.
  void release(std::span<const std::uint32_t> slots, std::span<const std::int64_t> offsets, bool is_dirty);

  // On slots the caller has pinned, or keeps from being evicted otherwise.
  void birth(std::int64_t table, std::span<const std::int64_t> ids, std::span<const std::uint32_t> slots);
  void birth_at(std::int64_t table, std::int64_t id, std::uint32_t slot) const { tables_[table].birth(id, slot); }
  void pack(std::int64_t table, std::span<const std::uint32_t> slots, std::byte* records) const;
  void unpack(std::int64_t table, std::span<const std::uint32_t> slots, const std::byte* records);
  // The first widths[t] bytes of records, one after another in `message`, of rows listed in blocks: block b is counts[b]
  // rows of table b % T. Unpacked, zeros are what was not sent of a record.
  void pack_blocks(std::span<const std::uint32_t> slots, std::span<const std::int64_t> counts,
                   std::span<const std::int64_t> widths, std::span<std::byte> message) const;
  void unpack_blocks(std::span<const std::uint32_t> slots, std::span<const std::int64_t> counts,
                     std::span<const std::int64_t> widths, std::span<const std::byte> message);
  std::vector<std::int64_t> clocks(std::int64_t table, std::span<const std::uint32_t> slots) const;

  // Weights of resident rows to out; the positions of the others.
  std::vector<std::int32_t> read(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out) const;
  void birth_values(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out) const;

  std::vector<std::pair<std::int64_t, std::uint32_t>> resident(std::int64_t table, bool only_dirty) const;
  void clean(std::int64_t table, std::span<const std::uint32_t> slots);
  // A row in use is born again in place, the others give their slot back; absent ones are passed over. Those that a
  // snapshot still needs go to the sink first.
  void erase(std::int64_t table, std::span<const std::int64_t> ids, const TableSink& sink);
  // At most `most` dirty rows of a table to the sink; they stay, clean.
  void write_dirty(std::int64_t table, std::int64_t most, const TableSink& sink);

  // A snapshot is of all rows that are dirty now, as they are now; nothing is copied yet. Each of them reaches a sink
  // once, with is_for_commit: from `save`, which must come before a row changes; when it leaves; from `save_some`.
  // invalid_argument if one is being taken already.
  void begin_snapshot();
  void save(std::span<const std::uint32_t> slots, std::span<const std::int64_t> offsets, const TableSink& sink);
  bool save_some(std::int64_t table, std::int64_t most, const TableSink& sink);  // false: none is left
  void end_snapshot();  // what was not saved is dirty again
  // Rows of an acquire that came to nothing, released: they are as if never admitted.
  void drop(std::int64_t table, std::span<const std::int64_t> ids);

  std::int64_t num_tables() const { return static_cast<std::int64_t>(tables_.size()); }
  Dtype dtype() const { return format_.dtype; }
  bool is_split() const { return format_.is_split; }
  bool has_rows(std::int64_t table) const { return at(table).share().has_rows(); }  // of those there can be
  const RowLayout& layout(std::int64_t table) const { return at(table).layout(); }
  std::int64_t capacity_rows(std::int64_t table) const { return at(table).settings().capacity_rows; }
  std::int64_t num_rows(std::int64_t table) const;
  std::uint64_t num_looked(std::int64_t table) const;  // slots, to choose who leaves, ever
  double pinned_share(std::int64_t table) const;  // of the slots of a table whose rows may leave; else 0
  std::int64_t resident_bytes() const;

 private:
  struct Run {
    std::int64_t table, begin, end;
  };
  using Lock = std::unique_lock<std::mutex>;
  Lock lock(std::int64_t table) const;  // invalid_argument if there is no such table
  // visit(first, last) for runs of whole tables, whose locks are held meanwhile: enough runs for all threads, and for
  // them to share evenly; one thread alone holds as few as it can.
  template <class Visit>
  void for_each_group(std::span<const Run> runs, const Visit& visit);
  const TableRows& at(std::int64_t table) const;
  TableRows& at(std::int64_t table) { return const_cast<TableRows&>(std::as_const(*this).at(table)); }
  std::vector<Run> runs(std::span<const std::int64_t> offsets, std::size_t size, const char* name) const;
  void check_slots(std::int64_t table, std::span<const std::uint32_t> slots) const;
  // visit(layout, slot, a record to use (of zeros at first), where the row's bytes begin in the message, how many), for
  // each row of each block.
  template <class Visit>
  void for_each_block(std::span<const std::uint32_t> slots, std::span<const std::int64_t> counts,
                      std::span<const std::int64_t> widths, std::size_t message_bytes, const Visit& visit) const;
  [[noreturn]] void refuse_id(std::int64_t table, std::span<const std::int64_t> ids) const;

  RowFormat format_;
  std::vector<TableRows> tables_;
  std::atomic<bool> has_snapshot_ = false;
  // Of acquire, whose rows get their first values when it has let go of their tables; who would read or change these
  // rows meanwhile takes it too.
  mutable std::mutex acquiring_;
  std::unique_ptr<std::mutex[]> mutexes_;    // by table
  mutable std::atomic<int> num_waiting_ = 0;  // threads that want one of them; who saves rows lets them go first
};

// offsets (T + 1,) must ascend from 0 to size; invalid_argument, naming `name`, if not.
void check_parts(std::span<const std::int64_t> offsets, std::int64_t num_tables, std::int64_t size,
                 const char* name);

}  // namespace colonnade
