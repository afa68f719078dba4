#include <map>

#include "../crc32c.h"
#include "../row_index.h"
#include "check.h"

using namespace colonnade;

namespace {

void random_operations_match_a_map(std::uint64_t universe) {
  Random random(universe);
  RowIndex index;
  std::map<std::int64_t, std::int64_t> model;
  for (int step = 0; step < 300; ++step) {
    std::vector<std::int64_t> ids(random.below(200)), values(ids.size()), found(ids.size());
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
        index.get(ids, found);
        for (std::size_t i = 0; i < ids.size(); ++i) {
          const auto at = model.find(ids[i]);
          CHECK(found[i] == (at == model.end() ? RowIndex::kAbsent : at->second));
        }
    }
    CHECK(index.size() == static_cast<std::int64_t>(model.size()));
  }
  const auto items = index.items();
  CHECK(std::equal(items.begin(), items.end(), model.begin(), model.end(),
                   [](const auto& a, const auto& b) { return a.first == b.first && a.second == b.second; }));
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
  checksum();
}
