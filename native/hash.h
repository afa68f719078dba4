// Mixing function of ids, and owners derived from it. Reference: src/colonnade/ops/reference.py.
#pragma once

#include <cstdint>

// Always inlined: this header is compiled once per instruction set, and the linker must not keep an out-of-line copy
// that was compiled for AVX-512. Kernels for processors that hardly anybody has are inlined as the compiler likes, which
// takes it a tenth of the time.
#ifdef COLONNADE_FALLBACK
#define COLONNADE_ALWAYS_INLINE
#else
#define COLONNADE_ALWAYS_INLINE __attribute__((always_inline))
#endif
#define COLONNADE_INLINE_MEMBER inline COLONNADE_ALWAYS_INLINE
#define COLONNADE_INLINE static COLONNADE_INLINE_MEMBER
// For lambdas. Compilers treat a function that only prefetches as one without effect, and drop calls to it.
#define COLONNADE_INLINE_LAMBDA COLONNADE_ALWAYS_INLINE

namespace colonnade {

// The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words, 0 -> 0.
COLONNADE_INLINE constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Return floor(x * n / 2^64): x as a fraction of n, monotonic in x.
COLONNADE_INLINE constexpr std::uint64_t scale_down(std::uint64_t x, std::uint64_t n) {
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(x) * n) >> 64);
}

// Owner in an open table: a fraction of the hash, so hash order groups owners.
COLONNADE_INLINE constexpr std::uint32_t open_owner(std::int64_t id, std::uint32_t num_owners) {
  return static_cast<std::uint32_t>(scale_down(mix64(static_cast<std::uint64_t>(id)), num_owners));
}

// Owner in a vocabulary table: each block of num_owners consecutive ids has one id per owner, in an order rotated by a
// hash of the block, so that local row numbers id / num_owners are dense.
COLONNADE_INLINE constexpr std::uint32_t vocabulary_owner(std::uint64_t id, std::uint32_t num_owners) {
  const std::uint64_t block = id / num_owners, place = id % num_owners;
  return static_cast<std::uint32_t>((place + mix64(block) % num_owners) % num_owners);
}

}  // namespace colonnade
