#include "dram.h"

#include <algorithm>
#include <limits>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kRun = 4096;  // rows a thread takes at a time
constexpr std::size_t kRunsPerThread = 16;

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("dram: " + message);
}

}  // namespace

void check_parts(std::span<const std::int64_t> offsets, std::int64_t num_tables, std::int64_t size,
                 const char* name) {
  if (static_cast<std::int64_t>(offsets.size()) != num_tables + 1) {
    throw std::invalid_argument("offsets: got " + std::to_string(offsets.size()) + " elements, wanted " +
                                std::to_string(num_tables + 1) + " (tables + 1)");
  }
  for (std::int64_t t = 0; t < num_tables; ++t) {
    if (offsets[t] > offsets[t + 1]) {
      throw std::invalid_argument("offsets decrease at table " + std::to_string(t) + ": " +
                                  std::to_string(offsets[t]) + " -> " + std::to_string(offsets[t + 1]));
    }
  }
  if (offsets.front() != 0 || offsets.back() != size) {
    throw std::invalid_argument("offsets span " + std::to_string(offsets.front()) + " .. " +
                                std::to_string(offsets.back()) + ", wanted 0 .. " + std::to_string(size) +
                                " (" + name + ")");
  }
}

Dram::Dram(std::span<const TableSettings> tables, const RowFormat& format) : format_(format) {
  for (const auto& settings : tables) {
    const auto num_owners = settings.num_owners, place = settings.place;
    if (num_owners < 1 || num_owners > std::numeric_limits<std::int32_t>::max())
      refuse("num_owners " + std::to_string(num_owners) + ", wanted 1 .. 2^31 - 1");
    if (place != VocabularyShare::kNone && (place < 0 || place >= num_owners)) {
      refuse("place " + std::to_string(place) + ", wanted 0 .. " + std::to_string(num_owners - 1) +
             ", or -1 for a table without rows here");
    }
  }
  tables_.reserve(tables.size());
  mutexes_ = std::make_unique<std::mutex[]>(tables.size());
  for (const auto& settings : tables) tables_.emplace_back(settings, format);
}

const TableRows& Dram::at(std::int64_t table) const {
  if (table < 0 || table >= num_tables()) {
    refuse("table " + std::to_string(table) + " of " + std::to_string(num_tables()));
  }
  return tables_[table];
}

std::vector<Dram::Run> Dram::runs(std::span<const std::int64_t> offsets, std::size_t size,
                                  const char* name) const {
  check_parts(offsets, num_tables(), static_cast<std::int64_t>(size), name);
  std::vector<Run> all;
  for (std::int64_t t = 0; t < num_tables(); ++t) {
    for (std::int64_t i = offsets[t]; i < offsets[t + 1]; i += kRun)
      all.push_back({t, i, std::min(i + kRun, offsets[t + 1])});
  }
  return all;
}

Dram::Lock Dram::lock(std::int64_t table) const {
  at(table);
  ++num_waiting_;
  Lock held(mutexes_[table]);
  --num_waiting_;
  return held;
}

template <class Visit>
void Dram::for_each_group(std::span<const Run> runs, const Visit& visit) {
  const auto threads = static_cast<std::size_t>(num_threads());
  const std::size_t most = threads > 1 ? kRunsPerThread * threads : 1;
  for (std::size_t first = 0, last = 0; first < runs.size(); first = last) {
    std::vector<Lock> locks;
    while (last < runs.size() && (last - first < most || runs[last].table == runs[last - 1].table)) {
      if (last == first || runs[last].table != runs[last - 1].table) locks.push_back(lock(runs[last].table));
      ++last;
    }
    visit(static_cast<std::int64_t>(first), static_cast<std::int64_t>(last));
  }
}

