#include "row_log.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "radix.h"

namespace colonnade {

namespace {

constexpr std::size_t kRowsAtOnce = 256;  // rows that compaction moves under one lock
constexpr std::size_t kHotShare = 8;      // the hottest eighth of the moved rows is collected separately
constexpr double kHotMemory = 10;         // calls over which the frequency threshold is averaged

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument(message);
}

const RowLogSettings& checked(const RowLogSettings& settings) {
  const auto check = [](bool is_right, const char* name, std::int64_t got, const std::string& wanted) {
    if (!is_right) refuse(std::string(name) + ": got " + std::to_string(got) + ", wanted " + wanted);
  };
  const auto& s = settings;
  check(s.record_bytes >= 1 && s.record_bytes < 1 << 30, "record_bytes", s.record_bytes, "at least 1");
  check(s.rows >= 0, "rows", s.rows, "0 (an open table) or more");
  check(s.num_owners >= 1, "num_owners", s.num_owners, "at least 1");
  check(s.place >= 0 && s.place < s.num_owners, "place", s.place, "0 to num_owners - 1");
  check(s.segment_bytes >= 1, "segment_bytes", s.segment_bytes, "at least 1");
  const auto stride = static_cast<std::int64_t>(frame_stride(static_cast<std::size_t>(s.record_bytes)));
  check(s.chunk_bytes >= stride && s.chunk_bytes % static_cast<std::int64_t>(kPageBytes) == 0, "chunk_bytes", s.chunk_bytes,
        "a multiple of 4096, at least " + std::to_string(stride) + " (one frame)");
  check(s.num_streams >= 1 && s.num_streams <= 64, "num_streams", s.num_streams, "1 to 64");
  check(s.first_segment >= 0 && s.first_segment < 1 << 30, "first_segment", s.first_segment, "0 to 2^30 - 1");
  return settings;
}

}  // namespace

RowLog::RowLog(const RowLogSettings& settings)
    : settings_(checked(settings)),
      stride_(frame_stride(static_cast<std::size_t>(settings.record_bytes))),
      share_(settings.rows, settings.num_owners, settings.place),
      index_(share_.num_places()),
      active_(static_cast<std::size_t>(settings.num_streams), kNoSegment),
      next_segment_(settings.first_segment) {}

void RowLog::check_ids(std::span<const std::int64_t> ids) const {
  if (is_open()) return;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const bool is_outside = share_.is_outside(ids[i]);
    if (!is_outside && share_.owns(ids[i])) [[likely]] continue;
    const std::string what = "position " + std::to_string(i) + " id " + std::to_string(ids[i]) + " rows " +
                             std::to_string(settings_.rows);
    if (is_outside) throw std::out_of_range(what);
    refuse(what + ": another owner has it, this is owner " + std::to_string(settings_.place));
  }
}

void RowLog::check_stream(std::int64_t stream) const {
  if (stream < 0 || stream >= static_cast<std::int64_t>(active_.size())) {
    refuse("stream: got " + std::to_string(stream) + ", wanted 0 to " + std::to_string(active_.size() - 1));
  }
}

std::int64_t RowLog::place_of(PlaceEntry entry) const {
  if (entry.place == kNoPlace) return kNowhere;
  return segment_of(entry).number() << 32 | static_cast<std::int64_t>(entry.place & kRecordMask);
}

std::uint32_t RowLog::handle_of(std::int64_t segment) const {
  const auto at = handles_.find(segment);
  if (at == handles_.end()) refuse("segment: got " + std::to_string(segment) + ", which this log does not have");
  return at->second;
}

LogSegment& RowLog::at(std::int64_t segment) const {
  return *by_handle_[handle_of(segment)];
}

