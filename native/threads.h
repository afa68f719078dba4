// Helper threads: a thread with work shares it with idle ones, and waits for no other.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>

namespace colonnade {

// End of the core's threads: a JoinedThread ends with the object that started it; the destructor first tells it to
// stop, also if the constructor throws. The helpers of `share` never end: they own nothing and sleep until the process
// ends. A child of fork has neither, and leaves their memory alone.
class JoinedThread {
 public:
  JoinedThread() = default;
  template <class Run>
  explicit JoinedThread(Run run) : thread_(std::move(run)) {}  // system_error: no more threads
  JoinedThread(JoinedThread&&) = default;
  JoinedThread& operator=(JoinedThread&& other) {
    join();
    thread_ = std::move(other.thread_);
    return *this;
  }
  ~JoinedThread() { join(); }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

void set_num_threads(int n) noexcept;  // 0: as many as torch has
// Limit calls from the calling thread to n threads; 0: no limit. For threads that work during training.
void limit_threads_here(int n) noexcept;
int num_threads() noexcept;

using Work = void (*)(void*);
// Call run(work) on this thread, and on up to `helpers` threads that join while it runs; return when all are done. Does
// not wait for a helper without a processor, and an idle helper sleeps. So there may be more threads than processors
// (the lookahead's, other ranks'), while a complete team waits for its last member, and spinning members take the
// processor from it. Nested shared work runs on one thread.
void share(int helpers, void* work, Work run) noexcept;

// Call visit(i) for i in [0, n), each on one thread, in order of assignment. `visit` must not throw.
template <class Visit>
void for_each_unit(std::int64_t n, const Visit& visit) noexcept {
  const int threads = static_cast<int>(n < num_threads() ? n : num_threads());
  if (threads <= 1) {
    for (std::int64_t i = 0; i < n; ++i) visit(i);
    return;
  }
  std::atomic<std::int64_t> next{0};
  auto work = [&] {
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) visit(i);
  };
  share(threads - 1, &work, [](void* self) { (*static_cast<decltype(work)*>(self))(); });
}

// Call visit likewise, if all visits together touch `bytes`: for few bytes one thread is done before a second one
// joins.
template <class Visit>
void for_each_unit(std::int64_t n, std::int64_t bytes, const Visit& visit) noexcept {
  constexpr std::int64_t kAlone = std::int64_t{1} << 18;
  if (bytes > kAlone) return for_each_unit(n, visit);
  for (std::int64_t i = 0; i < n; ++i) visit(i);
}

// Call visit(begin, end) over [0, n) in runs of `run`.
template <class Visit>
void for_each_run(std::int64_t n, std::int64_t run, const Visit& visit) noexcept {
  for_each_unit((n + run - 1) / run, [&](std::int64_t i) {
    const std::int64_t end = (i + 1) * run;
    visit(i * run, end < n ? end : n);
  });
}

}  // namespace colonnade
