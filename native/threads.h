// Threads that help: who has work shares it with those that are free, and waits for no other.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>

namespace colonnade {

// How the core's threads end: a JoinedThread with the object that started it, whose destructor first tells it to stop,
// also where its constructor throws; the helpers of `share` never: they own nothing and sleep until the process ends. A
// child of fork has neither, and leaves alone what they used.
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

void set_num_threads(int n) noexcept;  // 0: as many as torch
// At most n for calls from the calling thread; 0: no limit. For a thread that works beside training.
void limit_threads_here(int n) noexcept;
int num_threads() noexcept;

using Work = void (*)(void*);
// run(work) here, and on up to `helpers` threads that come while it runs here; returns when all of these are done. A
// helper that gets no processor meanwhile is not waited for, and one without work sleeps: there may be more threads
// than processors (the lookahead's, other ranks'), where a team that has to be complete waits for its last member, and
// members that spin take the processor from who would let it end. Work shared inside of it is done alone.
void share(int helpers, void* work, Work run) noexcept;

// visit(i) for i in [0, n), each by one thread, handed out in order. `visit` must not throw.
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

// The same where all visits together touch so many bytes: of few, one thread is done before a second one has come.
template <class Visit>
void for_each_unit(std::int64_t n, std::int64_t bytes, const Visit& visit) noexcept {
  constexpr std::int64_t kAlone = std::int64_t{1} << 18;
  if (bytes > kAlone) return for_each_unit(n, visit);
  for (std::int64_t i = 0; i < n; ++i) visit(i);
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
