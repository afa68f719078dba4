#include "threads.h"

#include <omp.h>

namespace colonnade {

namespace {
std::atomic<int> wanted{0};
}

void set_num_threads(int n) noexcept {
  wanted.store(n < 0 ? 0 : n, std::memory_order_relaxed);
}

int num_threads() noexcept {
  const int n = wanted.load(std::memory_order_relaxed);
  return n > 0 ? n : omp_get_max_threads();
}

}  // namespace colonnade
