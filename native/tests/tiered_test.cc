// Rows of tables over logs, with and without a cache between them: random calls against a map, and everything at once:
// two threads train, one writes and collects, one commits, one looks. A program of its own, for the thread sanitizer too.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>

#include "../tiered_rows.h"
#include "check.h"

using namespace colonnade;

namespace {

constexpr std::int64_t kRows = 900, kDim = 4, kTrainers = 2;

TableSettings table(std::int64_t rows, std::int64_t capacity) {
  return {.parts = {{.dim = kDim, .init_scale = 0.5}},
          .state_elements = 1,
          .rows = rows,
          .capacity_rows = capacity,
          .seed = 3};
}

// A log's files, which vanish with their descriptors. One thread writes and collects.
struct Files {
  RowLog& log;
  std::map<std::int64_t, int> fds;
  std::set<std::int64_t> complete;  // segments, all of which is in their files

  explicit Files(RowLog& log) : log(log) {}
  ~Files() {
    for (const auto& [segment, fd] : fds) ::close(fd);
  }
  void drain() {
    while (const auto chunk = log.next_chunk()) {
      if (!fds.contains(chunk->segment)) {
        std::string name = (std::filesystem::temp_directory_path() / "tiered_test_XXXXXX").string();
        const int fd = ::mkstemp(name.data());
        CHECK(fd >= 0 && ::unlink(name.c_str()) == 0);
        fds[chunk->segment] = fd;
        log.attach(chunk->segment, fd);
      }
      CHECK(::pwrite(fds[chunk->segment], chunk->bytes.data(), static_cast<std::size_t>(chunk->num_bytes), chunk->offset) ==
            chunk->num_bytes);
      log.written(chunk);
      if (chunk->is_last) complete.insert(chunk->segment);
    }
  }
  // The segment with the fewest live rows; its keys are asked for and forgotten as when its key list is written.
  void collect() {
    std::int64_t victim = -1, records = 0, live = kRows + 1;
    for (const auto& use : log.segments()) {
      if (!complete.contains(use.number) || use.num_live >= live) continue;
      victim = use.number, records = use.num_records, live = use.num_live;
    }
    if (victim < 0) return;
    const std::vector<std::int64_t> ids = log.keys(victim);
    CHECK(static_cast<std::int64_t>(ids.size()) == records);
    log.forget_keys(victim);
    std::vector<std::uint8_t> frames(static_cast<std::size_t>(records * log.stride()));
    CHECK(::pread(fds[victim], frames.data(), frames.size(), kSegmentHeaderBytes) == static_cast<ssize_t>(frames.size()));
    log.rewrite(victim, ids, frames, 0, 1, 1);
    log.detach(victim);
    log.forget(victim);
    ::close(fds[victim]);
    fds.erase(victim);
    complete.erase(victim);
  }
};

// A cache's tables have any ids; a table that fits in memory has no rows there.
std::unique_ptr<Dram> cache_of(std::span<const TableSettings> settings, std::initializer_list<std::int64_t> capacities) {
  std::vector<TableSettings> cached(settings.begin(), settings.end());
  std::size_t t = 0;
  for (const auto capacity : capacities) {
    cached[t].rows = 0;
    cached[t++].capacity_rows = capacity;
  }
  return t > 0 ? std::make_unique<Dram>(cached, RowFormat{Dtype::float32}) : nullptr;
}

std::int64_t num_frozen(const RowLog& log) {
  std::int64_t rows = 0;
  for (const auto segment : log.frozen_segments()) {
    for (const auto byte : log.frozen_live(segment)) rows += std::popcount(byte);
  }
  return rows;
}

void everything_at_once(const std::string& kind, int steps, std::initializer_list<std::int64_t> cache_rows) {
  const TableSettings settings[] = {table(0, 300), table(kRows, 250), table(kRows, kRows)};
  constexpr int kTables = 3;
  set_num_threads(1);
  Dram dram(settings, {Dtype::float32});
  std::vector<std::unique_ptr<RowLog>> logs;
  std::vector<RowLog*> borrowed;
  std::vector<std::unique_ptr<Files>> files;
  for (int t = 0; t < kTables; ++t) {
    logs.push_back(std::make_unique<RowLog>(RowLogSettings{.record_bytes = dram.layout(t).record_bytes(),
                                                           .rows = settings[t].rows,
                                                           .segment_bytes = 20'000,
                                                           .chunk_bytes = 4096,
                                                           .num_streams = 2}));
    borrowed.push_back(logs.back().get());
    files.push_back(std::make_unique<Files>(*logs.back()));
  }
  PageReader reader(kind, 8);
  const std::unique_ptr<Dram> cache = cache_of(settings, cache_rows);
  TieredRows rows(dram, borrowed, reader, 0, cache.get());

  // Updates of each row: a trainer's ids are its own, and only it writes their counts.
  std::vector<std::vector<std::atomic<std::uint32_t>>> counts(kTables);
  for (auto& of_table : counts) of_table = std::vector<std::atomic<std::uint32_t>>(kRows);
  std::shared_mutex step;  // a commit begins between two steps
  std::mutex moving;       // and nothing is collected while it is written
  std::atomic<bool> is_over = false;

  const auto train = [&](std::int64_t trainer) {
    Random random(static_cast<std::uint64_t>(trainer));
    for (int n = 0; n < steps; ++n) {
      std::vector<std::int64_t> ids, offsets{0};
      for (int t = 0; t < kTables; ++t) {
        std::set<std::int64_t> chosen;
        for (int i = 0; i < 50; ++i)
          chosen.insert(static_cast<std::int64_t>(random.below(kRows / kTrainers)) * kTrainers + trainer);
        ids.insert(ids.end(), chosen.begin(), chosen.end());
        offsets.push_back(static_cast<std::int64_t>(ids.size()));
      }
      std::vector<std::uint32_t> slots(ids.size());
      const auto job = rows.acquire(ids, offsets, {}, slots);
      const std::shared_lock training(step);
      CHECK(!rows.wait(*job));
      rows.before_update(slots, offsets);
      for (int t = 0; t < kTables; ++t) {
        const RowLayout& layout = dram.layout(t);
        for (std::int64_t i = offsets[t]; i < offsets[t + 1]; ++i) {
          auto& count = counts[t][static_cast<std::size_t>(ids[i])];
          CHECK(layout.clock_of(slots[i]) == count);
          auto* const weights = reinterpret_cast<float*>(layout.weights_of(slots[i]));
          for (int d = 0; d < kDim && count > 0; ++d) CHECK(weights[d] == static_cast<float>(ids[i] * 1000 + count));
          ++count;
          for (int d = 0; d < kDim; ++d) weights[d] = static_cast<float>(ids[i] * 1000 + count);
          layout.clock_of(slots[i]) = count;
        }
      }
      dram.release(slots, offsets, true);
    }
  };
  const auto write = [&] {
    while (!is_over) {
      for (auto& of_log : files) {
        of_log->drain();
        const std::scoped_lock lock(moving);
        of_log->collect();
      }
    }
  };
  const auto commit = [&] {
    while (!is_over) {
      const std::scoped_lock lock(moving);
      std::vector<std::int64_t> wanted(kTables);
      {
        const std::unique_lock between(step);
        rows.begin_snapshot();
        for (auto* log : borrowed) log->freeze();
        for (int t = 0; t < kTables; ++t) wanted[t] = std::ranges::count_if(counts[t], [](const auto& n) { return n > 0; });
      }
      while (rows.save_some(64) > 0) {
      }
      for (int t = 0; t < kTables; ++t) {
        CHECK(num_frozen(*borrowed[t]) == wanted[t]);
        borrowed[t]->thaw();
      }
      rows.end_snapshot();
    }
  };
  const auto look = [&] {
    while (!is_over) {
      for (int t = 0; t < kTables; ++t) {
        CHECK(dram.num_rows(t) <= dram.capacity_rows(t) && dram.pinned_share(t) <= 1.0 && borrowed[t]->num_rows() <= kRows);
      }
      CHECK(!rows.fault() && dram.resident_bytes() > 0);
    }
  };
  std::vector<std::thread> trainers, others;
  for (std::int64_t number = 0; number < kTrainers; ++number) trainers.emplace_back(train, number);
  others.emplace_back(write);
  others.emplace_back(commit);
  others.emplace_back(look);
  for (auto& thread : trainers) thread.join();
  is_over = true;
  for (auto& thread : others) thread.join();
  CHECK(!rows.settle());
  for (int t = 0; t < kTables; ++t) {
    std::vector<std::int64_t> ids;
    for (std::int64_t id = 0; id < kRows; ++id) {
      if (counts[t][static_cast<std::size_t>(id)] > 0) ids.push_back(id);
    }
    std::vector<float> weights(ids.size() * kDim);
    CHECK(!rows.read(t, ids, reinterpret_cast<std::byte*>(weights.data())));
    for (std::size_t i = 0; i < ids.size(); ++i)
      CHECK(weights[i * kDim] == static_cast<float>(ids[i] * 1000 + counts[t][static_cast<std::size_t>(ids[i])]));
    files[t]->drain();
  }
}

// One table of rows whose weights tell their id and number of updates, over a log and perhaps a cache.
class Model {
 public:
  using Counts = std::map<std::int64_t, std::uint32_t>;

