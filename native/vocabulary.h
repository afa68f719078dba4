// Rows of a table that a rank owns, with local numbers for a vocabulary: `vocabulary_owner` of hash.h without a
// division.
#pragma once

#include <cstdint>

#include "hash.h"

namespace colonnade {

// A table's rows belong to owners 0 .. num_owners - 1; this rank is owner `place`, or none of them. rows 0: open table,
// for which any id is valid, and which only tells whether the rank owns rows. In a vocabulary table an owner has one id
// of each block of num_owners; its local number is the block's number.
class VocabularyShare {
 public:
  static constexpr std::int64_t kNone = -1;  // `place` of a rank without rows of the table

  VocabularyShare(std::int64_t rows, std::int64_t num_owners, std::int64_t place)
      : rows_(static_cast<std::uint64_t>(rows)),
        num_owners_(static_cast<std::uint64_t>(num_owners)),
        place_(static_cast<std::uint64_t>(place)),
        has_rows_(place != kNone),
        reciprocal_(num_owners == 1 ? 0 : static_cast<std::uint64_t>(-1) / num_owners_) {}

  bool has_rows() const { return has_rows_; }
  bool is_whole() const { return num_owners_ == 1; }  // then an id is its own local number
  bool is_outside(std::int64_t id) const { return static_cast<std::uint64_t>(id) >= rows_; }
  std::int64_t num_places() const {
    return rows_ && has_rows_ ? static_cast<std::int64_t>((rows_ - 1) / num_owners_ + 1) : 0;
  }

  bool owns(std::int64_t id) const {  // for a valid id
    if (is_whole()) return has_rows_;
    const std::uint64_t place = place_of(id), within = static_cast<std::uint64_t>(id) - place * num_owners_;
    const std::uint64_t sum = within + rest(mix64(place));
    return (sum >= num_owners_ ? sum - num_owners_ : sum) == place_;
  }
  std::uint64_t place_of(std::int64_t id) const {
    return is_whole() ? static_cast<std::uint64_t>(id) : quotient(static_cast<std::uint64_t>(id));
  }
  std::int64_t id_of(std::uint64_t place) const {
    if (is_whole()) return static_cast<std::int64_t>(place);
    const std::uint64_t turn = rest(mix64(place));
    // No branch, because it would be unpredictable.
    return static_cast<std::int64_t>(place * num_owners_ + place_ - turn + (num_owners_ & (0 - static_cast<std::uint64_t>(turn > place_))));
  }

 private:
  // The reciprocal is rounded down: the first guess is right or one too low.
  std::uint64_t quotient(std::uint64_t x) const {
    const std::uint64_t guess = scale_down(x, reciprocal_);
    return guess + (x - guess * num_owners_ >= num_owners_);
  }
  std::uint64_t rest(std::uint64_t x) const { return x - quotient(x) * num_owners_; }

  std::uint64_t rows_, num_owners_, place_;
  bool has_rows_;
  std::uint64_t reciprocal_;
};

}  // namespace colonnade