void Dram::check_slots(std::int64_t table, std::span<const std::uint32_t> slots) const {
  const auto capacity = static_cast<std::uint64_t>(at(table).num_addresses());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= capacity) {
      refuse("slots: got " + std::to_string(static_cast<std::int32_t>(slots[i])) + " at position " +
             std::to_string(i) + ", table " + std::to_string(table) + " has " + std::to_string(capacity) +
             " slots");
    }
  }
}

// Return the first id that is not a row of this rank.
void Dram::refuse_id(std::int64_t table, std::span<const std::int64_t> ids) const {
  const auto& rows = at(table);
  const auto& share = rows.share();
  const bool is_open = rows.settings().rows == 0;  // and without rows on this rank
  const auto where =
      std::ranges::find_if(ids, [&](auto id) { return is_open || share.is_outside(id) || !share.owns(id); });
  const std::string id = "table " + std::to_string(table) + " position " + std::to_string(where - ids.begin()) +
                         " id " + std::to_string(*where) + " rows " + std::to_string(rows.settings().rows);
  if (!is_open && share.is_outside(*where)) throw std::out_of_range(id);
  if (!share.has_rows()) refuse(id + ": no row of this table is here");
  refuse(id + ": owner " +
         std::to_string(vocabulary_owner(static_cast<std::uint64_t>(*where),
                                         static_cast<std::uint32_t>(rows.settings().num_owners))) +
         " has it, this is owner " + std::to_string(rows.settings().place));
}

Acquired Dram::acquire(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets,
                       std::span<const std::uint8_t> next_use, std::span<std::uint32_t> slots, bool is_initialising,
                       const TableSink& sink, const TableSink& clean_sink) {
  const auto runs = this->runs(offsets, ids.size(), "ids");
  if (!next_use.empty() && next_use.size() != ids.size())
    refuse("next_use: got " + std::to_string(next_use.size()) + " codes, wanted " + std::to_string(ids.size()));
  const auto hints = [&](std::int64_t begin, std::int64_t end) {
    return next_use.empty() ? next_use : next_use.subspan(begin, end - begin);
  };
  const auto part = [&](auto span, std::int64_t t) {
    return span.subspan(offsets[t], offsets[t + 1] - offsets[t]);
  };
  const std::scoped_lock acquiring(acquiring_);
  std::vector<TableRows::LookupCounts> counts(tables_.size()), run_counts(runs.size());
  Acquired acquired;
  std::int64_t num_missing = 0;

  for_each_group(runs, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t r = first; r < last; ++r) {
      const std::int64_t t = runs[r].table;
      if (runs[r].begin == offsets[t]) tables_[t].tick(offsets[t + 1] - offsets[t], !next_use.empty());
    }
    for_each_unit(last - first, [&](std::int64_t i) {
      const auto [t, begin, end] = runs[first + i];
      run_counts[first + i] = tables_[t].pin_resident(ids.subspan(begin, end - begin), hints(begin, end),
                                                      slots.subspan(begin, end - begin));
    });
    for (std::int64_t r = first; r < last; ++r) {
      counts[runs[r].table] += run_counts[r];
      tables_[runs[r].table].pinned(run_counts[r].newly_pinned);
    }
  });
  try {
    for (std::int64_t t = 0; t < num_tables(); ++t) {
      const Lock held = lock(t);
      auto& rows = tables_[t];
      const std::int64_t wanted = offsets[t + 1] - offsets[t];
      if (counts[t].outside || counts[t].foreign) refuse_id(t, part(ids, t));
      if (counts[t].overpinned)
        refuse("table " + std::to_string(t) + ": no memory for one more pin of a row; release some batches first");
      if (!rows.has_room(counts[t], wanted)) {
        const std::int64_t pinned_by_others = rows.num_others(counts[t], wanted);
        throw NoRoom("table " + std::to_string(t) + " needs " + std::to_string(wanted) + " slots of " +
                     std::to_string(rows.settings().capacity_rows) + ", " + std::to_string(pinned_by_others) +
                     " pinned");
      }
      num_missing += counts[t].missing;
      if (rows.is_mapped()) acquired.num_mapped += wanted - counts[t].missing;
      rows.reserve(counts[t]);
    }
    acquired.missing.reserve(static_cast<std::size_t>(num_missing));
    std::vector<std::pair<std::int64_t, std::int64_t>> evicted(tables_.size());
    std::vector<std::exception_ptr> failed(tables_.size());
    for_each_unit(num_tables(), [&](std::int64_t t) {
      if (counts[t].missing == 0) return;
      try {
        const Lock held = lock(t);
        RowSink clean_rows;
        if (clean_sink) clean_rows = [&](const EvictedRows& rows) { clean_sink(t, rows); };
        evicted[t] = tables_[t].evict(counts[t], [&](const EvictedRows& rows) { sink(t, rows); }, clean_rows);
      } catch (...) {
        failed[t] = std::current_exception();
      }
    });
    for (const auto& error : failed) {
      if (error) std::rethrow_exception(error);
    }
    for (const auto& [num, num_dirty] : evicted) {
      acquired.num_evicted += num;
      acquired.num_evicted_dirty += num_dirty;
    }
  } catch (...) {
    for (std::int64_t t = 0; t < num_tables(); ++t) {
      const Lock held = lock(t);
      tables_[t].unpin(part(slots, t), counts[t]);
    }
    throw;
  }

  for (std::size_t i = 0; num_missing && i < slots.size(); ++i) {
    if (slots[i] == kNoSlot) acquired.missing.push_back(static_cast<std::int32_t>(i));
  }
  for_each_unit(num_tables(), [&](std::int64_t t) {
    if (offsets[t] == offsets[t + 1]) return;
    const Lock held = lock(t);
    tables_[t].admit(part(ids, t), hints(offsets[t], offsets[t + 1]), part(slots, t), counts[t]);
  });
  if (is_initialising) {
    for_each_run(static_cast<std::int64_t>(acquired.missing.size()), kRun / 16,
                 [&](std::int64_t begin, std::int64_t end) {
                   auto t = std::ranges::upper_bound(offsets, acquired.missing[begin]) - offsets.begin() - 1;
                   for (std::int64_t i = begin; i < end; ++i) {
                     const std::int32_t position = acquired.missing[i];
                     while (position >= offsets[t + 1]) ++t;
                     tables_[t].initialise(ids[position], slots[position]);
                   }
                 });
  }
  return acquired;
}

