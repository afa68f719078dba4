// Cache of rows in memory, for files of rows that are larger than it. The rows of a batch that it lacks are read from
// the files with many reads in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "buffer.h"

namespace colonnade {

class Ring;

// Row r of file f is at bytes [begin + r * stride, + stride). Any thread may use it; calls wait for one another.
class RowCache {
 public:
  struct File {
    int fd = -1;  // the cache opens the file again, without the system's own cache of pages if it can
    std::int64_t begin = 0;
    std::int64_t stride = 0;    // bytes of a row
    std::int64_t num_rows = 0;  // below 2^32
  };
  // Rows of one file to copy, row slots[i] to out + i * stride. Slots that are no rows of the file are skipped.
  struct Request {
    std::size_t file = 0;
    std::span<const std::uint32_t> slots;
    std::byte* out = nullptr;
  };
  // Rows that were copied: from memory, and from files; and the number of reads.
  struct Counts {
    std::int64_t hits = 0, misses = 0, reads = 0;
  };

  // `bytes`: limit of the memory of rows and their index; rows of equal stride share it, each stride by its files'
  // lengths. Buffers of 256 reads are additional. has_ring: read with io_uring, if this system has it. invalid_argument:
  // too little for 16 rows of each stride; system_error: no memory or descriptors.
  RowCache(std::span<const File> files, std::int64_t bytes, bool has_ring = true);
  ~RowCache();
  RowCache(const RowCache&) = delete;
  RowCache& operator=(const RowCache&) = delete;

  // Copy the rows of all requests. false, with the rows undefined: a file could not be read, or ends too soon.
  bool read(std::span<const Request> requests);

  Counts counts() const;
  std::size_t num_files() const noexcept;

 private:
  struct Group;
  struct Source;
  struct Miss {
    std::uint32_t file, slot;
    std::byte* out;
  };
  // Pages of one file, with the misses [first, last) in them.
  struct Run {
    std::uint32_t file, first, last;
    std::uint64_t offset, bytes, needed;
  };
  struct Flight;

  void copy_cached(const Request& request);
  void plan_runs();
  bool read_runs();
  bool read_in_flight(Ring& ring);
  bool read_one_by_one();
  void deliver(const Run& run, const std::byte* bytes);
  void insert(const Miss& miss, const std::byte* row);
  std::uint64_t offset_of(const Miss& miss) const noexcept;

  mutable std::mutex mutex_;
  std::vector<Group> groups_;
  std::vector<Source> files_;
  std::vector<Miss> misses_;
  std::vector<Run> runs_;
  std::uint64_t buffer_bytes_ = 0;  // of one read
  Buffer<std::byte> buffers_;
  std::unique_ptr<Ring> ring_;
  bool has_tried_ring_ = false, is_registered_ = false;
  int process_ = 0;  // that opened the ring
  Counts counts_;
};

}  // namespace colonnade
