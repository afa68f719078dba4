// Rows of tables over logs while everything happens at once: two threads train, one writes and collects, one commits, one
// looks. A program of its own, for the thread sanitizer too.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <filesystem>
#include <map>
#include <mutex>
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
        log.attach(chunk->segment, fd, nullptr);
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

void everything_at_once(const std::string& kind, int steps) {
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
  TieredRows rows(dram, borrowed, reader);

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
        std::int64_t found = 0;
        for (const auto segment : borrowed[t]->frozen_segments()) {
          for (const auto byte : borrowed[t]->frozen_live(segment)) found += std::popcount(byte);
        }
        CHECK(found == wanted[t]);
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

}  // namespace

int main() {
  everything_at_once("threads", 400);
  everything_at_once("auto", 200);
}
