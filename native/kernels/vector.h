// 64 bytes of elements as one value; compilers split it where registers are narrower. Same bits everywhere.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../hash.h"

namespace colonnade::COLONNADE_ISA {
namespace {

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float Vector __attribute__((vector_size(64)));
  typedef float Unaligned __attribute__((vector_size(64), aligned(4), may_alias));
};
template <>
struct Lanes<double> {
  typedef double Vector __attribute__((vector_size(64)));
  typedef double Unaligned __attribute__((vector_size(64), aligned(8), may_alias));
};
template <class T>
using Vector = typename Lanes<T>::Vector;
template <class T>
inline constexpr std::int64_t kLanes = 64 / static_cast<std::int64_t>(sizeof(T));

template <class T>
COLONNADE_INLINE Vector<T> load(const T* at) {
  return *reinterpret_cast<const typename Lanes<T>::Unaligned*>(at);
}

template <class T>
COLONNADE_INLINE void store(T* at, Vector<T> value) {
  *reinterpret_cast<typename Lanes<T>::Unaligned*>(at) = value;
}

template <class T>
COLONNADE_INLINE Vector<T> splat(T value) {
  return Vector<T>{} + value;
}

// Around the cache; `at` aligned to 64 bytes. stream_end() before other threads may look.
template <class T>
COLONNADE_INLINE void stream(T* at, Vector<T> value) {
#if defined(__AVX512F__)
  __m512i bits;
  __builtin_memcpy(&bits, &value, 64);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(at), bits);
#elif defined(__AVX__)
  __m256i bits[2];
  __builtin_memcpy(bits, &value, 64);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(at), bits[0]);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(at) + 1, bits[1]);
#elif defined(__x86_64__)
  __m128i bits[4];
  __builtin_memcpy(bits, &value, 64);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(at) + i, bits[i]);
#else
  store(at, value);
#endif
}

COLONNADE_INLINE void stream_end() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Sum of the lanes as a tree: lane i + lane i + half, and again.
template <class T>
COLONNADE_INLINE T tree_sum(Vector<T> value) {
  T lanes[kLanes<T>];
  __builtin_memcpy(lanes, &value, 64);
#pragma GCC unroll 8
  for (std::int64_t half = kLanes<T> / 2; half; half /= 2) {
    for (std::int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

COLONNADE_INLINE void fetch(const void* at) {
  __builtin_prefetch(at, 0, 2);
}  // prefetcht1

// The cache lines of a row of `bytes` bytes. A row that is not whole lines may straddle one more.
COLONNADE_INLINE void fetch_row(const void* at, std::int64_t bytes) {
  const auto* line = static_cast<const std::byte*>(at);
  for (std::int64_t b = 0; b < bytes; b += 64) fetch(line + b);
  if (bytes % 64) fetch(line + bytes - 1);
}

}  // namespace
}  // namespace colonnade::COLONNADE_ISA
