// How often ids were seen, roughly, never too low: a count-min sketch (Cormode, Muthukrishnan 2005) with conservative update.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "buffer.h"

namespace colonnade {

struct SketchSettings {
  std::int64_t threshold;  // 1 .. 255
  std::int64_t depth;      // counters of an id
  std::int64_t width;      // counters of a block and a depth
  // The hashes of all ids are cut into so many equal parts, each with counters of its own: ranks hold the blocks of
  // their ids and blocks move to other ranks, and are halved one after the other.
  std::int64_t num_blocks;
  std::int64_t first_block, end_block;  // of those, the ones here
  std::int64_t halve_steps;             // every count is halved once in so many steps; 0: never
};

// One byte a counter; it stops at 255. A snapshot is copied block by block while ids are heard: what changes in a block
// that is not copied yet is noted, to be undone in the copy. Another thread may call save_some and saved; all else is one
// thread at a time.
class CountMinSketch {
 public:
  explicit CountMinSketch(const SketchSettings& settings);

  // These ids (unique) were seen in `step`, which never descends. (N,) 1 where an id has been seen `threshold`
  // times, this one included. invalid_argument for an id of another rank.
  std::vector<std::uint8_t> hear(std::span<const std::int64_t> ids, std::int64_t step);

  std::span<std::uint8_t> counters() { return counters_; }  // (blocks here, depth, width)
  std::int64_t step() const { return step_; }                // up to which counts have been halved
  void set_step(std::int64_t step) { step_ = step; }
  std::uint64_t work() const { return work_; }  // counters touched, ever

  // From here on save_some copies the counters as they are now; a snapshot before this one is over.
  void begin_snapshot();
  bool save_some(std::int64_t bytes);  // about as many; whether some are left
  Buffer<std::uint8_t> saved();        // all of them, once none is left; the snapshot is over

 private:
  void halve(std::int64_t step);
  void save_block(std::size_t block);
  std::size_t block_bytes() const { return static_cast<std::size_t>(settings_.depth * settings_.width); }

  SketchSettings settings_;
  std::vector<std::uint8_t> counters_;
  std::int64_t step_ = 0;
  std::uint64_t work_ = 0;
  // A snapshot's: the copy, which blocks are in it (empty: there is none), the first that may not be, and what changed
  // before it was copied, as (place, value before).
  Buffer<std::uint8_t> copy_;
  std::vector<std::uint8_t> is_copied_;
  std::size_t cursor_ = 0;
  std::vector<std::pair<std::size_t, std::uint8_t>> changed_;
  std::mutex mutex_;
};

}  // namespace colonnade
