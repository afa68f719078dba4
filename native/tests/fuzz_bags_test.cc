// Messages of lookups to pool, damaged or made of anything: read to their end and no further, or refused; what comes out
// are lookups of rows that are there. And what is packed comes back, whatever the tables.
#include "../bags.h"
#include "../hash.h"
#include "fuzz.h"

using namespace colonnade;

namespace {

// Some columns of some tables that N ranks share, and each rank's lookups of them.
struct World {
  std::vector<std::int64_t> table_rows, num_owners, places;  // (T,), (T,), (N, T)
  std::vector<std::int32_t> tables;                          // (C,)
  std::size_t num_ranks;

  explicit World(Fuzz& fuzz) : num_ranks(fuzz.below(4) + 1) {
    const std::size_t num_tables = fuzz.below(3) + 1;
    places.assign(num_ranks * num_tables, -1);
    for (std::size_t t = 0; t < num_tables; ++t) {
      table_rows.push_back(fuzz.pick<std::int64_t>({0, 1, 50, 5'000, std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::max()}));
      const std::size_t owners = fuzz.one_in(2) ? num_ranks : 1, first = owners == 1 ? fuzz.below(num_ranks) : 0;
      num_owners.push_back(static_cast<std::int64_t>(owners));
      for (std::size_t p = 0; p < owners; ++p) places[(first + p) * num_tables + t] = static_cast<std::int64_t>(p);
    }
    const std::size_t num_columns = fuzz.below(4);
    for (std::size_t c = 0; c < num_columns; ++c) tables.push_back(static_cast<std::int32_t>(fuzz.below(num_tables)));
  }

  Dealt dealt() const { return {table_rows, num_owners}; }
  std::span<const std::int64_t> places_of(std::size_t rank) const {
    return std::span(places).subspan(rank * table_rows.size(), table_rows.size());
  }
  std::vector<std::int32_t> tables_at(std::size_t rank) const {
    std::vector<std::int32_t> own_tables;
    for (const auto t : tables) {
      if (places_of(rank)[static_cast<std::size_t>(t)] >= 0) own_tables.push_back(t);
    }
    return own_tables;
  }
  bool is_of(std::int64_t id, std::int32_t table, std::size_t rank) const {
    const auto t = static_cast<std::size_t>(table);
    const auto n = static_cast<std::uint32_t>(num_owners[t]);
    if (table_rows[t] && (id < 0 || id >= table_rows[t])) return false;
    const auto owner = table_rows[t] ? vocabulary_owner(static_cast<std::uint64_t>(id), n) : open_owner(id, n);
    return owner == static_cast<std::uint32_t>(places_of(rank)[t]);
  }
};

struct Batch {
  std::int64_t size;
  std::vector<std::int64_t> ids, starts{0}, bags;
  std::vector<std::uint8_t> poolings, codes;
  std::vector<float> weights;

  Batch(Fuzz& fuzz, const World& world) : size(static_cast<std::int64_t>(fuzz.below(12))), poolings(world.tables.size()) {
    const std::uint64_t different = fuzz.pick<std::uint64_t>({1, 3, 40, ~std::uint64_t{0}}), longest = fuzz.pick<std::uint64_t>({1, 2, 30});
    for (const auto t : world.tables) {
      const std::int64_t rows = world.table_rows[static_cast<std::size_t>(t)];
      const auto equal = fuzz.one_in(3) ? fuzz.below(longest + 1) : longest + 1;
      for (std::int64_t s = 0; s < size; ++s) {
        bags.push_back(static_cast<std::int64_t>(ids.size()));
        for (auto n = equal <= longest ? equal : fuzz.below(longest + 1); n; --n) {
          const auto number = fuzz.next() % different;
          ids.push_back(static_cast<std::int64_t>(rows ? number % static_cast<std::uint64_t>(rows) : number * 0x9e3779b97f4a7c15u));
        }
      }
      starts.push_back(static_cast<std::int64_t>(ids.size()));
    }
    bags.push_back(static_cast<std::int64_t>(ids.size()));
    for (std::size_t e = 0; e < ids.size(); ++e) {
      weights.push_back(static_cast<float>(fuzz.real()));
      codes.push_back(static_cast<std::uint8_t>(fuzz.next()));
    }
  }
};

JoinedBags join(const std::vector<std::vector<std::uint8_t>>& messages, const World& world, std::size_t rank) {
  std::vector<Block> blocks;
  std::vector<std::span<const std::uint8_t>> data;
  for (const auto& message : messages) {  // of exactly their size
    blocks.emplace_back(message.size());
    std::copy(message.begin(), message.end(), reinterpret_cast<std::uint8_t*>(blocks.back().data()));
    data.emplace_back(reinterpret_cast<const std::uint8_t*>(blocks.back().data()), message.size());
  }
  return join_bags(data, world.tables_at(rank), world.dealt(), world.places_of(rank), Dtype::float32);
}

void check_rows(const JoinedBags& joined, const World& world, std::size_t rank) {
  const auto tables = world.tables_at(rank);
  std::int64_t samples = 0;
  for (const auto size : joined.sizes) samples += size;
  const auto num_lookups = static_cast<std::int64_t>(joined.ids.size());
  CHECK(joined.feature_offsets.size() == tables.size() + 1 && joined.feature_offsets.back() == num_lookups);
  CHECK(joined.weights.empty() || joined.weights.size() == joined.ids.size() * sizeof(float));
  CHECK(joined.codes.empty() || joined.codes.size() == joined.ids.size());
  for (std::size_t c = 0; c < tables.size(); ++c) {
    for (auto e = joined.feature_offsets[c]; e < joined.feature_offsets[c + 1]; ++e) {
      CHECK(world.is_of(joined.ids[static_cast<std::size_t>(e)], tables[c], rank));
    }
  }
  if (!joined.bag_offsets.size()) {
    CHECK(num_lookups == samples * static_cast<std::int64_t>(tables.size()));
    return;
  }
  CHECK(joined.bag_offsets.size() == tables.size() * static_cast<std::size_t>(samples) + 1);
  CHECK(std::is_sorted(joined.bag_offsets.data(), joined.bag_offsets.data() + joined.bag_offsets.size()));
  CHECK(joined.bag_offsets[0] == 0 && joined.bag_offsets[joined.bag_offsets.size() - 1] == num_lookups);
}

void visit(std::uint64_t seed) {
  Fuzz fuzz(seed);
  const World world(fuzz);
  const auto rank = fuzz.below(world.num_ranks);
  std::vector<std::vector<std::uint8_t>> messages;
  std::vector<std::int64_t> wanted;  // ids that this rank has the rows of, column by column
  std::vector<Batch> batches;
  const bool has_weights = fuzz.one_in(3), has_codes = fuzz.one_in(3);
  for (std::size_t r = 0; r < world.num_ranks; ++r) {
    const auto& batch = batches.emplace_back(fuzz, world);
    std::optional<Weights> weights;
    if (has_weights) weights = Weights{batch.weights.data(), static_cast<std::int64_t>(batch.weights.size()), Dtype::float32};
    const Lookups lookups(batch.ids, batch.starts, world.tables, batch.poolings, batch.size, batch.bags, weights);
    const std::vector<std::uint8_t> is_weighted(world.tables.size(), has_weights);
    std::optional<std::span<const std::uint8_t>> codes;
    if (has_codes) codes = batch.codes;
    const auto packed = pack_bags(lookups, world.dealt(), world.places, is_weighted, codes);
    const auto end = packed.bytes.begin() + packed.ends[rank];
    messages.emplace_back(rank ? packed.bytes.begin() + packed.ends[rank - 1] : packed.bytes.begin(), end);
  }
  const auto whole = join(messages, world, rank);
  check_rows(whole, world, rank);
  for (std::size_t c = 0; c < world.tables.size(); ++c) {
    if (world.places_of(rank)[static_cast<std::size_t>(world.tables[c])] < 0) continue;
    for (const auto& batch : batches) {
      for (auto e = batch.starts[c]; e < batch.starts[c + 1]; ++e) {
        const auto id = batch.ids[static_cast<std::size_t>(e)];
        if (world.is_of(id, world.tables[c], rank)) wanted.push_back(id);
      }
    }
  }
  CHECK(std::equal(wanted.begin(), wanted.end(), whole.ids.data(), whole.ids.data() + whole.ids.size()));

  auto& message = messages[fuzz.below(messages.size())];
  if (fuzz.one_in(4)) {
    message.resize(fuzz.below(40));
    for (auto& byte : message) byte = static_cast<std::uint8_t>(fuzz.one_in(2) ? fuzz.below(8) : fuzz.next());
  } else {
    for (auto n = fuzz.below(3) + 1; n; --n) fuzz.damage(message);
  }
  // Samples alone, without a lookup, may be 2^24 in a few bytes: offsets for as many take the test's time.
  if (message.size() > 2 && (message[0] & message[1] & message[2] & 128)) return;
  std::optional<JoinedBags> joined;
  if (is_accepted([&] { joined = join(messages, world, rank); })) check_rows(*joined, world, rank);
}

}  // namespace

int main(int argc, char** argv) {
  for_each_seed(argc, argv, 50'000, visit);
}