std::int64_t Dram::resize(std::int64_t table, std::int64_t capacity, const TableSink& sink) {
  const std::scoped_lock acquiring(acquiring_);
  auto& rows = at(table);
  const Lock held = lock(table);
  return rows.resize(capacity, [&](const EvictedRows& left) { sink(table, left); });
}

void Dram::resume(std::int64_t table, std::span<const std::uint32_t> slots, std::span<const std::uint8_t> frequencies) {
  check_slots(table, slots);
  if (frequencies.size() != slots.size())
    refuse("frequencies: got " + std::to_string(frequencies.size()) + ", wanted " + std::to_string(slots.size()));
  const Lock held = lock(table);
  at(table).resume(slots, frequencies);
}

void Dram::recall(std::int64_t table, std::span<const std::uint32_t> slots, std::int64_t steps) {
  check_slots(table, slots);
  const Lock held = lock(table);
  at(table).recall(slots, steps);
}

void Dram::release(std::span<const std::uint32_t> slots, std::span<const std::int64_t> offsets,
                   bool is_dirty) {
  const auto runs = this->runs(offsets, slots.size(), "slots");
  std::vector<TableRows::ReleaseResult> results(runs.size());
  for_each_group(runs, [&](std::int64_t first, std::int64_t last) {
    for_each_unit(last - first, [&](std::int64_t i) {
      const auto [t, begin, end] = runs[first + i];
      if (!tables_[t].is_direct()) {
        results[first + i] = tables_[t].release(slots.subspan(begin, end - begin), is_dirty);
      } else if (begin == offsets[t]) {
        results[first + i] = tables_[t].release(slots.subspan(begin, offsets[t + 1] - begin), is_dirty);
      }
    });
    for (std::int64_t r = first; r < last; ++r) tables_[runs[r].table].unpinned(results[r].pins);
  });
  for (std::size_t r = 0; r < runs.size(); ++r) {
    if (!results[r].has_unpinned_slots) continue;
    const auto t = runs[r].table;
    refuse("release: a slot of table " + std::to_string(t) + " is not pinned; " +
           (tables_[t].is_direct() ? "none of that table's were released, of other tables'" : "of all others") +
           " those that are pinned were");
  }
}