std::uint32_t RowLog::add_segment(std::int64_t number) {
  if (free_handles_.empty()) {
    if (by_handle_.size() == kMaxSegments) throw NoRoom("more than 16384 segments; choose a larger segment_bytes");
    by_handle_.emplace_back();
    free_handles_.push_back(static_cast<std::uint32_t>(by_handle_.size() - 1));
  }
  const std::uint32_t handle = free_handles_.back();
  auto segment = std::make_unique<LogSegment>(number, stride_, settings_.chunk_bytes);
  if (is_frozen_) segment->begin_frozen();
  handles_.emplace(number, handle);
  free_handles_.pop_back();
  by_handle_[handle] = std::move(segment);
  return handle;
}

void RowLog::drop(std::int64_t segment, std::uint32_t handle) {
  handles_.erase(segment);
  by_handle_[handle] = nullptr;
  free_handles_.push_back(handle);
}

void RowLog::note_full(std::size_t since) {
  for (; since < full_.size(); ++since) pending_bytes_ += full_[since]->num_bytes;
}

void RowLog::seal_stream(std::int64_t stream) {
  auto& active = active_[static_cast<std::size_t>(stream)];
  const std::size_t before = full_.size();
  by_handle_[active]->seal(full_);
  note_full(before);
  active = kNoSegment;
}

template <class Write>
void RowLog::append_one(std::int64_t id, std::int64_t key, PlaceEntry old, const Write& write, std::uint8_t frequency,
                        std::int64_t stream, bool for_commit) {
  auto& active = active_[static_cast<std::size_t>(stream)];
  if (active != kNoSegment) {
    const LogSegment& segment = *by_handle_[active];
    if (segment.num_bytes() + static_cast<std::int64_t>(stride_) > settings_.segment_bytes ||
        segment.num_records() == std::int64_t{1} << kRecordBits) {
      seal_stream(stream);
    }
  }
  if (active == kNoSegment) active = add_segment(next_segment_++);
  LogSegment& segment = *by_handle_[active];
  const std::size_t before = full_.size();
  segment.append(id, static_cast<std::size_t>(settings_.record_bytes), write, full_);
  note_full(before);
  counts_.bytes_framed += static_cast<std::int64_t>(stride_);

  const std::int64_t record = segment.num_records() - 1;
  const bool is_old = old.place != kNoPlace;
  index_.put(key, {packed(active, record), frequency});
  if (for_commit && is_frozen_) {
    if (is_old) segment_of(old).set_frozen(record_of(old), false);
    segment.set_frozen(record, true);
  }
  if (is_old) segment_of(old).set_live(record_of(old), false);
  segment.set_live(record, true);
}

void RowLog::append(std::span<const std::int64_t> ids, const Pack& pack, std::span<const std::uint8_t> frequencies,
                    std::int64_t stream, bool for_commit) {
  check_ids(ids);
  check_stream(stream);
  const std::lock_guard lock(mutex_);
  for_each(ids, [&](std::size_t i, std::int64_t key, PlaceEntry old) {
    append_one(ids[i], key, old, [&](std::uint8_t* payload) { pack(i, payload); }, frequencies.empty() ? old.frequency : frequencies[i],
               stream, for_commit);
    ++counts_.rows_written;
  });
}

std::int64_t RowLog::erase(std::span<const std::int64_t> ids) {
  check_ids(ids);
  const std::lock_guard lock(mutex_);
  std::int64_t num_erased = 0;
  for_each(ids, [&](std::size_t, std::int64_t key, PlaceEntry entry) {
    if (entry.place == kNoPlace) return;
    segment_of(entry).set_live(record_of(entry), false);
    index_.erase(key);
    ++num_erased;
  });
  counts_.rows_deleted += num_erased;
  return num_erased;
}

void RowLog::places(std::span<const std::int64_t> ids, std::span<std::int64_t> out) const {
  check_ids(ids);
  const std::lock_guard lock(mutex_);
  for_each(ids, [&](std::size_t i, std::int64_t, PlaceEntry entry) { out[i] = place_of(entry); });
}

void RowLog::frequencies(std::span<const std::int64_t> ids, std::span<std::uint8_t> out) const {
  check_ids(ids);
  const std::lock_guard lock(mutex_);
  for_each(ids, [&](std::size_t i, std::int64_t, PlaceEntry entry) { out[i] = entry.frequency; });
}

