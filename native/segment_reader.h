// Framed records of a segment file, and batched asynchronous reads of them.
// The bytes are defined in src/colonnade/store/format.md; the asserts here repeat its MUSTs.
#pragma once

#include <bit>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace colonnade {

static_assert(std::endian::native == std::endian::little, "the store format is little-endian");

// What stands before every payload.
struct FrameHead {
  std::int64_t id;
  std::uint32_t flags;
  std::uint32_t crc;  // of: place u64 | id | flags | padded payload
};
static_assert(sizeof(FrameHead) == 16);

inline constexpr std::uint32_t kTombstone = 1;
inline constexpr std::size_t kSegmentHeaderBytes = 64;

// Where a record lies: segment number in bits 32..61, record number inside it in bits 0..31.
// Bit 62 marks a place that holds a tombstone; a negative place is "nowhere".
inline constexpr std::int64_t kTombstonePlace = std::int64_t{1} << 62;

inline constexpr std::size_t frame_stride(std::size_t record_bytes) {
  return sizeof(FrameHead) + (record_bytes + 7) / 8 * 8;
}
static_assert(frame_stride(9) == 32 && frame_stride(16) == 32 && frame_stride(17) == 40);

// Write n frames, at places first_place, first_place + 1, ...  `records` (n * record_bytes) null: tombstones.
// Borrows everything for the call.
void frame_records(const std::int64_t* ids, const std::uint8_t* records, std::size_t n,
                   std::size_t record_bytes, std::uint64_t first_place, std::uint8_t* frames) noexcept;

// The first of n frames whose checksum or flags are wrong; -1 if none.
std::int64_t check_records(const std::uint8_t* frames, std::size_t n, std::size_t record_bytes,
                           std::uint64_t first_place) noexcept;

struct ReadFault {
  enum class Kind { system, truncated, checksum, other_id };
  Kind kind;
  std::int64_t place;  // the lowest place that failed, whatever the threads did
  int error;           // errno for `system`
};

// One batch of reads. The caller keeps every pointer alive until wait() has returned.
struct ReadRequest {
  const std::int64_t* ids;       // (n,)
  const std::int64_t* places;    // (n,); negative or tombstone: not read
  std::uint8_t* out;             // (n, record_bytes); row i is written if places[i] is a row
  std::size_t n;
  std::size_t record_bytes;
  const std::int64_t* segments;  // (k,) ascending numbers; every place's segment is among them
  const std::int32_t* fds;       // (k,)
  std::size_t k;
};

class ReadJob;

// A few threads that do nothing but pread. Any thread may call read().
class SegmentReader {
 public:
  explicit SegmentReader(int num_threads);
  ~SegmentReader();  // finishes what was asked for
  SegmentReader(const SegmentReader&) = delete;
  SegmentReader& operator=(const SegmentReader&) = delete;

  // Returns at once. Frames are checked (checksum, place and id) before a byte reaches `out`.
  std::shared_ptr<ReadJob> read(const ReadRequest& request);

 private:
  friend class ReadJob;
  void push(std::function<void()> task);
  void work();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

class ReadJob {
 public:
  explicit ReadJob(const ReadRequest& request) : request_(request) {}
  // Blocks until every read is done. May be called again: same answer.
  std::optional<ReadFault> wait();

 private:
  friend class SegmentReader;
  struct Item {
    std::int64_t place;
    std::size_t position;  // in the request
  };

  void sort();
  void read_chunk(std::size_t first, std::size_t last);
  void read_run(std::size_t first, std::size_t last, int fd, std::vector<std::uint8_t>& buffer);
  int fd_of(std::int64_t segment) const;
  void fail(ReadFault fault);
  void finish(std::size_t num_chunks);

  ReadRequest request_;
  std::vector<Item> items_;
  std::mutex mutex_;
  std::condition_variable done_;
  std::size_t remaining_ = 1;  // the sort counts as a chunk until it has added the others
  std::optional<ReadFault> fault_;
};

}  // namespace colonnade
