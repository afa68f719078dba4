// Loads of samples' vectors to registers.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {
namespace {

// Prefetch the vectors of a later sample. Those of one cache line are read in address order, which the processor's
// prefetcher detects.
template <class T>
COLONNADE_INLINE void fetch_vectors(const VectorPlace* vectors, std::int64_t num_vectors, std::int64_t dim,
                                    std::int64_t sample) {
  const std::int64_t bytes = dim * static_cast<std::int64_t>(sizeof(T));
  if (bytes <= 64) return;
  for (std::int64_t v = 0; v < num_vectors; ++v) fetch_row(vectors[v].base + sample * vectors[v].stride, bytes);
}

}  // namespace
}  // namespace colonnade::COLONNADE_ISA
