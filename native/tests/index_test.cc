#include <map>
#include <unordered_map>

#include "../crc32c.h"
#include "../index.h"
#include "../row_index.h"
#include "check.h"

using namespace colonnade;

namespace {

void random_operations_match_a_map(std::uint64_t universe) {
  Random random(universe);
  RowIndex index;
  std::map<std::int64_t, std::int64_t> model;
  for (int step = 0; step < 300; ++step) {
    std::vector<std::int64_t> ids(random.below(200)), values(ids.size()), positions(ids.size());
    for (auto& id : ids) id = static_cast<std::int64_t>(mix64(random.below(universe)));
    for (auto& value : values) value = static_cast<std::int64_t>(random.next() >> 1);
    switch (random.below(3)) {
      case 0:
        index.put(ids, values);
        for (std::size_t i = 0; i < ids.size(); ++i) model[ids[i]] = values[i];
        break;
      case 1:
        index.erase(ids);
        for (const auto id : ids) model.erase(id);
        break;
      default:
        index.get(ids, positions);
        for (std::size_t i = 0; i < ids.size(); ++i) {
          const auto at = model.find(ids[i]);
          CHECK(positions[i] == (at == model.end() ? RowIndex::kAbsent : at->second));
        }
    }
    CHECK(index.size() == static_cast<std::int64_t>(model.size()));
  }
  const auto items = index.items();
  CHECK(std::equal(items.begin(), items.end(), model.begin(), model.end(),
                   [](const auto& a, const auto& b) { return a.first == b.first && a.second == b.second; }));
}

// Ids by slot, as a table keeps them.
struct Ids {
  std::vector<std::int64_t> by_slot;
  std::int64_t operator()(std::uint32_t slot) const { return by_slot[slot]; }
  void fetch(std::uint32_t slot) const { __builtin_prefetch(&by_slot[slot]); }
};

// The id whose hash is `word`: mix64 backwards.
std::int64_t unmix64(std::uint64_t word) {
  const auto unshift = [](std::uint64_t x, int bits) {
    std::uint64_t y = x;
    for (int i = 0; i < 64 / bits; ++i) y = x ^ (y >> bits);
    return y;
  };
  word = unshift(word, 31) * 0x319642b2d24d8ec3u;
  word = unshift(word, 27) * 0x96de1b173f119089u;
  return static_cast<std::int64_t>(unshift(word, 30));
}

// Steps that insert and erase while it grows. An insertion moves the buckets it needs and no more, and a row costs 7
// bytes at any time, above a few thousand.
template <class IdOf>
void index_matches_a_map(std::int64_t step, std::int64_t total, const IdOf& id_of) {
  Random random(static_cast<std::uint64_t>(total));
  SlotIndex index(0);
  Ids ids;
  std::unordered_map<std::int64_t, std::uint32_t> model;
  std::vector<std::uint32_t> freed;
  std::uint64_t next = 0;
  while (static_cast<std::int64_t>(model.size()) < total) {
    const std::uint64_t moved = index.num_moved();
    const auto wanted = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(step))) + 1;
    const auto size = static_cast<std::int64_t>(model.size()) + wanted;
    index.reserve(size);
    index.grow(ids);
    if (size > step)  // a fifth more buckets is one move of each: 5 for each that is added
      CHECK(index.num_moved() - moved <= 5.5 * static_cast<double>(wanted) / 9.42 + 6);
    for (std::int64_t i = 0; i < wanted; ++i) {
      const std::int64_t id = id_of(next++);
      if (freed.empty()) {
        freed.push_back(static_cast<std::uint32_t>(ids.by_slot.size()));
        ids.by_slot.push_back(0);
      }
      const std::uint32_t slot = freed.back();
      freed.pop_back();
      ids.by_slot[slot] = id;
      CHECK(index.find(id, ids) == SlotIndex::kAbsent);
      index.insert(id, slot);
      model[id] = slot;
    }
    if (size >= 100'000) CHECK(index.bytes() <= 7 * size);
    for (std::int64_t i = 0; i < wanted / 4; ++i) {
      const std::int64_t id = id_of(random.below(next));
      const auto at = model.find(id);
      CHECK(index.find(id, ids) == (at == model.end() ? SlotIndex::kAbsent : at->second));
      if (at == model.end()) continue;
      index.erase(id, at->second);
      freed.push_back(at->second);
      model.erase(at);
    }
  }
  std::vector<std::int64_t> all(next);
  for (std::uint64_t i = 0; i < next; ++i) all[i] = id_of(i);
  index.for_each(all, ids, [&](std::int64_t i, std::uint32_t slot) {
    const auto at = model.find(all[i]);
    CHECK(slot == (at == model.end() ? SlotIndex::kAbsent : at->second));
  });
  std::vector<std::uint32_t> slots(all.size());
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{64}, std::size_t{65}, all.size()}) {
    if (n > all.size()) continue;
    index.find_all(std::span(all).first(n), ids, slots.data());
    for (std::size_t i = 0; i < n; ++i) {
      const auto at = model.find(all[i]);
      CHECK(slots[i] == (at == model.end() ? SlotIndex::kAbsent : at->second));
    }
  }
}

