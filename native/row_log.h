// One table's rows at rest: an append-only log of segments, and the index of what is live in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "log_segment.h"
#include "page_reader.h"
#include "place_index.h"
#include "vocabulary.h"

namespace colonnade {

struct RowLogSettings {
  std::int64_t record_bytes;
  std::int64_t rows;  // 0: open table
  std::int64_t num_owners = 1, place = 0;  // rows are dealt to so many, of whom this is one
  std::int64_t segment_bytes;  // a segment ends before it is longer, but holds one record
  std::int64_t chunk_bytes;    // a multiple of 4096, at least a frame
  std::int64_t num_streams = 1;
  std::int64_t first_segment = 1;
};

// Where a row was found.
enum class RowAt : std::uint8_t { nowhere, memory, disk };

// Places are segment << 32 | record, -1 nowhere. Thread-safe: one lock inside, never held while a disk is waited for, and by
// garbage collection only for a few rows at a time.
// Every call that takes ids checks them first: out_of_range for an id outside a vocabulary, invalid_argument for an id of
// another owner; then nothing has changed.
class RowLog {
 public:
  static constexpr std::int64_t kNowhere = -1;
  // Writes the record_bytes of row i.
  using Pack = std::function<void(std::size_t i, std::uint8_t* payload)>;
  struct SegmentUse {
    std::int64_t number, num_records, num_live;
    bool is_sealed;
  };
  struct Sealed {
    std::int64_t num_records, num_bytes;
    std::uint64_t checksum;  // sum of the records' crcs
  };
  struct Counts {
    std::int64_t rows_written = 0;    // rewritten ones apart
    std::int64_t rows_rewritten = 0;  // by garbage collection
    std::int64_t rows_deleted = 0;
    std::int64_t bytes_framed = 0;    // of both
    std::int64_t rows_copied = 0;     // read from write buffers or mapped files
    std::int64_t rows_planned = 0;    // to be read from files
    std::int64_t rows_absent = 0;     // looked up, found nowhere
  };

  explicit RowLog(const RowLogSettings& settings);  // invalid_argument

  // Appends to the stream's write buffer; of equal ids the last wins. heats (N,) or empty: a row keeps what it has, a new
  // one gets 0. for_commit: the row also becomes part of the frozen content, in the place of what that has of it; a row
  // of the frozen content that changed since must be written so before it is written otherwise or deleted.
  // `pack` is called under the lock. NoRoom: the first rows of the call are written.
  void append(std::span<const std::int64_t> ids, const Pack& pack, std::span<const std::uint8_t> heats,
              std::int64_t stream, bool for_commit);
  std::int64_t erase(std::span<const std::int64_t> ids);  // how many were there

  void places(std::span<const std::int64_t> ids, std::span<std::int64_t> out) const;
  void heats(std::span<const std::int64_t> ids, std::span<std::uint8_t> out) const;  // 0 nowhere
  void touch(std::span<const std::int64_t> ids, std::span<const std::uint8_t> heats);  // absent rows are passed over

  // Rows in memory are delivered at once, on this thread (from write buffers under the lock); those on the disk are
  // added to the plan, and delivered when it is submitted. positions (N,): what `deliver` is told. found (N,) out;
  // heats (N,) out, or empty. source: what a fault calls this log.
  void plan_reads(std::span<const std::int64_t> ids, std::span<const std::uint32_t> positions, std::uint32_t source,
                  ReadPlan& plan, const Deliver& deliver, std::span<RowAt> found, std::span<std::uint8_t> heats);

  // The oldest full chunk that nobody took; null if there is none.
  std::shared_ptr<LogChunk> next_chunk();
  // It is in its file, which is attached: from now on its rows are read there.
  void written(const std::shared_ptr<LogChunk>& chunk);
  void attach(std::int64_t segment, int fd, const std::uint8_t* mapped);
  void detach(std::int64_t segment);  // returns when no read uses the descriptor any more
  // Ends the segments that take rows, and says which.
  std::vector<std::int64_t> seal();
  Sealed sealed(std::int64_t segment) const;
  std::vector<std::int64_t> keys(std::int64_t segment) const;
  void forget_keys(std::int64_t segment);

  std::vector<SegmentUse> segments() const;  // ascending number
  std::vector<std::uint8_t> live(std::int64_t segment) const;
  // The content as it is now, kept beside the current one.
  void freeze();
  std::vector<std::uint8_t> frozen_live(std::int64_t segment) const;
  std::vector<std::int64_t> frozen_segments() const;  // those with rows in it
  void thaw();

