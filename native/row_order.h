// Order of a table's rows in a plan.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>

#include "hash.h"

namespace colonnade {

// Computes vocabulary_owner and local row of ids below 2^63 for two owners or more, without a division.
class VocabularyDeal {
 public:
  explicit VocabularyDeal(std::uint32_t num_owners)
      : num_owners_(num_owners),
        shift_(std::bit_width(num_owners - 1) - 1),
        inverse_(static_cast<std::uint64_t>(((static_cast<unsigned __int128>(1) << (64 + shift_)) - 1) /
                                                num_owners +
                                            1)) {}

  std::uint64_t num_owners() const { return num_owners_; }

  // (owner, local row)
  std::pair<std::uint32_t, std::uint64_t> operator()(std::uint64_t id) const {
    const std::uint64_t local = quotient(id), hash = mix64(local), half = hash >> 1;
    const std::uint64_t rotation = within((half - quotient(half) * num_owners_) * 2 + (hash & 1));
    return {static_cast<std::uint32_t>(within(id - local * num_owners_ + rotation)), local};
  }

 private:
  // Return n / num_owners for n < 2^63 (Granlund and Montgomery 1994, theorem 4.2).
  std::uint64_t quotient(std::uint64_t n) const {
    return static_cast<std::uint64_t>(static_cast<unsigned __int128>(n) * inverse_ >> 64) >> shift_;
  }
  // No branch, because it would be unpredictable.
  std::uint64_t within(std::uint64_t x) const { return x - (num_owners_ & (0 - static_cast<std::uint64_t>(x >= num_owners_))); }

  std::uint64_t num_owners_;
  int shift_;
  std::uint64_t inverse_;  // 2^(64 + shift) / num_owners, rounded up
};

// Sort keys of rows: by owner, then by local row (vocabulary) or by hash, as one number.
struct DirectOrder {  // vocabulary with one owner
  std::uint64_t rows;
  std::uint64_t key(std::int64_t id) const { return static_cast<std::uint64_t>(id); }
  int key_bits() const { return std::bit_width(rows - 1); }
  bool has(std::int64_t id) const { return static_cast<std::uint64_t>(id) < rows; }
};
struct DealtOrder {  // vocabulary with several owners
  std::uint64_t rows;
  VocabularyDeal deal;
  std::uint64_t share;  // largest number of rows of one owner

  DealtOrder(std::int64_t rows, std::int64_t num_owners)
      : rows(static_cast<std::uint64_t>(rows)),
        deal(static_cast<std::uint32_t>(num_owners)),
        share((this->rows - 1) / static_cast<std::uint64_t>(num_owners) + 1) {}
  std::uint64_t key(std::int64_t id) const {
    const auto [owner, local] = deal(static_cast<std::uint64_t>(id));
    return owner * share + local;
  }
  int key_bits() const { return std::bit_width(deal.num_owners() * share - 1); }
  bool has(std::int64_t id) const { return static_cast<std::uint64_t>(id) < rows; }
};
struct HashOrder {
  std::uint64_t key(std::int64_t id) const { return mix64(static_cast<std::uint64_t>(id)); }
  int key_bits() const { return 64; }
  bool has(std::int64_t) const { return true; }
};

}  // namespace colonnade
