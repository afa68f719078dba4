#include "ring.h"

#ifdef COLONNADE_HAS_RING

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace colonnade {

namespace {

// Constants of newer headers.
constexpr unsigned kSingleIssuer = 1u << 12, kDeferTaskrun = 1u << 13, kCoopTaskrun = 1u << 8;

template <class T>
T* at(void* base, unsigned offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

std::unique_ptr<Ring> Ring::make(unsigned depth, bool is_shared) {
  // Completions wait until this thread asks for them, and interrupt no thread: Linux 6.1; less effective before.
  for (const unsigned flags : {kSingleIssuer | kDeferTaskrun, kCoopTaskrun, 0u}) {
    if (is_shared && (flags & kSingleIssuer)) continue;
    io_uring_params params{};
    params.flags = flags;
    const long fd = syscall(__NR_io_uring_setup, depth, &params);
    if (fd < 0) continue;
    std::unique_ptr<Ring> ring(new Ring);
    ring->fd_ = static_cast<int>(fd);
    // Without FAST_POLL (Linux 5.7) the wait for a wake-up would block a thread of the kernel.
    if ((params.features & IORING_FEAT_FAST_POLL) == 0 || !ring->map(params)) return nullptr;
    return ring;
  }
  return nullptr;
}

bool Ring::map(const io_uring_params& params) {
  const auto mapping = [this](std::size_t bytes, off_t what) {
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what);
    return at == MAP_FAILED ? Mapping{} : Mapping{at, bytes};
  };
  const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  const bool is_one = params.features & IORING_FEAT_SINGLE_MMAP;
  sq_ = mapping(is_one ? std::max(sq_bytes, cq_bytes) : sq_bytes, static_cast<off_t>(IORING_OFF_SQ_RING));
  if (!is_one) cq_ = mapping(cq_bytes, static_cast<off_t>(IORING_OFF_CQ_RING));
  sqes_mapping_ = mapping(params.sq_entries * sizeof(io_uring_sqe), static_cast<off_t>(IORING_OFF_SQES));
  void* const cq = is_one ? sq_.at : cq_.at;
  if (!sq_.at || !cq || !sqes_mapping_.at) return false;
  sq_tail_ = at<unsigned>(sq_.at, params.sq_off.tail);
  sq_array_ = at<unsigned>(sq_.at, params.sq_off.array);
  sq_mask_ = *at<unsigned>(sq_.at, params.sq_off.ring_mask);
  cq_head_ = at<unsigned>(cq, params.cq_off.head);
  cq_tail_ = at<unsigned>(cq, params.cq_off.tail);
  cq_mask_ = *at<unsigned>(cq, params.cq_off.ring_mask);
  cqes_ = at<io_uring_cqe>(cq, params.cq_off.cqes);
  sqes_ = static_cast<io_uring_sqe*>(sqes_mapping_.at);
  return true;
}

Ring::~Ring() {
  for (const Mapping& mapping : {sq_, cq_, sqes_mapping_}) {
    if (mapping.at) munmap(mapping.at, mapping.bytes);
  }
  if (fd_ >= 0) close(fd_);
}

bool Ring::register_memory(void* base, std::size_t bytes) {
  const iovec memory{base, bytes};
  return syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS, &memory, 1) == 0;
}

void Ring::read(int fd, void* to, std::uint32_t bytes, std::uint64_t offset, bool is_registered, std::uint64_t tag) {
  std::atomic_ref<unsigned> tail(*sq_tail_);
  const unsigned at = tail.load(std::memory_order_relaxed), index = at & sq_mask_;
  io_uring_sqe& sqe = sqes_[index];
  std::memset(&sqe, 0, sizeof sqe);
  sqe.opcode = is_registered ? IORING_OP_READ_FIXED : IORING_OP_READ;
  sqe.fd = fd;
  sqe.addr = reinterpret_cast<std::uintptr_t>(to);
  sqe.len = bytes;
  sqe.off = offset;
  sqe.user_data = tag;
  sq_array_[index] = index;
  tail.store(at + 1, std::memory_order_release);
  ++num_put_;
}

void Ring::enter(unsigned least) {
  for (;;) {
    const long taken = syscall(__NR_io_uring_enter, fd_, num_put_, least, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken >= 0) num_put_ -= static_cast<unsigned>(taken);
    // EAGAIN, EBUSY: no memory for requests at the moment; completions free some.
    if (taken >= 0 || errno == EAGAIN || errno == EBUSY) return;
    if (errno != EINTR) return;
  }
}

}  // namespace colonnade

#endif
