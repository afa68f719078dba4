// read_mapped against loops that a reader can check, on every path, bit for bit.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <optional>

#include "../mapped_rows.h"
#include "check.h"

using namespace colonnade;

namespace {

constexpr std::int64_t kDim = 5, kBegin = 24, kBlockBits = 6;
constexpr std::int64_t kStride = kDim * 4;

enum class Index { all, direct, hashed, open };

// A table of random rows in plain memory, rows that are newer, and what a lookup must find.
struct Rows {
  std::int64_t num_ids;
  std::vector<std::int64_t> ids;
  std::vector<float> values;  // of the file's rows, then of newer ones
  std::vector<std::int32_t> slots_by_id;
  std::vector<std::uint8_t> checked;
  RowIndex hashed, newer;
  std::map<std::int64_t, std::int64_t> slots;  // what each id has
  MappedTable table;

  Rows(Index index, std::int64_t num_rows, Random& random) : num_ids(index == Index::open ? 0 : index == Index::all ? num_rows : 3 * num_rows) {
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const std::int64_t id = index == Index::open ? static_cast<std::int64_t>(random.next()) : index == Index::all ? row : 3 * row + 1;
      ids.push_back(id);
      slots[id] = row;
    }
    const std::int64_t num_newer = num_rows / 2;
    for (std::int64_t i = 0; i < (num_rows + num_newer) * kDim; ++i) values.push_back(static_cast<float>(random.real()));
    std::vector<std::int64_t> row_numbers(num_rows);
    for (std::int64_t row = 0; row < num_rows; ++row) row_numbers[row] = row;
    if (index == Index::direct) {
      slots_by_id.assign(num_ids, -1);
      for (std::int64_t row = 0; row < num_rows; ++row) slots_by_id[ids[row]] = static_cast<std::int32_t>(row);
    } else if (index != Index::all) {
      hashed.put(ids, row_numbers);
    }
    checked.assign(((kBegin + num_rows * kStride) >> kBlockBits) + 1, 1);
    table.num_ids = num_ids;
    table.num_rows = num_rows;
    table.slots_by_id = slots_by_id;
    if (index == Index::hashed || index == Index::open) table.hashed = &hashed;
    table.base = reinterpret_cast<const std::byte*>(values.data());
    table.stride = kStride;
    table.begin = kBegin;
    table.block_bits = kBlockBits;
    table.checked = checked;
    for (std::int64_t i = 0; i < num_newer; ++i) {
      const std::int64_t id = any_id(random);
      const bool is_deleted = i % 3 == 0;
      const std::int64_t slot = is_deleted ? MappedTable::kDeleted : num_rows + i;
      newer.put({&id, 1}, {&slot, 1});
      slots[id] = is_deleted ? -1 : slot;
    }
    if (num_newer) table.newer = &newer;
  }
  std::int64_t any_id(Random& random) const {
    if (random.below(2) && !ids.empty()) return ids[random.below(ids.size())];
    return static_cast<std::int64_t>(num_ids ? random.below(static_cast<std::uint64_t>(num_ids)) : random.next());
  }
  std::vector<float> row(std::int64_t id, const Dram& initial_rows, std::int32_t t) const {
    std::vector<float> row(kDim);
    const auto at = slots.find(id);
    if (at == slots.end() || at->second < 0) {
      initial_rows.initial_values(t, {&id, 1}, reinterpret_cast<std::byte*>(row.data()));
    } else {
      std::memcpy(row.data(), values.data() + at->second * kDim, kStride);
    }
    return row;
  }
};

Dram initial_values_of(std::span<Rows* const> tables) {
  std::vector<TableSettings> settings;
  for (const auto* rows : tables) {
    settings.push_back({.parts = {{.dim = kDim, .init_scale = 0.5, .initial_state = 0, .initial_count = 1}},
                        .state_elements = 1,
                        .rows = rows->num_ids,
                        .capacity_rows = 1,
                        .seed = 7});
  }
  return Dram(settings, {Dtype::float32});
}

// One column of lookups, and its output: columns 1 .. 3 of a row, into an output of 4 columns.
struct Column {
  MappedColumn column;
  std::vector<std::int64_t> ids, offsets;
  std::vector<float> weights, out, wanted;

