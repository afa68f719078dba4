#include "../place_index.h"

#include <chrono>
#include <cstdio>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "check.h"

using namespace colonnade;

namespace {

// A bijection's inverse, to make ids whose hashes agree.
std::uint64_t unmix64(std::uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642b2d24d8ec3u;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96de1b173f119089u;
  return x ^ (x >> 30) ^ (x >> 60);
}

PlaceEntry entry_of(Random& random) {
  return {random.below(std::uint64_t{1} << 40), static_cast<std::uint8_t>(random.next())};
}

bool same(PlaceEntry a, PlaceEntry b) {
  return a.place == b.place && a.frequency == b.frequency;
}

// Puts, finds and erasures against a map, where rows come, stay and go.
template <class KeyOf>
void is_a_map(std::int64_t rows, std::uint64_t seed, std::int64_t num_steps, const KeyOf& key_of) {
  Random random(seed);
  PlaceIndex index(rows);
  std::unordered_map<std::int64_t, PlaceEntry> model;
  for (std::int64_t step = 0; step < num_steps; ++step) {
    // Three phases: it fills, stays, and empties.
    const std::int64_t phase = 3 * step / num_steps;
    const std::int64_t key = key_of(random);
    if (random.below(4) < (phase == 0 ? 3u : phase == 1 ? 2u : 1u)) {
      const PlaceEntry entry = entry_of(random);
      index.put(key, entry);
      model[key] = entry;
    } else {
      index.erase(key);
      model.erase(key);
    }
    const std::int64_t other = key_of(random);
    const auto at = model.find(other);
    CHECK(same(index.find(other), at == model.end() ? kNoEntry : at->second));
    CHECK(index.size() == static_cast<std::int64_t>(model.size()));
  }
  std::vector<std::int64_t> keys;
  for (const auto& [key, entry] : model) keys.push_back(key);
  std::size_t visited = 0;
  index.for_each(keys.size(), [&](std::size_t i) { return keys[i]; },
                 [&](std::size_t i, std::int64_t key, PlaceEntry entry) {
                   CHECK(i == visited++ && key == keys[i] && same(entry, model[key]));
                 });
  CHECK(visited == keys.size());
  for (const std::int64_t key : keys) index.erase(key);
  CHECK(index.size() == 0 && index.bytes() < 1 << 20);
  for (const std::int64_t key : keys) CHECK(same(index.find(key), kNoEntry));
}

// Runs of rows added at once, between puts and erasures, against a map.
void rows_added_at_once(std::int64_t rows, std::uint64_t seed) {
  Random random(seed);
  PlaceIndex index(rows);
  std::map<std::int64_t, PlaceEntry> model;
  for (int round = 0; round < 20; ++round) {
    std::map<std::int64_t, PlaceEntry> added;
    for (std::uint64_t n = random.below(rows + 1); n > 0; --n) {
      const auto key = static_cast<std::int64_t>(random.below(rows));
      if (!model.contains(key)) added.emplace(key, entry_of(random));
    }
    const std::vector<std::pair<std::int64_t, PlaceEntry>> list(added.begin(), added.end());
    index.add(list.size(), [&](std::size_t i) { return list[i].first; }, [&](std::size_t i) { return list[i].second; });
    model.insert(added.begin(), added.end());
    for (std::uint64_t n = random.below(rows + 1); n > 0; --n) {
      const auto key = static_cast<std::int64_t>(random.below(rows));
      index.erase(key);
      model.erase(key);
    }
    CHECK(index.size() == static_cast<std::int64_t>(model.size()));
    for (std::int64_t key = 0; key < rows; ++key) {
      const auto at = model.find(key);
      CHECK(same(index.find(key), at == model.end() ? kNoEntry : at->second));
    }
  }
}

void small_tables_of_odd_sizes() {
  for (const std::int64_t rows : {1, 2, 63, 64, 65, 127, 1009}) {
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      is_a_map(rows, seed, 5'000, [rows](Random& random) { return static_cast<std::int64_t>(random.below(rows)); });
      rows_added_at_once(rows, seed);
    }
  }
}

void open_tables_of_any_ids() {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    is_a_map(0, seed, 5'000, [](Random& random) { return static_cast<std::int64_t>(random.below(40)) - 20; });
    is_a_map(0, seed, 50'000, [](Random& random) {
      const auto low = static_cast<std::int64_t>(random.below(30'000));
      return random.below(2) ? low : INT64_MAX - low;
    });
    is_a_map(0, seed, 20'000, [](Random& random) { return INT64_MIN + static_cast<std::int64_t>(random.below(2'000)); });
    // One bucket for all: ids that somebody chose.
    is_a_map(0, seed, 20'000, [](Random& random) { return static_cast<std::int64_t>(unmix64(random.below(1'500) << 40)); });
  }
}

