#include "sketch.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "hash.h"

namespace colonnade {

CountMinSketch::CountMinSketch(const SketchSettings& settings) : settings_(settings) {
  const auto& s = settings_;
  if (s.threshold < 1 || s.threshold > 255 || s.depth < 1 || s.width < 1 || s.num_blocks < 1 || s.first_block < 0 ||
      s.end_block <= s.first_block || s.end_block > s.num_blocks || s.halve_steps < 0)
    throw std::invalid_argument("CountMinSketch: got settings that no sketch can have");
  counters_.resize(static_cast<std::size_t>((s.end_block - s.first_block) * s.depth * s.width));
}

std::vector<std::uint8_t> CountMinSketch::record_updates(std::span<const std::int64_t> ids, std::int64_t step) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const std::scoped_lock lock(mutex_);
  halve(step);
  const auto depth = static_cast<std::size_t>(settings_.depth);
  const auto width = static_cast<std::uint64_t>(settings_.width);
  std::vector<std::uint8_t> result(ids.size());
  std::vector<std::uint8_t*> mine(depth);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint64_t hash = mix64(static_cast<std::uint64_t>(ids[i]));
    const auto block = static_cast<std::int64_t>(scale_down(hash, static_cast<std::uint64_t>(settings_.num_blocks)));
    if (block < settings_.first_block || block >= settings_.end_block)
      throw std::invalid_argument("CountMinSketch: id " + std::to_string(ids[i]) + " belongs to another rank");
    std::uint8_t* const counters =
        counters_.data() + static_cast<std::uint64_t>(block - settings_.first_block) * depth * width;
    std::uint8_t least = 255;
    for (std::size_t d = 0; d < depth; ++d) {
      mine[d] = counters + d * width + scale_down(mix64(hash + (d + 1) * kGolden), width);
      least = std::min(least, *mine[d]);
    }
    const auto count = static_cast<std::uint8_t>(least + (least < 255));
    const auto place = static_cast<std::size_t>(block - settings_.first_block);
    const bool is_noted = place < is_copied_.size() && !is_copied_[place];
    for (std::uint8_t* counter : mine) {
      if (*counter >= count) continue;
      if (is_noted) changed_.emplace_back(static_cast<std::size_t>(counter - counters_.data()), *counter);
      *counter = count;
    }
    result[i] = count >= settings_.threshold;
  }
  work_ += ids.size() * depth;
  return result;
}

// Block b is halved b / num_blocks of the way between two multiples of halve_steps.
void CountMinSketch::halve(std::int64_t step) {
  if (step < step_) throw std::invalid_argument("CountMinSketch: got an earlier step than before");
  const std::int64_t every = settings_.halve_steps, block_size = settings_.depth * settings_.width;
  if (every) {
    for (std::int64_t b = settings_.first_block; b < settings_.end_block; ++b) {
      const auto late = static_cast<std::int64_t>(static_cast<__int128>(b) * every / settings_.num_blocks);
      const std::int64_t times = (step + every - late) / every - (step_ + every - late) / every;
      if (times == 0) continue;
      save_block(static_cast<std::size_t>(b - settings_.first_block));
      std::uint8_t* const counters = counters_.data() + (b - settings_.first_block) * block_size;
      const int shift = static_cast<int>(std::min<std::int64_t>(times, 8));
      for (std::int64_t i = 0; i < block_size; ++i) counters[i] = static_cast<std::uint8_t>(counters[i] >> shift);
      work_ += static_cast<std::uint64_t>(block_size);
    }
  }
  step_ = step;
}

void CountMinSketch::begin_snapshot() {
  const std::scoped_lock lock(mutex_);
  copy_ = Buffer<std::uint8_t>(counters_.size());
  is_copied_.assign(static_cast<std::size_t>(settings_.end_block - settings_.first_block), 0);
  cursor_ = 0;
  changed_.clear();
}

void CountMinSketch::save_block(std::size_t block) {
  if (block >= is_copied_.size() || is_copied_[block]) return;
  std::memcpy(copy_.data() + block * block_bytes(), counters_.data() + block * block_bytes(), block_bytes());
  is_copied_[block] = 1;
}

bool CountMinSketch::save_some(std::int64_t bytes) {
  const std::scoped_lock lock(mutex_);
  for (; bytes > 0 && cursor_ < is_copied_.size(); ++cursor_) {
    if (!is_copied_[cursor_]) bytes -= static_cast<std::int64_t>(block_bytes());
    save_block(cursor_);
  }
  return cursor_ < is_copied_.size();
}

Buffer<std::uint8_t> CountMinSketch::saved() {
  while (save_some(std::int64_t{1} << 20)) {
  }
  const std::scoped_lock lock(mutex_);
  is_copied_.clear();
  for (auto at = changed_.rbegin(); at != changed_.rend(); ++at) copy_[at->first] = at->second;
  changed_ = {};
  return std::move(copy_);
}

}  // namespace colonnade
