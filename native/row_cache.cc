#include "row_cache.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "read_queue.h"
#include "ring.h"

namespace colonnade {

#ifndef COLONNADE_HAS_RING
class Ring {};
#endif

namespace {

constexpr std::int64_t kWays = 16;           // entries of a set: one line of the processor's cache
constexpr std::size_t kDepth = 256;          // reads in flight
constexpr std::size_t kChunk = 64;           // lookups whose memory is fetched together
constexpr std::int64_t kEntryBytes = 4;
// An entry is tag << 4 | age; 0: empty. A row that is used has age 0. A new one has an old age, so that rows that are
// used once leave first.
constexpr std::uint32_t kOldest = 15, kNew = 14;
constexpr std::int64_t kMaxTag = (std::int64_t{1} << 28) - 1;

[[noreturn]] void refuse(std::int64_t bytes, std::int64_t wanted) {
  throw std::invalid_argument("got " + std::to_string(bytes) + " bytes for rows, wanted at least " + std::to_string(wanted));
}

bool is_prime(std::int64_t n) noexcept {
  for (std::int64_t d = 2; d * d <= n; ++d) {
    if (n % d == 0) return false;
  }
  return n > 1;
}

std::uint64_t page_floor(std::uint64_t offset) { return offset / kPageBytes * kPageBytes; }
std::uint64_t page_ceil(std::uint64_t offset) { return page_floor(offset + kPageBytes - 1); }

// Return the entry of a set that has a tag, or null.
std::uint32_t* find_entry(std::uint32_t* set, std::uint32_t tag) noexcept {
  std::uint32_t* const entry = std::find_if(set, set + kWays, [tag](std::uint32_t value) { return value >> 4 == tag; });
  return entry == set + kWays ? nullptr : entry;
}

// Open a file again, with a position and flags of its own. Reads of single rows fill whole pages of the system's cache,
// which costs more than the read: bypass it where the file system can.
int reopen(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
#ifdef O_DIRECT
  const int direct = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (direct >= 0) {
    Buffer<std::byte> page(kPageBytes);
    if (::pread(direct, page.data(), kPageBytes, 0) >= 0) return direct;
    ::close(direct);
  }
#endif
  int opened = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
#ifdef POSIX_FADV_RANDOM
  if (opened >= 0) posix_fadvise(opened, 0, 0, POSIX_FADV_RANDOM);
#endif
  if (opened < 0) opened = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (opened < 0) throw std::system_error(errno, std::generic_category(), "row cache: could not open a file again");
  return opened;
}

}  // namespace

// Rows of one stride: sets of kWays entries, and the rows of the entries.
struct RowCache::Group {
  std::int64_t stride = 0, num_rows = 0, num_sets = 0;
  std::uint32_t* entries = nullptr;
  std::byte* rows = nullptr;
  std::size_t mapped_bytes = 0;

  Group() = default;
  Group(Group&& other) noexcept { *this = std::move(other); }
  Group& operator=(Group&& other) noexcept {
    std::swap(stride, other.stride);
    std::swap(num_rows, other.num_rows);
    std::swap(num_sets, other.num_sets);
    std::swap(entries, other.entries);
    std::swap(rows, other.rows);
    std::swap(mapped_bytes, other.mapped_bytes);
    return *this;
  }
  ~Group() {
    if (entries) munmap(entries, mapped_bytes);
  }

  std::int64_t set_bytes() const noexcept { return kWays * (stride + kEntryBytes); }

  void allocate(std::int64_t bytes) {
    const std::int64_t set_bytes = this->set_bytes();
    const std::int64_t all = (num_rows + kWays - 1) / kWays;  // sets that hold every row
    num_sets = std::clamp<std::int64_t>(bytes / set_bytes, 1, std::max<std::int64_t>(all, 1));
    // A prime number spreads rows that are used at regular distances over all sets.
    while (num_sets < all && num_sets > 2 && !is_prime(num_sets)) --num_sets;
    if (num_rows / num_sets >= kMaxTag) refuse(bytes, num_rows / kMaxTag * set_bytes + set_bytes);
    const std::size_t index_bytes = page_ceil(static_cast<std::uint64_t>(num_sets * kWays * kEntryBytes));
    mapped_bytes = index_bytes + static_cast<std::size_t>(num_sets * kWays * stride);
    void* const memory = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "row cache: no memory");
#ifdef MADV_HUGEPAGE
    madvise(memory, mapped_bytes, MADV_HUGEPAGE);
#endif
    entries = static_cast<std::uint32_t*>(memory);
    rows = static_cast<std::byte*>(memory) + index_bytes;
  }
  std::uint32_t* set_of(std::int64_t number) const noexcept { return entries + number % num_sets * kWays; }
  std::uint32_t tag_of(std::int64_t number) const noexcept { return static_cast<std::uint32_t>(number / num_sets + 1); }
  std::byte* row_of(const std::uint32_t* entry) const noexcept { return rows + (entry - entries) * stride; }
};

struct RowCache::Source {
  File file;  // with a descriptor of the cache's own
  Group* group = nullptr;
  std::int64_t first = 0;  // number of row 0 among the group's rows

