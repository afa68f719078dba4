#include "mapped_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "buffer.h"
#include "isa.h"
#include "pool.h"
#include "threads.h"

namespace colonnade {

namespace {

constexpr std::size_t kChunk = 256;          // lookups in an index at a time
constexpr std::int64_t kRun = 1024;          // outputs that a thread pools at a time
constexpr std::int64_t kBytesOfLookup = 64;  // read in an index

// Write the slots of up to kChunk ids that the index has.
void find_hashed(const RowIndex& index, std::span<const std::int64_t> ids, std::uint32_t* slots) noexcept {
  std::int64_t values[kChunk];
  index.get(ids, {values, ids.size()});
  for (std::size_t i = 0; i < ids.size(); ++i) slots[i] = static_cast<std::uint32_t>(values[i]);
}

// Replace the slots of up to kChunk ids that differ from the file.
void find_newer(const RowIndex& newer, std::span<const std::int64_t> ids, std::uint32_t* slots) noexcept {
  std::int64_t values[kChunk];
  newer.get(ids, {values, ids.size()});
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (values[i] == RowIndex::kAbsent) continue;
    slots[i] = values[i] == MappedTable::kDeleted ? MappedTable::kAbsent : static_cast<std::uint32_t>(values[i]);
  }
}

bool are_inside(std::span<const std::int64_t> ids, std::int64_t num_ids) noexcept {
  bool is_outside = false;
  for (const std::int64_t id : ids) is_outside |= static_cast<std::uint64_t>(id) >= static_cast<std::uint64_t>(num_ids);
  return !is_outside;
}

bool are_checked(const MappedTable& table, std::span<const std::uint32_t> slots) noexcept {
  bool is_unchecked = false;
  for (const std::uint32_t slot : slots) {
    if (slot >= table.num_rows) continue;  // not in the file
    const std::int64_t first = table.begin + slot * table.stride, last = first + table.stride - 1;
    for (std::int64_t block = first >> table.block_bits; block <= last >> table.block_bits; ++block) {
      is_unchecked |= !table.checked[block];
    }
  }
  return !is_unchecked;
}

// Rows of a column's lookups.
struct Located {
  const std::byte* rows = nullptr;
  std::uint32_t* slots = nullptr;
  std::int64_t num_absent = 0;
  Buffer<std::byte> gathered;  // copies of all rows, if some are absent, or are not read from the mapping
};

// Copy a column's rows to memory of the call, with first values for absent rows. has_file_rows: those of the file are
// there already.
void gather(const MappedTable& table, std::int32_t t, const Dram& initial_rows, std::span<const std::int64_t> ids,
            bool has_file_rows, Located& located) noexcept {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    std::byte* const row = located.gathered.data() + static_cast<std::int64_t>(i) * table.stride;
    if (located.slots[i] == MappedTable::kAbsent) {
      initial_rows.initial_values(t, ids.subspan(i, 1), row);
    } else if (!has_file_rows || located.slots[i] >= table.num_rows) {
      std::memcpy(row, table.base + located.slots[i] * table.stride, static_cast<std::size_t>(table.stride));
    }
    located.slots[i] = static_cast<std::uint32_t>(i);
  }
  located.rows = located.gathered.data();
}

// Copy the files' rows of all columns to their `gathered`. false: a file could not be read.
bool gather_cached(RowCache& cache, std::span<const MappedColumn> columns, std::span<Located> located) {
  std::vector<RowCache::Request> requests;
  for (std::size_t c = 0; c < columns.size(); ++c) {
    requests.push_back({static_cast<std::size_t>(columns[c].table), {located[c].slots, columns[c].ids.size()}, located[c].gathered.data()});
  }
  return cache.read(requests);
}

// Copy the first `num_rows` rows of a read's output to those of all other samples.
void repeat(const MappedRead& read, std::int64_t num_rows, std::int64_t num_samples, std::int64_t item) noexcept {
  for (std::int64_t row = num_rows; row < num_rows * num_samples; ++row) {
    std::memcpy(read.out + row * read.out_stride, read.out + (row - num_rows) * read.out_stride,
                static_cast<std::size_t>(read.dim * item));
  }
}

// Output rows that are pooled; a shared column's are then repeated.
std::int64_t num_outputs(const MappedColumn& column, std::int64_t num_samples) noexcept {
  if (column.is_shared && !num_samples) return 0;
  if (column.is_sequence) return static_cast<std::int64_t>(column.ids.size());
  return column.is_shared ? 1 : num_samples;
}