void Dram::initialise(std::int64_t table, std::span<const std::int64_t> ids,
                 std::span<const std::uint32_t> slots) {
  check_slots(table, slots);
  const auto& rows = at(table);
  for_each_run(static_cast<std::int64_t>(ids.size()), kRun / 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) rows.initialise(ids[i], slots[i]);
  });
}

void Dram::pack(std::int64_t table, std::span<const std::uint32_t> slots, std::byte* records) const {
  check_slots(table, slots);
  const auto& layout = at(table).layout();
  for_each_run(static_cast<std::int64_t>(slots.size()), kRun, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) layout.pack(slots[i], records + i * layout.record_bytes());
  });
}

void Dram::unpack(std::int64_t table, std::span<const std::uint32_t> slots, const std::byte* records) {
  check_slots(table, slots);
  const auto& layout = at(table).layout();
  for_each_run(static_cast<std::int64_t>(slots.size()), kRun, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) layout.unpack(slots[i], records + i * layout.record_bytes());
  });
}

template <class Visit>
void Dram::for_each_block(std::span<const std::uint32_t> slots, std::span<const std::int64_t> counts,
                          std::span<const std::int64_t> widths, std::size_t message_bytes,
                          const Visit& visit) const {
  const auto num_tables = tables_.size();
  if (widths.size() != num_tables || counts.size() % num_tables != 0)
    refuse("blocks: got " + std::to_string(counts.size()) + " of " + std::to_string(widths.size()) +
           " widths, of " + std::to_string(num_tables) + " tables");
  for (std::size_t t = 0; t < num_tables; ++t) {
    if (widths[t] < 0 || widths[t] > at(t).layout().record_bytes())
      refuse("widths: got " + std::to_string(widths[t]) + " bytes of records of " +
             std::to_string(at(t).layout().record_bytes()));
  }
  std::size_t row = 0, byte = 0;
  for (std::size_t b = 0; b < counts.size(); ++b) {
    const std::size_t t = b % num_tables;
    if (counts[b] < 0 || static_cast<std::size_t>(counts[b]) > slots.size() - row)
      refuse("counts: got more rows than slots, " + std::to_string(slots.size()));
    check_slots(t, slots.subspan(row, counts[b]));
    row += counts[b];
    byte += counts[b] * widths[t];
  }
  if (row != slots.size() || byte != message_bytes)
    refuse("blocks: got " + std::to_string(slots.size()) + " slots and " + std::to_string(message_bytes) +
           " bytes, wanted " + std::to_string(row) + " and " + std::to_string(byte));
  row = byte = 0;
  for (std::size_t b = 0; b < counts.size(); ++b) {
    const std::size_t t = b % num_tables;
    const auto& layout = at(t).layout();
    for_each_run(counts[b], kRun, [&](std::int64_t begin, std::int64_t end) {
      std::vector<std::byte> record(layout.record_bytes());
      for (std::int64_t i = begin; i < end; ++i) visit(layout, row + i, record, byte + i * widths[t], widths[t]);
    });
    row += counts[b];
    byte += counts[b] * widths[t];
  }
}

