// What is packed comes back: ids of any table and owner, in order and as listed, of any number.
#include "../packing.h"

#include <algorithm>
#include <limits>
#include <set>

#include "../hash.h"
#include "check.h"

using namespace colonnade;

namespace {

std::uint32_t owner_of(std::int64_t id, const IdSpace& space) {
  const auto n = static_cast<std::uint32_t>(space.num_owners);
  return space.rows ? vocabulary_owner(static_cast<std::uint64_t>(id), n) : open_owner(id, n);
}

void sort_as_planned(std::vector<std::int64_t>& ids, const IdSpace& space) {
  std::sort(ids.begin(), ids.end(), [&](std::int64_t a, std::int64_t b) {
    if (space.rows) return a / space.num_owners < b / space.num_owners;
    return mix64(static_cast<std::uint64_t>(a)) < mix64(static_cast<std::uint64_t>(b));
  });
}

std::size_t comes_back(const std::vector<std::int64_t>& ids, const IdSpace& space, bool is_ascending) {
  std::vector<std::uint8_t> out{0xaa};
  Packer(out).list(ids, space, is_ascending);
  std::vector<std::int64_t> unpacked{-7};
  const std::span<const std::uint8_t> message = std::span<const std::uint8_t>(out).subspan(1);
  Unpacker unpacker(message);
  CHECK(unpacker.list(space, is_ascending, unpacked) == static_cast<std::int64_t>(ids.size()));
  CHECK(unpacker.position() == out.size() - 1);
  CHECK(unpacked.front() == -7 && std::equal(ids.begin(), ids.end(), unpacked.begin() + 1, unpacked.end()));
  // Any shorter message is refused, whatever lies behind it.
  for (std::size_t size = 0; size + 1 < out.size(); size += 1 + size / 8) {
    const std::vector<std::uint8_t> cut(message.begin(), message.begin() + static_cast<std::ptrdiff_t>(size));
    CHECK_THROWS(Unpacker{cut}.list(space, is_ascending, unpacked), std::invalid_argument, "message of ids");
  }
  return out.size() - 1;
}

void numbers_come_back() {
  Random random(1);
  for (int round = 0; round < 2'000; ++round) {
    std::vector<std::uint64_t> values(random.below(400));
    const auto width = random.below(65);
    for (auto& value : values) value = width ? random.next() >> (64 - width) : 0;
    std::vector<std::uint8_t> out;
    Packer(out).numbers(values);
    std::vector<std::uint64_t> unpacked(values.size());
    Unpacker unpacker(out);
    unpacker.numbers(unpacked);
    CHECK(unpacked == values && unpacker.position() == out.size());
    CHECK(out.size() <= (values.size() * width + 7) / 8 + 2 * (values.size() + 127) / 128 + 1);
  }
  for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{127}, std::uint64_t{128}, ~std::uint64_t{0}}) {
    std::vector<std::uint8_t> out;
    Packer(out).varint(value);
    CHECK(Unpacker(out).varint() == value);
  }
}

void ids_come_back() {
  Random random(2);
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max(), kLeast = std::numeric_limits<std::int64_t>::min();
  for (int round = 0; round < 3'000; ++round) {
    IdSpace space{0, static_cast<std::int64_t>(random.below(9)) + 1, 0};
    space.place = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(space.num_owners)));
    const std::int64_t sizes[] = {0, 0, 1, 2, 97, 100'000, kMost};
    space.rows = sizes[random.below(7)];
    const auto kind = random.below(4);
    std::set<std::int64_t> drawn;
    const auto wanted = random.below(300);
    for (std::uint64_t i = 0; i < 4 * wanted; ++i) {
      std::int64_t id = static_cast<std::int64_t>(random.next());
      if (space.rows) {
        id = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(space.rows)));
      } else if (kind == 1) {
        id = static_cast<std::int64_t>(random.below(1'000)) - 500;
      } else if (kind == 2) {
        id = random.below(2) ? kMost - static_cast<std::int64_t>(random.below(3)) : kLeast + static_cast<std::int64_t>(random.below(3));
      }
      if (owner_of(id, space) == static_cast<std::uint32_t>(space.place)) drawn.insert(id);
    }
    std::vector<std::int64_t> ids(drawn.begin(), drawn.end());
    sort_as_planned(ids, space);
    comes_back(ids, space, true);
    for (std::size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[random.below(i)]);
    if (!ids.empty()) ids.push_back(ids.front());  // as listed, an id may come twice
    comes_back(ids, space, false);
  }
}

// All rows of a vocabulary take a byte for 128 of them.
void a_whole_table_costs_nothing() {
  const IdSpace space{100'000, 1, 0};
  std::vector<std::int64_t> ids(100'000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  CHECK(comes_back(ids, space, true) == 3 + (100'000 + 127) / 128);
}

void hostile_messages_are_refused() {
  std::vector<std::int64_t> ids;
  const auto refused = [&](std::vector<std::uint8_t> bytes, IdSpace space, bool is_ascending, const char* why) {
    bytes.shrink_to_fit();
    CHECK_THROWS(Unpacker{bytes}.list(space, is_ascending, ids), std::invalid_argument, why);
  };
  refused({}, {10, 1, 0}, true, "an end after 0 bytes");
  refused({0xff, 0xff, 0xff, 0xff, 0x0f, 0}, {1 << 30, 1, 0}, true, "4294967295 ids in 1 bytes");
  refused({0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02}, {10, 1, 0}, true, "more than 64 bits");
  refused({2, 65, 0, 0}, {10, 1, 0}, true, "65 bits");
  refused({2, 8, 1}, {10, 1, 0}, true, "wanted 2");
  refused({2, 8, 9, 0}, {10, 1, 0}, true, "beyond its table");   // 9, then 10
  refused({1, 8, 10}, {10, 1, 0}, false, "beyond its table");
  refused({1, 64, 255, 255, 255, 255, 255, 255, 255, 255}, {10, 1, 0}, true, "beyond its table");
  refused({1, 4, 0x11}, {10, 1, 0}, true, "bits after");
  refused({1, 2, 0, 0}, {0, 1, 0}, true, "kind 2");
  refused({1, 0, 0}, {0, 1, 0}, false, "kind 0");  // hashes ascend
  // An open table's hash 0 belongs to the first of two owners; 2^63 to the second.
  refused({1, 1, 0, 0}, {0, 2, 1}, true, "another owner");
  refused({1, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0x80}, {0, 2, 0}, true, "another owner");
  refused({2, 0, 64, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0}, {0, 1, 0}, true, "another owner");
}

void mixing_goes_backwards() {
  Random random(3);
  for (int i = 0; i < 10'000; ++i) {
    const auto x = random.next();
    CHECK(unmix64(mix64(x)) == x && mix64(unmix64(x)) == x);
  }
}

}  // namespace

int main() {
  mixing_goes_backwards();
  numbers_come_back();
  ids_come_back();
  a_whole_table_costs_nothing();
  hostile_messages_are_refused();
}
