#include "distinct.h"

#include <algorithm>
#include <bit>

#include "radix.h"

namespace colonnade {
namespace {

constexpr std::uint64_t kRowsPerKey = 256;  // for sparser rows, words without marks take as long as hashing
constexpr std::size_t kFew = 64;            // sorted by comparison
constexpr int kPrefixBits = 8;              // of hashes, beyond those that count them

// std::popcount is a function call if the processor may lack the instruction.
constexpr std::uint64_t count_bits(std::uint64_t x) {
  x -= x >> 1 & 0x5555555555555555u;
  x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
  x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu;
  return x * 0x0101010101010101u >> 56;
}

}  // namespace

std::span<const std::uint64_t> Distinct::find(std::span<const std::uint64_t> keys, std::uint64_t limit) {
  unique_.clear();
  is_marked_ = limit && limit / kRowsPerKey <= keys.size();
  if (is_marked_) {
    mark(keys, limit);
  } else {
    hash(keys);
    sort(limit);
  }
  return unique_;
}

void Distinct::number(std::span<const std::uint64_t> keys, std::span<std::uint64_t> numbers) const {
  if (is_marked_) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint64_t key = keys[i], word = key / 64;
      numbers[i] = before_[word] + count_bits(marks_[word] & ((std::uint64_t{1} << key % 64) - 1));
    }
  } else {
    for (std::size_t i = 0; i < keys.size(); ++i) numbers[i] = place_[came_[i]];
  }
}

void Distinct::mark(std::span<const std::uint64_t> keys, std::uint64_t limit) {
  const auto num_words = static_cast<std::size_t>((limit - 1) / 64 + 1);
  marks_.assign(num_words, 0);
  before_.resize(num_words);
  for (const auto key : keys) marks_[key / 64] |= std::uint64_t{1} << key % 64;
  // At most as many as there are keys; written without a capacity check each time.
  unique_.resize(std::min(static_cast<std::uint64_t>(keys.size()), limit));
  std::uint64_t* next = unique_.data();
  for (std::size_t w = 0; w < num_words; ++w) {
    before_[w] = static_cast<std::uint32_t>(next - unique_.data());
    for (std::uint64_t left = marks_[w]; left; left &= left - 1) {
      *next++ = w * 64 + static_cast<std::uint64_t>(std::countr_zero(left));
    }
  }
  unique_.resize(static_cast<std::size_t>(next - unique_.data()));
}

void Distinct::hash(std::span<const std::uint64_t> keys) {
  const std::size_t size = std::bit_ceil(2 * keys.size() + 2), mask = size - 1;
  const int shift = 64 - std::countr_zero(size);
  slots_.assign(size, 0);
  came_.resize(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint64_t key = keys[i];
    std::size_t at = static_cast<std::size_t>(key * 0x9e3779b97f4a7c15u >> shift);
    while (slots_[at] && unique_[slots_[at] - 1] != key) at = (at + 1) & mask;
    if (!slots_[at]) {
      unique_.push_back(key);
      slots_[at] = static_cast<std::uint32_t>(unique_.size());
    }
    came_[i] = slots_[at] - 1;
  }
}

void Distinct::sort(std::uint64_t limit) {
  const std::size_t count = unique_.size();
  const auto number_bits = static_cast<int>(std::bit_width(count));
  const auto key_bits = static_cast<int>(limit ? std::bit_width(limit - 1) : 64);
  int bits = std::min({key_bits, kMaxKeyBits, 64 - number_bits});
  if (!limit) bits = std::min(bits, static_cast<int>(std::bit_width(count)) + kPrefixBits);
  const int dropped = key_bits - bits;
  words_.resize(count);
  for (std::size_t i = 0; i < count; ++i) words_[i] = (dropped < 64 ? unique_[i] >> dropped : 0) << number_bits | i;
  if (count <= kFew) {
    std::sort(words_.begin(), words_.end());
  } else {
    radix_sort(words_, number_bits, bits);
  }
  const std::uint64_t mask = (std::uint64_t{1} << number_bits) - 1;
  // Keys that these bits do not separate.
  for (std::size_t i = 0, end; dropped && i < count; i = end) {
    for (end = i + 1; end < count && words_[end] >> number_bits == words_[i] >> number_bits;) ++end;
    if (end - i < 2) continue;
    std::sort(words_.begin() + static_cast<std::ptrdiff_t>(i), words_.begin() + static_cast<std::ptrdiff_t>(end),
              [&](auto a, auto b) { return unique_[a & mask] < unique_[b & mask]; });
  }
  place_.resize(count);
  sorted_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto came = static_cast<std::size_t>(words_[i] & mask);
    sorted_[i] = unique_[came];
    place_[came] = static_cast<std::uint32_t>(i);
  }
  unique_.swap(sorted_);
}

}  // namespace colonnade