  Column(std::int32_t t, const Rows& rows, std::int64_t num_samples, const Dram& initial_rows, Random& random) {
    const bool is_bag = random.below(2), is_weighted = random.below(2);
    column.table = t;
    column.is_shared = num_samples != 1 && random.below(2);
    column.is_sequence = random.below(3) == 0;
    column.divisor = column.is_sequence ? Divisor::one : static_cast<Divisor>(random.below(2));
    const std::int64_t own_samples = column.is_shared ? 1 : num_samples;
    offsets = {0};
    for (std::int64_t b = 0; b < own_samples; ++b) {
      for (auto n = is_bag ? random.below(4) : 1; n > 0; --n) ids.push_back(rows.any_id(random));
      offsets.push_back(static_cast<std::int64_t>(ids.size()));
    }
    for (std::size_t e = 0; e < ids.size(); ++e) weights.push_back(static_cast<float>(random.real()));
    column.ids = ids;
    if (is_bag) column.offsets = offsets.data();
    if (is_weighted) column.weights = weights.data();
    for (std::int64_t b = 0; b < num_samples; ++b) {
      const std::int64_t own = column.is_shared ? 0 : b;
      std::vector<float> sum(4);
      for (std::int64_t e = offsets[own]; e < offsets[own + 1]; ++e) {
        const auto row = rows.row(ids[e], initial_rows, t);
        for (int j = 0; j < 3; ++j) {
          const float term = is_weighted ? row[j + 1] * weights[e] : row[j + 1];
          sum[j] = e == offsets[own] || column.is_sequence ? term : sum[j] + term;
        }
        if (column.is_sequence) wanted.insert(wanted.end(), sum.begin(), sum.end());
      }
      if (column.is_sequence) continue;
      const auto length = offsets[own + 1] - offsets[own];
      for (int j = 0; j < 3 && column.divisor == Divisor::n && length > 1; ++j) sum[j] /= static_cast<float>(length);
      wanted.insert(wanted.end(), sum.begin(), sum.end());
    }
  }
};

// Rows of the tables in files, with a cache of about a fourth of them.
struct Files {
  std::vector<std::FILE*> files;
  std::vector<RowCache::File> opened;

  explicit Files(std::span<Rows* const> tables) {
    for (const auto* rows : tables) {
      std::FILE* const file = std::tmpfile();
      const std::vector<std::byte> head(kBegin);
      CHECK(std::fwrite(head.data(), 1, kBegin, file) == kBegin);
      const auto num_values = static_cast<std::size_t>(rows->table.num_rows * kDim);
      CHECK(std::fwrite(rows->values.data(), 4, num_values, file) == num_values && std::fflush(file) == 0);
      files.push_back(file);
      opened.push_back({fileno(file), kBegin, kStride, rows->table.num_rows});
    }
  }
  ~Files() {
    for (auto* const file : files) std::fclose(file);
  }
  std::int64_t cache_bytes() const {
    std::int64_t bytes = 0;
    for (const auto& file : opened) bytes += file.num_rows * kStride / 4;
    return std::max<std::int64_t>(bytes, 16 * (kStride + 4));
  }
};

void files_that_end_too_soon_are_refused() {
  Random random(2);
  Rows rows(Index::all, 700, random);
  Rows* const tables[] = {&rows};
  for (const bool has_ring : {true, false}) {
    Files files(tables);
    RowCache cache(files.opened, files.cache_bytes(), has_ring);
    std::vector<float> out(2 * kDim);
    const std::uint32_t slots[] = {3, 699};
    const RowCache::Request request{0, slots, reinterpret_cast<std::byte*>(out.data())};
    CHECK(cache.read({&request, 1}));
    CHECK(std::memcmp(out.data(), rows.values.data() + 3 * kDim, kStride) == 0);
    CHECK(std::memcmp(out.data() + kDim, rows.values.data() + 699 * kDim, kStride) == 0);
    CHECK(ftruncate(files.opened[0].fd, kBegin + 650 * kStride) == 0);
    CHECK(cache.read({&request, 1}));  // in memory
    const std::uint32_t missing[] = {649, 650};
    const RowCache::Request beyond{0, missing, reinterpret_cast<std::byte*>(out.data())};
    CHECK(!cache.read({&beyond, 1}));
    const RowCache::Request last{0, {missing, 1}, reinterpret_cast<std::byte*>(out.data())};
    CHECK(cache.read({&last, 1}));
    CHECK(std::memcmp(out.data(), rows.values.data() + 649 * kDim, kStride) == 0);
    const auto counts = cache.counts();
    CHECK(counts.hits + counts.misses == 7 && counts.reads >= 2);
  }
}