void RowLog::touch(std::span<const std::int64_t> ids, std::span<const std::uint8_t> frequencies) {
  check_ids(ids);
  const std::lock_guard lock(mutex_);
  for_each(ids, [&](std::size_t i, std::int64_t key, PlaceEntry entry) {
    if (entry.place != kNoPlace) index_.put(key, {entry.place, frequencies[i]});
  });
}

void RowLog::plan_reads(std::span<const std::int64_t> ids, std::span<const std::uint32_t> positions,
                        std::uint32_t source, ReadPlan& plan, const Deliver& deliver, std::span<RowAt> locations,
                        std::span<std::uint8_t> frequencies) {
  check_ids(ids);
  constexpr std::uint32_t kNoFile = ~std::uint32_t{0};
  const std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> file_of(by_handle_.size(), kNoFile);  // by handle: its number in the plan
  plan.items.reserve(plan.items.size() + ids.size());
  for_each(ids, [&](std::size_t i, std::int64_t, PlaceEntry entry) {
    if (!frequencies.empty()) frequencies[i] = entry.frequency;
    locations[i] = RowAt::nowhere;
    if (entry.place == kNoPlace) {
      ++counts_.rows_absent;
      return;
    }
    const LogSegment& segment = segment_of(entry);
    const auto record = static_cast<std::uint32_t>(record_of(entry));
    if (const std::uint8_t* frame = segment.frame_in_memory(record)) {
      deliver(positions[i], frame + kFrameHeadBytes);
      locations[i] = RowAt::memory;
      ++counts_.rows_copied;
      return;
    }
    if (!segment.file) {
      refuse("segment " + std::to_string(segment.number()) + ": attach its file before its rows are read");
    }
    std::uint32_t& file = file_of[entry.place >> kRecordBits];
    if (file == kNoFile) {
      file = static_cast<std::uint32_t>(plan.files.size());
      plan.files.push_back({FileUse(segment.file), segment.number(), stride_, source});
    }
    plan.items.push_back({file, record, positions[i], ids[i]});
    locations[i] = RowAt::disk;
    ++counts_.rows_planned;
  });
}

std::shared_ptr<LogChunk> RowLog::next_chunk() {
  const std::lock_guard lock(mutex_);
  if (full_.empty()) return nullptr;
  auto chunk = std::move(full_.front());
  full_.pop_front();
  return chunk;
}

void RowLog::written(const std::shared_ptr<LogChunk>& chunk) {
  const std::lock_guard lock(mutex_);
  LogSegment& segment = at(chunk->segment);
  if (!segment.file) {
    refuse("segment " + std::to_string(chunk->segment) + ": got a chunk that is written, wanted its file attached first");
  }
  if (chunk->is_written) refuse("chunk: got one that was written before");
  chunk->is_written = true;
  pending_bytes_ -= chunk->num_bytes;
  segment.drop_written();
}

void RowLog::attach(std::int64_t segment, int fd) {
  const std::lock_guard lock(mutex_);
  auto& file = at(segment).file;
  if (file) refuse("segment " + std::to_string(segment) + ": its file is attached already; detach it first");
  file = std::make_shared<SegmentFile>(fd);
}

void RowLog::detach(std::int64_t segment) {
  std::shared_ptr<SegmentFile> file;
  {
    const std::lock_guard lock(mutex_);
    file = std::exchange(at(segment).file, nullptr);
  }
  if (file) file->wait_unused();
}

std::vector<std::int64_t> RowLog::seal() {
  const std::lock_guard lock(mutex_);
  std::vector<std::int64_t> numbers;
  for (std::size_t stream = 0; stream < active_.size(); ++stream) {
    if (active_[stream] == kNoSegment) continue;
    numbers.push_back(by_handle_[active_[stream]]->number());
    seal_stream(static_cast<std::int64_t>(stream));
  }
  std::ranges::sort(numbers);
  return numbers;
}

