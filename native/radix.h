// A least-significant-digit radix sort of 64-bit words by their high bits.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace colonnade {

inline constexpr int kMaxDigitBits = 11;  // 2048 counters of 4 bytes stay in the first-level cache
inline constexpr int kMaxPasses = 6;      // 64 bits

// Sorts words[0, n), n < 2^32, by bits [low, high); those above are zero. The lower bits must ascend in
// words, and still ascend inside each run of equal high bits afterwards (few words: runs of equal words above
// low, all of which are sorted). Returns where the sorted words are: `words` or `spare`.
inline std::uint64_t* radix_sort(std::uint64_t* words, std::uint64_t* spare, std::int64_t n, int low,
                                 int high) {
  constexpr std::int64_t kFew = 256;
  if (n < 2 || low >= high) return words;
  if (n <= kFew) {
    std::sort(words, words + n);
    return words;
  }
  const int passes = (high - low + kMaxDigitBits - 1) / kMaxDigitBits;
  const int width = (high - low + passes - 1) / passes;
  const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
  std::array<std::array<std::uint32_t, 1 << kMaxDigitBits>, kMaxPasses> counts;
  for (int p = 0; p < passes; ++p) {
    counts[p].fill(0);
    for (std::int64_t i = 0; i < n; ++i) ++counts[p][words[i] >> (low + p * width) & mask];
  }
  for (int p = 0; p < passes; ++p) {
    auto& place = counts[p];
    const int shift = low + p * width;
    if (place[words[0] >> shift & mask] == static_cast<std::uint64_t>(n)) continue;  // one digit for all
    std::uint32_t sum = 0;
    for (std::uint64_t d = 0; d <= mask; ++d) sum += std::exchange(place[d], sum);
    for (std::int64_t i = 0; i < n; ++i) spare[place[words[i] >> shift & mask]++] = words[i];
    std::swap(words, spare);
  }
  return words;
}

}  // namespace colonnade
