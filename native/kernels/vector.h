// Vector of 64 bytes of elements, in as many registers as needed. Same bits on all instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../hash.h"

namespace colonnade::COLONNADE_ISA {
namespace {

// Compilers put a vector type in registers if one of its size exists, and otherwise on the stack, lane by lane.
#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

template <class T, int kBytes = kRegisterBytes>
struct Register {
  typedef T Value __attribute__((vector_size(kBytes)));
  typedef T Unaligned __attribute__((vector_size(kBytes), aligned(sizeof(T)), may_alias));
  static constexpr std::int64_t kLanes = kBytes / static_cast<std::int64_t>(sizeof(T));

  COLONNADE_INLINE_MEMBER static Value load(const T* at) { return *reinterpret_cast<const Unaligned*>(at); }
  COLONNADE_INLINE_MEMBER static void store(T* at, Value value) { *reinterpret_cast<Unaligned*>(at) = value; }
  // Non-temporal store if a register is a cache line, to which `at` is then aligned. Call stream_end() before other
  // threads may read.
  COLONNADE_INLINE_MEMBER static void stream(T* at, Value value) {
#if defined(__AVX512F__)
    if constexpr (kBytes == 64) {
      __m512i bits;
      __builtin_memcpy(&bits, &value, 64);
      return _mm512_stream_si512(reinterpret_cast<__m512i*>(at), bits);
    }
#endif
    store(at, value);
  }
};

constexpr int kParts = 64 / kRegisterBytes;
constexpr bool kCanStream = kRegisterBytes == 64;

template <class T>
struct Vector {
  using Part = typename Register<T>::Value;
  Part parts[kParts];

  template <class Compute>
  COLONNADE_INLINE_MEMBER static Vector of(const Compute& compute) {
    Vector result;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) result.parts[p] = compute(p);
    return result;
  }
};
template <class T>
inline constexpr std::int64_t kLanes = 64 / static_cast<std::int64_t>(sizeof(T));

#define COLONNADE_LANE_BY_LANE(op)                                                                       \
  template <class T>                                                                                     \
  COLONNADE_INLINE Vector<T> operator op(const Vector<T>& a, const Vector<T>& b) {                       \
    return Vector<T>::of([&](int p) COLONNADE_INLINE_LAMBDA { return a.parts[p] op b.parts[p]; });       \
  }                                                                                                      \
  template <class T>                                                                                     \
  COLONNADE_INLINE Vector<T> operator op(const Vector<T>& a, std::type_identity_t<T> b) {                \
    return Vector<T>::of([&](int p) COLONNADE_INLINE_LAMBDA { return a.parts[p] op b; });                \
  }
COLONNADE_LANE_BY_LANE(+)
COLONNADE_LANE_BY_LANE(-)
COLONNADE_LANE_BY_LANE(*)
COLONNADE_LANE_BY_LANE(/)
#undef COLONNADE_LANE_BY_LANE

template <class T>
COLONNADE_INLINE Vector<T> operator-(const Vector<T>& a) {
  return Vector<T>::of([&](int p) COLONNADE_INLINE_LAMBDA { return -a.parts[p]; });
}

template <class T>
COLONNADE_INLINE Vector<T> splat(T value) {
  return Vector<T>{} + value;
}

// Return, lane by lane, `then` if `holds` is true for the lane of a, else `otherwise`.
template <class T, class Holds>
COLONNADE_INLINE Vector<T> where(const Vector<T>& a, const Holds& holds, const Vector<T>& then,
                                 const Vector<T>& otherwise) {
  return Vector<T>::of([&](int p) COLONNADE_INLINE_LAMBDA {
    return holds(a.parts[p]) ? then.parts[p] : otherwise.parts[p];
  });
}

template <class T>
COLONNADE_INLINE Vector<T> load(const T* at) {
  return Vector<T>::of([&](int p) COLONNADE_INLINE_LAMBDA {
    return Register<T>::load(at + p * Register<T>::kLanes);
  });
}

template <class T>
COLONNADE_INLINE void store(T* at, const Vector<T>& value) {
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) Register<T>::store(at + p * Register<T>::kLanes, value.parts[p]);
}

// Non-temporal store; `at` aligned to 64 bytes. Call stream_end() before other threads may read.
template <class T>
COLONNADE_INLINE void stream(T* at, const Vector<T>& value) {
#if defined(__AVX512F__)
  Register<T>::stream(at, value.parts[0]);
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

// Sum the lanes as a tree: lane i + lane i + half, repeatedly.
template <class T>
COLONNADE_INLINE T tree_sum(const Vector<T>& value) {
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

// Prefetch the cache lines of a row of `bytes` bytes. A row that is not whole lines may straddle one more.
COLONNADE_INLINE void fetch_row(const void* at, std::int64_t bytes) {
  const auto* line = static_cast<const std::byte*>(at);
  for (std::int64_t b = 0; b < bytes; b += 64) fetch(line + b);
  if (bytes % 64) fetch(line + bytes - 1);
}

// Call visit(n) with the number of vectors of a row of dim elements as a constant, if loops are compiled for it, which
// keep the row in registers; else visit(0), for any dim. Float64 is for tests and small models: one loop for any dim.
template <class T, class Visit>
COLONNADE_INLINE void visit_num_vectors(std::int64_t dim, const Visit& visit) {
  const std::int64_t num_vectors = dim % kLanes<T> ? 0 : dim / kLanes<T>;
  if constexpr (sizeof(T) == 4) {
    if (num_vectors == 1) return visit(std::integral_constant<int, 1>());
    if (num_vectors == 2) return visit(std::integral_constant<int, 2>());
    if (num_vectors == 4) return visit(std::integral_constant<int, 4>());
    if (num_vectors == 8) return visit(std::integral_constant<int, 8>());
  }
  visit(std::integral_constant<int, 0>());
}

}  // namespace
}  // namespace colonnade::COLONNADE_ISA