RowLog::Sealed RowLog::sealed(std::int64_t segment) const {
  const std::lock_guard lock(mutex_);
  const LogSegment& part = at(segment);
  if (!part.is_sealed()) refuse("segment " + std::to_string(segment) + ": it still takes rows; seal it first");
  return {part.num_records(), part.num_bytes(), part.checksum()};
}

std::vector<std::int64_t> RowLog::keys(std::int64_t segment) const {
  std::unique_lock lock(mutex_);
  const LogSegment& part = at(segment);
  const auto blocks = part.keys();
  if (!blocks) refuse("segment " + std::to_string(segment) + ": its keys are in its key list, not here");
  const auto n = static_cast<std::size_t>(part.num_records());
  // Tens of megabytes, which would delay training under the lock.
  if (part.is_sealed()) lock.unlock();
  std::vector<std::int64_t> all;
  all.reserve(n);
  for (const auto& block : *blocks) all.insert(all.end(), block.begin(), block.end());
  return all;
}

void RowLog::forget_keys(std::int64_t segment) {
  std::shared_ptr<LogSegment::Keys> gone;  // freed after unlocking
  const std::lock_guard lock(mutex_);
  LogSegment& part = at(segment);
  if (!part.is_sealed()) refuse("segment " + std::to_string(segment) + ": it still takes rows; seal it first");
  gone = part.forget_keys();
}

std::vector<RowLog::SegmentUse> RowLog::segments() const {
  const std::lock_guard lock(mutex_);
  std::vector<SegmentUse> uses;
  uses.reserve(handles_.size());
  for (const auto& [number, handle] : handles_) {
    const LogSegment& part = *by_handle_[handle];
    uses.push_back({number, part.num_records(), part.num_live(), part.is_sealed()});
  }
  return uses;
}

std::vector<std::uint8_t> RowLog::live(std::int64_t segment) const {
  const std::lock_guard lock(mutex_);
  const LogSegment& part = at(segment);
  return part.live().bytes(part.num_records());
}

void RowLog::freeze() {
  const std::lock_guard lock(mutex_);
  if (is_frozen_) refuse("got a second freeze; thaw first");
  is_frozen_ = true;
  for (const auto& [number, handle] : handles_) by_handle_[handle]->freeze();
}

std::vector<std::uint8_t> RowLog::frozen_live(std::int64_t segment) const {
  const std::lock_guard lock(mutex_);
  if (!is_frozen_) refuse("got frozen_live, but nothing is frozen");
  const LogSegment& part = at(segment);
  return part.frozen().bytes(part.num_records());
}

std::vector<std::int64_t> RowLog::frozen_segments() const {
  const std::lock_guard lock(mutex_);
  if (!is_frozen_) refuse("got frozen_segments, but nothing is frozen");
  std::vector<std::int64_t> numbers;
  for (const auto& [number, handle] : handles_) {
    if (by_handle_[handle]->num_frozen() > 0) numbers.push_back(number);
  }
  return numbers;
}

void RowLog::thaw() {
  const std::lock_guard lock(mutex_);
  is_frozen_ = false;
  for (const auto& [number, handle] : handles_) by_handle_[handle]->thaw();
}