void an_index_that_cannot_grow_is_unchanged() {
  SlotIndex index(0);
  Ids ids{{5}};
  index.reserve(1);
  index.grow(ids);
  index.insert(5, 0);
  CHECK_THROWS(index.reserve(std::int64_t{1} << 50), NoRoom, "lower the table's capacity");
  CHECK(index.find(5, ids) == 0 && index.find(6, ids) == SlotIndex::kAbsent);
  index.reserve(100);
  index.grow(ids);
  CHECK(index.find(5, ids) == 0);
}

void a_row_at_rest_takes_23_bytes() {
  RowIndex index;
  for (std::uint64_t n = 0; n < 300'000;) {
    std::vector<std::int64_t> ids(3'000), values(3'000, 1);
    for (auto& id : ids) id = static_cast<std::int64_t>(mix64(++n));
    index.put(ids, values);
    if (n >= 100'000) CHECK(index.bytes() <= static_cast<std::int64_t>(23 * n));
  }
}

void checksum() {
  CHECK(crc32c(0, "123456789", 9) == 0xe3069283u);
  std::vector<unsigned char> data(10'000);
  Random random(7);
  for (auto& byte : data) byte = static_cast<unsigned char>(random.next());
  const std::uint32_t whole = crc32c(0, data.data(), data.size());
  for (const std::size_t cut : {0u, 1u, 8u, 3071u, 3072u, 9'999u}) {
    CHECK(crc32c(crc32c(0, data.data(), cut), data.data() + cut, data.size() - cut) == whole);
  }
  data[5'000] ^= 1;
  CHECK(crc32c(0, data.data(), data.size()) != whole);
}

}  // namespace

int main() {
  random_operations_match_a_map(50);
  random_operations_match_a_map(3'000);
  random_operations_match_a_map(1'000'000);
  index_matches_a_map(3, 500, [](std::uint64_t i) { return static_cast<std::int64_t>(i) - 200; });
  index_matches_a_map(50, 5'000, [](std::uint64_t i) { return static_cast<std::int64_t>(mix64(i)); });
  index_matches_a_map(4'096, 300'000, [](std::uint64_t i) { return static_cast<std::int64_t>(mix64(~i)); });
  // All at home in the first bucket, in the last, and in two in the middle; their tags agree.
  index_matches_a_map(20, 1'000, [](std::uint64_t i) { return unmix64(i << 40); });
  index_matches_a_map(20, 1'000, [](std::uint64_t i) { return unmix64(i << 40 | 0xffffffff); });
  index_matches_a_map(20, 1'000, [](std::uint64_t i) { return unmix64(i << 40 | (i % 2 ? 0x80000000 : 0x7fffffff)); });
  an_index_that_cannot_grow_is_unchanged();
  a_row_at_rest_takes_23_bytes();
  checksum();
}