  Model(std::int64_t vocabulary, std::int64_t capacity, std::int64_t cache_rows, std::int64_t segment_bytes)
      : settings_{table(vocabulary, capacity)},
        dram_(settings_, {Dtype::float32}),
        log_({.record_bytes = dram_.layout(0).record_bytes(),
              .rows = vocabulary,
              .segment_bytes = segment_bytes,
              .chunk_bytes = 4096,
              .num_streams = 2}),
        files_(log_),
        cache_(cache_rows < 0 ? nullptr : cache_of(settings_, {cache_rows})),
        rows_(dram_, {&log_}, reader_, 0, cache_.get()) {}

  // Train rows, of which every other is not changed.
  void train(const std::set<std::int64_t>& ids, bool is_update) {
    const std::vector<std::int64_t> wanted(ids.begin(), ids.end());
    const std::int64_t offsets[] = {0, static_cast<std::int64_t>(wanted.size())};
    std::vector<std::uint32_t> slots(wanted.size());
    const auto job = rows_.acquire(wanted, offsets, {}, slots);
    const auto& sources = job->counts();
    CHECK(sources.resident + sources.mapped + sources.read + sources.copied + sources.born == offsets[1]);
    CHECK(!rows_.wait(*job));
    rows_.before_update(slots, offsets);
    const RowLayout& layout = dram_.layout(0);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      auto* const weights = reinterpret_cast<float*>(layout.weights_of(slots[i]));
      const auto count = counts_.find(wanted[i]);
      CHECK(layout.clock_of(slots[i]) == (count == counts_.end() ? 0 : count->second));
      if (count != counts_.end()) CHECK(weights[0] == weight(wanted[i], count->second));
      if (!is_update || i % 2) continue;
      const std::uint32_t updates = ++counts_[wanted[i]];
      std::fill_n(weights, kDim, weight(wanted[i], updates));
      layout.clock_of(slots[i]) = updates;
    }
    dram_.release(slots, offsets, is_update);
  }
  void erase(const std::set<std::int64_t>& ids) {
    rows_.erase(0, std::vector(ids.begin(), ids.end()));
    for (const auto id : ids) counts_.erase(id);
  }
  // As a tier above does: rows that are not in memory are overwritten below.
  void write(const std::set<std::int64_t>& ids) {
    std::vector<std::int64_t> absent;
    for (const auto id : ids) {
      const auto resident = dram_.resident(0, false);
      if (std::ranges::none_of(resident, [&](const auto& row) { return row.first == id; })) absent.push_back(id);
    }
    const auto record_bytes = static_cast<std::size_t>(log_.record_bytes());
    std::vector<std::byte> records(absent.size() * record_bytes);
    for (std::size_t i = 0; i < absent.size(); ++i) {
      const std::uint64_t updates = ++counts_[absent[i]];
      const std::vector<float> weights(kDim, weight(absent[i], static_cast<std::uint32_t>(updates)));
      std::memcpy(records.data() + i * record_bytes, weights.data(), kDim * sizeof(float));
      std::memcpy(records.data() + (i + 1) * record_bytes - 8, &updates, 8);
    }
    rows_.write(0, absent, records.data());
  }
  void read(const std::set<std::int64_t>& ids) {
    const std::vector<std::int64_t> wanted(ids.begin(), ids.end());
    std::vector<float> weights(wanted.size() * kDim);
    CHECK(!rows_.read(0, wanted, reinterpret_cast<std::byte*>(weights.data())));
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (counts_.contains(wanted[i])) CHECK(weights[i * kDim + 1] == weight(wanted[i], counts_[wanted[i]]));
    }
  }
  void read_all() {
    std::set<std::int64_t> ids;
    for (const auto& [id, count] : counts_) ids.insert(id);
    read(ids);
  }
  void begin_commit() {
    rows_.begin_snapshot();
    log_.freeze();
    committed_ = counts_;
  }
  bool is_committing() const { return committed_.has_value(); }
  void save(std::int64_t rows) { rows_.save_some(rows); }
  // Compare the content of the commit with that of its beginning, record by record.
  void finish_commit() {
    while (rows_.save_some(8) > 0) {
    }
    log_.seal();
    files_.drain();
    Counts stored;
    for (const auto segment : log_.frozen_segments()) {
      const auto ids = log_.keys(segment);
      const auto live = log_.frozen_live(segment);
      std::vector<std::uint8_t> frames(ids.size() * static_cast<std::size_t>(log_.stride()));
      CHECK(::pread(files_.fds[segment], frames.data(), frames.size(), kSegmentHeaderBytes) ==
            static_cast<ssize_t>(frames.size()));
      for (std::size_t i = 0; i < ids.size(); ++i) {
        if (!(live[i / 8] >> (i % 8) & 1)) continue;
        const auto* const record = frames.data() + i * static_cast<std::size_t>(log_.stride()) + kFrameHeadBytes;
        std::uint64_t updates;
        float first;
        std::memcpy(&updates, record + log_.record_bytes() - 8, 8);
        std::memcpy(&first, record, sizeof(float));
        CHECK(first == weight(ids[i], static_cast<std::uint32_t>(updates)));
        CHECK(stored.emplace(ids[i], static_cast<std::uint32_t>(updates)).second);
      }
    }
    CHECK(stored == *committed_);
    abandon_commit();
  }
  void abandon_commit() {
    log_.thaw();
    rows_.end_snapshot();
    committed_.reset();
  }
  void flush() {
    if (is_committing()) return;
    while (rows_.write_dirty(0, 5) > 0) {
    }
    CHECK(log_.num_rows() == static_cast<std::int64_t>(counts_.size()));
  }
  // No row is in memory and in the cache.
  void check() const {
    CHECK(dram_.num_rows(0) <= dram_.capacity_rows(0));
    if (!cache_) return;
    CHECK(cache_->num_rows(0) <= cache_->capacity_rows(0) && cache_->pinned_share(0) == 0);
    const auto above = dram_.resident(0, false), below = cache_->resident(0, false);
    std::vector<std::pair<std::int64_t, std::uint32_t>> shared;
    std::ranges::set_intersection(above, below, std::back_inserter(shared), {}, &std::pair<std::int64_t, std::uint32_t>::first,
                                  &std::pair<std::int64_t, std::uint32_t>::first);
    CHECK(shared.empty());
  }
  std::int64_t num_cached() const { return rows_.cache_counts().hits; }

 private:
  static float weight(std::int64_t id, std::uint32_t updates) {
    return static_cast<float>(mix64(static_cast<std::uint64_t>(id) * 7919 + updates) % 100'003);
  }

  TableSettings settings_[1];
  Dram dram_;
  RowLog log_;
  Files files_;
  PageReader reader_{"threads", 4};
  std::unique_ptr<Dram> cache_;
  TieredRows rows_;
  Counts counts_;
  std::optional<Counts> committed_;
};

