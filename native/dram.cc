#include "dram.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kRun = 4096;  // rows a thread takes at a time

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
  if (format.num_ranks < 1) refuse("num_ranks " + std::to_string(format.num_ranks) + ", wanted 1 or more");
  if (format.rank < 0 || format.rank >= format.num_ranks) {
    refuse("rank " + std::to_string(format.rank) + ", wanted 0 .. " + std::to_string(format.num_ranks - 1));
  }
  tables_.reserve(tables.size());
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

void Dram::check_slots(std::int64_t table, std::span<const std::uint32_t> slots) const {
  const auto capacity = static_cast<std::uint64_t>(at(table).settings().capacity_rows);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= capacity) {
      refuse("slots: got " + std::to_string(static_cast<std::int32_t>(slots[i])) + " at position " +
             std::to_string(i) + ", table " + std::to_string(table) + " has " + std::to_string(capacity) +
             " slots");
    }
  }
}

// The first of ids that is not a row of this rank's.
void Dram::refuse_id(std::int64_t table, std::span<const std::int64_t> ids) const {
  const auto& rows = at(table);
  const auto& share = rows.share();
  const auto where = std::ranges::find_if(ids, [&](auto id) { return share.is_outside(id) || !share.owns(id); });
  const std::string id = "table " + std::to_string(table) + " position " + std::to_string(where - ids.begin()) +
                         " id " + std::to_string(*where) + " rows " + std::to_string(rows.settings().rows);
  if (share.is_outside(*where)) throw std::out_of_range(id);
  refuse(id + ": rank " +
         std::to_string(vocabulary_owner(static_cast<std::uint64_t>(*where),
                                         static_cast<std::uint32_t>(format_.num_ranks))) +
         " owns it, this is rank " + std::to_string(format_.rank));
}

Acquired Dram::acquire(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets,
                       std::span<std::uint32_t> slots, bool is_birth) {
  const auto runs = this->runs(offsets, ids.size(), "ids");
  const auto part = [&](auto span, std::int64_t t) {
    return span.subspan(offsets[t], offsets[t + 1] - offsets[t]);
  };
  const auto num_runs = static_cast<std::int64_t>(runs.size());

  const std::scoped_lock lock(mutex_);
  std::vector<TableRows::Found> found(tables_.size()), found_in_run(runs.size());
  std::vector<TableRows::Evicted> evicted(tables_.size());
  Acquired acquired;
  std::int64_t num_missing = 0;

  for_each_unit(num_runs, [&](std::int64_t r) {
    const auto [t, begin, end] = runs[r];
    found_in_run[r] =
        tables_[t].pin_resident(ids.subspan(begin, end - begin), slots.subspan(begin, end - begin));
  });
  try {
    std::int64_t num_evictions = 0;
    for (std::int64_t r = 0; r < num_runs; ++r) found[runs[r].table] += found_in_run[r];
    for (std::int64_t t = 0; t < num_tables(); ++t) {
      const auto& rows = tables_[t];
      const std::int64_t wanted = offsets[t + 1] - offsets[t];
      if (found[t].outside || found[t].foreign) refuse_id(t, part(ids, t));
      if (found[t].overpinned)
        refuse("table " + std::to_string(t) + ": no memory for one more pin of a row; release some batches first");
      if (!rows.has_room(found[t])) {
        const std::int64_t pinned_by_others =
            rows.num_pinned() - (wanted - found[t].missing - found[t].newly_pinned);
        throw NoRoom("table " + std::to_string(t) + " needs " + std::to_string(wanted) + " slots of " +
                     std::to_string(rows.settings().capacity_rows) + ", " + std::to_string(pinned_by_others) +
                     " pinned");
      }
      num_missing += found[t].missing;
    }
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      tables_[t].reserve(found[t], evicted[t]);
      num_evictions += static_cast<std::int64_t>(evicted[t].dirty_ids.capacity());
    }
    acquired.missing.reserve(static_cast<std::size_t>(num_missing));
    acquired.evicted_offsets.reserve(tables_.size() + 1);
    acquired.evicted_ids.reserve(static_cast<std::size_t>(num_evictions));
    acquired.evicted_records.reserve(tables_.size());
    for (const auto& rows : tables_) acquired.record_bytes.push_back(rows.layout().record_bytes());
  } catch (...) {
    for (const auto& [t, begin, end] : runs) tables_[t].unpin(slots.subspan(begin, end - begin));
    throw;
  }

  for (std::size_t i = 0; num_missing && i < slots.size(); ++i) {
    if (slots[i] == kNoSlot) acquired.missing.push_back(static_cast<std::int32_t>(i));
  }
  for_each_unit(num_tables(), [&](std::int64_t t) {
    tables_[t].admit(part(ids, t), part(slots, t), found[t], evicted[t]);
  });
  if (is_birth) {
    for_each_run(static_cast<std::int64_t>(acquired.missing.size()), kRun / 16,
                 [&](std::int64_t begin, std::int64_t end) {
                   auto t = std::ranges::upper_bound(offsets, acquired.missing[begin]) - offsets.begin() - 1;
                   for (std::int64_t i = begin; i < end; ++i) {
                     const std::int32_t position = acquired.missing[i];
                     while (position >= offsets[t + 1]) ++t;
                     tables_[t].birth(ids[position], slots[position]);
                   }
                 });
  }
  acquired.evicted_offsets.push_back(0);
  for (auto& lost : evicted) {
    acquired.evicted_ids.insert(acquired.evicted_ids.end(), lost.dirty_ids.begin(), lost.dirty_ids.end());
    acquired.evicted_offsets.push_back(static_cast<std::int64_t>(acquired.evicted_ids.size()));
    acquired.evicted_records.push_back(std::move(lost.records));
    acquired.num_evicted += lost.num;
  }
  return acquired;
}