void check_batch(std::int64_t num_samples, std::int64_t num_rows, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::unique_ptr<Rows>> owned;
  std::vector<Rows*> all;
  std::vector<const MappedTable*> tables;
  for (const Index index : {Index::all, Index::direct, Index::hashed, Index::open}) {
    owned.push_back(std::make_unique<Rows>(index, num_rows, random));
    all.push_back(owned.back().get());
    tables.push_back(&all.back()->table);
  }
  const Dram initial_rows = initial_values_of(all);
  std::vector<Column> columns;
  for (int c = 0; c < 9; ++c) columns.emplace_back(c % 4, *all[c % 4], num_samples, initial_rows, random);
  const Files files(all);
  RowCache with_ring(files.opened, files.cache_bytes()), without_ring(files.opened, files.cache_bytes(), false);
  const auto check = [&](RowCache* cache) {
    std::vector<MappedColumn> lookups;
    std::vector<MappedRead> reads;
    for (auto& column : columns) {
      column.out.assign(column.wanted.size(), 0);
      reads.push_back({static_cast<std::int32_t>(lookups.size()), 4, 3, reinterpret_cast<std::byte*>(column.out.data()), 16});
      // The vector moved: spans of its own ids are still right, for they are in the heap.
      lookups.push_back(column.column);
    }
    CHECK(read_mapped(tables, initial_rows, lookups, reads, num_samples, Dtype::float32, Dtype::float32, cache));
    for (const auto& column : columns) {
      CHECK(column.wanted.empty() || std::memcmp(column.out.data(), column.wanted.data(), 4 * column.out.size()) == 0);
    }
  };
  everywhere([&] {
    for (RowCache* const cache : {static_cast<RowCache*>(nullptr), &with_ring, &without_ring, &with_ring}) check(cache);
  });
}

void what_is_unusual_is_refused() {
  Random random(1);
  for (const Index index : {Index::all, Index::direct, Index::hashed, Index::open}) {
    Rows rows(index, 40, random);
    rows.table.newer = nullptr;
    std::vector<std::uint32_t> slots(300);
    std::vector<std::int64_t> ids(300, rows.ids[7]);
    CHECK(rows.table.find(ids, slots.data()) && slots[0] == 7 && slots[299] == 7);
    for (const std::int64_t bad : {rows.num_ids, std::int64_t{-1}, std::int64_t{1} << 62}) {
      ids[299] = bad;
      CHECK(rows.table.find(ids, slots.data()) == (index == Index::open));
    }
    ids[299] = rows.ids[7];
    const std::int64_t first = (kBegin + 7 * kStride) >> kBlockBits, last = (kBegin + 8 * kStride - 1) >> kBlockBits;
    for (std::int64_t block = 0; block < static_cast<std::int64_t>(rows.checked.size()); ++block) {
      rows.checked[block] = 0;
      CHECK(rows.table.find(ids, slots.data()) == (block < first || block > last));
      rows.checked[block] = 1;
    }
    const auto* const base = rows.table.base;
    rows.table.base = nullptr;
    CHECK(!rows.table.find(ids, slots.data()));
    rows.table.base = base;
    CHECK(rows.table.find({}, slots.data()));
  }
}

}  // namespace

int main() {
  std::uint64_t seed = 0;
  for (const std::int64_t num_samples : {0, 1, 2, 13, 2000}) {
    for (const std::int64_t num_rows : {1, 2, 40, 700}) check_batch(num_samples, num_rows, ++seed);
  }
  what_is_unusual_is_refused();
  files_that_end_too_soon_are_refused();
  return 0;
}
