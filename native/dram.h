// Rows of all tables in this process's memory.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "table_rows.h"

namespace colonnade {

// What an acquire did beyond pinning.
struct Acquired {
  std::vector<std::int32_t> missing;               // positions in ids, ascending: slot assigned
  std::vector<std::int64_t> evicted_offsets;       // (T + 1,) into the next two
  std::vector<std::int64_t> evicted_ids;           // dirty rows that lost their slot, table-major
  std::vector<Buffer<std::byte>> evicted_records;  // by table, (V_t, record_bytes)
  std::vector<std::int64_t> record_bytes;          // by table
  std::int64_t num_evicted = 0;                    // clean ones included

  Acquired() = default;
  Acquired(Acquired&&) = default;
  Acquired& operator=(Acquired&&) = default;
};

// Thread-safe: one lock around index, pins and flags. Row contents are not locked: a pinned row does not
// move, and who reads or writes it is the caller's order of things.
class Dram {
 public:
  Dram(std::span<const TableSettings> tables, const RowFormat& format);

  // ids (U,) unique inside each table's part; slots (U,) out. A full table evicts unpinned rows. NoRoom,
  // out_of_range and invalid_argument leave everything as it was (slots are all kNoSlot then).
  Acquired acquire(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets,
                   std::span<std::uint32_t> slots, bool is_birth);
  // invalid_argument, nothing changed, if a row is not pinned.
  void release(std::span<const std::uint32_t> slots, std::span<const std::int64_t> offsets, bool is_dirty);

  // On slots the caller has pinned, or keeps from being evicted otherwise.
  void birth(std::int64_t table, std::span<const std::int64_t> ids, std::span<const std::uint32_t> slots);
  void pack(std::int64_t table, std::span<const std::uint32_t> slots, std::byte* records) const;
  void unpack(std::int64_t table, std::span<const std::uint32_t> slots, const std::byte* records);
  std::vector<std::int64_t> clocks(std::int64_t table, std::span<const std::uint32_t> slots) const;

  // Weights of resident rows to out; the positions of the others.
  std::vector<std::int32_t> read(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out) const;
  void birth_values(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out) const;

  std::vector<std::pair<std::int64_t, std::uint32_t>> resident(std::int64_t table, bool only_dirty) const;
  void clean(std::int64_t table, std::span<const std::uint32_t> slots);
  // A row in use is born again in place, the others give their slot back; absent ones are passed over.
  void erase(std::int64_t table, std::span<const std::int64_t> ids);

  std::int64_t num_tables() const { return static_cast<std::int64_t>(tables_.size()); }
  Dtype dtype() const { return format_.dtype; }
  bool is_split() const { return format_.is_split; }
  const RowLayout& layout(std::int64_t table) const { return at(table).layout(); }
  std::int64_t capacity_rows(std::int64_t table) const { return at(table).settings().capacity_rows; }
  std::int64_t num_rows(std::int64_t table) const;
  std::int64_t resident_bytes() const;

 private:
  struct Run {
    std::int64_t table, begin, end;
  };
  const TableRows& at(std::int64_t table) const;
  TableRows& at(std::int64_t table) { return const_cast<TableRows&>(std::as_const(*this).at(table)); }
  std::vector<Run> runs(std::span<const std::int64_t> offsets, std::size_t size, const char* name) const;
  void check_slots(std::int64_t table, std::span<const std::uint32_t> slots) const;
  [[noreturn]] void refuse_id(std::int64_t table, std::span<const std::int64_t> ids) const;

  RowFormat format_;
  std::vector<TableRows> tables_;
  mutable std::mutex mutex_;
};

// offsets (T + 1,) must ascend from 0 to size; invalid_argument, naming `name`, if not.
void check_parts(std::span<const std::int64_t> offsets, std::int64_t num_tables, std::int64_t size,
                 const char* name);

}  // namespace colonnade