  Source() = default;
  Source(Source&& other) noexcept { *this = std::move(other); }
  Source& operator=(Source&& other) noexcept {
    std::swap(file, other.file);
    std::swap(group, other.group);
    std::swap(first, other.first);
    return *this;
  }
  ~Source() {
    if (file.fd >= 0) ::close(file.fd);
  }
};

// One read in flight.
struct RowCache::Flight {
  const Run* run = nullptr;
  std::uint64_t have = 0;
};

RowCache::RowCache(std::span<const File> files, std::int64_t bytes, bool has_ring) : has_tried_ring_(!has_ring) {
  double total = 0;
  std::vector<double> lengths;  // by group
  std::vector<std::size_t> group_of;
  for (const auto& file : files) {
    if (file.stride <= 0 || file.begin < 0 || file.num_rows < 0 || file.num_rows > 0xffffffff) {
      throw std::invalid_argument("files: got one of " + std::to_string(file.num_rows) + " rows of " +
                                  std::to_string(file.stride) + " bytes from byte " + std::to_string(file.begin));
    }
    const auto at = std::ranges::find(groups_, file.stride, &Group::stride);
    const auto g = static_cast<std::size_t>(at - groups_.begin());
    if (at == groups_.end()) {
      groups_.emplace_back().stride = file.stride;
      lengths.push_back(0);
    }
    Source& source = files_.emplace_back();
    source.file = file;
    source.file.fd = -1;
    source.file.fd = reopen(file.fd);
    source.first = groups_[g].num_rows;
    group_of.push_back(g);
    groups_[g].num_rows += file.num_rows;
    const auto length = static_cast<double>(file.num_rows) * static_cast<double>(file.stride);
    lengths[g] += length;
    total += length;
    buffer_bytes_ = std::max(buffer_bytes_, page_ceil(static_cast<std::uint64_t>(file.stride)) + kPageBytes);
  }
  std::int64_t least = 0;
  for (const auto& group : groups_) least += group.set_bytes();
  if (bytes < least) refuse(bytes, least);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const double share = total > 0 ? lengths[g] / total : 1.0 / static_cast<double>(groups_.size());
    groups_[g].allocate(static_cast<std::int64_t>(share * static_cast<double>(bytes)));
  }
  for (std::size_t f = 0; f < files_.size(); ++f) files_[f].group = &groups_[group_of[f]];
}

RowCache::~RowCache() {
  if (ring_ && process_ != getpid()) static_cast<void>(ring_.release());
}

std::size_t RowCache::num_files() const noexcept { return files_.size(); }

RowCache::Counts RowCache::counts() const {
  const std::lock_guard guard(mutex_);
  return counts_;
}

bool RowCache::read(std::span<const Request> requests) {
  const std::lock_guard guard(mutex_);
  misses_.clear();
  for (const auto& request : requests) copy_cached(request);
  counts_.misses += static_cast<std::int64_t>(misses_.size());
  if (misses_.empty()) return true;
  std::ranges::sort(misses_, {}, [](const Miss& miss) { return std::uint64_t{miss.file} << 32 | miss.slot; });
  plan_runs();
  counts_.reads += static_cast<std::int64_t>(runs_.size());
  if (!buffers_.size()) buffers_ = Buffer<std::byte>(kDepth * buffer_bytes_);
  return read_runs();
}

// Copy the rows that are in memory, and add the others to the misses. Memory of a chunk of lookups is fetched together.
void RowCache::copy_cached(const Request& request) {
  const Source& source = files_[request.file];
  const Group& group = *source.group;
  const auto stride = static_cast<std::size_t>(group.stride);
  std::uint32_t* sets[kChunk];
  std::uint32_t tags[kChunk];
  const std::byte* rows[kChunk];
  for (std::size_t begin = 0; begin < request.slots.size(); begin += kChunk) {
    const auto slots = request.slots.subspan(begin, std::min(kChunk, request.slots.size() - begin));
    std::byte* const out = request.out + begin * stride;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      sets[i] = nullptr;
      if (slots[i] >= source.file.num_rows) continue;
      const std::int64_t number = source.first + slots[i];
      sets[i] = group.set_of(number);
      tags[i] = group.tag_of(number);
      __builtin_prefetch(sets[i], 1);
    }
    for (std::size_t i = 0; i < slots.size(); ++i) {
      rows[i] = nullptr;
      if (!sets[i]) continue;
      std::uint32_t* const entry = find_entry(sets[i], tags[i]);
      if (!entry) {
        misses_.push_back({static_cast<std::uint32_t>(request.file), slots[i], out + i * stride});
        continue;
      }
      *entry = tags[i] << 4;  // age 0
      ++counts_.hits;
      rows[i] = group.row_of(entry);
      __builtin_prefetch(rows[i]);
    }
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (rows[i]) std::memcpy(out + i * stride, rows[i], stride);
    }
  }
}

std::uint64_t RowCache::offset_of(const Miss& miss) const noexcept {
  const File& file = files_[miss.file].file;
  return static_cast<std::uint64_t>(file.begin + miss.slot * file.stride);
}

