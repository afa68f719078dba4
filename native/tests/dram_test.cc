#include "../dram.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>

#include "check.h"

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

// Random acquires and releases against a map of clocks: nothing updated is ever lost.
void nothing_is_lost(std::int64_t rows, std::int64_t capacity, std::int64_t universe) {
  const TableSettings settings = table(rows, capacity);
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
    const Acquired acquired = dram.acquire(ids, offsets, slots, false);
    num_evicted += acquired.num_evicted;
    for (std::size_t i = 0; i < acquired.evicted_ids.size(); ++i) {
      const auto id = acquired.evicted_ids[i];
      below[id] = clock_in(acquired.evicted_records[0].data() + i * kRecordBytes);
      CHECK(below[id] == clocks[id]);
    }
    for (const auto position : acquired.missing) {
      dram.birth(0, {&ids[position], 1}, {&slots[position], 1});
      std::vector<std::byte> record(kRecordBytes);
      dram.pack(0, {&slots[position], 1}, record.data());
      std::memcpy(record.data() + kRecordBytes - 8, &below[ids[position]], 8);
      dram.unpack(0, {&slots[position], 1}, record.data());
    }
    const bool is_dirty = random.below(2);
    const auto found = dram.clocks(0, slots);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      CHECK(static_cast<std::uint64_t>(found[i]) == clocks[ids[i]]);
      if (is_dirty) dram.layout(0).clock_of(slots[i]) = static_cast<std::uint32_t>(++clocks[ids[i]]);
    }
    CHECK(dram.num_rows(0) <= capacity);
    dram.release(slots, offsets, is_dirty);
  }
  CHECK((num_evicted > 0) == (capacity < universe));
}

void refused_acquires_leave_no_trace() {
  const TableSettings settings[] = {table(0, 4), table(100, 4)};
  Dram dram(settings, {Dtype::float32});
  const std::int64_t first_ids[] = {1, 2, 7}, first_offsets[] = {0, 2, 3};
  std::uint32_t first_slots[3];
  dram.acquire(first_ids, first_offsets, first_slots, true);
  const std::int64_t ids[] = {1, 3, 8, 9, 10, 11}, offsets[] = {0, 2, 6};
  std::uint32_t slots[6];
  CHECK_THROWS(dram.acquire(ids, offsets, slots, true), NoRoom, "table 1 needs 4 slots of 4, 1 pinned");
  const std::int64_t outside[] = {1, 3, 8, 100, 10, 11};
  CHECK_THROWS(dram.acquire(outside, offsets, slots, true), std::out_of_range,
               "table 1 position 1 id 100 rows 100");
  CHECK(std::all_of(slots, slots + 6, [](auto slot) { return slot == kNoSlot; }));
  CHECK(dram.num_rows(0) == 2 && dram.num_rows(1) == 1);
  dram.release(first_slots, first_offsets, false);
  CHECK_THROWS(dram.release(first_slots, first_offsets, false), std::invalid_argument, "not pinned");
  dram.acquire(ids, offsets, slots, true);
  CHECK(dram.num_rows(1) == 4);
}

void births_depend_on_seed_and_id_alone() {
  const TableSettings settings = table(0, 1'000);
  std::vector<std::int64_t> ids(1'000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(mix64(i));
  std::vector<float> wanted;
  everywhere([&] {
    Dram dram({&settings, 1}, {Dtype::float32});
    std::vector<float> born(4'000), read(4'000);
    dram.birth_values(0, ids, reinterpret_cast<std::byte*>(born.data()));
    std::vector<std::uint32_t> slots(ids.size());
    const std::int64_t offsets[] = {0, 1'000};
    dram.acquire(ids, offsets, slots, true);
    CHECK(dram.read(0, ids, reinterpret_cast<std::byte*>(read.data())).empty());
    CHECK(born == read);
    if (wanted.empty()) wanted = born;
    CHECK(born == wanted);
  });
}

}  // namespace

int main() {
  nothing_is_lost(0, 1, 3);
  nothing_is_lost(0, 50, 40);
  nothing_is_lost(0, 50, 400);
  nothing_is_lost(1'000, 300, 1'000);
  nothing_is_lost(300, 300, 300);
  refused_acquires_leave_no_trace();
  births_depend_on_seed_and_id_alone();
}
