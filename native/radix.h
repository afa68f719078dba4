// Stable least-significant-digit radix sort of words = key << position_bits | position, pass by pass, over chunks that
// threads may share: each thread counts and moves its own words, so the result is the same as for one chunk.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace colonnade {

inline constexpr int kMaxDigitBits = 13;
inline constexpr int kMaxPasses = 4;
inline constexpr int kMaxKeyBits = kMaxPasses * kMaxDigitBits;

struct Digits {
  int passes = 0, width = 0;

  // Choose the digits with the fewest operations: a pass moves every word, then visits every counter.
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

// Count one chunk's words by digit; then the position of each digit's next word.
struct Counters {
  alignas(64) std::uint32_t counts[1 << kMaxDigitBits];
  alignas(64) std::uint32_t odd[1 << kMaxDigitBits];
};

template <class Word>
void count_digits(std::span<const Word> words, int shift, std::size_t values, Counters& counters) {
  // Two alternating counters: a single one would stall if many words have the same digit.
  std::fill_n(counters.counts, values, 0);
  std::fill_n(counters.odd, values, 0);
  std::size_t i = 0;
  for (; i + 1 < words.size(); i += 2) {
    ++counters.counts[words[i] >> shift & (values - 1)];
    ++counters.odd[words[i + 1] >> shift & (values - 1)];
  }
  if (i < words.size()) ++counters.counts[words[i] >> shift & (values - 1)];
  for (std::size_t d = 0; d < values; ++d) counters.counts[d] += counters.odd[d];
}

// Turn counts into positions: digit by digit, chunk by chunk.
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

// Sort by key_bits bits from `shift` on, on this thread.
inline void radix_sort(std::vector<std::uint64_t>& words, int shift, int key_bits) {
  const Digits digits(static_cast<std::int64_t>(words.size()), key_bits);
  std::vector<std::uint64_t> sorted(words.size());
  const auto counters = std::make_unique_for_overwrite<Counters>();
  for (int pass = 0; pass < digits.passes; ++pass, shift += digits.width) {
    count_digits(std::span<const std::uint64_t>(words), shift, digits.values(), *counters);
    place_digits({counters.get(), 1}, digits.values());
    scatter(std::span<const std::uint64_t>(words), shift, digits.values(), *counters, sorted.data());
    words.swap(sorted);
  }
}

// Return positions 0 .. n - 1, ascending by (high(i), low(i)), all distinct: sort by as many leading bits as separate
// most of them, then by comparison where they do not. A fifth of a sort's time for some thousands.
template <class High, class Low>
std::vector<std::uint32_t> ordered(std::size_t n, const High& high, const Low& low) {
  constexpr std::size_t kFew = 64;
  constexpr int kPrefixBits = 6;  // in addition to those that count them
  std::vector<std::uint32_t> order(n);
  const auto is_before = [&](std::uint32_t a, std::uint32_t b) {
    return high(a) != high(b) ? high(a) < high(b) : low(a) < low(b);
  };
  if (n <= kFew) {
    for (std::uint32_t i = 0; i < n; ++i) order[i] = i;
    std::sort(order.begin(), order.end(), is_before);
    return order;
  }
  std::uint64_t least_high = high(0), most_high = least_high, least_low = low(0), most_low = least_low;
  for (std::uint32_t i = 1; i < n; ++i) {
    least_high = std::min<std::uint64_t>(least_high, high(i));
    most_high = std::max<std::uint64_t>(most_high, high(i));
    least_low = std::min<std::uint64_t>(least_low, low(i));
    most_low = std::max<std::uint64_t>(most_low, low(i));
  }
  const int high_bits = std::bit_width(most_high - least_high), low_bits = std::bit_width(most_low - least_low);
  const int position_bits = std::bit_width(n - 1);
  const int bits = std::min({high_bits + low_bits, position_bits + kPrefixBits, 64 - position_bits, kMaxKeyBits});
  const int of_high = std::min(bits, high_bits), of_low = bits - of_high;
  std::vector<std::uint64_t> words(n);
  for (std::uint32_t i = 0; i < n; ++i) {
    std::uint64_t key = (high(i) - least_high) >> (high_bits - of_high);
    if (of_low) key = key << of_low | (low(i) - least_low) >> (low_bits - of_low);
    words[i] = key << position_bits | i;
  }
  radix_sort(words, position_bits, bits);
  const std::uint64_t mask = (std::uint64_t{1} << position_bits) - 1;
  for (std::size_t i = 0; i < n; ++i) order[i] = static_cast<std::uint32_t>(words[i] & mask);
  for (std::size_t begin = 0, end; bits < high_bits + low_bits && begin < n; begin = end) {
    for (end = begin + 1; end < n && words[end] >> position_bits == words[begin] >> position_bits;) ++end;
    if (end - begin > 1)
      std::sort(order.begin() + static_cast<std::ptrdiff_t>(begin), order.begin() + static_cast<std::ptrdiff_t>(end), is_before);
  }
  return order;
}

}  // namespace colonnade