// Divide the sorted misses into runs of pages. A page is read once, unless rows before and behind it need two buffers.
void RowCache::plan_runs() {
  runs_.clear();
  for (std::uint32_t i = 0; i < misses_.size(); ++i) {
    const std::uint64_t offset = offset_of(misses_[i]), end = offset + static_cast<std::uint64_t>(files_[misses_[i].file].file.stride);
    if (!runs_.empty() && runs_.back().file == misses_[i].file) {
      Run& run = runs_.back();
      if (offset < run.offset + run.bytes && page_ceil(end) - run.offset <= buffer_bytes_) {
        run.bytes = page_ceil(end) - run.offset;
        run.needed = end - run.offset;
        run.last = i + 1;
        continue;
      }
    }
    const std::uint64_t begin = page_floor(offset);
    runs_.push_back({misses_[i].file, i, i + 1, begin, page_ceil(end) - begin, end - begin});
  }
}

bool RowCache::read_runs() {
#ifdef COLONNADE_HAS_RING
  if (!has_tried_ring_) {
    has_tried_ring_ = true;
    process_ = getpid();
    ring_ = Ring::make(kDepth, true);
    if (ring_) is_registered_ = ring_->register_memory(buffers_.data(), buffers_.size());
  }
  // A child of fork must not use its parent's ring.
  if (ring_ && process_ == getpid()) return read_in_flight(*ring_);
#endif
  return read_one_by_one();
}

bool RowCache::read_one_by_one() {
  for (const Run& run : runs_) {
    const Arrived got = read_run(files_[run.file].file.fd, {run.file, run.first, run.last, run.offset, run.bytes}, run.needed,
                                 reinterpret_cast<std::uint8_t*>(buffers_.data()));
    if (got.have < run.needed) return false;
    deliver(run, buffers_.data());
  }
  return true;
}

bool RowCache::read_in_flight([[maybe_unused]] Ring& ring) {
  bool is_read = true;
#ifdef COLONNADE_HAS_RING
  std::vector<Flight> flights(kDepth);
  std::vector<std::uint64_t> free(kDepth);
  for (std::uint64_t i = 0; i < kDepth; ++i) free[i] = i;
  const auto start = [&](std::uint64_t i) {
    const auto& [run, have] = flights[i];
    const std::uint64_t from = page_floor(have);  // direct reads begin at a page
    ring.read(files_[run->file].file.fd, buffers_.data() + i * buffer_bytes_ + from, static_cast<std::uint32_t>(run->bytes - from),
              run->offset + from, is_registered_, i);
  };
  const auto complete = [&](std::uint64_t i, int result) {
    auto& [run, have] = flights[i];
    const std::uint64_t now = page_floor(have) + static_cast<std::uint64_t>(std::max(result, 0));
    const bool is_interrupted = result == -EINTR || result == -EAGAIN;
    if (is_interrupted || (now > have && now < run->needed)) {
      have = std::max(have, now);
      return start(i);
    }
    if (now >= run->needed) deliver(*run, buffers_.data() + i * buffer_bytes_);
    else is_read = false;
    free.push_back(i);
  };
  std::size_t next = 0;
  while (next < runs_.size() || free.size() < kDepth) {
    for (; next < runs_.size() && !free.empty(); ++next) {
      const std::uint64_t i = free.back();
      free.pop_back();
      flights[i] = {&runs_[next], 0};
      start(i);
    }
    ring.enter(static_cast<unsigned>(std::min<std::size_t>(kDepth - free.size(), kDepth / 4)));
    ring.reap(complete);
  }
#endif
  return is_read;
}

void RowCache::deliver(const Run& run, const std::byte* bytes) {
  const auto stride = static_cast<std::size_t>(files_[run.file].file.stride);
  for (std::uint32_t i = run.first; i < run.last; ++i) {
    const Miss& miss = misses_[i];
    const std::byte* const row = bytes + (offset_of(miss) - run.offset);
    std::memcpy(miss.out, row, stride);
    const bool is_last_of_slot = i + 1 == run.last || misses_[i + 1].slot != miss.slot;
    if (is_last_of_slot) insert(miss, row);
  }
}

// Put a row in place of an empty entry of its set, or of the oldest.
void RowCache::insert(const Miss& miss, const std::byte* row) {
  const Source& source = files_[miss.file];
  const Group& group = *source.group;
  const std::int64_t number = source.first + miss.slot;
  std::uint32_t* const set = group.set_of(number);
  std::uint32_t* victim = std::find(set, set + kWays, 0u);
  if (victim == set + kWays) {
    const auto age_of = [](std::uint32_t entry) { return entry & kOldest; };
    victim = std::ranges::max_element(set, set + kWays, {}, age_of);
    const std::uint32_t older = kOldest - age_of(*victim);
    for (std::int64_t way = 0; way < kWays; ++way) set[way] += older;
  }
  *victim = group.tag_of(number) << 4 | kNew;
  std::memcpy(group.row_of(victim), row, static_cast<std::size_t>(group.stride));
}

}  // namespace colonnade
