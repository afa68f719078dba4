#include "tiered_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kFresh = 0;        // stream of evicted rows; compaction has others
constexpr std::int64_t kSaves = 512;    // rows that a checkpoint saves at a time, for which training may wait
constexpr std::int64_t kInitialisedTogether = 256;   // rows that a thread initialises at a time

}  // namespace

TieredRows::TieredRows(Dram& dram, std::vector<RowLog*> logs, PageReader& reader, std::int64_t steps, Dram* cache)
    : dram_(dram), logs_(std::move(logs)), reader_(reader), steps_(steps), cache_(cache) {
  if (static_cast<std::int64_t>(logs_.size()) != dram.num_tables()) {
    throw std::invalid_argument("logs: got " + std::to_string(logs_.size()) + ", wanted one for each of " +
                                std::to_string(dram.num_tables()) + " tables");
  }
  for (std::int64_t t = 0; t < dram.num_tables(); ++t) {
    if (logs_[t] == nullptr) {
      if (dram.has_rows(t)) throw std::invalid_argument("table " + std::to_string(t) + " has rows here: wanted a log for them");
      continue;
    }
    if (logs_[t]->record_bytes() != dram.layout(t).record_bytes()) {
      throw std::invalid_argument("table " + std::to_string(t) + ": got a log of records of " +
                                  std::to_string(logs_[t]->record_bytes()) + " bytes, wanted " +
                                  std::to_string(dram.layout(t).record_bytes()));
    }
  }
  if (cache == nullptr) return;
  if (cache->num_tables() != dram.num_tables()) {
    throw std::invalid_argument("cache: got " + std::to_string(cache->num_tables()) + " tables, wanted " +
                                std::to_string(dram.num_tables()));
  }
  for (std::int64_t t = 0; t < dram.num_tables(); ++t) {
    const RowLayout &upper = dram.layout(t), &lower = cache->layout(t);
    if (upper.weights_bytes() != lower.weights_bytes() || upper.state_stride != lower.state_stride)
      throw std::invalid_argument("table " + std::to_string(t) + ": got a cache of rows with other columns");
    if (cache->is_direct(t))
      throw std::invalid_argument("table " + std::to_string(t) + ": got a cache of a vocabulary, wanted one of any ids");
  }
}

TieredRows::~TieredRows() {
  for (const auto& job : jobs_) job->read_->wait();
}

void TieredRows::append(std::int64_t table, const EvictedRows& rows) {
  logs_[table]->append(
      rows.ids, [&](std::size_t i, std::uint8_t* payload) { rows.pack(i, reinterpret_cast<std::byte*>(payload)); },
      rows.frequencies, kFresh, rows.is_for_commit);
}

TableSink TieredRows::sink() {
  return [this](std::int64_t t, const EvictedRows& rows) { append(t, rows); };
}

// Insert rows evicted from memory. The log gets dirty ones that the cache is too small for.
void TieredRows::insert_in_cache(std::int64_t table, const EvictedRows& rows, bool is_dirty) {
  const std::size_t room = static_cast<std::size_t>(cache_->capacity_rows(table));
  if (is_dirty && rows.ids.size() > room) {
    append(table, {rows.ids.subspan(room), rows.frequencies.subspan(room), false, rows.slots.subspan(room), rows.layout,
                   rows.scores});
  }
  const auto n = static_cast<std::int64_t>(cache_->insert(table, rows, is_dirty, sink()));
  rows_inserted_ += n;
  bytes_inserted_ += n * cache_->layout(table).record_bytes();
}

// After a failed eviction, when rows that stay in memory may have been inserted.
void TieredRows::drop_resident_from_cache() {
  for (std::int64_t t = 0; t < dram_.num_tables(); ++t) {
    std::vector<std::int64_t> ids;
    for (const auto& [id, slot] : dram_.resident(t, false)) ids.push_back(id);
    cache_->drop(t, ids);
  }
}

