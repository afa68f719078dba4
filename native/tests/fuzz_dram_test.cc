// Random calls on a Dram, every third one a little damaged, against a map of who is there and how often
// pinned; and on a RowIndex against a map.
#include <deque>
#include <map>
#include <optional>
#include <set>

#include "../dram.h"
#include "../row_index.h"
#include "fuzz.h"
#include "evicted_rows.h"

using namespace colonnade;

namespace {

constexpr std::int64_t kTables = 3;

// All that can be seen of a Dram.
struct Sight {
  std::vector<std::vector<std::pair<std::int64_t, std::uint32_t>>> resident, dirty;
  std::vector<std::vector<std::byte>> records;
  std::vector<std::int64_t> num_rows;
  bool operator==(const Sight&) const = default;

  explicit Sight(const Dram& dram) {
    for (std::int64_t t = 0; t < kTables; ++t) {
      resident.push_back(dram.resident(t, false));
      dirty.push_back(dram.resident(t, true));
      num_rows.push_back(dram.num_rows(t));
      std::vector<std::uint32_t> slots;
      for (const auto& [id, slot] : resident.back()) slots.push_back(slot);
      auto& mine = records.emplace_back(slots.size() * dram.layout(t).record_bytes());
      dram.pack(t, slots, mine.data());
    }
  }
};

struct Request {
  std::vector<std::int64_t> ids, offsets;
  std::vector<std::uint32_t> slots;
};

class Session {
 public:
  explicit Session(std::uint64_t seed) : fuzz_(seed) {
    format_.dtype = fuzz_.pick({Dtype::float32, Dtype::float64, Dtype::bfloat16, Dtype::float16});
    format_.is_split = format_.dtype == Dtype::bfloat16 && fuzz_.one_in(2);
    const std::int64_t rows[] = {0, 97,
                                 fuzz_.pick<std::int64_t>({1, 40, std::numeric_limits<std::int64_t>::max()})};
    for (const auto n : rows) {
      const std::int64_t dim = fuzz_.pick<std::int64_t>({1, 3, 16, 17, 64}),
                         state = fuzz_.pick<std::int64_t>({0, 1, 5});
      tables_.push_back({{{.dim = dim,
                           .state = state / 2,
                           .init_scale = 0.5,
                           .initial_state = 0.25,
                           .initial_count = state - state / 2},
                          {.dim = 3, .init_scale = 0.25}},
                         state,
                         n,
                         fuzz_.pick<std::int64_t>({0, 1, 13, 50, 120}),
                         seed});
      auto& table = tables_.back();
      table.num_owners = fuzz_.pick<std::int64_t>({1, 1, 2, 3});
      table.place = fuzz_.one_in(8) ? VocabularyShare::kNone
                                    : static_cast<std::int64_t>(fuzz_.below(static_cast<std::uint64_t>(table.num_owners)));
    }
    dram_.emplace(tables_, format_);
  }

  void run() {
    for (int step = 0; step < 60; ++step) {
      run_anywhere(fuzz_);
      switch (fuzz_.below(6)) {
        case 0:
        case 1:
          acquire();
          break;
        case 2:
          release();
          break;
        case 3:
          erase();
          break;
        case 4:
          read();
          break;
        default:
          visit_slots();
      }
    }
    while (!requests_.empty()) {
      dram_->release(requests_.front().slots, requests_.front().offsets, false);
      requests_.pop_front();
    }
    for (std::int64_t t = 0; t < kTables; ++t) {  // nothing is left pinned: all of it can go
      std::vector<std::int64_t> ids;
      for (const auto& [id, slot] : dram_->resident(t, false)) ids.push_back(id);
      dram_->erase(t, ids, nowhere);
      CHECK(dram_->num_rows(t) == 0 && dram_->resident(t, false).empty());
    }
  }

 private:
  // call() is refused only if it is wrong, and then changes nothing.
  template <class Call>
  bool accepts(bool is_wrong, const Call& call) {
    const Sight before(*dram_);
    const bool is_fine = is_accepted(call);
    CHECK(is_fine || is_wrong);
    CHECK(is_fine || before == Sight(*dram_));
    return is_fine;
  }

