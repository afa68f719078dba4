#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace colonnade {

namespace {
std::atomic<int> wanted{0};
thread_local int limit = 0;
thread_local bool is_sharing = false;

constexpr int kSpins = 1500;  // some tens of microseconds: the time to wake a thread

void pause_here() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// On the stack of the sharing thread.
struct Job {
  void* work;
  Work run;
  int wanted;                   // helpers that may still join
  std::atomic<int> running{0};  // helpers that joined and are not done
  Job* next = nullptr;
};

// One per process, never destroyed: its threads sleep until the process ends.
class Helpers {
 public:
  void share(Job& job) noexcept {
    const bool is_for_one = job.wanted == 1;
    {
      const std::scoped_lock lock(mutex_);
      while (num_threads_ < job.wanted && start()) {
      }
      job.next = first_;
      first_ = &job;
      version_.fetch_add(1, std::memory_order_release);
    }
    if (num_asleep_.load(std::memory_order_relaxed) > 0) {
      if (is_for_one) {
        wake_.notify_one();
      } else {
        wake_.notify_all();
      }
    }
    job.run(job.work);
    {  // no further helper can join
      const std::scoped_lock lock(mutex_);
      for (Job** at = &first_; *at; at = &(*at)->next) {
        if (*at == &job) {
          *at = job.next;
          break;
        }
      }
    }
    for (int i = 0; i < kSpins && job.running.load(std::memory_order_acquire); ++i) pause_here();
    if (!job.running.load(std::memory_order_acquire)) return;
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return job.running.load(std::memory_order_acquire) == 0; });
  }

 private:
  bool start() noexcept {
    try {
      std::thread([this] { serve(); }).detach();
      ++num_threads_;
      return true;
    } catch (...) {  // no more threads: continue with fewer
      return false;
    }
  }

  void serve() noexcept {
    is_sharing = true;
    std::unique_lock lock(mutex_);
    for (;;) {
      Job* job = first_;
      while (job && job->wanted == 0) job = job->next;
      if (job) {
        --job->wanted;
        job->running.fetch_add(1, std::memory_order_relaxed);
        lock.unlock();
        job->run(job->work);
        lock.lock();
        if (job->running.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
        continue;
      }
      const auto version = version_.load(std::memory_order_acquire);
      lock.unlock();
      for (int i = 0; i < kSpins && version_.load(std::memory_order_acquire) == version; ++i) pause_here();
      lock.lock();
      if (version_.load(std::memory_order_acquire) != version) continue;
      num_asleep_.fetch_add(1);
      wake_.wait(lock, [&] { return version_.load(std::memory_order_acquire) != version; });
      num_asleep_.fetch_sub(1);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* first_ = nullptr;
  int num_threads_ = 0;
  std::atomic<int> num_asleep_{0};
  std::atomic<std::uint64_t> version_{0};
};

// A child of fork has none of the threads, and perhaps a locked mutex: start over.
Helpers& helpers() {
  alignas(Helpers) static std::byte memory[sizeof(Helpers)];
  static Helpers* const helpers = [] {
    pthread_atfork(nullptr, nullptr, [] { new (memory) Helpers; });
    return new (memory) Helpers;
  }();
  return *helpers;
}
}  // namespace

void share(int wanted, void* work, Work run) noexcept {
  if (is_sharing) return run(work);
  is_sharing = true;
  Job job{work, run, wanted};
  helpers().share(job);
  is_sharing = false;
}

void set_num_threads(int n) noexcept {
  wanted.store(n < 0 ? 0 : n, std::memory_order_relaxed);
}

void limit_threads_here(int n) noexcept {
  limit = n;
}

namespace {
// The number of threads of torch's OpenMP runtime; before torch is loaded, the number of processors.
int omp_max_threads() noexcept {
  using Ask = int (*)();
  static std::atomic<Ask> known{nullptr};
  Ask ask = known.load(std::memory_order_relaxed);
  if (!ask) {
    ask = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    if (!ask) return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    known.store(ask, std::memory_order_relaxed);
  }
  return ask();
}
}  // namespace

int num_threads() noexcept {
  const int n = wanted.load(std::memory_order_relaxed), all = n > 0 ? n : omp_max_threads();
  return limit > 0 && limit < all ? limit : all;
}

}  // namespace colonnade
