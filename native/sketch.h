// Count-min sketch of updates per id, never too low (Cormode, Muthukrishnan 2005), with conservative update.
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
  std::int64_t depth;      // counters per id
  std::int64_t width;      // counters per block and depth
  // Number of equal parts of the hash range, each with its own counters: ranks have the blocks of their ids. Blocks
  // move to other ranks, and are halved one after another.
  std::int64_t num_blocks;
  std::int64_t first_block, end_block;  // blocks of this rank
  std::int64_t halve_steps;             // every count is halved once in this many steps; 0: never
};

// One byte per counter, saturating at 255. A snapshot is copied block by block while ids are counted: changes in a
// block that is not copied yet are recorded and undone in the copy. Another thread may call save_some and saved; all
// other calls are from one thread at a time.
class CountMinSketch {
 public:
  explicit CountMinSketch(const SketchSettings& settings);

  // Count one update of unique ids in `step`; return (N,) 1 for ids updated `threshold` times, this one included. Steps
  // never decrease. invalid_argument for an id of another rank.
  std::vector<std::uint8_t> record_updates(std::span<const std::int64_t> ids, std::int64_t step);

  std::span<std::uint8_t> counters() { return counters_; }  // (blocks of this rank, depth, width)
  std::int64_t step() const { return step_; }                // counts are halved up to this step
  void set_step(std::int64_t step) { step_ = step; }
  std::uint64_t work() const { return work_; }  // counters touched so far

  // Begin a snapshot of the current counters for save_some; ends an earlier snapshot.
  void begin_snapshot();
  bool save_some(std::int64_t bytes);  // copies about this many; returns whether some are left
  Buffer<std::uint8_t> saved();        // all of them, once none is left; ends the snapshot

 private:
  void halve(std::int64_t step);
  void save_block(std::size_t block);
  std::size_t block_bytes() const { return static_cast<std::size_t>(settings_.depth * settings_.width); }

  SketchSettings settings_;
  std::vector<std::uint8_t> counters_;
  std::int64_t step_ = 0;
  std::uint64_t work_ = 0;
  // Snapshot: the copy, the blocks in it (empty: none), the first block that may be missing, and changes before its
  // copy, as (position, old value).
  Buffer<std::uint8_t> copy_;
  std::vector<std::uint8_t> is_copied_;
  std::size_t cursor_ = 0;
  std::vector<std::pair<std::size_t, std::uint8_t>> changed_;
  std::mutex mutex_;
};

}  // namespace colonnade
