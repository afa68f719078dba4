#include "slab.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace colonnade {

namespace {

// Slabs begin at different offsets in a huge page, because tables that grow alike would otherwise all touch their next
// huge page in the same step. Offsets are multiples of the golden ratio, rounded to small pages.
std::size_t next_offset() {
  static std::atomic<std::uint32_t> number{0};
  const std::uint32_t fraction = number.fetch_add(1, std::memory_order_relaxed) * 0x9e3779b9u;
  return (std::uint64_t{fraction} * kHugePageBytes >> 32) / 4096 * 4096;
}

}  // namespace

Slab::Slab(std::size_t bytes) {
  if (bytes == 0) return;
  const bool is_huge = bytes >= kHugePageBytes;
  const std::size_t wanted = bytes + (is_huge ? 2 * kHugePageBytes : 0);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;
#endif
  void* mapping = wanted < bytes ? MAP_FAILED : mmap(nullptr, wanted, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapping == MAP_FAILED) {
    throw NoRoom("cannot reserve " + std::to_string(bytes) + " bytes of address space (" +
                 std::strerror(errno) + "); lower the table's capacity, or allow overcommit");
  }
  mapping_ = mapping;
  mapped_bytes_ = wanted;
  bytes_ = bytes;
  auto address = reinterpret_cast<std::uintptr_t>(mapping);
  if (is_huge) address = ((address + kHugePageBytes - 1) & ~(kHugePageBytes - 1)) + next_offset();
  data_ = reinterpret_cast<std::byte*>(address);
}

Slab::Slab(std::size_t bytes, const std::string& directory) {
  if (bytes == 0) return;
  const auto refuse = [&](const char* what) {
    throw NoRoom(directory + ": could not " + what + " a file of " + std::to_string(bytes) + " bytes for rows: " +
                 std::strerror(errno));
  };
  std::string name = directory + "/rows-XXXXXX";
  const int fd = mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) refuse("make");
  unlink(name.c_str());
  int error = 0;
#ifdef __linux__
  if (fallocate(fd, 0, 0, static_cast<off_t>(bytes)) != 0) error = errno;
  if (error == EOPNOTSUPP) error = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
#else
  error = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
#endif
  void* mapping = MAP_FAILED;
  if (error == 0) {
    mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) error = errno;
  }
  close(fd);
  if (error != 0) {
    errno = error;
    refuse("map");
  }
  mapping_ = mapping;
  mapped_bytes_ = bytes_ = bytes;
  data_ = static_cast<std::byte*>(mapping);
}

void Slab::ask_for_huge_pages(std::size_t touched_bytes) const noexcept {
#ifdef MADV_HUGEPAGE
  if (bytes_ < kHugePageBytes) return;
  madvise(data_, bytes_, MADV_HUGEPAGE);  // advice: failure costs speed only
  constexpr int kCollapse = 25;           // MADV_COLLAPSE, Linux 6.1: for memory that is already in small pages
  if (touched_bytes) madvise(data_, std::min(bytes_, touched_bytes), kCollapse);
#else
  static_cast<void>(touched_bytes);
#endif
}

void Slab::give_back(std::size_t begin, std::size_t end) const noexcept {
#ifdef MADV_DONTNEED
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  begin = (begin + page - 1) / page * page;
  end = end / page * page;
  if (begin < end) madvise(data_ + begin, end - begin, MADV_DONTNEED);
#endif
}

Slab::~Slab() {
  if (mapping_) munmap(mapping_, mapped_bytes_);
}

std::size_t checked_bytes(std::size_t item_bytes, std::size_t items) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(item_bytes, items, &bytes) || bytes > (std::size_t{1} << 62)) {
    throw NoRoom(std::to_string(items) + " rows of " + std::to_string(item_bytes) +
                 " bytes exceed the address space; lower the table's capacity");
  }
  return bytes;
}

}  // namespace colonnade
