// Segment of a log: its live records, and its bytes that are not on disk yet.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "buffer.h"
#include "frames.h"
#include "read_plan.h"

namespace colonnade {

// Bitmap of records. Bit r is bit r % 8 of byte r / 8.
class LiveBits {
 public:
  bool operator[](std::int64_t record) const {
    const auto word = static_cast<std::size_t>(record / 64);
    return word < words_.size() && (words_[word] >> (record % 64) & 1);
  }
  // Set a bit; return whether it changed.
  bool set(std::int64_t record, bool value);
  std::vector<std::uint8_t> bytes(std::int64_t num_records) const;
  static LiveBits of(std::span<const std::uint8_t> bytes, std::int64_t num_records);
  std::int64_t count() const;

 private:
  std::vector<std::uint64_t> words_;
};

// Chunk of a segment file to be written; chunks come in the order of the file.
struct LogChunk {
  std::int64_t segment;
  std::int64_t offset;  // in the file; a multiple of kPageBytes, as is num_bytes
  std::int64_t num_bytes = 0;
  Buffer<std::uint8_t> bytes;
  std::vector<std::uint8_t> straddler;  // complete frame that began in the previous chunk and ends here
  bool is_last = false;                 // last chunk of its segment
  bool is_written = false;
};

// Not thread-safe: the log has the lock.
class LogSegment {
 public:
  LogSegment(std::int64_t number, std::size_t stride, std::int64_t chunk_bytes)
      : number_(number), stride_(stride), chunk_bytes_(chunk_bytes) {}

  std::int64_t number() const { return number_; }
  std::int64_t num_records() const { return num_records_; }
  std::int64_t num_bytes() const { return static_cast<std::int64_t>(frame_offset(num_records_, stride_)); }
  std::int64_t num_live() const { return num_live_; }
  std::uint64_t checksum() const { return checksum_; }
  bool is_sealed() const { return is_sealed_; }
  bool is_written() const { return is_sealed_ && chunks_.empty(); }

  // Append a record, which is not live yet. `pack(payload)` writes its bytes. A full chunk is appended to `full`.
  // NoRoom: nothing changed.
  template <class Pack>
  void append(std::int64_t id, std::size_t record_bytes, const Pack& pack,
              std::deque<std::shared_ptr<LogChunk>>& full) {
    std::uint8_t* const frame = begin_frame(full);
    pack(frame + kFrameHeadBytes);
    end_frame(id, record_bytes, frame);
  }
  // Accept no more records. The last chunk, padded with zeros, is appended to `full`.
  void seal(std::deque<std::shared_ptr<LogChunk>>& full);
  // Restore a sealed segment of a checkpoint.
  void load(std::int64_t num_records, LiveBits live);
  // Free the memory of chunks from the first one on, as far as all are written.
  void drop_written();

  // Return a record's frame if part of it is not on disk; else null.
  const std::uint8_t* frame_in_memory(std::int64_t record) const;

  const LiveBits& live() const { return live_; }
  void set_live(std::int64_t record, bool value);
  // Live bitmap of a checkpoint: copied when it first differs from the current one.
  void freeze();
  void begin_frozen() { is_frozen_ = is_frozen_own_ = true; }  // the segment is younger than the freeze
  void thaw();
  const LiveBits& frozen() const { return is_frozen_own_ ? frozen_ : live_; }
  std::int64_t num_frozen() const { return is_frozen_own_ ? num_frozen_ : num_live_; }
  void set_frozen(std::int64_t record, bool value);

  using Keys = std::vector<std::vector<std::int64_t>>;  // by block, so that growing copies none
  // Ids of all records; null once freed. They do not change after the segment is sealed.
  const std::shared_ptr<Keys>& keys() const { return keys_; }
  std::shared_ptr<Keys> forget_keys() { return std::move(keys_); }

  std::shared_ptr<SegmentFile> file;  // null: not readable yet

 private:
  std::uint8_t* begin_frame(std::deque<std::shared_ptr<LogChunk>>& full);
  void end_frame(std::int64_t id, std::size_t record_bytes, std::uint8_t* frame) noexcept;
  void add_chunk();
  LogChunk& chunk(std::int64_t number) const { return *chunks_[static_cast<std::size_t>(number - num_dropped_)]; }
  void own_frozen();

  std::int64_t number_;
  std::size_t stride_;
  std::int64_t chunk_bytes_;
  std::int64_t num_records_ = 0, num_live_ = 0, num_frozen_ = 0;
  std::uint64_t checksum_ = 0;
  bool is_sealed_ = false, is_frozen_ = false, is_frozen_own_ = false;
  LiveBits live_, frozen_;
  std::shared_ptr<Keys> keys_ = std::make_shared<Keys>();
  std::deque<std::shared_ptr<LogChunk>> chunks_;  // not freed yet, ascending
  std::int64_t num_dropped_ = 0;                  // freed chunks
};

}  // namespace colonnade
