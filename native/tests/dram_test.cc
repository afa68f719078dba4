#include "../dram.h"

#include <algorithm>
#include <map>
#include <set>
#include <optional>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "evicted_rows.h"

using namespace colonnade;

namespace {

constexpr std::int64_t kRecordBytes = 4 * 4 + 4 + 8;  // dim 4, one state element, clock

TableSettings table(std::int64_t rows, std::int64_t capacity) {
  return {.parts = {{.dim = 4, .init_scale = 0.5, .initial_state = 0.25, .initial_count = 1}},
          .state_elements = 1,
          .rows = rows,
          .capacity_rows = capacity,
          .seed = 3};
}

std::uint64_t clock_in(const std::byte* record) {
  std::uint64_t clock;
  std::memcpy(&clock, record + kRecordBytes - 8, 8);
  return clock;
}

// Random acquires and releases against a map of clocks: nothing updated is ever lost. most_rows: the capacity changes,
// up to it, with and without pinned rows.
void nothing_is_lost(std::int64_t rows, std::int64_t capacity, std::int64_t universe, std::int64_t most_rows = 0) {
  TableSettings settings = table(rows, capacity);
  settings.most_rows = most_rows;
  Dram dram({&settings, 1}, {Dtype::float32});
  Random random(static_cast<std::uint64_t>(capacity));
  std::map<std::int64_t, std::uint64_t> clocks, below;
  std::int64_t num_evicted = 0;
  for (int step = 0; step < 400; ++step) {
    std::set<std::int64_t> chosen;
    for (auto n = random.below(static_cast<std::uint64_t>(capacity)) + 1; n > 0; --n) {
      const auto id = random.below(static_cast<std::uint64_t>(universe));
      chosen.insert(static_cast<std::int64_t>(rows ? id : mix64(id)));
    }
    const std::vector<std::int64_t> ids(chosen.begin(), chosen.end());
    const std::int64_t offsets[] = {0, static_cast<std::int64_t>(ids.size())};
    std::vector<std::uint32_t> slots(ids.size());
    Left left(dram);
    const auto note_left = [&] {
      for (std::size_t i = 0; i < left.tables[0].ids.size(); ++i) {
        const auto id = left.tables[0].ids[i];
        below[id] = clock_in(left.tables[0].records.data() + i * kRecordBytes);
        CHECK(below[id] == clocks[id]);
      }
      left.tables[0] = {};
    };
    const Acquired acquired = dram.acquire(ids, offsets, {}, slots, false, left.sink());
    num_evicted += acquired.num_evicted;
    note_left();
    for (const auto position : acquired.missing) {
      dram.initialise(0, {&ids[position], 1}, {&slots[position], 1});
      std::vector<std::byte> record(kRecordBytes);
      dram.pack(0, {&slots[position], 1}, record.data());
      std::memcpy(record.data() + kRecordBytes - 8, &below[ids[position]], 8);
      dram.unpack(0, {&slots[position], 1}, record.data());
    }
    const bool is_dirty = random.below(2);
    const auto read_clocks = dram.clocks(0, slots);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      CHECK(static_cast<std::uint64_t>(read_clocks[i]) == clocks[ids[i]]);
      if (is_dirty) dram.layout(0).clock_of(slots[i]) = static_cast<std::uint32_t>(++clocks[ids[i]]);
    }
    const auto resize = [&](std::int64_t num_pinned) {
      const auto wanted = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(most_rows) + 2));
      capacity = dram.resize(0, wanted, left.sink());
      note_left();
      CHECK(capacity == std::min(most_rows, std::max({wanted, num_pinned, std::int64_t{1}})));
      CHECK(capacity == dram.capacity_rows(0));
    };
    if (most_rows && random.below(4) == 0) {
      resize(static_cast<std::int64_t>(ids.size()));
      CHECK(std::ranges::equal(dram.clocks(0, slots), ids, {}, {}, [&](auto id) { return static_cast<std::int64_t>(clocks[id]); }));
    }
    CHECK(dram.num_rows(0) <= capacity);
    dram.release(slots, offsets, is_dirty);
    if (most_rows && random.below(4) == 0) resize(0);
  }
  CHECK((num_evicted > 0) == (capacity < universe));
}

void resizes_have_bounds_and_leave_direct_tables_alone() {
  TableSettings settings[] = {table(0, 8), table(8, 8)};
  settings[0].most_rows = settings[1].most_rows = 16;
  Dram dram(settings, {Dtype::float32});
  CHECK(dram.can_resize(0) && !dram.can_resize(1));
  CHECK(dram.resize(0, 100, nowhere) == 16 && dram.resize(1, 4, nowhere) == 8);
  CHECK(dram.resize(0, 0, nowhere) == 1);
}