std::shared_ptr<AcquireJob> TieredRows::acquire(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets,
                                                std::span<const std::uint8_t> next_use,
                                                std::span<std::uint32_t> slots) {
  const std::scoped_lock lock(order_);
  auto job = std::make_shared<AcquireJob>();
  std::atomic<std::int64_t> bytes_evicted = 0;  // tables evict on different threads
  std::atomic<bool> has_inserted = false;
  const TableSink dirty_rows = [&](std::int64_t t, const EvictedRows& left) {
    if (cache_ != nullptr) has_inserted = true;
    if (cache_ == nullptr || left.is_for_commit) append(t, left);
    if (cache_ != nullptr) insert_in_cache(t, left, !left.is_for_commit);
    bytes_evicted += static_cast<std::int64_t>(left.ids.size()) * logs_[t]->record_bytes();
  };
  TableSink clean_rows;
  if (cache_ != nullptr) {
    clean_rows = [&](std::int64_t t, const EvictedRows& left) {
      has_inserted = true;
      insert_in_cache(t, left, false);
    };
  }
  Acquired acquired;
  try {
    acquired = dram_.acquire(ids, offsets, next_use, slots, false, dirty_rows, clean_rows);
  } catch (...) {
    if (has_inserted) drop_resident_from_cache();
    throw;
  }
  const std::span<const std::int32_t> missing = acquired.missing;
  const std::int64_t num_tables = dram_.num_tables();
  try {
    // Positions below are in `missing`; the job keeps its ids and slots.
    struct Row {
      std::int64_t table, id;
      std::uint32_t slot;
    };
    auto rows = std::make_shared<std::vector<Row>>();
    rows->reserve(missing.size());
    std::vector<std::int64_t> missing_ids(missing.size());
    std::vector<std::uint32_t> positions(missing.size()), missing_slots(missing.size());
    std::vector<std::int64_t> bounds(static_cast<std::size_t>(num_tables) + 1);
    for (std::int64_t t = 0, i = 0; t < num_tables; ++t) {
      for (; i < static_cast<std::int64_t>(missing.size()) && missing[i] < offsets[t + 1]; ++i) {
        missing_ids[i] = ids[missing[i]];
        missing_slots[i] = slots[missing[i]];
        positions[i] = static_cast<std::uint32_t>(i);
        rows->push_back({t, missing_ids[i], missing_slots[i]});
      }
      bounds[t + 1] = i;
    }
    const Deliver deliver = [this, rows](std::uint32_t position, const std::uint8_t* payload) {
      const Row& row = (*rows)[position];
      dram_.layout(row.table).unpack(row.slot, reinterpret_cast<const std::byte*>(payload));
    };
    std::vector<std::uint32_t> cache_slots(cache_ == nullptr ? 0 : missing.size(), kNoSlot);
    std::vector<std::exception_ptr> failed(cache_ == nullptr ? 0 : static_cast<std::size_t>(num_tables));
    for_each_unit(static_cast<std::int64_t>(failed.size()), [&](std::int64_t t) {
      const auto part = [&](auto& all) { return std::span(all).subspan(bounds[t], bounds[t + 1] - bounds[t]); };
      if (part(cache_slots).empty()) return;
      try {
        cache_->copy_up(t, part(missing_ids), dram_.layout(t), part(missing_slots), part(cache_slots), sink());
      } catch (...) {
        failed[t] = std::current_exception();
      }
    });
    for (const auto& error : failed) {
      if (error) std::rethrow_exception(error);
    }
    ReadPlan plan;
    std::vector<RowAt> locations(missing.size(), RowAt::memory);
    std::vector<std::uint8_t> frequencies(missing.size());
    std::vector<std::int64_t> uncached_ids;  // that the cache does not have
    std::vector<std::uint32_t> uncached_positions;
    std::vector<RowAt> uncached_locations;
    std::vector<std::uint8_t> uncached_frequencies;
    std::int64_t num_cached = 0;
    for (std::int64_t t = 0; t < num_tables; ++t) {
      const std::int64_t begin = bounds[t], n = bounds[t + 1] - begin;
      if (n == 0) continue;
      const auto part = [&](auto& all) { return std::span(all).subspan(begin, n); };
      if (cache_ == nullptr) {
        logs_[t]->plan_reads(part(missing_ids), part(positions), static_cast<std::uint32_t>(t), plan, deliver,
                             part(locations), part(frequencies));
        continue;
      }
      uncached_ids.clear();
      uncached_positions.clear();
      for (std::int64_t i = begin; i < begin + n; ++i) {
        if (cache_slots[i] != kNoSlot) continue;
        uncached_ids.push_back(missing_ids[i]);
        uncached_positions.push_back(static_cast<std::uint32_t>(i));
      }
      num_cached += n - static_cast<std::int64_t>(uncached_ids.size());
      job->counts_.bytes_mapped += (n - static_cast<std::int64_t>(uncached_ids.size())) * logs_[t]->record_bytes();
      uncached_locations.resize(uncached_ids.size());
      uncached_frequencies.resize(uncached_ids.size());
      logs_[t]->plan_reads(uncached_ids, uncached_positions, static_cast<std::uint32_t>(t), plan, deliver,
                           uncached_locations, uncached_frequencies);
      for (std::size_t i = 0; i < uncached_ids.size(); ++i) {
        locations[uncached_positions[i]] = uncached_locations[i];
        frequencies[uncached_positions[i]] = uncached_frequencies[i];
      }
    }
    std::vector<std::uint32_t> born, resumed_slots, unknown_frequency_slots;
    std::vector<std::uint8_t> resumed_frequencies;
    for (std::size_t i = 0; i < missing.size(); ++i) {
      if (locations[i] == RowAt::nowhere) born.push_back(static_cast<std::uint32_t>(i));
      if (locations[i] == RowAt::disk) job->coming_.emplace_back((*rows)[i].table, missing_ids[i]);
    }
    std::ranges::sort(job->coming_);
    for_each_run(static_cast<std::int64_t>(born.size()), kInitialisedTogether, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const Row& row = (*rows)[born[i]];
        dram_.initialise_at(row.table, row.id, row.slot);
      }
    });
    for (std::int64_t t = 0; t < num_tables; ++t) {
      resumed_slots.clear();
      resumed_frequencies.clear();
      unknown_frequency_slots.clear();
      for (std::int64_t i = bounds[t]; i < bounds[t + 1]; ++i) {
        if (locations[i] == RowAt::nowhere || (cache_ != nullptr && cache_slots[i] != kNoSlot)) continue;
        if (frequencies[i] == access_frequency::kUnknown) {
          unknown_frequency_slots.push_back(missing_slots[i]);
          continue;
        }
        resumed_slots.push_back(missing_slots[i]);
        resumed_frequencies.push_back(frequencies[i]);
      }
      if (!resumed_slots.empty()) dram_.resume(t, resumed_slots, resumed_frequencies);
      if (!unknown_frequency_slots.empty()) job->unknown_frequency_slots_.emplace_back(t, unknown_frequency_slots);
    }
    auto& counts = job->counts_;
    counts.born = static_cast<std::int64_t>(born.size());
    counts.read = static_cast<std::int64_t>(job->coming_.size());
    counts.mapped = num_cached + acquired.num_mapped;
    counts.copied = static_cast<std::int64_t>(missing.size()) - counts.born - counts.read - num_cached;
    counts.resident = static_cast<std::int64_t>(ids.size() - missing.size()) - acquired.num_mapped;
    counts.evicted_dirty = acquired.num_evicted_dirty;
    counts.bytes_evicted = bytes_evicted;
    for (const auto& [t, id] : job->coming_) counts.bytes_read += logs_[t]->record_bytes();
    counts.evicted_clean = acquired.num_evicted - acquired.num_evicted_dirty;
    job->read_ = reader_.submit(std::move(plan), deliver, false);
    for (std::int64_t t = 0; t < num_tables && num_cached > 0; ++t) {  // cannot fail
      const auto part = [&](auto& all) { return std::span(all).subspan(bounds[t], bounds[t + 1] - bounds[t]); };
      cache_->move_up(t, part(cache_slots), dram_, part(missing_slots));
    }
    if (cache_ != nullptr) {
      hits_ += num_cached;
      misses_ += static_cast<std::int64_t>(missing.size()) - num_cached;
      bytes_read_ += counts.bytes_mapped;
    }
  } catch (...) {
    dram_.release(slots, offsets, false);
    for (std::int64_t t = 0; t < num_tables; ++t) {
      std::vector<std::int64_t> absent;
      for (const auto position : missing) {
        if (position >= offsets[t] && position < offsets[t + 1]) absent.push_back(ids[position]);
      }
      dram_.drop(t, absent);
    }
    std::ranges::fill(slots, kNoSlot);
    throw;
  }
  const std::scoped_lock jobs_lock(jobs_mutex_);
  job->number_ = next_number_++;
  jobs_.push_back(job);
  return job;
}

