// Colonnade's threads are torch's: one OpenMP runtime per process.
#pragma once

#include <atomic>
#include <cstdint>

namespace colonnade {

void set_num_threads(int n) noexcept;  // 0: as many as torch
// At most n for calls from the calling thread; 0: no limit. A thread that works beside training should not
// bring a second team of spinning workers.
void limit_threads_here(int n) noexcept;
int num_threads() noexcept;

// visit(i) for i in [0, n), each by one thread, handed out in order. `visit` must not throw.
// Only the plainest OpenMP is used: newer entry points may be missing from the runtime torch brought along.
template <class Visit>
void for_each_unit(std::int64_t n, const Visit& visit) noexcept {
  const int threads = static_cast<int>(n < num_threads() ? n : num_threads());
  if (threads <= 1) {
    for (std::int64_t i = 0; i < n; ++i) visit(i);
    return;
  }
  std::atomic<std::int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) visit(i);
  }
}

// visit(begin, end) over [0, n) in runs of `run`.
template <class Visit>
void for_each_run(std::int64_t n, std::int64_t run, const Visit& visit) noexcept {
  for_each_unit((n + run - 1) / run, [&](std::int64_t i) {
    const std::int64_t end = (i + 1) * run;
    visit(i * run, end < n ? end : n);
  });
}

}  // namespace colonnade
