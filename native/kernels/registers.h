// One register of elements, as wide as the instruction set has them, and vectors of samples on their way to it.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {
namespace {

// Where lanes never mix, the width of a register does not change the bits.
#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
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
  COLONNADE_INLINE_MEMBER static void stream(T* at, Value value) {
    if constexpr (kBytes == 64) {
      COLONNADE_ISA::stream(at, value);
    } else {
      store(at, value);
    }
  }
};

// The vectors of a later sample. Those of one cache line are read in the order in which they lie: the processor
// sees them coming.
template <class T>
COLONNADE_INLINE void fetch_vectors(const VectorPlace* vectors, std::int64_t num_vectors, std::int64_t dim,
                                    std::int64_t sample) {
  const std::int64_t bytes = dim * static_cast<std::int64_t>(sizeof(T));
  if (bytes <= 64) return;
  for (std::int64_t v = 0; v < num_vectors; ++v) fetch_row(vectors[v].base + sample * vectors[v].stride, bytes);
}

}  // namespace
}  // namespace colonnade::COLONNADE_ISA
