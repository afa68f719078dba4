// Which rows of a vocabulary table a rank owns, and their numbers: `vocabulary_owner` of hash.h without a division.
#pragma once

#include <cstdint>

#include "hash.h"

namespace colonnade {

// A rank owns one id of each block of num_ranks; its place among the rank's rows is the block's number.
class VocabularyShare {
 public:
  VocabularyShare(std::int64_t rows, std::int64_t num_ranks, std::int64_t rank)
      : rows_(static_cast<std::uint64_t>(rows)),
        num_ranks_(static_cast<std::uint64_t>(num_ranks)),
        rank_(static_cast<std::uint64_t>(rank)),
        reciprocal_(num_ranks == 1 ? 0 : static_cast<std::uint64_t>(-1) / num_ranks_) {}

  bool is_whole() const { return num_ranks_ == 1; }  // an id is its own place
  bool is_outside(std::int64_t id) const { return static_cast<std::uint64_t>(id) >= rows_; }
  std::int64_t num_places() const { return rows_ ? static_cast<std::int64_t>((rows_ - 1) / num_ranks_ + 1) : 0; }

  bool owns(std::int64_t id) const {  // an id that is not outside
    if (is_whole()) return true;
    const std::uint64_t place = place_of(id), within = static_cast<std::uint64_t>(id) - place * num_ranks_;
    const std::uint64_t sum = within + rest(mix64(place));
    return (sum >= num_ranks_ ? sum - num_ranks_ : sum) == rank_;
  }
  std::uint64_t place_of(std::int64_t id) const {
    return is_whole() ? static_cast<std::uint64_t>(id) : quotient(static_cast<std::uint64_t>(id));
  }
  std::int64_t id_of(std::uint64_t place) const {
    if (is_whole()) return static_cast<std::int64_t>(place);
    const std::uint64_t turn = rest(mix64(place));
    return static_cast<std::int64_t>(place * num_ranks_ + (turn > rank_ ? rank_ + num_ranks_ - turn : rank_ - turn));
  }

 private:
  // The reciprocal is rounded down: the first guess is right or one too low.
  std::uint64_t quotient(std::uint64_t x) const {
    const std::uint64_t guess = scale_down(x, reciprocal_);
    return guess + (x - guess * num_ranks_ >= num_ranks_);
  }
  std::uint64_t rest(std::uint64_t x) const { return x - quotient(x) * num_ranks_; }

  std::uint64_t rows_, num_ranks_, rank_, reciprocal_;
};

}  // namespace colonnade
