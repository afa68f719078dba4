#include "slab.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace colonnade {

Slab::Slab(std::size_t bytes) {
  if (bytes == 0) return;
  const bool is_huge = bytes >= kHugePageBytes;
  const std::size_t wanted = bytes + (is_huge ? kHugePageBytes : 0);
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
  if (is_huge) address = (address + kHugePageBytes - 1) & ~(kHugePageBytes - 1);
  data_ = reinterpret_cast<std::byte*>(address);
}

void Slab::ask_for_huge_pages(std::size_t touched_bytes) const noexcept {
#ifdef MADV_HUGEPAGE
  if (bytes_ < kHugePageBytes) return;
  madvise(data_, bytes_, MADV_HUGEPAGE);  // advice: failure costs speed only
  constexpr int kCollapse = 25;           // MADV_COLLAPSE, Linux 6.1: what is there in small pages already
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
