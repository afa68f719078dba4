#include "../plan.h"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "../row_order.h"
#include "check.h"

using namespace colonnade;

namespace {

struct Batch {
  std::vector<std::int64_t> ids, feature_offsets{0}, rows;
  std::vector<std::int32_t> tables;
  std::vector<std::uint8_t> poolings;

  Lookups lookups() const {
    return Lookups(ids, feature_offsets, tables, poolings, 0, std::nullopt, std::nullopt);
  }
};

// Sequences of random length over open and vocabulary tables.
Batch random_batch(Random& random) {
  static constexpr std::int64_t kRows[] = {0, 0, 1, 100, 1'000'003, std::int64_t{1} << 40, INT64_MAX};
  Batch batch;
  const auto num_tables = 1 + random.below(5);
  for (std::uint64_t t = 0; t < num_tables; ++t) batch.rows.push_back(kRows[random.below(std::size(kRows))]);
  for (auto f = random.below(8); f > 0; --f) {
    batch.tables.push_back(static_cast<std::int32_t>(random.below(num_tables)));
    batch.poolings.push_back(2);
    const auto rows = static_cast<std::uint64_t>(batch.rows[batch.tables.back()]);
    const auto distinct = random.below(3'000) + 1;
    // Now and then enough for threads to share the table.
    for (auto n = random.below(random.below(8) == 0 ? 60'000 : 4'000); n > 0; --n) {
      const auto id = mix64(random.below(distinct));
      batch.ids.push_back(static_cast<std::int64_t>(rows == 0 ? id : id % rows));
    }
    batch.feature_offsets.push_back(static_cast<std::int64_t>(batch.ids.size()));
  }
  return batch;
}

void check_plan(const Batch& batch, const Plan& plan, const std::vector<std::int64_t>& num_owners) {
  std::vector<std::pair<std::size_t, std::int64_t>> blocks;  // (table, owner)
  for (std::size_t t = 0; t < num_owners.size(); ++t) {
    for (std::int64_t owner = 0; owner < num_owners[t]; ++owner) blocks.emplace_back(t, owner);
  }
  CHECK(plan.entries.size() == batch.ids.size() && plan.inverse.size() == batch.ids.size());
  CHECK(plan.segment_offsets[0] == 0);
  CHECK(plan.segment_offsets[plan.num_unique()] == static_cast<std::int32_t>(batch.ids.size()));
  CHECK(plan.block_offsets.size() == blocks.size() + 1 && plan.block_offsets[0] == 0 &&
        plan.block_offsets[blocks.size()] == plan.num_unique());
  std::vector<char> visits(batch.ids.size(), 0);
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    const auto [t, wanted] = blocks[block];
    CHECK(plan.block_offsets[block] <= plan.block_offsets[block + 1]);
    for (std::int64_t u = plan.block_offsets[block]; u < plan.block_offsets[block + 1]; ++u) {
      const std::int64_t id = plan.unique_ids[u];
      std::int32_t owner = -1;
      owner_of({&id, 1}, batch.rows[t], num_owners[t], {&owner, 1});
      CHECK(owner == wanted);
      if (u > plan.block_offsets[block]) {
        const std::int64_t before = plan.unique_ids[u - 1];
        CHECK(batch.rows[t]
                  ? before < id
                  : mix64(static_cast<std::uint64_t>(before)) < mix64(static_cast<std::uint64_t>(id)));
      }
      CHECK(plan.segment_offsets[u] < plan.segment_offsets[u + 1]);
      for (std::int32_t i = plan.segment_offsets[u]; i < plan.segment_offsets[u + 1]; ++i) {
        const std::int32_t e = plan.entries[i];
        CHECK(i == plan.segment_offsets[u] || plan.entries[i - 1] < e);
        CHECK(batch.ids[e] == id && plan.inverse[e] == u && !visits[e]++);
        const auto f = std::upper_bound(batch.feature_offsets.begin(), batch.feature_offsets.end(), e) -
                       batch.feature_offsets.begin() - 1;
        CHECK(static_cast<std::size_t>(batch.tables[f]) == t);
      }
    }
  }
  CHECK(std::count(visits.begin(), visits.end(), 1) == static_cast<std::int64_t>(visits.size()));
}

void deals_as_defined(Random& random) {
  for (int i = 0; i < 20'000; ++i) {
    const std::uint64_t word = mix64(random.below(1'000'000));
    const auto num_ranks = static_cast<std::uint32_t>(2 + (word >> (33 + random.below(31))));
    const VocabularyDeal deal(num_ranks);
    const std::uint64_t any = mix64(random.below(1'000'000)) >> (1 + random.below(60));
    const std::uint64_t multiple = any / num_ranks * num_ranks;
    for (const std::uint64_t id : {any, multiple, multiple ? multiple - 1 : 0, std::uint64_t{INT64_MAX}}) {
      const auto [owner, local] = deal(id);
      CHECK(owner == vocabulary_owner(id, num_ranks) && local == id / num_ranks);
    }
  }
}

void ids_outside() {
  Batch batch;
  batch.rows = {0, 10};
  batch.tables = {0, 1};
  batch.poolings = {2, 2};
  batch.ids = {-5, 3, 9, 10, -1};
  batch.feature_offsets = {0, 1, 5};
  CHECK_THROWS(make_plan(batch.lookups(), batch.rows, std::vector<std::int64_t>{2, 2}), std::out_of_range,
               "table 1 feature 1 position 2 id 10 rows 10");
  batch.ids[3] = 0;
  batch.rows[1] = 1;
  CHECK_THROWS(make_plan(batch.lookups(), batch.rows, std::vector<std::int64_t>{3, 1}), std::out_of_range, "position 0 id 3 rows 1");
}

}  // namespace

int main() {
  Random random(1);
  for (int i = 0; i < 60; ++i) {
    const Batch batch = random_batch(random);
    const Lookups lookups = batch.lookups();
    std::vector<std::int64_t> num_owners(batch.rows.size());
    for (auto& owners : num_owners) owners = static_cast<std::int64_t>(1 + random.below(4));
    for (const int threads : {1, 3}) {
      set_num_threads(threads);
      check_plan(batch, make_plan(lookups, batch.rows, num_owners), num_owners);
    }
  }
  deals_as_defined(random);
  ids_outside();
}