void RowLog::load(std::int64_t segment, std::span<const std::int64_t> ids, std::span<const std::uint8_t> live, int fd) {
  check_ids(ids);
  const auto n = static_cast<std::int64_t>(ids.size());
  if (segment < 0 || segment >= 1 << 30) refuse("segment: got " + std::to_string(segment) + ", wanted 0 to 2^30 - 1");
  if (n > std::int64_t{1} << kRecordBits) refuse("ids: got " + std::to_string(n) + " records, wanted at most 2^26");
  if (static_cast<std::int64_t>(live.size()) != (n + 7) / 8) {
    refuse("live: got " + std::to_string(live.size()) + " bytes, wanted " + std::to_string((n + 7) / 8));
  }
  LiveBits bits = LiveBits::of(live, n);
  for (std::int64_t record = n; record < (n + 7) / 8 * 8; ++record) {
    if (bits[record]) refuse("live: got a bit behind the last record");
  }
  const std::lock_guard lock(mutex_);
  if (handles_.contains(segment)) refuse("segment: got " + std::to_string(segment) + ", which this log has already");
  const std::uint32_t handle = add_segment(segment);
  const std::int64_t twice = is_open() ? load_open(ids, bits, handle) : load_vocabulary(ids, bits, handle);
  if (twice >= 0) {
    drop(segment, handle);
    refuse("record " + std::to_string(twice) + ": got a second live record of id " +
           std::to_string(ids[static_cast<std::size_t>(twice)]));
  }
  LogSegment& part = *by_handle_[handle];
  part.load(n, std::move(bits));
  if (fd >= 0) part.file = std::make_shared<SegmentFile>(fd);
  next_segment_ = std::max(next_segment_, segment + 1);
}

std::int64_t RowLog::load_open(std::span<const std::int64_t> ids, const LiveBits& bits, std::uint32_t handle) {
  std::int64_t twice = -1;
  for_each(ids, [&](std::size_t i, std::int64_t key, PlaceEntry entry) {
    const auto record = static_cast<std::int64_t>(i);
    if (twice >= 0 || !bits[record]) return;
    if (entry.place == kNoPlace) {
      index_.put(key, {packed(handle, record), 0});
    } else {
      twice = record;
    }
  });
  for (std::int64_t record = 0; record < twice; ++record) {
    if (bits[record]) index_.erase(key_of(ids[static_cast<std::size_t>(record)]));
  }
  return twice;
}

// By ascending key: neighbours share a group, and its block is then allocated once.
std::int64_t RowLog::load_vocabulary(std::span<const std::int64_t> ids, const LiveBits& bits, std::uint32_t handle) {
  std::vector<std::uint64_t> words;  // key << kRecordBits | record
  words.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (bits[static_cast<std::int64_t>(i)]) {
      words.push_back(static_cast<std::uint64_t>(key_of(ids[i])) << kRecordBits | i);
    }
  }
  const std::size_t n = words.size();
  const int key_bits = std::bit_width(static_cast<std::uint64_t>(share_.num_places()));
  radix_sort(words, kRecordBits, key_bits);
  const auto key_at = [&](std::size_t i) { return static_cast<std::int64_t>(words[i] >> kRecordBits); };
  std::int64_t twice = -1;
  index_.for_each(n, key_at, [&](std::size_t i, std::int64_t key, PlaceEntry entry) {
    if (entry.place == kNoPlace && (i == 0 || key_at(i - 1) != key)) return;
    const auto record = static_cast<std::int64_t>(words[i] & kRecordMask);
    twice = twice < 0 ? record : std::min(twice, record);
  });
  if (twice >= 0) return twice;
  index_.add(n, key_at, [&](std::size_t i) {
    return PlaceEntry{packed(handle, static_cast<std::int64_t>(words[i] & kRecordMask)), 0};
  });
  return twice;
}

template <class FrequencyOf>
std::uint8_t RowLog::hot_frequency(std::size_t n, const FrequencyOf& frequency_of) {
  const std::lock_guard lock(mutex_);
  if (n > 0) {
    const auto frequency = static_cast<double>(frequency_of(n / kHotShare));
    hot_frequency_ = hot_frequency_ < 0 ? frequency : hot_frequency_ + (frequency - hot_frequency_) / kHotMemory;
  }
  return static_cast<std::uint8_t>(std::max(hot_frequency_, 0.0));
}

