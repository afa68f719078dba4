// A program of its own, for the thread sanitizer.
#include <algorithm>
#include <set>
#include <thread>

#include "../dram.h"
#include "../threads.h"
#include "check.h"
#include "evicted_rows.h"

using namespace colonnade;

namespace {

TableSettings table(std::int64_t rows, std::int64_t capacity) {
  return {.parts = {{.dim = 4, .init_scale = 0.5}},
          .state_elements = 1,
          .rows = rows,
          .capacity_rows = capacity,
          .seed = 3};
}

// Threads that acquire, read, release and erase the same rows at once, of an open table half as large as what they
// use and of one that indexes directly. Nobody trains, so every row always has its first value.
void threads_share_it() {
  const TableSettings settings[] = {table(0, 300), table(600, 600)};
  Dram dram(settings, {Dtype::float32});
  set_num_threads(1);
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&dram, seed] {
      Random random(seed);
      for (int step = 0; step < 200; ++step) {
        std::vector<std::int64_t> ids;
        std::int64_t offsets[] = {0, 0, 0};
        for (int t = 0; t < 2; ++t) {
          std::set<std::int64_t> chosen;
          for (int i = 0; i < 60; ++i) chosen.insert(static_cast<std::int64_t>(random.below(600)));
          ids.insert(ids.end(), chosen.begin(), chosen.end());
          offsets[t + 1] = static_cast<std::int64_t>(ids.size());
        }
        const auto part = [&](auto& all, int t) {
          return std::span(all).subspan(offsets[t], offsets[t + 1] - offsets[t]);
        };
        std::vector<std::uint32_t> slots(ids.size());
        dram.acquire(ids, offsets, {}, slots, true, nowhere);
        for (int t = 0; t < 2; ++t) {
          const std::span<const std::int64_t> mine = part(ids, t);
          if (random.below(2)) dram.erase(t, mine.first(mine.size() / 2), nowhere);
          std::vector<float> read(mine.size() * 4), born(mine.size() * 4);
          CHECK(dram.read(t, mine, reinterpret_cast<std::byte*>(read.data())).empty());
          dram.initial_values(t, mine, reinterpret_cast<std::byte*>(born.data()));
          CHECK(read == born);
          const auto resident = dram.resident(t, false);
          for (std::size_t i = 0; i < mine.size(); ++i)
            CHECK(std::ranges::binary_search(resident, std::pair(mine[i], part(slots, t)[i])));
        }
        dram.release(slots, offsets, random.below(2));
        for (int t = 0; t < 2; ++t) {
          std::vector<std::int64_t> any(20);
          for (auto& id : any) id = static_cast<std::int64_t>(random.below(600));
          dram.erase(t, any, nowhere);
          std::vector<float> read(any.size() * 4);
          dram.read(t, any, reinterpret_cast<std::byte*>(read.data()));
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int t = 0; t < 2; ++t) {  // nothing is left pinned: all of it can go
    std::vector<std::int64_t> all(600);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
    dram.erase(t, all, nowhere);
    CHECK(dram.num_rows(t) == 0);
  }
}

// Several threads share work at once, and what is shared inside of it is done alone: each unit is visited once, by the
// time the call returns.
void each_unit_is_visited_once() {
  set_num_threads(3);
  std::vector<std::thread> threads;
  for (int number = 0; number < 3; ++number) {
    threads.emplace_back([] {
      for (std::int64_t round = 0; round < 500; ++round) {
        const std::int64_t units = round % 37;
        if (units == 1) continue;  // shared with nobody, so what is inside of it may be
        std::vector<std::int64_t> visits(static_cast<std::size_t>(units));
        for_each_unit(units, [&](std::int64_t i) {
          const auto this_thread = std::this_thread::get_id();
          for_each_unit(3, [&](std::int64_t j) {
            CHECK(std::this_thread::get_id() == this_thread);
            visits[static_cast<std::size_t>(i)] += j + 1;
          });
        });
        CHECK(std::ranges::all_of(visits, [](auto n) { return n == 6; }));
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// Units that touch few bytes are all visited here, in order.
void little_is_done_alone() {
  set_num_threads(3);
  const auto this_thread = std::this_thread::get_id();
  for (int round = 0; round < 100; ++round) {
    std::int64_t next = 0;
    for_each_unit(50, 1000, [&](std::int64_t i) {
      CHECK(i == next++ && std::this_thread::get_id() == this_thread);
      std::this_thread::yield();
    });
    CHECK(next == 50);
  }
  std::atomic<int> visits{0};
  for_each_unit(50, std::int64_t{1} << 30, [&](std::int64_t) { ++visits; });
  CHECK(visits == 50);
}

}  // namespace

int main() {
  threads_share_it();
  each_unit_is_visited_once();
  little_is_done_alone();
}