  bool is_resident(std::int64_t t, std::int64_t id) const {
    const auto rows = dram_->resident(t, false);
    return std::ranges::any_of(rows, [id](const auto& row) { return row.first == id; });
  }
  bool is_mine(std::int64_t t, std::int64_t id) const {
    if (tables_[t].place == VocabularyShare::kNone) return false;
    if (tables_[t].rows == 0) return true;
    return id >= 0 && id < tables_[t].rows &&
           vocabulary_owner(static_cast<std::uint64_t>(id), static_cast<std::uint32_t>(tables_[t].num_owners)) ==
               static_cast<std::uint32_t>(tables_[t].place);
  }
  // Of any table, now and then of none.
  std::int64_t any_table() {
    return fuzz_.one_in(10) ? fuzz_.pick<std::int64_t>({-1, kTables, std::int64_t{1} << 40})
                            : static_cast<std::int64_t>(fuzz_.below(kTables));
  }
  static bool is_table(std::int64_t t) { return t >= 0 && t < kTables; }
  std::int64_t any_id() { return fuzz_.one_in(4) ? fuzz_.id() : static_cast<std::int64_t>(fuzz_.below(100)); }

  void acquire() {
    Request request{{}, {0}, {}};
    std::vector<bool> fits(kTables);  // surely
    for (std::int64_t t = 0; t < kTables; ++t) {
      std::set<std::int64_t> chosen;
      for (auto n = fuzz_.below(fuzz_.pick<std::uint64_t>({1, 3, 14, 60})); n > 0; --n) {
        const std::int64_t id = any_id();
        if (is_mine(t, id)) chosen.insert(id);
      }
      request.ids.insert(request.ids.end(), chosen.begin(), chosen.end());
      request.offsets.push_back(static_cast<std::int64_t>(request.ids.size()));
      auto pinned = chosen;
      for (const auto& other : requests_)
        pinned.insert(other.ids.begin() + other.offsets[t], other.ids.begin() + other.offsets[t + 1]);
      fits[t] = static_cast<std::int64_t>(pinned.size()) <= dram_->capacity_rows(t);
    }
    bool is_wrong = std::ranges::count(fits, true) < kTables;
    if (fuzz_.one_in(3)) {
      is_wrong = true;
      fuzz_.damage(fuzz_.one_in(2) ? request.ids : request.offsets);
    }
    request.ids = {request.ids.begin(), request.ids.end()};
    request.slots.assign(request.ids.size(), 7);
    const bool is_initialising = fuzz_.one_in(2);
    Acquired acquired;
    Left left(*dram_);
    std::vector<std::uint8_t> hints(fuzz_.one_in(3) ? request.ids.size() : 0);
    for (auto& code : hints) code = static_cast<std::uint8_t>(fuzz_.next());
    if (fuzz_.one_in(20)) hints.push_back(1);
    is_wrong |= !hints.empty() && hints.size() != request.ids.size();
    if (!accepts(is_wrong,
                 [&] { acquired = dram_->acquire(request.ids, request.offsets, hints, request.slots, is_initialising, left.sink()); }))
      return;
    std::int64_t num_evicted = 0;
    for (std::int64_t t = 0; t < kTables; ++t) {
      const auto evicted = static_cast<std::int64_t>(left.tables[t].ids.size());
      num_evicted += evicted;
      for (std::int64_t i = request.offsets[t]; i < request.offsets[t + 1]; ++i) {
        CHECK(request.slots[i] < dram_->capacity_rows(t));
        const bool is_missing = std::ranges::binary_search(acquired.missing, static_cast<std::int32_t>(i));
        if (is_missing && !is_initialising) dram_->initialise(t, {&request.ids[i], 1}, {&request.slots[i], 1});
        if (fuzz_.one_in(2)) dram_->layout(t).clock_of(request.slots[i]) = 5;
      }
      CHECK(dram_->num_rows(t) <= dram_->capacity_rows(t));
    }
    CHECK(num_evicted <= acquired.num_evicted &&
          num_evicted == acquired.num_evicted_dirty);
    requests_.push_back(std::move(request));
    for (const auto& held : requests_) {  // who is pinned stays where it is
      for (std::int64_t t = 0; t < kTables; ++t) {
        const auto rows = dram_->resident(t, false);
        for (std::int64_t i = held.offsets[t]; i < held.offsets[t + 1]; ++i)
          CHECK(std::ranges::binary_search(rows, std::pair(held.ids[i], held.slots[i])));
      }
    }
  }