std::int64_t RowLog::rewrite(std::int64_t segment, std::span<const std::int64_t> ids,
                             std::span<const std::uint8_t> frames, std::int64_t first_record, std::int64_t stream,
                             std::int64_t hot_stream) {
  check_stream(stream);
  check_stream(hot_stream);
  check_ids(ids);
  const std::size_t n = ids.size();
  const std::uint64_t first_place = static_cast<std::uint64_t>(segment) << 32 | static_cast<std::uint64_t>(first_record);
  const std::int64_t bad = check_records(ids.data(), frames.data(), n, static_cast<std::size_t>(settings_.record_bytes), first_place);
  if (bad >= 0) refuse("record " + std::to_string(first_record + bad) + ": its checksum does not match");

  struct Row {
    std::uint32_t frame;
    std::uint8_t frequency;
  };
  std::vector<Row> rows;
  // Check that the index still has the row at the record of this frame.
  const auto packed_place = [&](std::uint32_t handle, std::size_t frame) {
    return packed(handle, first_record + static_cast<std::int64_t>(frame));
  };
  {
    const std::lock_guard lock(mutex_);
    const std::uint32_t handle = handle_of(segment);
    const LogSegment& victim = *by_handle_[handle];
    if (!victim.is_sealed()) refuse("segment " + std::to_string(segment) + ": it still takes rows; seal it first");
    if (first_record < 0 || first_record + static_cast<std::int64_t>(n) > victim.num_records()) {
      refuse("first_record: got records " + std::to_string(first_record) + " to " +
             std::to_string(first_record + static_cast<std::int64_t>(n)) + ", the segment has " +
             std::to_string(victim.num_records()));
    }
    for_each(ids, [&](std::size_t i, std::int64_t, PlaceEntry entry) {
      if (entry.place == packed_place(handle, i)) rows.push_back({static_cast<std::uint32_t>(i), entry.frequency});
    });
  }
  std::ranges::stable_sort(rows, [](const Row& a, const Row& b) { return a.frequency > b.frequency; });
  const std::uint8_t hot = hot_frequency(rows.size(), [&](std::size_t i) { return rows[i].frequency; });
  // Few at a time, because training may wait for the lock. In between, rows may be written again, and frozen.
  std::int64_t num_moved = 0;
  for (std::size_t begin = 0; begin < rows.size(); begin += kRowsAtOnce) {
    const auto part = std::span(rows).subspan(begin, std::min(kRowsAtOnce, rows.size() - begin));
    const std::lock_guard lock(mutex_);
    const std::uint32_t handle = handle_of(segment);
    const LogSegment& victim = *by_handle_[handle];
    index_.for_each(
        part.size(), [&](std::size_t i) { return key_of(ids[part[i].frame]); },
        [&](std::size_t i, std::int64_t key, PlaceEntry entry) {
          const std::uint32_t frame = part[i].frame;
          if (entry.place != packed_place(handle, frame)) return;
          const std::uint8_t* const payload = frames.data() + frame * stride_ + kFrameHeadBytes;
          // If the frozen content has the row at this place, move it there too.
          const bool is_frozen = is_frozen_ && victim.frozen()[first_record + frame];
          append_one(ids[frame], key, entry,
                     [&](std::uint8_t* to) { std::memcpy(to, payload, static_cast<std::size_t>(settings_.record_bytes)); },
                     entry.frequency, entry.frequency > hot ? hot_stream : stream, is_frozen);
          ++num_moved;
          ++counts_.rows_rewritten;
        });
  }
  return num_moved;
}

void RowLog::forget(std::int64_t segment) {
  const std::lock_guard lock(mutex_);
  const std::uint32_t handle = handle_of(segment);
  const LogSegment& part = *by_handle_[handle];
  const std::int64_t num_used = part.num_live() + (is_frozen_ ? part.num_frozen() : 0);
  if (num_used > 0 || !part.is_written()) {
    refuse("segment " + std::to_string(segment) + ": got one with " + std::to_string(num_used) + " live rows" +
           (part.is_written() ? "" : " that is not written yet") + ", wanted an empty one that is written");
  }
  drop(segment, handle);
}

std::int64_t RowLog::num_rows() const {
  const std::lock_guard lock(mutex_);
  return index_.size();
}

std::int64_t RowLog::index_bytes() const {
  const std::lock_guard lock(mutex_);
  return index_.bytes();
}

RowLog::Counts RowLog::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace colonnade