std::optional<ReadFault> TieredRows::wait_before(std::uint64_t number) {
  for (;;) {
    std::shared_ptr<AcquireJob> job;
    {
      const std::scoped_lock lock(jobs_mutex_);
      if (fault_ || jobs_.empty() || jobs_.front()->number_ >= number) return fault_;
      job = jobs_.front();
    }
    const auto fault = job->read_->wait();
    const std::scoped_lock lock(jobs_mutex_);
    if (fault && !fault_) fault_ = fault;
    if (jobs_.empty() || jobs_.front() != job) continue;
    // Before any waiting thread continues: no thread has released or changed these rows.
    for (const auto& [t, slots] : job->unknown_frequency_slots_) {
      if (!fault_) dram_.recall(t, slots, steps_);
    }
    jobs_.pop_front();
  }
}

std::optional<ReadFault> TieredRows::wait(const AcquireJob& job) { return wait_before(job.number_ + 1); }

std::optional<ReadFault> TieredRows::settle() {
  const std::scoped_lock lock(order_);
  return wait_before(~std::uint64_t{0});
}

std::optional<ReadFault> TieredRows::fault() const {
  const std::scoped_lock lock(jobs_mutex_);
  return fault_;
}

std::optional<ReadFault> TieredRows::read(std::int64_t table, std::span<const std::int64_t> ids, std::byte* out) {
  const std::int64_t width = dram_.layout(table).weights_bytes();
  std::vector<std::int64_t> absent_ids;
  std::vector<RowAt> locations;
  std::vector<std::int32_t> absent;
  std::shared_ptr<ReadJob> job;
  {
    const std::scoped_lock lock(order_);
    if (auto fault = wait_before(~std::uint64_t{0})) return fault;
    absent = dram_.read(table, ids, out);
    if (cache_ != nullptr) absent = read_cached(table, ids, std::move(absent), out);
    if (absent.empty()) return std::nullopt;
    for (const auto position : absent) absent_ids.push_back(ids[position]);
    if (logs_[table] == nullptr) throw std::invalid_argument("table " + std::to_string(table) + ": no row of it is here");
    const std::vector<std::uint32_t> positions(absent.begin(), absent.end());
    locations.resize(absent.size());
    const Deliver deliver = [out, width](std::uint32_t position, const std::uint8_t* payload) {
      std::memcpy(out + position * width, payload, static_cast<std::size_t>(width));
    };
    ReadPlan plan;
    logs_[table]->plan_reads(absent_ids, positions, static_cast<std::uint32_t>(table), plan, deliver, locations, {});
    job = reader_.submit(std::move(plan), deliver, true);
  }
  for_each_run(static_cast<std::int64_t>(absent.size()), kInitialisedTogether, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      if (locations[i] == RowAt::nowhere) dram_.initial_values(table, {&absent_ids[i], 1}, out + absent[i] * width);
    }
  });
  return job->wait();
}

