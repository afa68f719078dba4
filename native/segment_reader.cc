#include "segment_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "crc32c.h"

namespace colonnade {
namespace {

// Reading through a gap this small costs an SSD less than a second request: one random 4 KiB read takes
// about as long as 25 KB of a stream. A run is bounded so that a worker's buffer stays in cache.
constexpr std::size_t kMaxGapBytes = 16 << 10;
constexpr std::size_t kMaxRunBytes = 128 << 10;
constexpr std::size_t kChunkRecords = 256;

std::uint32_t frame_crc(const std::uint8_t* frame, std::size_t stride, std::uint64_t place) noexcept {
  std::uint8_t head[8 + offsetof(FrameHead, crc)];
  std::memcpy(head, &place, 8);
  std::memcpy(head + 8, frame, offsetof(FrameHead, crc));
  const std::uint32_t crc = crc32c(0, head, sizeof head);
  return crc32c(crc, frame + sizeof(FrameHead), stride - sizeof(FrameHead));
}

FrameHead head_of(const std::uint8_t* frame) noexcept {
  FrameHead head;
  std::memcpy(&head, frame, sizeof head);
  return head;
}

std::int64_t segment_of(std::int64_t place) noexcept { return place >> 32; }

std::size_t offset_of(std::int64_t place, std::size_t stride) noexcept {
  return kSegmentHeaderBytes + static_cast<std::size_t>(place & 0xffffffff) * stride;
}

}  // namespace

void frame_records(const std::int64_t* ids, const std::uint8_t* records, std::size_t n,
                   std::size_t record_bytes, std::uint64_t first_place, std::uint8_t* frames) noexcept {
  const std::size_t stride = frame_stride(record_bytes);
  for (std::size_t i = 0; i < n; ++i) {
    std::uint8_t* frame = frames + i * stride;
    FrameHead head{ids[i], records == nullptr ? kTombstone : 0, 0};
    std::memcpy(frame, &head, sizeof head);
    std::uint8_t* payload = frame + sizeof head;
    const std::size_t kept = records == nullptr ? 0 : record_bytes;
    if (kept != 0) std::memcpy(payload, records + i * record_bytes, kept);
    std::memset(payload + kept, 0, stride - sizeof head - kept);
    head.crc = frame_crc(frame, stride, first_place + i);
    std::memcpy(frame, &head, sizeof head);
  }
}

std::int64_t check_records(const std::uint8_t* frames, std::size_t n, std::size_t record_bytes,
                           std::uint64_t first_place) noexcept {
  const std::size_t stride = frame_stride(record_bytes);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint8_t* frame = frames + i * stride;
    const FrameHead head = head_of(frame);
    if (head.crc != frame_crc(frame, stride, first_place + i) || head.flags > kTombstone)
      return static_cast<std::int64_t>(i);
  }
  return -1;
}

SegmentReader::SegmentReader(int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("num_threads: got " + std::to_string(num_threads) + ", wanted at least 1");
  threads_.reserve(static_cast<std::size_t>(num_threads));
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
}

SegmentReader::~SegmentReader() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void SegmentReader::push(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void SegmentReader::work() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

std::shared_ptr<ReadJob> SegmentReader::read(const ReadRequest& request) {
  auto job = std::make_shared<ReadJob>(request);
  job->items_.reserve(request.n);  // here, where running out of memory can still be told to the caller
  // The first task sorts, on a worker, so that the caller's thread is free; then it hands out the reads.
  push([this, job] {
    job->sort();
    const std::size_t n = job->items_.size();
    const std::size_t num_chunks = (n + kChunkRecords - 1) / kChunkRecords;
    {
      std::lock_guard lock(job->mutex_);
      job->remaining_ += num_chunks;
    }
    for (std::size_t c = 0; c < num_chunks; ++c) {
      push([job, c, n] {
        job->read_chunk(c * kChunkRecords, std::min(n, (c + 1) * kChunkRecords));
        job->finish(1);
      });
    }
    job->finish(1);
  });
  return job;
}

std::optional<ReadFault> ReadJob::wait() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return remaining_ == 0; });
  return fault_;
}

void ReadJob::sort() {
  for (std::size_t i = 0; i < request_.n; ++i) {
    const std::int64_t place = request_.places[i];
    if (place >= 0 && place < kTombstonePlace) items_.push_back({place, i});
  }
  std::sort(items_.begin(), items_.end(),
            [](const Item& a, const Item& b) { return a.place < b.place; });
}

void ReadJob::read_chunk(std::size_t first, std::size_t last) {
  thread_local std::vector<std::uint8_t> buffer;
  const std::size_t stride = frame_stride(request_.record_bytes);
  while (first < last) {
    const std::int64_t segment = segment_of(items_[first].place);
    const std::size_t begin = offset_of(items_[first].place, stride);
    std::size_t next = first + 1;
    for (; next < last && segment_of(items_[next].place) == segment; ++next) {
      const std::size_t previous_end = offset_of(items_[next - 1].place, stride) + stride;
      const std::size_t offset = offset_of(items_[next].place, stride);
      // Equal places (an id asked for twice) give an offset below previous_end.
      if (offset > previous_end + kMaxGapBytes || offset + stride > begin + kMaxRunBytes) break;
    }
    read_run(first, next, fd_of(segment), buffer);
    first = next;
  }
}

void ReadJob::read_run(std::size_t first, std::size_t last, int fd, std::vector<std::uint8_t>& buffer) {
  const std::size_t stride = frame_stride(request_.record_bytes);
  const std::size_t begin = offset_of(items_[first].place, stride);
  const std::size_t size = offset_of(items_[last - 1].place, stride) + stride - begin;
  if (buffer.size() < size) buffer.resize(size);
  std::size_t have = 0;
  while (have < size) {
    const ssize_t got = ::pread(fd, buffer.data() + have, size - have, static_cast<off_t>(begin + have));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      // Blame the first record that did not arrive whole.
      std::size_t i = first;
      while (offset_of(items_[i].place, stride) + stride - begin <= have) ++i;
      const auto kind = got < 0 ? ReadFault::Kind::system : ReadFault::Kind::truncated;
      fail({kind, items_[i].place, got < 0 ? errno : 0});
      return;
    }
    have += static_cast<std::size_t>(got);
  }
  for (std::size_t i = first; i < last; ++i) {
    const auto [place, position] = items_[i];
    const std::uint8_t* frame = buffer.data() + (offset_of(place, stride) - begin);
    const FrameHead head = head_of(frame);
    if (head.crc != frame_crc(frame, stride, static_cast<std::uint64_t>(place)) || head.flags != 0)
      return fail({ReadFault::Kind::checksum, place, 0});
    if (head.id != request_.ids[position]) return fail({ReadFault::Kind::other_id, place, 0});
    std::memcpy(request_.out + position * request_.record_bytes, frame + sizeof head,
                request_.record_bytes);
  }
}

int ReadJob::fd_of(std::int64_t segment) const {
  const std::int64_t* end = request_.segments + request_.k;
  const std::int64_t* at = std::lower_bound(request_.segments, end, segment);
  // An unknown segment gives fd -1: pread answers EBADF, which names the place.
  return at != end && *at == segment ? request_.fds[at - request_.segments] : -1;
}

void ReadJob::fail(ReadFault fault) {
  std::lock_guard lock(mutex_);
  if (!fault_ || fault.place < fault_->place) fault_ = fault;
}

void ReadJob::finish(std::size_t num_chunks) {
  std::lock_guard lock(mutex_);
  remaining_ -= num_chunks;
  if (remaining_ == 0) done_.notify_all();
}

}  // namespace colonnade