double bytes_beyond(const PlaceIndex& index, double bytes_of_row) {
  return static_cast<double>(index.bytes()) - bytes_of_row * static_cast<double>(index.size());
}

void a_vocabulary_costs_half_a_byte_and_six_for_what_is_stored() {
  for (const std::int64_t rows : {300'007, 2'000'003}) {
    PlaceIndex index(rows);
    CHECK(index.bytes() == 0);
    // The last pages of arrays are a cost of tables, not of rows: to be seen in small ones.
    const double allowed = 0.5 * static_cast<double>(rows) + (rows < 1'000'000 ? 262'144.0 : 0.0);
    Random random(7);
    for (std::int64_t i = 0; i < 3 * rows / 2; ++i) {
      index.put(static_cast<std::int64_t>(random.below(rows)), {random.below(1 << 30), 0});
      if (i % (rows / 50) == rows / 50 - 1) CHECK(bytes_beyond(index, 6.0) <= allowed);
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      index.erase(static_cast<std::int64_t>(random.below(rows)));
      if (i % (rows / 50) == rows / 50 - 1) CHECK(bytes_beyond(index, 6.0) <= allowed);
    }
  }
}

void an_open_table_costs_sixteen_bytes_a_row() {
  PlaceIndex index(0);
  Random random(9);
  const auto id = [](std::int64_t i) { return static_cast<std::int64_t>(mix64(static_cast<std::uint64_t>(i) + 12345)); };
  std::int64_t n = 0;
  for (; n < 1'000'000; ++n) {
    index.put(id(n), {static_cast<std::uint64_t>(n), 1});
    if (n % 10'000 == 9'999 && n > 200'000) CHECK(bytes_beyond(index, 16.0) <= 0.0);
  }
  for (std::int64_t i = 0; i < 800'000; ++i) {
    index.erase(id(i));
    if (i % 10'000 == 9'999) CHECK(bytes_beyond(index, 16.0) <= 0.0);
  }
  for (std::int64_t i = 800'000; i < n; ++i) CHECK(index.find(id(i)).place == static_cast<std::uint64_t>(i));
}

// Address space, not memory.
void a_billion_rows_open() {
  PlaceIndex index(1'000'000'000);
  for (const std::int64_t row : {std::int64_t{0}, std::int64_t{999'999'999}, std::int64_t{500'000'000}}) {
    CHECK(same(index.find(row), kNoEntry));
    index.put(row, {static_cast<std::uint64_t>(row), 3});
  }
  CHECK(index.find(999'999'999).place == 999'999'999 && index.size() == 3);
  CHECK(index.bytes() < 100'000);
}

void print_times() {
  using Clock = std::chrono::steady_clock;
  for (const std::int64_t rows : {std::int64_t{0}, std::int64_t{400'000}}) {
    PlaceIndex index(rows);
    constexpr std::int64_t kRows = 300'000;
    const auto key = [](std::int64_t i) { return static_cast<std::int64_t>(mix64(static_cast<std::uint64_t>(i)) % 400'000); };
    double worst = 0.0;
    const auto start = Clock::now();
    for (std::int64_t i = 0; i < kRows; ++i) {
      const auto before = Clock::now();
      index.put(key(i), {static_cast<std::uint64_t>(i), 0});
      worst = std::max(worst, std::chrono::duration<double>(Clock::now() - before).count());
    }
    const auto middle = Clock::now();
    std::uint64_t sum = 0;
    index.for_each(kRows, [&](std::size_t i) { return key(static_cast<std::int64_t>(i)); },
                   [&](std::size_t, std::int64_t, PlaceEntry entry) { sum += entry.place; });
    const auto end = Clock::now();
    CHECK(sum > 0);
    std::printf("%s: put %.0f ns (worst %.0f us), find %.0f ns, %.2f bytes a stored row\n", rows ? "vocabulary" : "open",
                1e9 * std::chrono::duration<double>(middle - start).count() / kRows, 1e6 * worst,
                1e9 * std::chrono::duration<double>(end - middle).count() / kRows,
                static_cast<double>(index.bytes()) / static_cast<double>(index.size()));
  }
}

}  // namespace

int main() {
  small_tables_of_odd_sizes();
  open_tables_of_any_ids();
  a_vocabulary_costs_half_a_byte_and_six_for_what_is_stored();
  an_open_table_costs_sixteen_bytes_a_row();
  a_billion_rows_open();
  print_times();
}