void Dram::pack_blocks(std::span<const std::uint32_t> slots, std::span<const std::int64_t> counts,
                       std::span<const std::int64_t> widths, std::span<std::byte> message) const {
  for_each_block(slots, counts, widths, message.size(),
                 [&](const auto& layout, auto row, std::span<std::byte> record, auto byte, auto width) {
                   layout.pack(slots[row], record.data());
                   std::memcpy(message.data() + byte, record.data(), width);
                 });
}

void Dram::unpack_blocks(std::span<const std::uint32_t> slots, std::span<const std::int64_t> counts,
                         std::span<const std::int64_t> widths, std::span<const std::byte> message) {
  for_each_block(slots, counts, widths, message.size(),
                 [&](const auto& layout, auto row, std::span<std::byte> record, auto byte, auto width) {
                   std::memcpy(record.data(), message.data() + byte, width);
                   layout.unpack(slots[row], record.data());
                 });
}

std::vector<std::int64_t> Dram::clocks(std::int64_t table, std::span<const std::uint32_t> slots) const {
  check_slots(table, slots);
  std::vector<std::int64_t> clocks(slots.size());
  std::ranges::transform(slots, clocks.begin(), [&](auto slot) {
    return std::int64_t{count_updates(at(table).layout().clock_of(slot))};
  });
  return clocks;
}

std::vector<std::int32_t> Dram::read(std::int64_t table, std::span<const std::int64_t> ids,
                                     std::byte* out) const {
  const auto& rows = at(table);
  const auto& layout = rows.layout();
  std::vector<std::int32_t> absent;
  Buffer<std::uint32_t> slots(ids.size());
  const std::scoped_lock acquiring(acquiring_);
  const Lock held = lock(table);
  for_each_run(static_cast<std::int64_t>(ids.size()), kRun, [&](std::int64_t begin, std::int64_t end) {
    rows.for_each_slot(ids.subspan(begin, end - begin), [&](std::int64_t i, std::uint32_t slot) {
      slots[begin + i] = slot;
      if (slot != kNoSlot) __builtin_prefetch(layout.weights_of(slot), 0, 2);
    });
    for (std::int64_t i = begin; i < end; ++i) {
      if (slots[i] != kNoSlot)
        std::memcpy(out + i * layout.weights_bytes(), layout.weights_of(slots[i]), layout.weights_bytes());
    }
  });
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (slots[i] == kNoSlot) absent.push_back(static_cast<std::int32_t>(i));
  }
  return absent;
}

void Dram::initial_values(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out) const {
  const auto& rows = at(table);
  for_each_run(static_cast<std::int64_t>(ids.size()), kRun / 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      rows.initial_values(ids[i], out + i * rows.layout().weights_bytes());
  });
}

std::vector<std::pair<std::int64_t, std::uint32_t>> Dram::resident(std::int64_t table,
                                                                   bool only_dirty) const {
  const auto& rows = at(table);
  const Lock held = lock(table);
  return rows.resident(only_dirty);
}

void Dram::clean(std::int64_t table, std::span<const std::uint32_t> slots) {
  check_slots(table, slots);
  const Lock held = lock(table);
  at(table).clean(slots);
}

void Dram::erase(std::int64_t table, std::span<const std::int64_t> ids, const TableSink& sink) {
  auto& rows = at(table);
  const std::scoped_lock acquiring(acquiring_);
  const Lock held = lock(table);
  for (const auto id : ids) rows.erase(id, [&](const EvictedRows& left) { sink(table, left); });
}

void Dram::write_dirty(std::int64_t table, std::int64_t most, const TableSink& sink) {
  auto& rows = at(table);
  const Lock held = lock(table);
  rows.write_dirty(most, [&](const EvictedRows& left) { sink(table, left); });
}

void Dram::begin_snapshot() {
  if (has_snapshot_.exchange(true)) refuse("begin_snapshot: one is being taken already; end it first");
  for (std::int64_t t = 0; t < num_tables(); ++t) {
    const Lock held = lock(t);
    tables_[t].begin_snapshot();
  }
}

