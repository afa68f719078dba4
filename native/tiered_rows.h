// Rows of all tables of a rank in tiers: rows in use in memory, others in byte-addressable memory, the rest in one log
// per table.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "dram.h"
#include "page_reader.h"
#include "row_log.h"

namespace colonnade {

// Acquire with reads that may be pending.
class AcquireJob {
 public:
  // Rows by origin, and rows evicted for them.
  struct Counts {
    std::int64_t resident = 0, mapped = 0, read = 0, copied = 0, born = 0, evicted_clean = 0, evicted_dirty = 0;
    std::int64_t bytes_read = 0, bytes_mapped = 0, bytes_evicted = 0;  // of records
  };
  const Counts& counts() const { return counts_; }
  bool is_done() const { return read_->is_done(); }

 private:
  friend class TieredRows;
  std::uint64_t number_ = 0;
  Counts counts_;
  std::vector<std::pair<std::int64_t, std::int64_t>> coming_;  // (table, id) read from files, ascending
  std::vector<std::pair<std::int64_t, std::vector<std::uint32_t>>> unknown_frequency_slots_;  // by table
  std::shared_ptr<ReadJob> read_;
};

// A row is nowhere (initial value), in its log, in a slot of the cache, being read to a slot, or in a slot; its newest
// version is in exactly one of these, except that a clean row is in the log too. A dirty row leaves its slot by being
// inserted in the cache, or appended to the log's write buffer, before any thread can look it up again, and a log reads
// rows in memory from there. So a read may be requested arbitrarily early.
//
// The cache is exclusive: evicted rows move down to it, and up again when they are acquired, so no row takes memory
// twice. Rows that it evicts go to the log if they are dirty. What it has is lost with the process, like rows in memory.
//
// acquire, read, erase and settle exclude each other; all other calls may run concurrently. A thread that reads or
// writes values of acquired rows first waits for that job and earlier ones, which may share rows.
class TieredRows {
 public:
  // Rows moved between memory and the cache since it was opened.
  struct CacheCounts {
    std::int64_t hits = 0, misses = 0, rows_inserted = 0, bytes_read = 0, bytes_inserted = 0;
  };

  // One log per table with the same record size, or null for a table without rows here; else invalid_argument. Borrows
  // all. steps: number of steps that the stored rows were trained for. cache: rows between memory and the logs, in
  // tables with the same columns that can have any ids; null for none.
  TieredRows(Dram& dram, std::vector<RowLog*> logs, PageReader& reader, std::int64_t steps = 0, Dram* cache = nullptr);
  ~TieredRows();  // waits for pending reads
  TieredRows(const TieredRows&) = delete;
  TieredRows& operator=(const TieredRows&) = delete;

  const Dram& dram() const { return dram_; }

  // Pin rows as Dram::acquire does, and read or initialise those not resident. An exception leaves no row pinned.
  std::shared_ptr<AcquireJob> acquire(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets,
                                      std::span<const std::uint8_t> next_use, std::span<std::uint32_t> slots);
  // Wait until this job and all earlier ones are done. Returns the first fault in any of them; its source is the table.
  // Do not use rows that could not be read, now or later: after a fault every call returns it again.
  std::optional<ReadFault> wait(const AcquireJob& job);
  std::optional<ReadFault> settle();  // waits until no read is pending
  std::optional<ReadFault> fault() const;

  // Copy weights of a table's rows, from memory or the log, to out; changes nothing.
  std::optional<ReadFault> read(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out);
  // Delete rows, in memory and in the log. Waits for pending reads.
  void erase(std::int64_t table, std::span<const std::int64_t> ids);

  // Change the capacity of a table as Dram::resize does; returns it. Waits for pending reads; a fault changes nothing.
  std::int64_t resize(std::int64_t table, std::int64_t capacity);

  // Write about `rows` dirty rows of a table to its log, where they remain resident; return their number, 0 if none is
  // dirty.
  std::int64_t write_dirty(std::int64_t table, std::int64_t rows);
  // Overwrite rows that are not resident with records, in the cache or else the log.
  void write(std::int64_t table, std::span<const std::int64_t> ids, const std::byte* records);
  void begin_snapshot();
  void before_update(std::span<const std::uint32_t> slots, std::span<const std::int64_t> offsets) {
    dram_.save(slots, offsets, sink());
  }
  // Save about `rows` rows that a snapshot still needs; return their number, 0 if none. Another thread may train.
  std::int64_t save_some(std::int64_t rows);
  void end_snapshot();
  CacheCounts cache_counts() const;

 private:
  TableSink sink();
  void insert_in_cache(std::int64_t table, const EvictedRows& rows, bool is_dirty);
  void drop_resident_from_cache();
  void append(std::int64_t table, const EvictedRows& rows);
  std::vector<std::int32_t> read_cached(std::int64_t table, std::span<const std::int64_t> ids,
                                        std::vector<std::int32_t> absent, std::byte* out) const;
  std::optional<ReadFault> wait_before(std::uint64_t number);

  Dram& dram_;
  std::vector<RowLog*> logs_;
  PageReader& reader_;
  std::int64_t steps_;
  Dram* cache_;
  std::atomic<std::int64_t> hits_ = 0, misses_ = 0, rows_inserted_ = 0, bytes_read_ = 0, bytes_inserted_ = 0;  // of it
  std::mutex order_;
  mutable std::mutex jobs_mutex_;
  std::deque<std::shared_ptr<AcquireJob>> jobs_;  // possibly pending, by ascending number
  std::uint64_t next_number_ = 1;
  std::optional<ReadFault> fault_;
};

}  // namespace colonnade
