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

// Result of `acquire`: missing and evicted rows.
struct Acquired {
  std::vector<std::int32_t> missing;               // positions in ids, ascending; slots are assigned
  std::int64_t num_evicted = 0;        // evicted rows
  std::int64_t num_evicted_dirty = 0;  // of these, dirty ones, passed to the sink
  std::int64_t num_mapped = 0;         // resident rows of tables whose rows are in mapped files
};

// Receives rows of a table that are evicted or saved. Called under the Dram's lock, so it must not call back.
using TableSink = std::function<void(std::int64_t table, const EvictedRows& rows)>;

// Thread-safe: one lock per table for its index, pins and bits; one acquire at a time. Row contents are not locked: a
// pinned row does not move, and callers order their reads and writes.
class Dram {
 public:
  Dram(std::span<const TableSettings> tables, const RowFormat& format);

  // Pin rows. ids (U,) unique within each table; next_use (U,) codes of access_frequency.h, or empty; slots (U,) output. A full
  // table evicts unpinned rows, dirty ones to the sink, trained clean ones to `clean_sink` if there is one. NoRoom,
  // out_of_range and invalid_argument change nothing (all slots are then kNoSlot); so do exceptions of the sink, except
  // that rows may have been evicted.
  Acquired acquire(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets,
                   std::span<const std::uint8_t> next_use, std::span<std::uint32_t> slots, bool is_initialising,
                   const TableSink& sink, const TableSink& clean_sink = {});
  // Change the capacity of a table as TableRows::resize does; returns it.
  std::int64_t resize(std::int64_t table, std::int64_t capacity, const TableSink& sink);
  // Restore the access frequency (access_frequency.h) of rows that were just acquired and had been resident before.
  void resume(std::int64_t table, std::span<const std::uint32_t> slots, std::span<const std::uint8_t> frequencies);
  // Estimate from their clocks the access frequency of rows, just acquired and read, that only earlier processes used,
  // in `steps` steps.
  void recall(std::int64_t table, std::span<const std::uint32_t> slots, std::int64_t steps);
  // Unpin rows. invalid_argument if a row is not pinned, after the others are released; directly indexed tables have no
  // pins to check.
  void release(std::span<const std::uint32_t> slots, std::span<const std::int64_t> offsets, bool is_dirty);

  // For slots that the caller has pinned, or otherwise keeps from being evicted:
  void initialise(std::int64_t table, std::span<const std::int64_t> ids, std::span<const std::uint32_t> slots);
  void initialise_at(std::int64_t table, std::int64_t id, std::uint32_t slot) const { tables_[table].initialise(id, slot); }
  void pack(std::int64_t table, std::span<const std::uint32_t> slots, std::byte* records) const;
  void unpack(std::int64_t table, std::span<const std::uint32_t> slots, const std::byte* records);
  // Copy the first widths[t] bytes of records, one after another, to or from `message`. Rows are listed in blocks:
  // block b has counts[b] rows of table b % T. Unpacking sets bytes of a record that were not sent to 0.
  void pack_blocks(std::span<const std::uint32_t> slots, std::span<const std::int64_t> counts,
                   std::span<const std::int64_t> widths, std::span<std::byte> message) const;
  void unpack_blocks(std::span<const std::uint32_t> slots, std::span<const std::int64_t> counts,
                     std::span<const std::int64_t> widths, std::span<const std::byte> message);
  std::vector<std::int64_t> clocks(std::int64_t table, std::span<const std::uint32_t> slots) const;

  // Copy weights of resident rows to out; return the positions of the others.
  std::vector<std::int32_t> read(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out) const;
  void initial_values(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out) const;

  std::vector<std::pair<std::int64_t, std::uint32_t>> resident(std::int64_t table, bool only_dirty) const;
  void clean(std::int64_t table, std::span<const std::uint32_t> slots);
  // Delete rows. A row in use is reinitialised in place, the slots of others become free; absent ids are ignored. Rows
  // that a snapshot still needs go to the sink first.
  void erase(std::int64_t table, std::span<const std::int64_t> ids, const TableSink& sink);
  // Write at most `most` dirty rows of a table to the sink; they remain resident, clean.
  void write_dirty(std::int64_t table, std::int64_t most, const TableSink& sink);

