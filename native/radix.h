// A stable least-significant-digit radix sort of words = key << position_bits | position, pass by pass, over
// chunks that threads may share: each counts and places its own words, so the result is that of one chunk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

namespace colonnade {

inline constexpr int kMaxDigitBits = 13;
inline constexpr int kMaxPasses = 4;
inline constexpr int kMaxKeyBits = 39;  // what lies below the last digit then fits 32 bits

struct Digits {
  int passes = 0, width = 0;

  // Fewest operations: a pass moves every word, then visits every counter.
  Digits(std::int64_t n, int key_bits) {
    std::int64_t least = INT64_MAX;
    for (int p = (key_bits + kMaxDigitBits - 1) / kMaxDigitBits; p <= kMaxPasses; ++p) {
      const int bits = p ? (key_bits + p - 1) / p : 0;
      const std::int64_t operations = p * (2 * n + (std::int64_t{1} << bits));
      if (operations < least) {
        least = operations;
        passes = p;
        width = bits;
      }
    }
  }
  std::size_t values() const { return std::size_t{1} << width; }
};

// One chunk's, by digit.
struct Counters {
  alignas(64) std::uint32_t counts[1 << kMaxDigitBits];  // words, then the place of the next word
  // In the last pass: the place of the next word | what the word before has below its digit << 32.
  alignas(64) std::uint64_t last[1 << kMaxDigitBits];
};
inline constexpr std::uint64_t kNoWordBefore = ~std::uint64_t{0} << 32;

template <class Word>
void count_digits(std::span<const Word> words, int shift, std::size_t values, Counters& counters) {
  std::fill_n(counters.counts, values, 0);
  for (const Word word : words) ++counters.counts[word >> shift & (values - 1)];
}

// Counts become places: digit by digit, chunk by chunk.
inline void place_digits(std::span<Counters> chunks, std::size_t values) {
  std::uint32_t sum = 0;
  for (std::size_t d = 0; d < values; ++d) {
    for (auto& chunk : chunks) sum += std::exchange(chunk.counts[d], sum);
  }
}

template <class Word>
void scatter(std::span<const Word> words, int shift, std::size_t values, Counters& counters, Word* out) {
  for (const Word word : words) out[counters.counts[word >> shift & (values - 1)]++] = word;
}

// What a word has below its last digit, above its position.
template <class Word>
std::uint64_t below(Word word, int position_bits, int shift) {
  return std::uint64_t{word} >> position_bits & ((std::uint64_t{1} << (shift - position_bits)) - 1);
}

// Before place_last_digits, for all chunks but one that is alone.
template <class Word>
void note_last_words(std::span<const Word> words, int position_bits, int shift, std::size_t values,
                     Counters& counters) {
  for (const Word word : words)
    counters.last[word >> shift & (values - 1)] = below(word, position_bits, shift) << 32;
}

inline void place_last_digits(std::span<Counters> chunks, std::size_t values) {
  std::uint32_t sum = 0;
  for (std::size_t d = 0; d < values; ++d) {
    std::uint64_t before = kNoWordBefore;
    for (auto& chunk : chunks) {
      if (chunk.counts[d]) {
        before = std::exchange(chunk.last[d], before | sum) & kNoWordBefore;
      } else {
        chunk.last[d] = before | sum;
      }
      sum += chunk.counts[d];
    }
  }
}

// The last pass. place(where, word, its key differs from that of the word before).
template <class Word, class Place>
void scatter_last(std::span<const Word> words, int position_bits, int shift, std::size_t values,
                  Counters& counters, const Place& place) {
  for (const Word word : words) {
    std::uint64_t& last = counters.last[word >> shift & (values - 1)];
    const std::uint64_t before = last, rest = below(word, position_bits, shift);
    last = rest << 32 | static_cast<std::uint32_t>(before + 1);
    place(static_cast<std::uint32_t>(before), word, before >> 32 != rest);
  }
}

}  // namespace colonnade