// Copy weights of rows in the cache; return the positions of the others.
std::vector<std::int32_t> TieredRows::read_cached(std::int64_t table, std::span<const std::int64_t> ids,
                                                  std::vector<std::int32_t> absent, std::byte* out) const {
  const auto width = static_cast<std::size_t>(cache_->layout(table).weights_bytes());
  std::vector<std::int64_t> absent_ids;
  for (const auto position : absent) absent_ids.push_back(ids[position]);
  std::vector<std::byte> weights(absent.size() * width);
  std::vector<std::int32_t> others;
  std::size_t next = 0;
  const auto missing = cache_->read(table, absent_ids, weights.data());
  for (std::size_t i = 0; i < absent.size(); ++i) {
    if (next < missing.size() && missing[next] == static_cast<std::int32_t>(i)) {
      others.push_back(absent[i]);
      ++next;
    } else {
      std::memcpy(out + static_cast<std::size_t>(absent[i]) * width, weights.data() + i * width, width);
    }
  }
  return others;
}

void TieredRows::erase(std::int64_t table, std::span<const std::int64_t> ids) {
  const std::scoped_lock lock(order_);
  std::uint64_t behind = 0;
  {
    const std::scoped_lock jobs_lock(jobs_mutex_);
    for (const auto& job : jobs_) {
      if (job->is_done()) continue;
      const auto is_coming = [&](std::int64_t id) {
        return std::ranges::binary_search(job->coming_, std::pair(table, id));
      };
      if (std::ranges::any_of(ids, is_coming)) behind = job->number_ + 1;
    }
  }
  wait_before(behind);
  dram_.erase(table, ids, sink());
  if (cache_ != nullptr) cache_->erase(table, ids, sink());
  if (logs_[table] != nullptr) logs_[table]->erase(ids);
}