  void release() {
    if (requests_.empty()) return;
    std::swap(requests_.front(), requests_[fuzz_.below(requests_.size())]);
    Request request = requests_.front();
    if (fuzz_.one_in(
            3)) {  // what is wrong and passes cannot be told from another batch's release: it must be refused
      if (fuzz_.one_in(2)) {
        fuzz_.damage(request.offsets);
        if (request.offsets == requests_.front().offsets) return;
        if (is_accepted([&] { check_parts(request.offsets, kTables, request.slots.size(), "slots"); }))
          return;
        CHECK(!accepts(true, [&] { dram_->release(request.slots, request.offsets, true); }));
        return;
      }
      if (!request.slots.empty()) {
        const std::size_t at = fuzz_.below(request.slots.size());
        request.slots[at] = fuzz_.pick<std::uint32_t>({kNoSlot, 120, 1u << 31});
        if (request.slots[at] != requests_.front().slots[at]) {
          CHECK(!is_accepted([&] { dram_->release(request.slots, request.offsets, true); }));
          keep_unreleased(requests_.front(), static_cast<std::int64_t>(at));
          return;
        }
      }
    }
    dram_->release(request.slots, request.offsets, fuzz_.one_in(2));
    requests_.pop_front();
  }

  // What a release leaves pinned that is wrong at `at`: that row, or all of a table that has no pins by row.
  void keep_unreleased(Request& request, std::int64_t at) const {
    std::int64_t t = 0;
    while (at >= request.offsets[t + 1]) ++t;
    const bool is_direct = !dram_->layout(t).ids;
    const std::int64_t first = is_direct ? request.offsets[t] : at, last = is_direct ? request.offsets[t + 1] : at + 1;
    Request left{{request.ids.begin() + first, request.ids.begin() + last},
                 std::vector<std::int64_t>(kTables + 1, 0),
                 {request.slots.begin() + first, request.slots.begin() + last}};
    std::fill(left.offsets.begin() + t + 1, left.offsets.end(), last - first);
    request = std::move(left);
  }

  void erase() {
    const std::int64_t t = any_table();
    std::vector<std::int64_t> ids(fuzz_.pick<std::size_t>({0, 1, 17}));
    for (auto& id : ids) id = any_id();
    if (!accepts(!is_table(t), [&] { dram_->erase(t, ids, nowhere); })) return;
    std::set<std::int64_t> pinned;
    for (const auto& held : requests_)
      pinned.insert(held.ids.begin() + held.offsets[t], held.ids.begin() + held.offsets[t + 1]);
    for (const auto id : ids) {
      if (pinned.count(id)) CHECK(is_resident(t, id));
      if (requests_.empty()) CHECK(!is_resident(t, id));
    }
  }

  void read() {
    const std::int64_t t = any_table();
    std::vector<std::int64_t> ids(fuzz_.pick<std::size_t>({0, 1, 5, 71}));
    for (auto& id : ids) id = any_id();
    const std::int64_t row = is_table(t) ? dram_->layout(t).weights_bytes() : 8;
    const Block out(ids.size() * static_cast<std::size_t>(row)), born(out.size());
    std::vector<std::int32_t> absent;
    if (!accepts(!is_table(t), [&] {
          absent = dram_->read(t, ids, out.data());
          dram_->initial_values(t, ids, born.data());
        })) {
      CHECK(out.is_untouched() && born.is_untouched());
      return;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
      CHECK(std::ranges::binary_search(absent, static_cast<std::int32_t>(i)) != is_resident(t, ids[i]));
      const bool is_written = std::ranges::any_of(std::span(out.data() + i * row, row),
                                                  [](std::byte b) { return b != std::byte{0x5a}; });
      CHECK(is_written == is_resident(t, ids[i]));
      CHECK(!is_written ||
            std::memcmp(out.data() + i * row, born.data() + i * row, row) == 0);  // nobody trains
    }
  }

  // pack, unpack, clocks, initialise and clean of rows that are here, or of slots that no table has.
  void visit_slots() {
    const std::int64_t t = any_table();
    std::vector<std::uint32_t> slots;
    std::vector<std::int64_t> ids;
    if (is_table(t)) {
      for (const auto& [id, slot] : dram_->resident(t, false)) {
        ids.push_back(id);
        slots.push_back(slot);
      }
    }
    bool is_wrong = !is_table(t);
    if (fuzz_.one_in(3)) {
      is_wrong = true;
      slots.push_back(fuzz_.pick<std::uint32_t>({kNoSlot, 1u << 31, 120}));
      ids.push_back(0);
    }
    slots = {slots.begin(), slots.end()};
    const Block records(slots.size() *
                        static_cast<std::size_t>(is_table(t) ? dram_->layout(t).record_bytes() : 8));
    if (!accepts(is_wrong, [&] { dram_->pack(t, slots, records.data()); })) {
      CHECK(records.is_untouched());
      CHECK(!accepts(true, [&] { dram_->unpack(t, slots, records.data()); }));
      CHECK(!accepts(true, [&] { dram_->clocks(t, slots); }));
      CHECK(!accepts(true, [&] { dram_->initialise(t, ids, slots); }));
      CHECK(!accepts(true, [&] { dram_->clean(t, slots); }));
      return;
    }
    const Sight before(*dram_);
    const auto clocks = dram_->clocks(t, slots);
    dram_->initialise(t, ids, slots);
    CHECK(std::ranges::count(dram_->clocks(t, slots), 0) == static_cast<std::int64_t>(slots.size()));
    dram_->unpack(t, slots, records.data());
    CHECK(dram_->clocks(t, slots) == clocks && before == Sight(*dram_));
    dram_->clean(t, slots);
    CHECK(dram_->resident(t, true).empty());
  }

