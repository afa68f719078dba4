// Messages of ids, damaged or made of anything: read to their end and no further, or refused; ids that come out are
// their owner's, and packing them gives a message that is read alike.
#include "../hash.h"
#include "../packing.h"
#include "fuzz.h"

using namespace colonnade;

namespace {

void visit(std::uint64_t seed) {
  Fuzz fuzz(seed);
  IdSpace space{0, static_cast<std::int64_t>(fuzz.below(5)) + 1, 0};
  space.place = static_cast<std::int64_t>(fuzz.below(static_cast<std::uint64_t>(space.num_owners)));
  space.rows = fuzz.pick<std::int64_t>({0, 0, 1, 50, 5'000, std::numeric_limits<std::int64_t>::max()});
  const bool is_ascending = fuzz.one_in(2);
  std::vector<std::uint8_t> bytes;
  if (fuzz.one_in(3)) {
    bytes.resize(fuzz.below(40));
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(fuzz.one_in(2) ? fuzz.below(8) : fuzz.next());
  } else {
    std::vector<std::uint64_t> values(fuzz.below(200));
    const auto width = fuzz.below(20) + (fuzz.one_in(8) ? 44 : 0);
    for (auto& value : values) value = width ? fuzz.next() >> (64 - width) : 0;
    Packer packer(bytes);
    packer.varint(values.size());
    if (!space.rows) bytes.push_back(static_cast<std::uint8_t>(fuzz.below(2)));
    if (!space.rows && bytes.back() == 1) packer.varint(fuzz.next());
    packer.numbers(values);
    if (fuzz.one_in(2)) fuzz.damage(bytes);
  }
  Block block(bytes.size());
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::uint8_t*>(block.data()));
  const std::span data(reinterpret_cast<const std::uint8_t*>(block.data()), block.size());
  std::vector<std::int64_t> ids;
  Unpacker unpacker(data);
  if (!is_accepted([&] { (void)unpacker.list(space, is_ascending, ids); })) return;
  CHECK(unpacker.position() <= data.size());
  const auto n = static_cast<std::uint32_t>(space.num_owners);
  for (const auto id : ids) {
    CHECK(!space.rows || (id >= 0 && id < space.rows));
    const auto owner = space.rows ? vocabulary_owner(static_cast<std::uint64_t>(id), n) : open_owner(id, n);
    CHECK(owner == static_cast<std::uint32_t>(space.place));
  }
  if (is_ascending && !space.rows) return;  // in the order of ids, which need not be that of hashes
  std::vector<std::uint8_t> again;
  Packer(again).list(ids, space, is_ascending);
  std::vector<std::int64_t> unpacked;
  Unpacker(again).list(space, is_ascending, unpacked);
  CHECK(unpacked == ids);
}

}  // namespace

int main(int argc, char** argv) {
  for_each_seed(argc, argv, 200'000, visit);
}
