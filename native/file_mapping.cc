#include "file_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>

namespace colonnade {

namespace {

// Largest number of mappings that a process may have (vm.max_map_count is 65,530).
constexpr std::size_t kMost = 1 << 16;

// Read by the handler while other threads write: an entry is valid while `begin` is not 0; it is written last and
// cleared first.
struct Entry {
  std::atomic<std::uintptr_t> begin{0};
  std::atomic<std::uintptr_t> file_end{0};  // end of the pages that the file backs
  std::atomic<std::size_t> bytes{0};        // including the room
  std::atomic<bool> is_damaged{false};
};

Entry entries[kMost];
std::atomic<std::size_t> num_entries{0};  // ever used
std::atomic<std::uint64_t> damaged{0};
std::mutex changing;
struct sigaction previous {};
std::atomic<bool> has_passed_on{false};
static_assert(std::atomic<std::uintptr_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

Entry* find(std::uintptr_t address) noexcept {
  const std::size_t count = num_entries.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uintptr_t begin = entries[i].begin.load(std::memory_order_acquire);
    if (begin && begin <= address && address < entries[i].file_end.load(std::memory_order_relaxed)) return &entries[i];
  }
  return nullptr;
}

// Replace the whole mapping at once, because its user discards all of it: one call for any number of missing pages, and
// no additional mappings of the process's limited number. Set the flag first, so that a thread that reads a zero finds
// it.
bool replace(Entry& entry) noexcept {
  const std::uintptr_t begin = entry.begin.load(), end = entry.file_end.load();
  entry.is_damaged.store(true);
  damaged.fetch_add(1);
  return mmap(reinterpret_cast<void*>(begin), end - begin, PROT_READ,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

// Default action: a load is repeated and ends the process; a signal that was sent is sent again.
void end_process(int number) noexcept {
  struct sigaction by_default {};
  by_default.sa_handler = SIG_DFL;
  sigaction(number, &by_default, nullptr);
  raise(number);
}

void pass_on(int number, siginfo_t* info, void* context) noexcept {
  // Handlers that dump and raise the signal again (faulthandler) may have restored ours before: avoid a second round.
  const bool is_raised = info->si_code == SI_TKILL && info->si_pid == getpid();
  if (is_raised && has_passed_on.load()) return end_process(number);
  has_passed_on.store(true);
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(number, info, context);
  if (previous.sa_handler == SIG_IGN && info->si_code <= 0) return;
  if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) return end_process(number);
  previous.sa_handler(number);
}

// Async-signal-safe: atomics, mmap, sigaction, raise.
void on_fault(int number, siginfo_t* info, void* context) noexcept {
  const int error = errno;
  Entry* const entry = info->si_code > 0 ? find(reinterpret_cast<std::uintptr_t>(info->si_addr)) : nullptr;
  if (!entry || !replace(*entry)) pass_on(number, info, context);
  errno = error;
}

Entry* free_entry() noexcept {
  const std::size_t count = num_entries.load();
  for (std::size_t i = 0; i < count; ++i) {
    if (!entries[i].begin.load()) return &entries[i];
  }
  if (count == kMost) return nullptr;
  num_entries.store(count + 1, std::memory_order_release);
  return &entries[count];
}

}  // namespace

FileMapping map_file(int fd, std::size_t offset, std::size_t length, std::size_t room, bool is_random) noexcept {
  const std::size_t page = page_bytes(), file_bytes = (length + page - 1) / page * page;
  if (file_bytes < length || file_bytes + room < room || file_bytes + room == 0) return {nullptr, EINVAL};
  const std::size_t bytes = file_bytes + room;
  const std::lock_guard guard(changing);
  Entry* const entry = free_entry();
  if (!entry) return {nullptr, ENOMEM};
  // Only address space: files may be larger than memory.
  void* const base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return {nullptr, errno};
  const bool is_mapped =
      (!length ||
       mmap(base, length, PROT_READ, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) != MAP_FAILED) &&
      (!room || mprotect(static_cast<std::byte*>(base) + file_bytes, room, PROT_READ | PROT_WRITE) == 0);
  if (!is_mapped) {
    const int error = errno;
    munmap(base, bytes);
    return {nullptr, error};
  }
  if (is_random) madvise(base, file_bytes, MADV_RANDOM);
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  entry->file_end.store(begin + file_bytes);
  entry->bytes.store(bytes);
  entry->is_damaged.store(false);
  entry->begin.store(begin, std::memory_order_release);
  handle_faults();
  return {base, 0};
}

void unmap_file(void* address) noexcept {
  const std::lock_guard guard(changing);
  for (std::size_t i = 0; i < num_entries.load(); ++i) {
    if (entries[i].begin.load() != reinterpret_cast<std::uintptr_t>(address)) continue;
    entries[i].begin.store(0);
    munmap(address, entries[i].bytes.load());
    return;
  }
}

bool is_damaged(const void* address) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  for (std::size_t i = 0; i < num_entries.load(); ++i) {
    if (entries[i].begin.load() == begin) return entries[i].is_damaged.load();
  }
  return false;
}

std::uint64_t num_damaged() noexcept { return damaged.load(); }

void handle_faults() noexcept {
  struct sigaction current {};
  if (sigaction(SIGBUS, nullptr, &current)) return;
  if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_fault) return;
  previous = current;
  has_passed_on.store(false);
  struct sigaction ours {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

std::size_t unchecked_blocks(const std::uint32_t* slots, std::size_t num_slots, std::uint64_t num_rows,
                             std::uint64_t begin, std::uint64_t stride, std::uint64_t block_bytes,
                             const std::uint8_t* checked, std::int64_t* unchecked, std::size_t room) noexcept {
  std::size_t count = 0;
  for (std::size_t i = 0; i < num_slots; ++i) {
    if (slots[i] >= num_rows) continue;  // beyond the file's rows
    const std::uint64_t first = begin + slots[i] * stride, last = (first + stride - 1) / block_bytes;
    for (std::uint64_t block = first / block_bytes; block <= last; ++block) {
      const auto number = static_cast<std::int64_t>(block);
      if (checked[block] || std::find(unchecked, unchecked + count, number) != unchecked + count) continue;
      if (count == room) return count;
      unchecked[count++] = number;
    }
  }
  return count;
}

}  // namespace colonnade
