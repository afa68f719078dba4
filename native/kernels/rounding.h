// Conversion of updated rows to 16 bits: stochastic rounding, or a split into two halves without loss.
#pragma once

#include "convert.h"

namespace colonnade::COLONNADE_ISA {
namespace {

// Longer than registers may be: compilers split it. For 16-bit elements only.
typedef float Floats __attribute__((vector_size(64)));
typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef std::int32_t SignedWords __attribute__((vector_size(64)));
typedef std::int16_t SignedHalves __attribute__((vector_size(32)));
typedef std::uint64_t LongWords __attribute__((vector_size(64)));

// Start of the random bits of a row's update: word k of its stream is mix64(start + k * golden).
COLONNADE_INLINE std::uint64_t stream_start(std::uint64_t seed, std::int64_t id, std::uint64_t clock) {
  return mix64(mix64(mix64(static_cast<std::uint64_t>(id)) ^ seed) ^ (clock + 1));
}

// 16 random bits for each of the columns from `column` on: column c has bits 16 * (c mod 4) and up of word c / 4 + 1.
COLONNADE_INLINE Halves random_halves(std::uint64_t start, std::int64_t column) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const LongWords places = {1, 2, 3, 4, 5, 6, 7, 8};
  LongWords words = (places + static_cast<std::uint64_t>(column / 4)) * kGolden + start;
  words = (words ^ (words >> 30)) * 0xbf58476d1ce4e5b9u;
  words = (words ^ (words >> 27)) * 0x94d049bb133111ebu;
  words = words ^ (words >> 31);
  std::uint16_t lanes[32];
  __builtin_memcpy(lanes, &words, 64);
  Halves halves;
  __builtin_memcpy(&halves, lanes + column % 4, 32);
  return halves;
}

// Round to one of the two neighbours, so that the expected value is exact; representable values stay. The upper
// neighbour of the largest number is infinity; a NaN stays a quiet NaN.
template <class Row>
COLONNADE_INLINE Halves round_at_random(Vector<float> value, Halves random);
template <>
COLONNADE_INLINE_MEMBER Halves round_at_random<Bfloat16>(Vector<float> value, Halves random) {
  Words bits;
  __builtin_memcpy(&bits, &value, 64);
  const Words rounded = (bits + __builtin_convertvector(random, Words)) >> 16;
  const Words words = (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded;
  return __builtin_convertvector(words, Halves);
}
template <>
COLONNADE_INLINE_MEMBER Halves round_at_random<Float16>(Vector<float> value, Halves random) {
  constexpr std::uint32_t kSmallestNormal = (127u - 14u) << 23, kInfinity = 0x7f800000u;
  Words bits;
  __builtin_memcpy(&bits, &value, 64);
  const Words magnitude = bits & 0x7fffffffu;
  const Words up = __builtin_convertvector(random >> 3, Words);  // 13 bits
  Words words = ((magnitude + up) >> 13) - ((127u - 15u) << 10);
  words = words > 0x7c00u ? (Words{} + 0x7c00u) : words;
  // Below the smallest normal number: count steps of 2^-24.
  const Words small = magnitude < kSmallestNormal ? magnitude : Words{};
  Floats steps;
  __builtin_memcpy(&steps, &small, 64);
  steps = steps * 0x1p24f + __builtin_convertvector(up, Floats) * 0x1p-13f;
  const Words counted = __builtin_convertvector(__builtin_convertvector(steps, SignedWords), Words);
  words = magnitude < kSmallestNormal ? counted : words;
  words = magnitude > kInfinity ? (0x7e00u | (magnitude >> 13 & 0x3ffu)) : words;
  return __builtin_convertvector(words | (bits >> 16 & 0x8000u), Halves);
}

// A master's bits are (high << 16) + low with signed low: high is the master rounded to nearest, half up.
COLONNADE_INLINE Vector<float> join(Halves high, Halves low) {
  SignedHalves signed_low;
  __builtin_memcpy(&signed_low, &low, 32);
  const Words bits = (__builtin_convertvector(high, Words) << 16) +
                     __builtin_convertvector(__builtin_convertvector(signed_low, SignedWords), Words);
  Vector<float> value;
  __builtin_memcpy(&value, &bits, 64);
  return value;
}
COLONNADE_INLINE void split(Vector<float> value, Halves& high, Halves& low) {
  Words bits;
  __builtin_memcpy(&bits, &value, 64);
  high = __builtin_convertvector((bits + 0x8000u) >> 16, Halves);
  low = __builtin_convertvector(bits & 0xffffu, Halves);
}

// 16 elements from column 16 * v of a row of dim; elements past the end are zeros, and are not written.
COLONNADE_INLINE Halves load_halves(const std::byte* row, std::int64_t v, std::int64_t dim) {
  Halves halves = {};
  const std::int64_t rest = dim - 16 * v;
  if (rest >= 16) {
    __builtin_memcpy(&halves, row + 32 * v, 32);
  } else {
    std::uint16_t lanes[16] = {};
    for (std::int64_t j = 0; j < rest; ++j) __builtin_memcpy(lanes + j, row + 32 * v + 2 * j, 2);
    __builtin_memcpy(&halves, lanes, 32);
  }
  return halves;
}
COLONNADE_INLINE void store_halves(std::byte* row, std::int64_t v, std::int64_t dim, Halves halves) {
  const std::int64_t rest = dim - 16 * v;
  if (rest >= 16) {
    __builtin_memcpy(row + 32 * v, &halves, 32);
  } else {
    std::uint16_t lanes[16];
    __builtin_memcpy(lanes, &halves, 32);
    for (std::int64_t j = 0; j < rest; ++j) __builtin_memcpy(row + 32 * v + 2 * j, lanes + j, 2);
  }
}

}  // namespace
}  // namespace colonnade::COLONNADE_ISA
