// Access frequency of a row: a logarithmic count of uses with exponential decay.
#pragma once

#include <array>
#include <cstdint>

#include "hash.h"

namespace colonnade {

// A row's count of uses halves with every half-life, and each use adds one. Decay needs no writes (forward decay,
// Cormode et al. 2009): the stored 16 bits are log2(count) + time, time in half-lives, in 1/1024 of a doubling, modulo
// 64 doublings. A count that cannot grow by a whole unit grows by one with the probability that preserves the mean.
// Storage keeps the high byte: four steps per doubling; 0 means unknown to this process.
namespace access_frequency {

inline constexpr std::uint32_t kDoubling = 1024;
// Scores from 40 doublings behind the clock to 24 ahead of it are distinguishable.
inline constexpr std::uint16_t kBehind = 40 * kDoubling;

// 65536 * 1024 * log2(1 + 2^-x), x in steps of 1/32 doubling: what one use adds to a count of 2^x.
inline constexpr int kGains = 24 * 32;
extern const std::array<std::uint32_t, kGains + 1> kGain;

// Return `score` after one more use at time `now`. random: 16 bits.
COLONNADE_INLINE std::uint16_t after_use(std::uint16_t score, std::uint16_t now, std::uint32_t random) {
  const int ahead = static_cast<std::uint16_t>(score - now + kBehind) - kBehind;  // 1024 * log2(count)
  const int distance = (ahead < 0 ? -ahead : ahead) >> 5;
  const std::uint32_t gain = kGain[distance < kGains ? distance : kGains];
  const std::uint32_t grown = (gain + (random & 0xffff)) >> 16;
  // log2(2^a + 1): the larger of the two plus the share of the smaller. Limited, so that a score never wraps and looks
  // old.
  const std::uint16_t larger = ahead < 0 ? now : score;
  return ahead > 23 * static_cast<int>(kDoubling) ? score : static_cast<std::uint16_t>(larger + grown);
}

inline constexpr std::uint8_t kUnknown = 0;
COLONNADE_INLINE std::uint8_t to_stored(std::uint16_t score) {
  const auto high = static_cast<std::uint8_t>(score >> 8);
  return high == kUnknown ? 1 : high;
}
COLONNADE_INLINE std::uint16_t from_stored(std::uint8_t frequency) {
  return static_cast<std::uint16_t>(frequency << 8 | 0x80);
}

}  // namespace access_frequency

// Hint of an id's next lookup from a reader: code 0 is unknown, 255 never, c in about 2^((c - 1) / 8) batches or
// earlier.
namespace next_use {

inline constexpr std::uint8_t kUnknown = 0, kNever = 255;
extern const std::array<std::uint32_t, 256> kBatches;  // by code, rounded up; at most 2^31

}  // namespace next_use

}  // namespace colonnade