PoolTask task_of(const MappedRead& read, const MappedColumn& column, const MappedTable& table, const Located& located,
                 Dtype out_dtype) noexcept {
  return {
      .rows = located.rows + read.first_byte,
      .row_stride = table.stride,
      .dim = read.dim,
      .index = located.slots,
      .weights = column.weights,
      .bags = column.is_sequence ? nullptr : column.offsets,
      .first = 0,
      .order = nullptr,
      .divisor = column.divisor,
      .rounding = rounding_to(out_dtype),
      .is_streamed = false,
      .out = read.out,
      .out_stride = read.out_stride,
      .begin = 0,
      .end = 0,
  };
}

}  // namespace

bool MappedTable::find(std::span<const std::int64_t> ids, std::uint32_t* slots) const noexcept {
  if (!base || (num_ids && !are_inside(ids, num_ids))) return false;
  for (std::size_t begin = 0; begin < ids.size(); begin += kChunk) {
    const auto chunk = ids.subspan(begin, std::min(kChunk, ids.size() - begin));
    std::uint32_t* const out = slots + begin;
    if (hashed) {
      find_hashed(*hashed, chunk, out);
    } else if (!slots_by_id.empty()) {
      for (std::size_t i = 0; i < chunk.size(); ++i) out[i] = static_cast<std::uint32_t>(slots_by_id[chunk[i]]);
    } else {
      for (std::size_t i = 0; i < chunk.size(); ++i) out[i] = static_cast<std::uint32_t>(chunk[i]);
    }
    if (newer) find_newer(*newer, chunk, out);
    if (!are_checked(*this, {out, chunk.size()})) return false;
  }
  return true;
}

bool read_mapped(std::span<const MappedTable* const> tables, const Dram& initial_rows, std::span<const MappedColumn> columns,
                 std::span<const MappedRead> reads, std::int64_t num_samples, Dtype dtype, Dtype out_dtype,
                 RowCache* cache) {
  std::int64_t num_lookups = 0, bytes = 0;
  for (const auto& column : columns) {
    num_lookups += static_cast<std::int64_t>(column.ids.size());
    bytes += static_cast<std::int64_t>(column.ids.size()) * (tables[column.table]->stride + kBytesOfLookup);
  }
  Buffer<std::uint32_t> slots(static_cast<std::size_t>(num_lookups));
  std::vector<Located> located(columns.size());
  std::uint32_t* next = slots.data();
  for (std::size_t c = 0; c < columns.size(); ++c) {
    located[c].slots = next;
    next += columns[c].ids.size();
  }
  std::atomic<bool> is_found{true};
  for_each_unit(static_cast<std::int64_t>(columns.size()), bytes, [&](std::int64_t c) {
    const auto ids = columns[c].ids;
    const auto& table = *tables[columns[c].table];
    located[c].rows = table.base;
    if (!table.find(ids, located[c].slots)) return is_found.store(false, std::memory_order_relaxed);
    located[c].num_absent = std::count(located[c].slots, located[c].slots + ids.size(), MappedTable::kAbsent);
  });
  if (!is_found) return false;
  std::vector<std::int64_t> incomplete;
  for (std::size_t c = 0; c < columns.size(); ++c) {
    if (!located[c].num_absent && !cache) continue;
    located[c].gathered = Buffer<std::byte>(columns[c].ids.size() * static_cast<std::size_t>(tables[columns[c].table]->stride));
    incomplete.push_back(static_cast<std::int64_t>(c));
  }
  if (cache && !gather_cached(*cache, columns, located)) return false;
  for_each_unit(static_cast<std::int64_t>(incomplete.size()), bytes, [&](std::int64_t i) {
    const auto& column = columns[incomplete[i]];
    gather(*tables[column.table], column.table, initial_rows, column.ids, cache != nullptr, located[incomplete[i]]);
  });
  std::vector<PoolTask> tasks;
  tasks.reserve(reads.size());
  for (const auto& read : reads) {
    const auto& column = columns[read.column];
    PoolTask task = task_of(read, column, *tables[column.table], located[read.column], out_dtype);
    for (const std::int64_t end = num_outputs(column, num_samples); task.begin < end; task.begin = task.end) {
      task.end = std::min(end, task.begin + kRun);
      tasks.push_back(task);
    }
  }
  const auto kernel = kernels().pool[static_cast<int>(dtype)];
  for_each_unit(static_cast<std::int64_t>(tasks.size()), bytes, [&](std::int64_t i) { kernel(tasks[i]); });
  for_each_unit(static_cast<std::int64_t>(reads.size()), bytes, [&](std::int64_t r) {
    const auto& column = columns[reads[r].column];
    if (column.is_shared) repeat(reads[r], num_outputs(column, num_samples), num_samples, item_bytes(out_dtype));
  });
  return true;
}

}  // namespace colonnade
