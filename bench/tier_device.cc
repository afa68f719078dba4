// What does the device itself do? Random 4 KiB direct reads of given files through one io_uring, nothing else.
//
//   tier_device SECONDS DEPTH FILE...   prints: reads, seconds, processor seconds
//
// By raw system calls, registered buffers and files, completions reaped and submissions made a batch at a time:
// what `ssd_reads_of_raw_iops` and the device's bound in `bench tiers` are measured against.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr unsigned kPage = 4096;
constexpr unsigned kBatch = 32;  // completions waited for before new reads are submitted

void check(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

struct Ring {
  int fd = -1;
  unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
  io_uring_sqe* entries;
  io_uring_cqe* done;
};

Ring open_ring(unsigned depth) {
  Ring ring;
  io_uring_params p{};
  // Newer kernels first: no interrupts of the submitting thread. Older ones refuse the flags.
  for (const unsigned flags : {unsigned{IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN}, 0u}) {
    p = {};
    p.flags = flags;
    ring.fd = static_cast<int>(syscall(SYS_io_uring_setup, depth, &p));
    if (ring.fd >= 0) break;
  }
  check(ring.fd >= 0, "io_uring_setup");
  const auto map = [&](size_t bytes, off_t offset) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, offset);
    check(at != MAP_FAILED, "mmap of the ring");
    return static_cast<char*>(at);
  };
  char* sq = map(p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
  char* cq = map(p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
  ring.entries = reinterpret_cast<io_uring_sqe*>(map(p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
  ring.sq_tail = reinterpret_cast<unsigned*>(sq + p.sq_off.tail);
  ring.sq_mask = reinterpret_cast<unsigned*>(sq + p.sq_off.ring_mask);
  ring.sq_array = reinterpret_cast<unsigned*>(sq + p.sq_off.array);
  ring.cq_head = reinterpret_cast<unsigned*>(cq + p.cq_off.head);
  ring.cq_tail = reinterpret_cast<unsigned*>(cq + p.cq_off.tail);
  ring.cq_mask = reinterpret_cast<unsigned*>(cq + p.cq_off.ring_mask);
  ring.done = reinterpret_cast<io_uring_cqe*>(cq + p.cq_off.cqes);
  return ring;
}

double cpu_seconds() {
  rusage use;
  getrusage(RUSAGE_SELF, &use);
  return use.ru_utime.tv_sec + use.ru_stime.tv_sec + 1e-6 * (use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

}  // namespace

int main(int count, char** words) try {
  if (count < 4) throw std::runtime_error("usage: tier_device SECONDS DEPTH FILE...");
  const double limit = std::atof(words[1]);
  const unsigned depth = static_cast<unsigned>(std::atoi(words[2]));
  std::vector<int> files;
  std::vector<uint64_t> starts{0};  // pages before each file
  for (int i = 3; i < count; ++i) {
    const int fd = open(words[i], O_RDONLY | O_DIRECT);
    check(fd >= 0, words[i]);
    struct stat info;
    check(!fstat(fd, &info), "fstat");
    if (info.st_size < kPage) {
      close(fd);
      continue;
    }
    files.push_back(fd);
    starts.push_back(starts.back() + static_cast<uint64_t>(info.st_size) / kPage);
  }
  if (files.empty()) throw std::runtime_error("no file holds a page");
  Ring ring = open_ring(depth);
  char* memory = static_cast<char*>(std::aligned_alloc(kPage, size_t{kPage} * depth));
  check(memory != nullptr, "aligned_alloc");
  std::memset(memory, 0, size_t{kPage} * depth);
  const iovec buffer{memory, size_t{kPage} * depth};
  check(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1) >= 0, "registering buffers");
  check(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_FILES, files.data(), files.size()) >= 0,
        "registering files");
  std::mt19937_64 random(1);
  const auto submit = [&](unsigned slot) {
    const uint64_t page = random() % starts.back();
    size_t f = 0;
    while (starts[f + 1] <= page) ++f;
    const unsigned tail = *ring.sq_tail, at = tail & *ring.sq_mask;
    io_uring_sqe& entry = ring.entries[at];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = IORING_OP_READ_FIXED;
    entry.flags = IOSQE_FIXED_FILE;
    entry.fd = static_cast<int>(f);
    entry.off = (page - starts[f]) * kPage;
    entry.addr = reinterpret_cast<uint64_t>(memory + size_t{slot} * kPage);
    entry.len = kPage;
    entry.user_data = slot;
    ring.sq_array[at] = at;
    std::atomic_ref(*ring.sq_tail).store(tail + 1, std::memory_order_release);
  };
  for (unsigned slot = 0; slot < depth; ++slot) submit(slot);
  unsigned waiting = depth;
  uint64_t reads = 0;
  const auto start = std::chrono::steady_clock::now();
  const double cpu = cpu_seconds();
  double spent = 0;
  while (spent < limit) {
    const unsigned wanted = kBatch < depth / 2 ? kBatch : (depth + 1) / 2;
    const long got = syscall(SYS_io_uring_enter, ring.fd, waiting, wanted, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (got < 0 && errno == EINTR) continue;
    check(got >= 0, "io_uring_enter");
    waiting = 0;
    unsigned head = *ring.cq_head;
    const unsigned tail = std::atomic_ref(*ring.cq_tail).load(std::memory_order_acquire);
    for (; head != tail; ++head, ++waiting, ++reads) {
      const io_uring_cqe& done = ring.done[head & *ring.cq_mask];
      if (done.res != static_cast<int>(kPage)) {
        errno = done.res < 0 ? -done.res : EIO;
        check(false, "a read");
      }
      submit(static_cast<unsigned>(done.user_data));
    }
    std::atomic_ref(*ring.cq_head).store(head, std::memory_order_release);
    spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  std::printf("%llu %.6f %.6f\n", static_cast<unsigned long long>(reads), spent, cpu_seconds() - cpu);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
