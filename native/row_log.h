// Stored rows of one table: an append-only log of segments, with an index of live records.
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
  std::int64_t num_owners = 1, place = 0;  // number of owners of the rows, and this one among them
  std::int64_t segment_bytes;  // largest segment, unless a single record is larger
  std::int64_t chunk_bytes;    // a multiple of 4096, at least a frame
  std::int64_t num_streams = 1;
  std::int64_t first_segment = 1;
};

// Place of a row.
enum class RowAt : std::uint8_t { nowhere, memory, disk };

// Places are segment << 32 | record; -1: absent. Thread-safe by one lock, which is never held during disk accesses, and
// by compaction only for a few rows at a time. Calls check ids first: out_of_range for an id outside the vocabulary,
// invalid_argument for an id of another owner; then nothing changes.
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
    std::int64_t rows_written = 0;    // without rewritten ones
    std::int64_t rows_rewritten = 0;  // by compaction
    std::int64_t rows_deleted = 0;
    std::int64_t bytes_framed = 0;    // of both
    std::int64_t rows_copied = 0;     // read from write buffers
    std::int64_t rows_planned = 0;    // to be read from files
    std::int64_t rows_absent = 0;     // looked up and absent
  };

  explicit RowLog(const RowLogSettings& settings);  // invalid_argument

  // Append rows to the stream's write buffer; the last of equal ids wins. frequencies (N,) or empty: a row keeps its frequency, a
  // new row gets 0. for_commit: the row also replaces its version in the frozen content; a row of the frozen content
  // that changed since must first be written with for_commit, before any other write or delete of it. `pack` is called
  // under the lock. NoRoom: the first rows of the call are written.
  void append(std::span<const std::int64_t> ids, const Pack& pack, std::span<const std::uint8_t> frequencies,
              std::int64_t stream, bool for_commit);
  std::int64_t erase(std::span<const std::int64_t> ids);  // returns the number of rows that existed

  void places(std::span<const std::int64_t> ids, std::span<std::int64_t> out) const;
  void frequencies(std::span<const std::int64_t> ids, std::span<std::uint8_t> out) const;  // 0 for absent rows
  void touch(std::span<const std::int64_t> ids, std::span<const std::uint8_t> frequencies);  // absent rows are ignored

  // Read rows. Rows in memory are delivered at once, on this thread (from write buffers under the lock). Rows on disk
  // are added to the plan, and delivered when it is submitted. positions (N,): passed to `deliver`. locations (N,)
  // output; frequencies (N,) output, or empty. source: number of this log in faults.
  void plan_reads(std::span<const std::int64_t> ids, std::span<const std::uint32_t> positions, std::uint32_t source,
                  ReadPlan& plan, const Deliver& deliver, std::span<RowAt> locations, std::span<std::uint8_t> frequencies);

  // Return the oldest full chunk that was not returned before; null if there is none.
  std::shared_ptr<LogChunk> next_chunk();
  // Mark a chunk as written to its file, which must be attached: its rows are then read there.
  void written(const std::shared_ptr<LogChunk>& chunk);
  void attach(std::int64_t segment, int fd);
  void detach(std::int64_t segment);  // returns when no read uses the descriptor
  // Seal the open segments and return their numbers.
  std::vector<std::int64_t> seal();
  Sealed sealed(std::int64_t segment) const;
  std::vector<std::int64_t> keys(std::int64_t segment) const;
  void forget_keys(std::int64_t segment);

  std::vector<SegmentUse> segments() const;  // by ascending number
  std::vector<std::uint8_t> live(std::int64_t segment) const;
  // Retain the current content next to the changing one.
  void freeze();
  std::vector<std::uint8_t> frozen_live(std::int64_t segment) const;
  std::vector<std::int64_t> frozen_segments() const;  // with rows of the frozen content
  void thaw();

  // Add a sealed segment of a checkpoint; ids (n,) of its records. fd -1: attach later. invalid_argument, with nothing
  // changed, for a live id that is live elsewhere, or repeated.
  void load(std::int64_t segment, std::span<const std::int64_t> ids, std::span<const std::uint8_t> live, int fd);
  // Append the live records of a segment to write buffers, hottest first. ids (n,), frames (n, stride): its records as
  // read from its files. Rows hotter than seven in eight of the rows moved lately go to `hot_stream`: such rows stay in
  // memory and are written rarely, or by every checkpoint. invalid_argument, with the first record that has a wrong crc
  // and nothing changed.
  std::int64_t rewrite(std::int64_t segment, std::span<const std::int64_t> ids, std::span<const std::uint8_t> frames,
                       std::int64_t first_record, std::int64_t stream, std::int64_t hot_stream);
  void forget(std::int64_t segment);  // requires: fully written, no live record, in the frozen content either

  std::int64_t record_bytes() const { return settings_.record_bytes; }
  std::int64_t stride() const { return static_cast<std::int64_t>(stride_); }
  // Bytes of full chunks that are not written yet. Takes no lock: every batch asks every log.
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
  // Place of a record, from the index.
  static std::uint64_t packed(std::uint32_t handle, std::int64_t record) {
    return static_cast<std::uint64_t>(handle) << kRecordBits | static_cast<std::uint64_t>(record);
  }
  static std::int64_t record_of(PlaceEntry entry) { return static_cast<std::int64_t>(entry.place & kRecordMask); }
  // Call visit(i, key, entry) for all ids in order.
  template <class Visit>
  void for_each(std::span<const std::int64_t> ids, const Visit& visit) const {
    index_.for_each(ids.size(), [&](std::size_t i) { return key_of(ids[i]); }, visit);
  }
  // Move the row `id`, which is at `old` now.
  template <class Write>
  void append_one(std::int64_t id, std::int64_t key, PlaceEntry old, const Write& write, std::uint8_t frequency,
                  std::int64_t stream, bool for_commit);
  // Index the live records of a checkpoint's segment; return the first with an id that is indexed already (then nothing
  // changed), or -1.
  std::int64_t load_open(std::span<const std::int64_t> ids, const LiveBits& bits, std::uint32_t handle);
  std::int64_t load_vocabulary(std::span<const std::int64_t> ids, const LiveBits& bits, std::uint32_t handle);
  template <class FrequencyOf>
  std::uint8_t hot_frequency(std::size_t n, const FrequencyOf& frequency_of);
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
  // Index entries refer to a segment by a handle, which is reused.
  std::vector<std::unique_ptr<LogSegment>> by_handle_;
  std::vector<std::uint32_t> free_handles_;
  std::map<std::int64_t, std::uint32_t> handles_;  // by number
  std::vector<std::uint32_t> active_;              // by stream: handle, or kNoSegment
  std::int64_t next_segment_;
  Frames full_;                     // not taken yet
  std::atomic<std::int64_t> pending_bytes_ = 0;  // bytes of full chunks, taken or not, that are not written
  bool is_frozen_ = false;
  double hot_frequency_ = -1;  // hotter rows are collected separately; -1: nothing was moved yet
  Counts counts_;
};

}  // namespace colonnade
