// Rows of all tables of a rank: in memory those in use, the others in a log each.
#pragma once

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

// One acquire whose rows may still be on their way.
class AcquireJob {
 public:
  // Rows, by where they were, and rows that left for them.
  struct Counts {
    std::int64_t resident = 0, read = 0, copied = 0, born = 0, evicted_clean = 0, evicted_dirty = 0;
    std::int64_t bytes_read = 0, bytes_evicted = 0;  // of records
  };
  const Counts& counts() const { return counts_; }
  bool is_done() const { return read_->is_done(); }

 private:
  friend class TieredRows;
  std::uint64_t number_ = 0;
  Counts counts_;
  std::vector<std::pair<std::int64_t, std::int64_t>> coming_;  // (table, id) read from files, ascending
  std::vector<std::pair<std::int64_t, std::vector<std::uint32_t>>> strange_;  // by table: slots of rows whose heat is not known
  std::shared_ptr<ReadJob> read_;
};

// A row is nowhere (its first value), in its log, on its way into a slot, or in a slot; never newer in two places than in
// one of them. It leaves its slot by being appended to the log's write buffer, if it is newer than there, before anybody
// can look it up again; and a log reads what it holds in memory from there. So a read may be asked for arbitrarily early.
//
// acquire, read, erase and settle exclude each other; all else may run beside them. Whoever reads or writes values of
// rows acquired waits for that job first, and for those before it: a row of an earlier one may be among them.
class TieredRows {
 public:
  // One log by table, of the same records, or null for a table without rows here; invalid_argument if not. Borrows all. steps: that rows at rest were trained
  // for before.
  TieredRows(Dram& dram, std::vector<RowLog*> logs, PageReader& reader, std::int64_t steps = 0);
  ~TieredRows();  // waits for rows on their way
  TieredRows(const TieredRows&) = delete;
  TieredRows& operator=(const TieredRows&) = delete;

  const Dram& dram() const { return dram_; }

  // As Dram::acquire, where rows not resident are read or born. Anything thrown leaves no row pinned.
  std::shared_ptr<AcquireJob> acquire(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets,
                                      std::span<const std::uint8_t> next_use, std::span<std::uint32_t> slots);
  // Until this job and all before it are done. The first fault there was in any of them; its source is the table. Rows
  // that could not be read are not to be used, now or later: after a fault everything says it again.
  std::optional<ReadFault> wait(const AcquireJob& job);
  std::optional<ReadFault> settle();  // until no row is on its way
  std::optional<ReadFault> fault() const;

  // Weights of rows of a table, wherever they are, to out; leaves no trace.
  std::optional<ReadFault> read(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out);
  // Forgets rows, in memory and in the log. Waits for those on their way.
  void erase(std::int64_t table, std::span<const std::int64_t> ids);

  // Some rows of a table that are newer than in its log go there, about `rows`, and stay; how many. 0: there are none.
  std::int64_t write_dirty(std::int64_t table, std::int64_t rows);
  void begin_snapshot() { dram_.begin_snapshot(); }
  void before_update(std::span<const std::uint32_t> slots, std::span<const std::int64_t> offsets) {
    dram_.save(slots, offsets, sink());
  }
  // Some rows that a snapshot still needs, about `rows`; how many. 0: there are none. Another thread may train.
  std::int64_t save_some(std::int64_t rows);
  void end_snapshot() { dram_.end_snapshot(); }

 private:
  TableSink sink();
  std::optional<ReadFault> wait_before(std::uint64_t number);

  Dram& dram_;
  std::vector<RowLog*> logs_;
  PageReader& reader_;
  std::int64_t steps_;
  std::mutex order_;
  mutable std::mutex jobs_mutex_;
  std::deque<std::shared_ptr<AcquireJob>> jobs_;  // not known to be done, ascending number
  std::uint64_t next_number_ = 1;
  std::optional<ReadFault> fault_;
};

}  // namespace colonnade