std::int64_t TieredRows::resize(std::int64_t table, std::int64_t capacity) {
  const std::scoped_lock lock(order_);
  if (wait_before(~std::uint64_t{0})) return dram_.capacity_rows(table);
  return dram_.resize(table, capacity, sink());
}

std::int64_t TieredRows::write_dirty(std::int64_t table, std::int64_t rows) {
  std::int64_t written = 0;
  const TableSink counted = [&](std::int64_t t, const EvictedRows& left) {
    append(t, left);
    written += static_cast<std::int64_t>(left.ids.size());
  };
  std::unique_lock lock(order_, std::defer_lock);
  if (cache_ != nullptr) lock.lock();  // no row moves up between the two passes
  dram_.write_dirty(table, rows, counted);
  if (cache_ != nullptr && written == 0) cache_->write_dirty(table, rows, counted);
  return written;
}

std::int64_t TieredRows::save_some(std::int64_t rows) {
  std::int64_t saved = 0;
  const TableSink counted = [&](std::int64_t t, const EvictedRows& left) {
    append(t, left);
    saved += static_cast<std::int64_t>(left.ids.size());
  };
  for (Dram* const tier : {&dram_, cache_}) {
    for (std::int64_t t = 0; tier != nullptr && t < tier->num_tables() && saved < rows; ++t) {
      while (saved < rows && tier->save_some(t, kSaves, counted)) {
      }
    }
  }
  return saved;
}

void TieredRows::write(std::int64_t table, std::span<const std::int64_t> ids, const std::byte* records) {
  const std::scoped_lock lock(order_);
  std::size_t n = 0;
  if (cache_ != nullptr) {
    cache_->erase(table, ids, sink());
    n = cache_->insert(table, ids, records, sink());
    rows_inserted_ += static_cast<std::int64_t>(n);
    bytes_inserted_ += static_cast<std::int64_t>(n) * cache_->layout(table).record_bytes();
  }
  const std::int64_t record_bytes = logs_[table]->record_bytes();
  logs_[table]->append(
      ids.subspan(n),
      [&](std::size_t i, std::uint8_t* payload) {
        std::memcpy(payload, records + static_cast<std::int64_t>(n + i) * record_bytes, static_cast<std::size_t>(record_bytes));
      },
      {}, kFresh, false);
}

// Not while rows move between the tiers, where a snapshot would miss them.
void TieredRows::begin_snapshot() {
  const std::scoped_lock lock(order_);
  dram_.begin_snapshot();
  if (cache_ != nullptr) cache_->begin_snapshot();
}

void TieredRows::end_snapshot() {
  dram_.end_snapshot();
  if (cache_ != nullptr) cache_->end_snapshot();
}

TieredRows::CacheCounts TieredRows::cache_counts() const {
  return {hits_, misses_, rows_inserted_, bytes_read_, bytes_inserted_};
}

}  // namespace colonnade
