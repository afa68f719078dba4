#include "lookups.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace colonnade {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("lookups: " + message);
}

std::string number(std::int64_t n) {
  return std::to_string(n);
}

void want_length(const char* name, std::size_t got, std::int64_t wanted, const char* why) {
  if (static_cast<std::int64_t>(got) != wanted) {
    refuse(std::string(name) + " has " + number(static_cast<std::int64_t>(got)) + " elements, wanted " +
           number(wanted) + " (" + why + ")");
  }
}

}  // namespace

Lookups::Lookups(std::span<const std::int64_t> ids, std::span<const std::int64_t> feature_offsets,
                 std::span<const std::int32_t> feature_tables, std::span<const std::uint8_t> poolings,
                 std::int64_t batch_size, std::optional<std::span<const std::int64_t>> bag_offsets,
                 std::optional<Weights> weights)
    : ids_(ids),
      feature_offsets_(feature_offsets),
      tables_(feature_tables),
      poolings_(poolings),
      batch_size_(batch_size),
      weights_(weights) {
  const std::int64_t num_lookups = this->num_lookups(), num_features = this->num_features();
  if (num_lookups > std::numeric_limits<std::int32_t>::max()) {
    refuse(number(num_lookups) + " lookups in one batch, at most 2^31 - 1 fit; use a smaller batch");
  }
  want_length("feature_offsets", feature_offsets.size(), num_features + 1, "features + 1");
  want_length("poolings", poolings.size(), num_features, "features");
  if (weights) want_length("weights", static_cast<std::size_t>(weights->size), num_lookups, "ids");
  if (feature_offsets[0] != 0)
    refuse("feature_offsets starts at " + number(feature_offsets[0]) + ", wanted 0");
  for (std::int64_t f = 0; f < num_features; ++f) {
    if (first(f) > last(f)) {
      refuse("feature_offsets decrease at feature " + number(f) + ": " + number(first(f)) + " -> " +
             number(last(f)));
    }
    if (tables_[f] < 0) refuse("feature " + number(f) + " names table " + number(tables_[f]));
    if (poolings_[f] > 3) {
      refuse("feature " + number(f) + " has pooling " + number(poolings_[f]) +
             ", wanted 0 sum, 1 mean, 2 sequence or 3 sqrtn");
    }
  }
  if (feature_offsets.back() != num_lookups) {
    refuse("feature_offsets end at " + number(feature_offsets.back()) + " but there are " +
           number(num_lookups) + " ids");
  }
  if (std::ranges::all_of(poolings,
                          [](std::uint8_t p) { return static_cast<Pooling>(p) == Pooling::sequence; })) {
    return;
  }
  if (batch_size < 0) refuse("batch_size " + number(batch_size));
  if (!bag_offsets) {
    for (std::int64_t f = 0; f < num_features; ++f) {
      if (pooling(f) != Pooling::sequence && last(f) - first(f) != batch_size) {
        refuse("feature " + number(f) + " has " + number(last(f) - first(f)) + " lookups for " +
               number(batch_size) +
               " samples and no bag_offsets; one-hot features have one lookup per sample");
      }
    }
    return;
  }
  std::int64_t wanted = 0;
  if (__builtin_mul_overflow(num_features, batch_size, &wanted) || __builtin_add_overflow(wanted, 1, &wanted))
    refuse("batch_size " + number(batch_size));
  want_length("bag_offsets", bag_offsets->size(), wanted, "features * batch_size + 1");
  bag_offsets_ = bag_offsets->data();
  for (std::int64_t f = 0; f < num_features; ++f) {
    if (pooling(f) == Pooling::sequence) continue;
    const std::int64_t* bag = bags(f);
    if (bag[0] != first(f) || bag[batch_size] != last(f)) {
      refuse("feature " + number(f) + " has lookups " + number(first(f)) + " .. " + number(last(f)) +
             " but its bags span " + number(bag[0]) + " .. " + number(bag[batch_size]));
    }
    bool decreases = false;
    for (std::int64_t b = 0; b < batch_size; ++b) decreases |= bag[b] > bag[b + 1];
    for (std::int64_t b = 0; decreases; ++b) {
      if (bag[b] > bag[b + 1]) {
        refuse("bag_offsets decrease at feature " + number(f) + " sample " + number(b) + ": " +
               number(bag[b]) + " -> " + number(bag[b + 1]));
      }
    }
  }
}

const std::int32_t* Lookups::output_rows() const {
  if (!bag_offsets_) return nullptr;
  std::call_once(output_rows_made_, [this] {
    Buffer<std::int32_t> rows(ids_.size());
    for_each_unit(num_features(), [&](std::int64_t f) {
      const std::int64_t* bag = bags(f);
      for (std::int64_t b = 0; bag && b < batch_size_; ++b) {
        std::fill(rows.data() + bag[b], rows.data() + bag[b + 1], static_cast<std::int32_t>(b));
      }
    });
    output_rows_ = std::move(rows);
  });
  return output_rows_.data();
}

Lookups::ByTable Lookups::by_table(std::int64_t num_tables) const {
  ByTable by{std::vector<std::int32_t>(tables_.size()),
             std::vector<std::int64_t>(static_cast<std::size_t>(num_tables) + 1)};
  for (std::int64_t f = 0; f < num_features(); ++f) {
    if (tables_[f] >= num_tables) {
      refuse("feature " + number(f) + " names table " + number(tables_[f]) + " of " + number(num_tables));
    }
    ++by.first[tables_[f] + 1];
  }
  for (std::int64_t t = 0; t < num_tables; ++t) by.first[t + 1] += by.first[t];
  auto next = by.first;
  for (std::int64_t f = 0; f < num_features(); ++f) {
    by.features[next[tables_[f]]++] = static_cast<std::int32_t>(f);
  }
  return by;
}

void check_inside(const Lookups& lookups, std::span<const std::int32_t> features, std::int64_t table, std::int64_t rows) {
  const auto* const ids = lookups.ids().data();
  const auto is_outside = [&](std::int64_t e) { return static_cast<std::uint64_t>(ids[e]) >= static_cast<std::uint64_t>(rows); };
  for (const auto f : features) {
    // Below 0 or not below `rows`: the top bit of one of the two differences.
    std::uint64_t signs = 0;
    for (auto e = lookups.first(f); e < lookups.last(f); ++e) {
      signs |= static_cast<std::uint64_t>(ids[e]) | (static_cast<std::uint64_t>(rows - 1) - static_cast<std::uint64_t>(ids[e]));
    }
    if (!(signs >> 63)) continue;
    for (auto e = lookups.first(f); e < lookups.last(f); ++e) {
      if (is_outside(e)) {
        throw std::out_of_range("table " + number(table) + " feature " + number(f) + " position " + number(e - lookups.first(f)) +
                                " id " + number(ids[e]) + " rows " + number(rows));
      }
    }
  }
}

}  // namespace colonnade