  // A sealed segment of a commit; ids (n,) of its records. fd -1: attach later. invalid_argument, nothing changed: a
  // live id that is live elsewhere, or twice.
  void load(std::int64_t segment, std::span<const std::int64_t> ids, std::span<const std::uint8_t> live, int fd);
  // ids (n,) and frames (n, stride) of a segment's records as read from its files. Those of rows that still lie there are
  // appended, hottest first; to `hot_stream`, what is hotter than seven in eight of the rows moved lately: such rows stay in
  // memory and are written seldom, or are written by every commit. invalid_argument naming the first record whose crc is wrong: nothing changed.
  std::int64_t rewrite(std::int64_t segment, std::span<const std::int64_t> ids, std::span<const std::uint8_t> frames,
                       std::int64_t first_record, std::int64_t stream, std::int64_t hot_stream);
  void forget(std::int64_t segment);  // nothing in it is live, now or in the frozen content, and all of it is written

  std::int64_t record_bytes() const { return settings_.record_bytes; }
  std::int64_t stride() const { return static_cast<std::int64_t>(stride_); }
  // Of full chunks that are not written yet. Takes no lock: every batch asks every log.
  std::int64_t pending_bytes() const { return pending_bytes_.load(std::memory_order_relaxed); }
  std::int64_t num_rows() const;
  std::int64_t index_bytes() const;
  Counts counts() const;

 private:
  using Frames = std::deque<std::shared_ptr<LogChunk>>;
  bool is_open() const { return settings_.rows == 0; }
  void check_ids(std::span<const std::int64_t> ids) const;
  void check_stream(std::int64_t stream) const;
  std::int64_t key_of(std::int64_t id) const {
    return is_open() ? id : static_cast<std::int64_t>(share_.place_of(id));
  }
  std::int64_t place_of(PlaceEntry entry) const;
  LogSegment& segment_of(PlaceEntry entry) const { return *by_handle_[entry.place >> kRecordBits]; }
  LogSegment& at(std::int64_t segment) const;  // invalid_argument if there is none
  std::uint32_t handle_of(std::int64_t segment) const;
  std::uint32_t add_segment(std::int64_t number);
  // Where a record lies, as the index says it.
  static std::uint64_t packed(std::uint32_t handle, std::int64_t record) {
    return static_cast<std::uint64_t>(handle) << kRecordBits | static_cast<std::uint64_t>(record);
  }
  static std::int64_t record_of(PlaceEntry entry) { return static_cast<std::int64_t>(entry.place & kRecordMask); }
  // visit(i, key, entry) for all ids in order.
  template <class Visit>
  void for_each(std::span<const std::int64_t> ids, const Visit& visit) const {
    index_.for_each(ids.size(), [&](std::size_t i) { return key_of(ids[i]); }, visit);
  }
  // The row `id`, which is at `old` now.
  template <class Write>
  void append_one(std::int64_t id, std::int64_t key, PlaceEntry old, const Write& write, std::uint8_t heat,
                  std::int64_t stream, bool for_commit);
  // Live records of a segment of a commit, into the index; the first whose id is there already (then nothing changed), or -1.
  std::int64_t load_open(std::span<const std::int64_t> ids, const LiveBits& bits, std::uint32_t handle);
  std::int64_t load_vocabulary(std::span<const std::int64_t> ids, const LiveBits& bits, std::uint32_t handle);
  template <class HeatOf>
  std::uint8_t hot_heat(std::size_t n, const HeatOf& heat_of);
  void note_full(std::size_t since);
  void drop(std::int64_t segment, std::uint32_t handle);
  void seal_stream(std::int64_t stream);

  static constexpr int kRecordBits = 26;
  static constexpr std::uint64_t kRecordMask = (std::uint64_t{1} << kRecordBits) - 1;
  static constexpr std::uint32_t kNoSegment = ~std::uint32_t{0};
  static constexpr std::size_t kMaxSegments = std::size_t{1} << 14;

  RowLogSettings settings_;
  std::size_t stride_;
  VocabularyShare share_;
  mutable std::mutex mutex_;
  PlaceIndex index_;
  // An entry of the index names a segment by its handle, which is used again.
  std::vector<std::unique_ptr<LogSegment>> by_handle_;
  std::vector<std::uint32_t> free_handles_;
  std::map<std::int64_t, std::uint32_t> handles_;  // by number
  std::vector<std::uint32_t> active_;              // by stream: handle, or kNoSegment
  std::int64_t next_segment_;
  Frames full_;                     // not taken yet
  std::atomic<std::int64_t> pending_bytes_ = 0;  // full ones, taken or not; less those written
  bool is_frozen_ = false;
  double hot_heat_ = -1;  // what is hotter is collected apart; -1: nothing was moved yet
  Counts counts_;
};

}  // namespace colonnade
