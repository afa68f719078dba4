#include "tiered_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kHot = 0;        // stream of evicted rows; compaction has others
constexpr std::int64_t kSaves = 512;    // rows that a checkpoint saves at a time, for which training may wait
constexpr std::int64_t kBirths = 256;   // rows that a thread initialises at a time

}  // namespace

TieredRows::TieredRows(Dram& dram, std::vector<RowLog*> logs, PageReader& reader, std::int64_t steps)
    : dram_(dram), logs_(std::move(logs)), reader_(reader), steps_(steps) {
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
}

TieredRows::~TieredRows() {
  for (const auto& job : jobs_) job->read_->wait();
}

TableSink TieredRows::sink() {
  return [this](std::int64_t t, const LeftRows& rows) {
    logs_[t]->append(
        rows.ids, [&](std::size_t i, std::uint8_t* payload) { rows.pack(i, reinterpret_cast<std::byte*>(payload)); },
        rows.heats, kHot, rows.is_for_commit);
  };
}

std::shared_ptr<AcquireJob> TieredRows::acquire(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets,
                                                std::span<const std::uint8_t> next_use,
                                                std::span<std::uint32_t> slots) {
  const std::scoped_lock lock(order_);
  auto job = std::make_shared<AcquireJob>();
  std::atomic<std::int64_t> bytes_evicted = 0;  // tables evict on different threads
  const TableSink to_log = sink();
  const Acquired acquired =
      dram_.acquire(ids, offsets, next_use, slots, false, [&](std::int64_t t, const LeftRows& left) {
        to_log(t, left);
        bytes_evicted += static_cast<std::int64_t>(left.ids.size()) * logs_[t]->record_bytes();
      });
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
    ReadPlan plan;
    std::vector<RowAt> found(missing.size());
    std::vector<std::uint8_t> heats(missing.size());
    for (std::int64_t t = 0; t < num_tables; ++t) {
      const std::int64_t begin = bounds[t], n = bounds[t + 1] - begin;
      if (n == 0) continue;
      const auto part = [&](auto& all) { return std::span(all).subspan(begin, n); };
      logs_[t]->plan_reads(part(missing_ids), part(positions), static_cast<std::uint32_t>(t), plan, deliver, part(found),
                           part(heats));
    }
    std::vector<std::uint32_t> born, back, strange;
    std::vector<std::uint8_t> back_heats;
    for (std::size_t i = 0; i < missing.size(); ++i) {
      if (found[i] == RowAt::nowhere) born.push_back(static_cast<std::uint32_t>(i));
      if (found[i] == RowAt::disk) job->coming_.emplace_back((*rows)[i].table, missing_ids[i]);
    }
    std::ranges::sort(job->coming_);
    for_each_run(static_cast<std::int64_t>(born.size()), kBirths, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const Row& row = (*rows)[born[i]];
        dram_.birth_at(row.table, row.id, row.slot);
      }
    });
    for (std::int64_t t = 0; t < num_tables; ++t) {
      back.clear();
      back_heats.clear();
      strange.clear();
      for (std::int64_t i = bounds[t]; i < bounds[t + 1]; ++i) {
        if (found[i] == RowAt::nowhere) continue;
        if (heats[i] == heat::kUnknown) {
          strange.push_back(missing_slots[i]);
          continue;
        }
        back.push_back(missing_slots[i]);
        back_heats.push_back(heats[i]);
      }
      if (!back.empty()) dram_.resume(t, back, back_heats);
      if (!strange.empty()) job->strange_.emplace_back(t, strange);
    }
    auto& counts = job->counts_;
    counts.born = static_cast<std::int64_t>(born.size());
    counts.read = static_cast<std::int64_t>(job->coming_.size());
    counts.copied = static_cast<std::int64_t>(missing.size()) - counts.born - counts.read;
    counts.resident = static_cast<std::int64_t>(ids.size() - missing.size());
    counts.evicted_dirty = acquired.num_evicted_dirty;
    counts.bytes_evicted = bytes_evicted;
    for (const auto& [t, id] : job->coming_) counts.bytes_read += logs_[t]->record_bytes();
    counts.evicted_clean = acquired.num_evicted - acquired.num_evicted_dirty;
    job->read_ = reader_.submit(std::move(plan), deliver, false);
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
    for (const auto& [t, slots] : job->strange_) {
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
  std::vector<RowAt> found;
  std::vector<std::int32_t> absent;
  std::shared_ptr<ReadJob> job;
  {
    const std::scoped_lock lock(order_);
    if (auto fault = wait_before(~std::uint64_t{0})) return fault;
    absent = dram_.read(table, ids, out);
    if (absent.empty()) return std::nullopt;
    for (const auto position : absent) absent_ids.push_back(ids[position]);
    if (logs_[table] == nullptr) throw std::invalid_argument("table " + std::to_string(table) + ": no row of it is here");
    const std::vector<std::uint32_t> positions(absent.begin(), absent.end());
    found.resize(absent.size());
    const Deliver deliver = [out, width](std::uint32_t position, const std::uint8_t* payload) {
      std::memcpy(out + position * width, payload, static_cast<std::size_t>(width));
    };
    ReadPlan plan;
    logs_[table]->plan_reads(absent_ids, positions, static_cast<std::uint32_t>(table), plan, deliver, found, {});
    job = reader_.submit(std::move(plan), deliver, true);
  }
  for_each_run(static_cast<std::int64_t>(absent.size()), kBirths, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      if (found[i] == RowAt::nowhere) dram_.birth_values(table, {&absent_ids[i], 1}, out + absent[i] * width);
    }
  });
  return job->wait();
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
  if (logs_[table] != nullptr) logs_[table]->erase(ids);
}

std::int64_t TieredRows::resize(std::int64_t table, std::int64_t capacity) {
  const std::scoped_lock lock(order_);
  if (wait_before(~std::uint64_t{0})) return dram_.capacity_rows(table);
  return dram_.resize(table, capacity, sink());
}

std::int64_t TieredRows::write_dirty(std::int64_t table, std::int64_t rows) {
  std::int64_t written = 0;
  const TableSink to_log = sink();
  dram_.write_dirty(table, rows, [&](std::int64_t t, const LeftRows& left) {
    to_log(t, left);
    written += static_cast<std::int64_t>(left.ids.size());
  });
  return written;
}

std::int64_t TieredRows::save_some(std::int64_t rows) {
  std::int64_t saved = 0;
  const TableSink to_log = sink();
  for (std::int64_t t = 0; t < dram_.num_tables(); ++t) {
    while (saved < rows && dram_.save_some(t, kSaves, [&](std::int64_t table, const LeftRows& left) {
      to_log(table, left);
      saved += static_cast<std::int64_t>(left.ids.size());
    })) {
    }
    if (saved >= rows) break;
  }
  return saved;
}

}  // namespace colonnade