void Dram::save(std::span<const std::uint32_t> slots, std::span<const std::int64_t> offsets, const TableSink& sink) {
  if (!has_snapshot_) return;
  check_parts(offsets, num_tables(), static_cast<std::int64_t>(slots.size()), "slots");
  for (std::int64_t t = 0; t < num_tables(); ++t) {
    const auto mine = slots.subspan(offsets[t], offsets[t + 1] - offsets[t]);
    check_slots(t, mine);
    const Lock held = lock(t);
    tables_[t].save(mine, [&](const EvictedRows& left) { sink(t, left); });
  }
}

bool Dram::save_some(std::int64_t table, std::int64_t most, const TableSink& sink) {
  auto& rows = at(table);
  while (num_waiting_ > 0) std::this_thread::yield();
  const Lock held(mutexes_[table]);
  return has_snapshot_ && rows.save_some(most, [&](const EvictedRows& left) { sink(table, left); });
}

void Dram::end_snapshot() {
  if (!has_snapshot_) return;
  for (std::int64_t t = 0; t < num_tables(); ++t) {
    const Lock held = lock(t);
    tables_[t].end_snapshot();
  }
  has_snapshot_ = false;
}

std::size_t Dram::insert(std::int64_t table, const EvictedRows& rows, bool is_dirty, const TableSink& sink) {
  auto& own = at(table);
  const Lock held = lock(table);
  return own.insert(rows, is_dirty, [&](const EvictedRows& left) { sink(table, left); });
}

std::size_t Dram::insert(std::int64_t table, std::span<const std::int64_t> ids, const std::byte* records,
                         const TableSink& sink) {
  auto& own = at(table);
  const Lock held = lock(table);
  return own.insert(ids, records, [&](const EvictedRows& left) { sink(table, left); });
}

void Dram::copy_up(std::int64_t table, std::span<const std::int64_t> ids, const RowLayout& upper,
                   std::span<const std::uint32_t> upper_slots, std::span<std::uint32_t> slots, const TableSink& sink) {
  auto& own = at(table);
  const Lock held = lock(table);
  own.copy_up(ids, upper, upper_slots, slots, [&](const EvictedRows& left) { sink(table, left); });
}

void Dram::move_up(std::int64_t table, std::span<const std::uint32_t> slots, Dram& upper,
                   std::span<const std::uint32_t> upper_slots) {
  auto& own = at(table);
  const Lock held_above = upper.lock(table), held = lock(table);
  own.move_up(slots, upper.tables_[table], upper_slots);
}

void Dram::drop(std::int64_t table, std::span<const std::int64_t> ids) {
  auto& rows = at(table);
  const Lock held = lock(table);
  for (const auto id : ids) rows.drop(id);
}

std::int64_t Dram::num_rows(std::int64_t table) const {
  const auto& rows = at(table);
  const Lock held = lock(table);
  return rows.num_rows();
}

std::uint64_t Dram::num_slots_examined(std::int64_t table) const {
  const auto& rows = at(table);
  const Lock held = lock(table);
  return rows.num_slots_examined();
}

double Dram::pinned_share(std::int64_t table) const {
  const auto& rows = at(table);
  const Lock held = lock(table);
  if (!rows.can_evict()) return 0.0;
  return static_cast<double>(rows.num_pinned()) / static_cast<double>(std::max<std::int64_t>(1, rows.settings().capacity_rows));
}

std::int64_t Dram::resident_bytes() const {
  std::int64_t bytes = 0;
  for (std::int64_t t = 0; t < num_tables(); ++t) {
    const Lock held = lock(t);
    bytes += tables_[t].resident_bytes() - tables_[t].mapped_bytes();
  }
  return bytes;
}

std::int64_t Dram::mapped_bytes() const {
  std::int64_t bytes = 0;
  for (std::int64_t t = 0; t < num_tables(); ++t) {
    const Lock held = lock(t);
    bytes += tables_[t].mapped_bytes();
  }
  return bytes;
}

}  // namespace colonnade