// An id of an open table: any 64 bits, also negative.
std::int64_t spread(std::int64_t id) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(id) * 0x9E3779B97F4A7C1 - 77);
}

void random_calls(std::uint64_t seed) {
  Random random(seed);
  const auto pick = [&](std::initializer_list<std::int64_t> from) { return from.begin()[random.below(from.size())]; };
  const std::int64_t vocabulary = pick({0, 211});
  Model model(vocabulary, pick({13, 29, 60}), pick({-1, 0, 1, 7, 31, 97, 400}), pick({500, 20'000}));
  const auto ids = [&](std::uint64_t most) {
    std::set<std::int64_t> chosen;
    for (auto n = random.below(most + 1); n > 0; --n) {
      const auto low = random.below(211), high = random.below(211);
      const auto id = static_cast<std::int64_t>(low * high / 211);  // small ids more often
      chosen.insert(vocabulary == 0 ? spread(id) : id);
    }
    return chosen;
  };
  for (int step = 0; step < 250; ++step) {
    switch (random.below(12)) {
      case 0:
        model.erase(ids(6));
        break;
      case 1:
        model.read(ids(30));
        break;
      case 2:
        model.write(ids(9));
        break;
      case 3:
        if (!model.is_committing()) model.begin_commit();
        break;
      case 4:
        if (!model.is_committing()) break;
        random.below(4) == 0 ? model.abandon_commit() : model.finish_commit();
        break;
      case 5:
        model.save(3);
        break;
      case 6:
        model.flush();
        break;
      default:
        model.train(ids(13), random.below(5) > 0);
    }
    model.check();
  }
  model.read_all();
}

// A log that is full refuses rows at any moment: none is lost or goes back in time.
void full_log(std::int64_t capacity, std::int64_t batch, std::int64_t cache_rows) {
  Random random(5);
  Model model(0, capacity, cache_rows, 1);  // a segment holds a record
  int num_refused = 0;
  for (int step = 0; step < 6000 && num_refused < 50; ++step) {
    std::set<std::int64_t> ids;
    for (int i = 0; i < batch; ++i) ids.insert(static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(30 * capacity))));
    try {
      model.train(ids, random.below(3) > 0);
    } catch (const NoRoom&) {
      ++num_refused;
    }
    model.check();
  }
  CHECK(num_refused == 50);
  model.read_all();
}

}  // namespace

int main() {
  everything_at_once("threads", 400, {});
  everything_at_once("auto", 200, {});
  everything_at_once("threads", 400, {200, 150, 0});
  everything_at_once("auto", 200, {31, 1, 0});
  set_num_threads(1);
  for (std::uint64_t seed = 0; seed < 300; ++seed) random_calls(seed);
  for (const std::int64_t cache_rows : {-1, 0, 1, 50}) full_log(40, 30, cache_rows);
  for (const std::int64_t cache_rows : {300, 700, 1500}) full_log(700, 500, cache_rows);
}
