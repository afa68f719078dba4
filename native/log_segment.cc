#include "log_segment.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "read_queue.h"

namespace colonnade {

namespace {

constexpr std::size_t kKeysOfBlock = 1 << 14;

}  // namespace

bool LiveBits::set(std::int64_t record, bool value) {
  const auto word = static_cast<std::size_t>(record / 64);
  if (word >= words_.size()) {
    if (!value) return false;
    words_.resize(word + 1);
  }
  const std::uint64_t bit = std::uint64_t{1} << (record % 64), before = words_[word];
  words_[word] = value ? before | bit : before & ~bit;
  return words_[word] != before;
}

std::vector<std::uint8_t> LiveBits::bytes(std::int64_t num_records) const {
  std::vector<std::uint8_t> all(static_cast<std::size_t>((num_records + 7) / 8));
  if (!all.empty()) std::memcpy(all.data(), words_.data(), std::min(all.size(), 8 * words_.size()));
  return all;
}

LiveBits LiveBits::of(std::span<const std::uint8_t> bytes, std::int64_t num_records) {
  LiveBits bits;
  bits.words_.resize(static_cast<std::size_t>((num_records + 63) / 64));
  if (!bytes.empty()) std::memcpy(bits.words_.data(), bytes.data(), bytes.size());
  return bits;
}

std::int64_t LiveBits::count() const {
  std::int64_t count = 0;
  for (const std::uint64_t word : words_) count += std::popcount(word);
  return count;
}

void LogSegment::add_chunk() {
  auto chunk = std::make_shared<LogChunk>();
  chunk->segment = number_;
  chunk->offset = (num_dropped_ + static_cast<std::int64_t>(chunks_.size())) * chunk_bytes_;
  chunk->num_bytes = chunk_bytes_;
  chunk->bytes = Buffer<std::uint8_t>(static_cast<std::size_t>(chunk_bytes_));
  // The writer fills in the file's header here.
  if (chunk->offset == 0) std::memset(chunk->bytes.data(), 0, kSegmentHeaderBytes);
  chunks_.push_back(std::move(chunk));
}

std::uint8_t* LogSegment::begin_frame(std::deque<std::shared_ptr<LogChunk>>& full) {
  const std::int64_t offset = num_bytes(), end = offset + static_cast<std::int64_t>(stride_);
  const std::int64_t first = offset / chunk_bytes_, last = (end - 1) / chunk_bytes_;
  if (keys_->empty() || keys_->back().size() == kKeysOfBlock) {
    keys_->emplace_back();
    keys_->back().reserve(kKeysOfBlock);
  }
  // Frames are at most as long as chunks: only the first frame of a segment may need two new ones.
  while (num_dropped_ + static_cast<std::int64_t>(chunks_.size()) <= last) {
    add_chunk();
    if (chunks_.size() > 1) full.push_back(chunks_[chunks_.size() - 2]);
  }
  if (first == last) return chunk(first).bytes.data() + offset % chunk_bytes_;
  chunk(last).straddler.resize(stride_);
  return chunk(last).straddler.data();
}

void LogSegment::end_frame(std::int64_t id, std::size_t record_bytes, std::uint8_t* frame) noexcept {
  const std::int64_t offset = num_bytes(), end = offset + static_cast<std::int64_t>(stride_);
  const std::int64_t first = offset / chunk_bytes_, last = (end - 1) / chunk_bytes_;
  std::memset(frame + kFrameHeadBytes + record_bytes, 0, stride_ - kFrameHeadBytes - record_bytes);
  const std::uint64_t place = static_cast<std::uint64_t>(number_) << 32 | static_cast<std::uint64_t>(num_records_);
  const std::uint32_t crc = frame_crc(frame, stride_, place, id);
  std::memcpy(frame, &crc, sizeof crc);
  if (first != last) {
    const std::int64_t begun = last * chunk_bytes_ - offset;
    std::memcpy(chunk(first).bytes.data() + offset % chunk_bytes_, frame, static_cast<std::size_t>(begun));
    std::memcpy(chunk(last).bytes.data(), frame + begun, stride_ - static_cast<std::size_t>(begun));
  }
  keys_->back().push_back(id);
  checksum_ += crc;
  ++num_records_;
}

void LogSegment::seal(std::deque<std::shared_ptr<LogChunk>>& full) {
  is_sealed_ = true;
  LogChunk& last = *chunks_.back();
  const std::int64_t used = num_bytes() - last.offset;
  last.num_bytes = (used + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::memset(last.bytes.data() + used, 0, static_cast<std::size_t>(last.num_bytes - used));
  last.is_last = true;
  full.push_back(chunks_.back());
}

void LogSegment::load(std::int64_t num_records, LiveBits live) {
  num_records_ = num_records;
  live_ = std::move(live);
  num_live_ = live_.count();
  is_sealed_ = true;
  keys_ = nullptr;
}

void LogSegment::drop_written() {
  while (!chunks_.empty() && chunks_.front()->is_written) {
    chunks_.pop_front();
    ++num_dropped_;
  }
}

const std::uint8_t* LogSegment::frame_in_memory(std::int64_t record) const {
  if (chunks_.empty()) return nullptr;
  const auto offset = static_cast<std::int64_t>(frame_offset(static_cast<std::uint64_t>(record), stride_));
  const std::int64_t first = offset / chunk_bytes_;
  const std::int64_t last = (offset + static_cast<std::int64_t>(stride_) - 1) / chunk_bytes_;
  if (last < num_dropped_) return nullptr;
  return first == last ? chunk(first).bytes.data() + offset % chunk_bytes_ : chunk(last).straddler.data();
}

void LogSegment::own_frozen() {
  if (is_frozen_own_) return;
  frozen_ = live_;
  num_frozen_ = num_live_;
  is_frozen_own_ = true;
}

void LogSegment::set_live(std::int64_t record, bool value) {
  if (is_frozen_) own_frozen();
  if (live_.set(record, value)) num_live_ += value ? 1 : -1;
}

void LogSegment::freeze() {
  is_frozen_ = true;
  is_frozen_own_ = false;
}

void LogSegment::thaw() {
  is_frozen_ = is_frozen_own_ = false;
  frozen_ = LiveBits();
  num_frozen_ = 0;
}

void LogSegment::set_frozen(std::int64_t record, bool value) {
  own_frozen();
  if (frozen_.set(record, value)) num_frozen_ += value ? 1 : -1;
}

}  // namespace colonnade