  Fuzz fuzz_;
  RowFormat format_{Dtype::float32};
  std::vector<TableSettings> tables_;
  std::optional<Dram> dram_;
  std::deque<Request> requests_;
};

// Settings that cannot be, and some that can.
void fuzz_settings(std::uint64_t seed) {
  Fuzz fuzz(seed);
  const auto number = [&](std::int64_t usual) {
    return fuzz.one_in(4) ? fuzz.pick<std::int64_t>(
                                {-1, 0, std::int64_t{1} << 31, (std::int64_t{1} << 32) - 1, fuzz.id()})
                          : usual;
  };
  TableSettings table{{}, number(2), number(9), number(4), 1};
  for (auto n = fuzz.below(3); n > 0; --n)
    table.parts.push_back(
        {.dim = number(3), .state = number(0), .init_scale = fuzz.real(), .initial_count = number(2)});
  table.num_owners = number(1);
  table.place = number(0);
  const RowFormat format{fuzz.pick({Dtype::float32, Dtype::bfloat16}), fuzz.one_in(3)};
  std::optional<Dram> dram;
  if (!is_accepted([&] { dram.emplace(std::span(&table, 1), format); })) return;
  const std::int64_t id = fuzz.id(), offsets[] = {0, 1};
  std::uint32_t slot = 0;
  if (dram->layout(0).record_bytes() > 1 << 20) return;  // a row that could be, of gigabytes
  if (is_accepted([&] { dram->acquire({&id, 1}, offsets, {}, {&slot, 1}, true, nowhere); }))
    dram->release({&slot, 1}, offsets, true);
}

void fuzz_index(std::uint64_t seed) {
  Fuzz fuzz(seed);
  RowIndex index;
  std::map<std::int64_t, std::int64_t> map;
  const std::uint64_t universe = fuzz.pick<std::uint64_t>({1, 20, 3000});
  const auto any_id = [&] {
    return fuzz.one_in(8) ? fuzz.id() : static_cast<std::int64_t>(mix64(fuzz.below(universe)));
  };
  for (int step = 0; step < 40; ++step) {
    std::vector<std::int64_t> ids(fuzz.pick<std::size_t>({0, 1, 2, 63, 64, 65, 300})), values(ids.size());
    for (auto& id : ids) id = any_id();
    for (auto& value : values) value = fuzz.one_in(1000) ? -1 : static_cast<std::int64_t>(fuzz.next() >> 1);
    if (fuzz.one_in(3)) {
      index.erase(ids);
      for (const auto id : ids) map.erase(id);
    } else if (is_accepted([&] { index.put(ids, values); })) {
      for (std::size_t i = 0; i < ids.size(); ++i) map[ids[i]] = values[i];
    } else {
      CHECK(std::ranges::count(values, -1) > 0);
    }
    std::vector<std::int64_t> positions(ids.size());
    index.get(ids, positions);
    for (std::size_t i = 0; i < ids.size(); ++i) CHECK(positions[i] == (map.count(ids[i]) ? map[ids[i]] : -1));
    CHECK(index.size() == static_cast<std::int64_t>(map.size()));
  }
  const auto items = index.items();
  CHECK(std::ranges::equal(
      items, map, [](const auto& a, const auto& b) { return a.first == b.first && a.second == b.second; }));
}

}  // namespace

int main(int argc, char** argv) {
  for_each_seed(argc, argv, 400, [](std::uint64_t seed) {
    Session(seed).run();
    for (std::uint64_t i = 0; i < 10; ++i) fuzz_settings(seed * 10 + i);
    fuzz_index(seed);
  });
}