void Dram::release(std::span<const std::uint32_t> slots, std::span<const std::int64_t> offsets,
                   bool is_dirty) {
  const auto runs = this->runs(offsets, slots.size(), "slots");
  const auto num_runs = static_cast<std::int64_t>(runs.size());
  std::vector<std::int64_t> unpinned(runs.size());
  const std::scoped_lock lock(mutex_);
  const auto slots_of = [&](std::int64_t r) {
    return slots.subspan(runs[r].begin, runs[r].end - runs[r].begin);
  };
  for_each_unit(num_runs,
                [&](std::int64_t r) { unpinned[r] = tables_[runs[r].table].can_release(slots_of(r)); });
  for (std::int64_t r = 0; r < num_runs; ++r) {
    const std::int64_t t = runs[r].table;
    if (!unpinned[r] || !tables_[t].holds(offsets[t + 1] - offsets[t]))
      refuse("release: a slot of table " + std::to_string(t) + " is not pinned");
  }
  for_each_unit(num_runs, [&](std::int64_t r) {
    const auto [t, begin, end] = runs[r];
    if (!tables_[t].is_direct()) {
      unpinned[r] = tables_[t].release(slots_of(r), is_dirty);
    } else if (begin == offsets[t]) {
      unpinned[r] = tables_[t].release(slots.subspan(begin, offsets[t + 1] - begin), is_dirty);
    } else {
      unpinned[r] = 0;
    }
  });
  for (std::int64_t r = 0; r < num_runs; ++r) tables_[runs[r].table].unpinned(unpinned[r]);
}

void Dram::birth(std::int64_t table, std::span<const std::int64_t> ids,
                 std::span<const std::uint32_t> slots) {
  check_slots(table, slots);
  const auto& rows = at(table);
  for_each_run(static_cast<std::int64_t>(ids.size()), kRun / 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) rows.birth(ids[i], slots[i]);
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

std::vector<std::int64_t> Dram::clocks(std::int64_t table, std::span<const std::uint32_t> slots) const {
  check_slots(table, slots);
  std::vector<std::int64_t> clocks(slots.size());
  std::ranges::transform(slots, clocks.begin(), [&](auto slot) {
    return static_cast<std::int64_t>(at(table).layout().clock_of(slot));
  });
  return clocks;
}

std::vector<std::int32_t> Dram::read(std::int64_t table, std::span<const std::int64_t> ids,
                                     std::byte* out) const {
  const auto& rows = at(table);
  const auto& layout = rows.layout();
  std::vector<std::int32_t> absent;
  Buffer<std::uint32_t> slots(ids.size());
  const std::scoped_lock lock(mutex_);
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

void Dram::birth_values(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out) const {
  const auto& rows = at(table);
  for_each_run(static_cast<std::int64_t>(ids.size()), kRun / 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      rows.birth_values(ids[i], out + i * rows.layout().weights_bytes());
  });
}

std::vector<std::pair<std::int64_t, std::uint32_t>> Dram::resident(std::int64_t table,
                                                                   bool only_dirty) const {
  const auto& rows = at(table);
  const std::scoped_lock lock(mutex_);
  return rows.resident(only_dirty);
}

void Dram::clean(std::int64_t table, std::span<const std::uint32_t> slots) {
  check_slots(table, slots);
  const std::scoped_lock lock(mutex_);
  at(table).clean(slots);
}

void Dram::erase(std::int64_t table, std::span<const std::int64_t> ids) {
  auto& rows = at(table);
  const std::scoped_lock lock(mutex_);
  for (const auto id : ids) rows.erase(id);
}

std::int64_t Dram::num_rows(std::int64_t table) const {
  const auto& rows = at(table);
  const std::scoped_lock lock(mutex_);
  return rows.num_rows();
}

std::int64_t Dram::resident_bytes() const {
  const std::scoped_lock lock(mutex_);
  std::int64_t bytes = 0;
  for (const auto& rows : tables_) bytes += rows.resident_bytes();
  return bytes;
}

}  // namespace colonnade
