// io_uring through its system calls: submissions and completions of one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(__NR_io_uring_setup) && defined(IORING_FEAT_FAST_POLL)  // kernel headers of Linux 5.7 or newer
#define COLONNADE_HAS_RING 1
#endif
#endif

#ifdef COLONNADE_HAS_RING

#include <sys/uio.h>

#include <atomic>
#include <memory>

namespace colonnade {

class Ring {
 public:
  // Open a ring; at most `depth` submissions in flight. is_shared: for any thread, one at a time; else for the calling
  // thread only. Null on a system without io_uring.
  static std::unique_ptr<Ring> make(unsigned depth, bool is_shared = false);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Pin memory, so that reads into it need no pinning of their own. false: not permitted.
  bool register_memory(void* base, std::size_t bytes);

  // Queue a read for the next `enter`. is_registered: `to` is in registered memory.
  void read(int fd, void* to, std::uint32_t bytes, std::uint64_t offset, bool is_registered, std::uint64_t tag);
  // Submit queued reads and wait for `least` completions.
  void enter(unsigned least);
  // Call completed(tag, result or -errno) for each completion.
  template <class Completed>
  void reap(const Completed& completed) {
    std::atomic_ref<unsigned> head(*cq_head_), tail(*cq_tail_);
    for (unsigned at = head.load(std::memory_order_relaxed); at != tail.load(std::memory_order_acquire);) {
      const io_uring_cqe cqe = cqes_[at & cq_mask_];
      head.store(++at, std::memory_order_release);
      completed(cqe.user_data, cqe.res);
    }
  }

 private:
  Ring() = default;
  bool map(const io_uring_params& params);

  struct Mapping {
    void* at = nullptr;
    std::size_t bytes = 0;
  };
  int fd_ = -1;
  Mapping sq_, cq_, sqes_mapping_;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, num_put_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
};

}  // namespace colonnade

#endif