void refused_acquires_leave_no_trace() {
  const TableSettings settings[] = {table(0, 4), table(100, 4)};
  Dram dram(settings, {Dtype::float32});
  const std::int64_t first_ids[] = {1, 2, 7}, first_offsets[] = {0, 2, 3};
  std::uint32_t first_slots[3];
  dram.acquire(first_ids, first_offsets, {}, first_slots, true, nowhere);
  const std::int64_t ids[] = {1, 3, 8, 9, 10, 11}, offsets[] = {0, 2, 6};
  std::uint32_t slots[6];
  CHECK_THROWS(dram.acquire(ids, offsets, {}, slots, true, nowhere), NoRoom, "table 1 needs 4 slots of 4, 1 pinned");
  const std::int64_t outside[] = {1, 3, 8, 100, 10, 11};
  CHECK_THROWS(dram.acquire(outside, offsets, {}, slots, true, nowhere), std::out_of_range,
               "table 1 position 1 id 100 rows 100");
  CHECK(std::all_of(slots, slots + 6, [](auto slot) { return slot == kNoSlot; }));
  CHECK(dram.num_rows(0) == 2 && dram.num_rows(1) == 1);
  dram.release(first_slots, first_offsets, false);
  CHECK_THROWS(dram.release(first_slots, first_offsets, false), std::invalid_argument, "not pinned");
  dram.acquire(ids, offsets, {}, slots, true, nowhere);
  CHECK(dram.num_rows(1) == 4);
}

void initial_values_depend_on_seed_and_id_alone() {
  const TableSettings settings = table(0, 1'000);
  std::vector<std::int64_t> ids(1'000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(mix64(i));
  std::vector<float> wanted;
  everywhere([&] {
    Dram dram({&settings, 1}, {Dtype::float32});
    std::vector<float> born(4'000), read(4'000);
    dram.initial_values(0, ids, reinterpret_cast<std::byte*>(born.data()));
    std::vector<std::uint32_t> slots(ids.size());
    const std::int64_t offsets[] = {0, 1'000};
    dram.acquire(ids, offsets, {}, slots, true, nowhere);
    CHECK(dram.read(0, ids, reinterpret_cast<std::byte*>(read.data())).empty());
    CHECK(born == read);
    if (wanted.empty()) wanted = born;
    CHECK(born == wanted);
  });
}

// A row all of whose weights are its clock.
void set_row(const Dram& dram, std::uint32_t slot, std::uint64_t clock) {
  const RowLayout& layout = dram.layout(0);
  for (int i = 0; i < 4; ++i)
    std::memcpy(layout.weights_of(slot) + 4 * i, std::vector<float>{static_cast<float>(clock)}.data(), 4);
  layout.clock_of(slot) = static_cast<std::uint32_t>(clock);
}

// A snapshot is of its moment while rows are trained, leave and are forgotten, and another thread saves.
void snapshots_are_of_their_moment(std::int64_t rows, std::int64_t capacity, std::int64_t universe) {
  TableSettings settings = table(rows, capacity);
  settings.most_rows = 2 * capacity;  // tables that evict are resized
  Dram dram({&settings, 1}, {Dtype::float32});
  Random random(static_cast<std::uint64_t>(universe));
  std::map<std::int64_t, std::uint64_t> clocks, below, committed;
  Left left(dram);
  std::size_t num_read = 0;
  const auto check_tier_below = [&] {  // rows that left most recently
    const std::scoped_lock lock(left.mutex);
    for (; num_read < left.tables[0].ids.size(); ++num_read) {
      const std::byte* record = left.tables[0].records.data() + num_read * kRecordBytes;
      const std::uint64_t clock = clock_in(record);
      float weights[4];
      std::memcpy(weights, record, 16);
      for (const float weight : weights) CHECK(weight == static_cast<float>(clock));
      const auto id = left.tables[0].ids[num_read];
      below[id] = clock;
      if (left.tables[0].is_for_commit[num_read]) committed[id] = clock;
    }
  };
  for (int round = 0; round < 30; ++round) {
    std::optional<std::thread> saver;
    std::map<std::int64_t, std::uint64_t> wanted;
    const bool is_beside = round % 3 > 0;
    for (int step = 0; step < 20; ++step) {
      if (step == 8) {
        check_tier_below();
        wanted = clocks;
        committed = below;
        dram.begin_snapshot();
        CHECK_THROWS(dram.begin_snapshot(), std::invalid_argument, "already");
        if (is_beside) {
          saver.emplace([&] {
            while (dram.save_some(0, 5, left.sink())) std::this_thread::yield();
          });
        }
      }
      std::set<std::int64_t> chosen;
      while (static_cast<std::int64_t>(chosen.size()) < capacity / 3)
        chosen.insert(static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(universe))));
      const std::vector<std::int64_t> ids(chosen.begin(), chosen.end());
      const std::int64_t offsets[] = {0, static_cast<std::int64_t>(ids.size())};
      std::vector<std::uint32_t> slots(ids.size());
      const Acquired acquired = dram.acquire(ids, offsets, {}, slots, true, left.sink());
      check_tier_below();
      for (const auto position : acquired.missing) set_row(dram, slots[position], below[ids[position]]);
      const bool is_dirty = random.below(3);
      if (is_dirty) dram.save(slots, offsets, left.sink());
      for (std::size_t i = 0; i < ids.size(); ++i) {
        CHECK(dram.layout(0).clock_of(slots[i]) == clocks[ids[i]]);
        if (is_dirty) set_row(dram, slots[i], ++clocks[ids[i]]);
      }
      dram.release(slots, offsets, is_dirty);
      if (round % 2) {
        dram.resize(0, capacity / 3 + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(capacity))), left.sink());
        check_tier_below();
      }
      if (step % 5 == 4) {
        const std::int64_t gone[] = {static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(universe)))};
        dram.erase(0, gone, left.sink());
        check_tier_below();
        clocks.erase(gone[0]);
        below.erase(gone[0]);
      }
    }
    if (saver) saver->join();
    const bool is_abandoned = round % 5 == 4;
    while (!is_abandoned && dram.save_some(0, 7, left.sink())) {
    }
    dram.end_snapshot();
    check_tier_below();
    if (is_abandoned) {  // the next one has what was not saved
      wanted = clocks;
      committed = below;
      dram.begin_snapshot();
      while (dram.save_some(0, 7, left.sink())) {
      }
      dram.end_snapshot();
      check_tier_below();
    }
    for (const auto& [id, clock] : wanted) CHECK(committed[id] == clock);
  }
}

