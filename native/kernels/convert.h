// Conversion of 16-bit elements of rows and outputs, alone or 16 as one vector of float32. Same bits on all instruction
// sets.
//
// A kernel that is a template on its rows' element type reads with load_as / widen and writes with store_as / narrow;
// for float32 and float64 these only load and store.
#pragma once

#include "vector.h"

namespace colonnade {

struct Bfloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

}  // namespace colonnade

namespace colonnade::COLONNADE_ISA {
namespace {

// Type in which elements are computed.
template <class Row>
struct Computed {
  typedef Row Type;
};
template <>
struct Computed<Bfloat16> {
  typedef float Type;
};
template <>
struct Computed<Float16> {
  typedef float Type;
};
template <class Row>
using Compute = typename Computed<Row>::Type;

COLONNADE_INLINE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
COLONNADE_INLINE float float_of(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Convert one element exactly.
COLONNADE_INLINE float widen(float value) {
  return value;
}
COLONNADE_INLINE double widen(double value) {
  return value;
}
COLONNADE_INLINE float widen(Bfloat16 value) {
  return float_of(static_cast<std::uint32_t>(value.bits) << 16);
}
// A signalling NaN becomes quiet, as on processors.
COLONNADE_INLINE float widen(Float16 value) {
  constexpr std::uint32_t kInfinity = 0x7c00u << 13, kRebias = (127u - 15u) << 23;
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
  std::uint32_t bits = magnitude + kRebias;
  if (magnitude >= kInfinity) {
    bits += kRebias;
    if (magnitude > kInfinity) bits |= 0x400000u;
  } else if (magnitude < 1u << 23) {  // subnormal: its bits count steps of 2^-24
    bits = bits_of(float_of(bits + (1u << 23)) - 0x1p-14f);
  }
  return float_of(sign | bits);
}

// Convert one element to the nearest Row, ties to even; too large: infinity; a NaN stays a quiet NaN.
template <class Row>
COLONNADE_INLINE Row narrow(Compute<Row> value) {
  return value;
}
template <>
COLONNADE_INLINE_MEMBER Bfloat16 narrow<Bfloat16>(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return {static_cast<std::uint16_t>(value != value ? bits >> 16 | 0x40u : rounded)};
}
template <>
COLONNADE_INLINE_MEMBER Float16 narrow<Float16>(float value) {
  const std::uint32_t sign = bits_of(value) >> 16 & 0x8000u;
  std::uint32_t bits = bits_of(value) & 0x7fffffffu;
  if (bits > 0x7f800000u) {
    bits = 0x7e00u | (bits >> 13 & 0x3ffu);
  } else if (bits >= (127u + 16u) << 23) {
    bits = 0x7c00u;
  } else if (bits < (127u - 14u) << 23) {  // subnormal: adding 0.5 rounds to steps of 2^-24
    bits = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
  } else {  // a carry out of the fraction is correct, up to infinity
    bits = (bits - ((127u - 15u) << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | bits)};
}

// 16 elements of Row as one value.
typedef std::uint16_t Halves __attribute__((vector_size(32)));

#if defined(__AVX512F__)
// maskz with all lanes: compilers warn about the undefined value in the plain intrinsics.
constexpr __mmask16 kAll = 0xffff;

COLONNADE_INLINE Vector<float> widen_lanes(const Bfloat16* at) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  return {{_mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, halves), 16))}};
}
COLONNADE_INLINE Vector<float> widen_lanes(const Float16* at) {
  return {{_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))}};
}
template <class Row>
COLONNADE_INLINE Halves narrow_lanes(Vector<float> value);
template <>
COLONNADE_INLINE_MEMBER Halves narrow_lanes<Bfloat16>(Vector<float> value) {
  const __m512i bits = _mm512_castps_si512(value.parts[0]), high = _mm512_maskz_srli_epi32(kAll, bits, 16);
  const __m512i is_odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value.parts[0], value.parts[0], _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __m512i words = _mm512_mask_mov_epi32(_mm512_maskz_srli_epi32(kAll, up, 16), is_nan, quiet);
  return reinterpret_cast<Halves>(_mm512_maskz_cvtepi32_epi16(kAll, words));
}
template <>
COLONNADE_INLINE_MEMBER Halves narrow_lanes<Float16>(Vector<float> value) {
  return reinterpret_cast<Halves>(
      _mm512_maskz_cvtps_ph(kAll, value.parts[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX2__)
COLONNADE_INLINE Vector<float> widen_lanes(const Bfloat16* at) {
  return Vector<float>::of([&](int p) COLONNADE_INLINE_LAMBDA {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  });
}
COLONNADE_INLINE Vector<float> widen_lanes(const Float16* at) {
  return Vector<float>::of([&](int p) COLONNADE_INLINE_LAMBDA {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + p));
  });
}
template <class Row>
COLONNADE_INLINE Halves narrow_lanes(Vector<float> value);
template <>
COLONNADE_INLINE_MEMBER Halves narrow_lanes<Bfloat16>(Vector<float> value) {
  __m256i words[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 part = value.parts[i];
    const __m256i bits = _mm256_castps_si256(part), high = _mm256_srli_epi32(bits, 16);
    const __m256i is_odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), is_odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(part, part, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    words[i] = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), quiet, is_nan);
  }
  return reinterpret_cast<Halves>(_mm256_permute4x64_epi64(_mm256_packus_epi32(words[0], words[1]), 0xd8));
}
template <>
COLONNADE_INLINE_MEMBER Halves narrow_lanes<Float16>(Vector<float> value) {
  __m128i words[2];
  for (int i = 0; i < 2; ++i) {
    words[i] = _mm256_cvtps_ph(value.parts[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  return reinterpret_cast<Halves>(_mm256_set_m128i(words[1], words[0]));
}
#else
template <class Row>
COLONNADE_INLINE Vector<float> widen_lanes(const Row* at) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = widen(at[i]);
  return load(lanes);
}
template <class Row>
COLONNADE_INLINE Halves narrow_lanes(Vector<float> value) {
  float lanes[16];
  Row narrowed[16];
  store(lanes, value);
  for (int i = 0; i < 16; ++i) narrowed[i] = narrow<Row>(lanes[i]);
  Halves halves;
  __builtin_memcpy(&halves, narrowed, 32);
  return halves;
}
#endif

// kLanes<Compute<Row>> elements at any address.
template <class Row>
COLONNADE_INLINE Vector<Compute<Row>> load_as(const Row* at) {
  if constexpr (sizeof(Row) == 2) {
    return widen_lanes(at);
  } else {
    return load(at);
  }
}
template <class Row>
COLONNADE_INLINE void store_as(Row* at, Vector<Compute<Row>> value) {
  if constexpr (sizeof(Row) == 2) {
    const Halves halves = narrow_lanes<Row>(value);
    __builtin_memcpy(at, &halves, 32);
  } else {
    store(at, value);
  }
}

// Non-temporal stores; `at` is aligned to the bytes written: 32 for 16-bit elements, else 64.
template <class Row>
COLONNADE_INLINE void stream_as(Row* at, Vector<Compute<Row>> value) {
  if constexpr (sizeof(Row) == 2) {
    const Halves halves = narrow_lanes<Row>(value);
#if defined(__AVX__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(at), reinterpret_cast<__m256i>(halves));
#elif defined(__x86_64__)
    __m128i parts[2];
    __builtin_memcpy(parts, &halves, 32);
    for (int i = 0; i < 2; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(at) + i, parts[i]);
#else
    __builtin_memcpy(at, &halves, 32);
#endif
  } else {
    stream(at, value);
  }
}

}  // namespace
}  // namespace colonnade::COLONNADE_ISA
