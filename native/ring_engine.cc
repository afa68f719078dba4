// Page reader engine on io_uring.
#include "page_reader.h"
#include "ring.h"

#ifdef COLONNADE_HAS_RING

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <future>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include "buffer.h"
#include "threads.h"

namespace colonnade {

namespace {

// While this many reads are in flight, the thread sleeps until some have completed.
constexpr std::size_t kBusy = 16;
constexpr unsigned kBatch = 8;
constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};

class RingEngine final : public PageReader::Engine {
 public:
  RingEngine(ReadQueue& queue, int depth) : queue_(queue), slots_(static_cast<std::size_t>(depth)) {
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return;
    std::promise<bool> started;
    auto is_started = started.get_future();
    // Only the thread that creates a ring may use it.
    try {
      thread_ = JoinedThread([this, &started] {
        bool is_ready = false;
        try {
          ring_ = Ring::make(static_cast<unsigned>(slots_.size() + 1));
          if (ring_) prepare();
          is_ready = ring_ != nullptr;
        } catch (const std::bad_alloc&) {  // the engine with smaller buffers may still work
        }
        started.set_value(is_ready);
        if (is_ready) work();
        ring_.reset();
      });
    } catch (const std::system_error&) {  // no more threads
      return;
    }
    is_running_ = is_started.get();
  }
  ~RingEngine() override {
    if (is_running_) {
      queue_.stop();
      wake();
    }
    thread_.join();
    if (wake_fd_ >= 0) ::close(wake_fd_);
  }
  bool is_running() const { return is_running_; }
  const char* name() const override { return "ring"; }
  void wake() override {
    const std::uint64_t one = 1;
    while (::write(wake_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

 private:
  struct Slot {
    ReadQueue::Work work;
    std::uint8_t* bytes = nullptr;  // kMaxRunBytes of memory_
    Buffer<std::uint8_t> large;     // used instead for a run that is longer
    std::uint64_t from = 0, have = 0, needed = 0;
  };

  void prepare() {
    memory_ = Buffer<std::uint8_t>(slots_.size() * kMaxRunBytes);
    is_registered_ = ring_->register_memory(memory_.data(), memory_.size());
    for (std::size_t i = slots_.size(); i-- > 0;) {
      slots_[i].bytes = memory_.data() + i * kMaxRunBytes;
      free_.push_back(i);
    }
  }

  void work() {
    std::vector<ReadQueue::Work> taken;
    read_wake();
    for (;;) {
      const bool is_stopped = queue_.is_stopped();  // read before checking for runs, so that earlier runs are seen
      if (!free_.empty()) queue_.take(taken, free_.size());
      for (auto& work : taken) start(std::move(work));
      taken.clear();
      const std::size_t in_flight = slots_.size() - free_.size();
      if (in_flight == 0 && is_stopped) return;
      ring_->enter(in_flight >= kBusy ? kBatch : 1);
      ring_->reap([this](std::uint64_t tag, int result) {
        if (tag == kWakeTag) return read_wake();
        completed(static_cast<std::size_t>(tag), result);
      });
    }
  }

  void read_wake() { ring_->read(wake_fd_, &wakes_, sizeof wakes_, 0, false, kWakeTag); }

  void start(ReadQueue::Work work) {
    const std::size_t i = free_.back();
    free_.pop_back();
    Slot& slot = slots_[i];
    slot.have = 0;
    slot.needed = work.job->needed_bytes(work.run);
    slot.work = std::move(work);
    if (slot.work.run.bytes > kMaxRunBytes) slot.large = Buffer<std::uint8_t>(slot.work.run.bytes);
    read(i);
  }

  // Read the missing rest, from the start of a page, as direct reads require.
  void read(std::size_t i) {
    Slot& slot = slots_[i];
    const ReadRun& run = slot.work.run;
    slot.from = slot.have / kPageBytes * kPageBytes;
    const bool is_large = slot.large.size() > 0;
    ring_->read(slot.work.job->fd_of(run), (is_large ? slot.large.data() : slot.bytes) + slot.from,
                static_cast<std::uint32_t>(run.bytes - slot.from), run.offset + slot.from, is_registered_ && !is_large, i);
  }

  void completed(std::size_t i, int result) {
    Slot& slot = slots_[i];
    if (result == -EINTR || result == -EAGAIN) return read(i);
    if (result > 0 && slot.from + static_cast<std::uint64_t>(result) > slot.have) {
      slot.have = slot.from + static_cast<std::uint64_t>(result);
      if (slot.have < slot.needed) return read(i);
    }
    queue_.done(slot.work, slot.have);
    slot.work.job->arrived(slot.work.run, slot.large.size() > 0 ? slot.large.data() : slot.bytes,
                           {slot.have, result < 0 ? -result : 0});
    slot.work.job = nullptr;
    slot.large = Buffer<std::uint8_t>();
    free_.push_back(i);
  }

  ReadQueue& queue_;
  std::unique_ptr<Ring> ring_;
  Buffer<std::uint8_t> memory_;
  bool is_registered_ = false, is_running_ = false;
  std::vector<Slot> slots_;
  std::vector<std::size_t> free_;
  int wake_fd_ = -1;
  std::uint64_t wakes_ = 0;
  JoinedThread thread_;
};

}  // namespace

std::unique_ptr<PageReader::Engine> make_ring_engine(ReadQueue& queue, int depth) {
  auto engine = std::make_unique<RingEngine>(queue, depth);
  if (!engine->is_running()) return nullptr;
  return engine;
}

}  // namespace colonnade

#else

namespace colonnade {

std::unique_ptr<PageReader::Engine> make_ring_engine(ReadQueue&, int) {
  return nullptr;
}

}  // namespace colonnade

#endif
