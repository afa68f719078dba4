#include "threads.h"

#include <omp.h>

namespace colonnade {

namespace {
std::atomic<int> wanted{0};
thread_local int limit = 0;
}  // namespace

void set_num_threads(int n) noexcept {
  wanted.store(n < 0 ? 0 : n, std::memory_order_relaxed);
}

void limit_threads_here(int n) noexcept {
  limit = n;
}

int num_threads() noexcept {
  const int n = wanted.load(std::memory_order_relaxed), all = n > 0 ? n : omp_get_max_threads();
  return limit > 0 && limit < all ? limit : all;
}

}  // namespace colonnade