  // Begin a snapshot of all dirty rows, without copying yet. Each row reaches a sink once, with is_for_commit: in
  // `save`, to be called before a row changes; at its eviction; or in `save_some`. invalid_argument if a snapshot is
  // being taken.
  void begin_snapshot();
  void save(std::span<const std::uint32_t> slots, std::span<const std::int64_t> offsets, const TableSink& sink);
  bool save_some(std::int64_t table, std::int64_t most, const TableSink& sink);  // false: none is left
  void end_snapshot();  // rows not saved are dirty again
  // As a cache below another tier with the same tables: see table_rows.h. `insert` and `move_up` are called, or call,
  // under the lock of that tier's table.
  std::size_t insert(std::int64_t table, const EvictedRows& rows, bool is_dirty, const TableSink& sink);
  std::size_t insert(std::int64_t table, std::span<const std::int64_t> ids, const std::byte* records,
                     const TableSink& sink);
  void copy_up(std::int64_t table, std::span<const std::int64_t> ids, const RowLayout& upper,
               std::span<const std::uint32_t> upper_slots, std::span<std::uint32_t> slots, const TableSink& sink);
  void move_up(std::int64_t table, std::span<const std::uint32_t> slots, Dram& upper,
               std::span<const std::uint32_t> upper_slots);
  // Release rows of an acquire that failed, as if never admitted.
  void drop(std::int64_t table, std::span<const std::int64_t> ids);

  std::int64_t num_tables() const { return static_cast<std::int64_t>(tables_.size()); }
  Dtype dtype() const { return format_.dtype; }
  bool is_split() const { return format_.is_split; }
  bool has_rows(std::int64_t table) const { return at(table).share().has_rows(); }  // whether this rank can have rows
  bool is_direct(std::int64_t table) const { return at(table).is_direct(); }
  const RowLayout& layout(std::int64_t table) const { return at(table).layout(); }
  std::int64_t capacity_rows(std::int64_t table) const { return at(table).settings().capacity_rows; }
  std::int64_t num_addresses(std::int64_t table) const { return at(table).num_addresses(); }
  bool can_resize(std::int64_t table) const { return at(table).can_evict() && !at(table).is_mapped(); }
  std::int64_t num_rows(std::int64_t table) const;
  std::uint64_t num_slots_examined(std::int64_t table) const;  // slots examined so far for eviction
  double pinned_share(std::int64_t table) const;  // of slots in tables that evict; else 0
  std::int64_t resident_bytes() const;  // without those of mapped files
  std::int64_t mapped_bytes() const;    // of rows in mapped files, which tables use in place

 private:
  struct Run {
    std::int64_t table, begin, end;
  };
  using Lock = std::unique_lock<std::mutex>;
  Lock lock(std::int64_t table) const;  // invalid_argument if there is no such table
  // Call visit(first, last) for runs of whole tables with their locks held: enough runs for all threads to share the
  // work evenly; with one thread, as few locks at a time as possible.
  template <class Visit>
  void for_each_group(std::span<const Run> runs, const Visit& visit);
  const TableRows& at(std::int64_t table) const;
  TableRows& at(std::int64_t table) { return const_cast<TableRows&>(std::as_const(*this).at(table)); }
  std::vector<Run> runs(std::span<const std::int64_t> offsets, std::size_t size, const char* name) const;
  void check_slots(std::int64_t table, std::span<const std::uint32_t> slots) const;
  // Call visit(layout, slot, scratch record (zeros at first), offset of the row's bytes in the message, their number)
  // for each row of each block.
  template <class Visit>
  void for_each_block(std::span<const std::uint32_t> slots, std::span<const std::int64_t> counts,
                      std::span<const std::int64_t> widths, std::size_t message_bytes, const Visit& visit) const;
  [[noreturn]] void refuse_id(std::int64_t table, std::span<const std::int64_t> ids) const;

  RowFormat format_;
  std::vector<TableRows> tables_;
  std::atomic<bool> has_snapshot_ = false;
  // Lock of an acquire that initialises rows after it has unlocked their tables; readers and writers of such rows take
  // it too.
  mutable std::mutex acquiring_;
  std::unique_ptr<std::mutex[]> mutexes_;    // by table
  mutable std::atomic<int> num_waiting_ = 0;  // threads that wait for one; savers of rows yield to them
};

// Check that offsets (T + 1,) ascend from 0 to size; invalid_argument, with `name`, if not.
void check_parts(std::span<const std::int64_t> offsets, std::int64_t num_tables, std::int64_t size,
                 const char* name);

}  // namespace colonnade