// An append that fails loses nothing: who was to leave stays, and nobody is pinned.
void sinks_may_fail() {
  const TableSettings settings = table(0, 8);
  Dram dram({&settings, 1}, {Dtype::float32});
  const std::int64_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8}, offsets[] = {0, 8};
  std::uint32_t slots[8];
  dram.acquire(ids, offsets, {}, slots, true, nowhere);
  for (const auto slot : slots) set_row(dram, slot, 1);
  dram.release(slots, offsets, true);
  const TableSink full = [](std::int64_t, const EvictedRows&) { throw NoRoom("full"); };
  const std::int64_t others[] = {11, 12, 1, 2}, other_offsets[] = {0, 4};
  std::uint32_t other_slots[4];
  CHECK_THROWS(dram.acquire(others, other_offsets, {}, other_slots, true, full), NoRoom, "full");
  CHECK(dram.resident(0, true).size() == 8 && dram.num_rows(0) == 8);
  CHECK_THROWS(dram.release(other_slots, other_offsets, false), std::invalid_argument, "not pinned");
  CHECK_THROWS(dram.write_dirty(0, 100, full), NoRoom, "full");
  CHECK(dram.resident(0, true).size() == 8);
  Left left(dram);
  dram.acquire(others, other_offsets, {}, other_slots, true, left.sink());
  CHECK(left.tables[0].ids.size() == 2);
}

}  // namespace

int main() {
  nothing_is_lost(0, 1, 3);
  nothing_is_lost(0, 50, 40);
  nothing_is_lost(0, 50, 400);
  nothing_is_lost(1'000, 300, 1'000);
  nothing_is_lost(0, 50, 400, 120);
  nothing_is_lost(1'000, 300, 1'000, 900);
  resizes_have_bounds_and_leave_direct_tables_alone();
  nothing_is_lost(300, 300, 300);
  for (const std::int64_t rows : {0, 200, 60}) snapshots_are_of_their_moment(rows, 60, rows ? rows : 150);
  sinks_may_fail();
  refused_acquires_leave_no_trace();
  initial_values_depend_on_seed_and_id_alone();
}
