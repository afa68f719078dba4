#include "page_reader.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include "buffer.h"
#include "threads.h"

namespace colonnade {

namespace {

constexpr int kMaxThreads = 16;  // enough to keep an SSD busy

class ThreadEngine final : public PageReader::Engine {
 public:
  ThreadEngine(ReadQueue& queue, int depth) : queue_(queue) {
    const int num_threads = std::min(depth, kMaxThreads);
    threads_.reserve(static_cast<std::size_t>(num_threads));
    for (int i = 0; i < num_threads; ++i) {
      try {
        threads_.emplace_back([this] { work(); });
      } catch (const std::system_error&) {  // no more threads: continue with fewer
        if (threads_.empty()) throw;
        break;
      }
    }
  }
  ~ThreadEngine() override { queue_.stop(); }
  const char* name() const override { return "threads"; }

 private:
  void work() {
    Buffer<std::uint8_t> buffer(kMaxRunBytes);
    std::vector<ReadQueue::Work> taken;
    while (queue_.wait_and_take(taken)) {
      const auto& [job, run] = taken.front();
      if (buffer.size() < run.bytes) buffer = Buffer<std::uint8_t>(run.bytes);
      const Arrived what = read_run(job->fd_of(run), run, job->needed_bytes(run), buffer.data());
      queue_.done(taken.front(), what.have);
      job->arrived(run, buffer.data(), what);
      taken.clear();
    }
  }

  ReadQueue& queue_;
  std::vector<JoinedThread> threads_;
};

}  // namespace

std::unique_ptr<PageReader::Engine> make_thread_engine(ReadQueue& queue, int depth) {
  return std::make_unique<ThreadEngine>(queue, depth);
}

PageReader::PageReader(const std::string& kind, int depth) : queue_(new ReadQueue), process_(getpid()) {
  if (kind != "auto" && kind != "ring" && kind != "threads") {
    throw std::invalid_argument("kind: got '" + kind + "', choose from auto, ring, threads");
  }
  if (depth < 1 || depth > 1024) {
    throw std::invalid_argument("depth: got " + std::to_string(depth) + ", wanted 1 to 1024 reads in flight");
  }
  if (kind != "threads") engine_ = make_ring_engine(*queue_, depth);
  if (!engine_ && kind == "ring") {
    throw std::runtime_error("kind: got 'ring', but this system has no io_uring; choose 'threads' or 'auto'");
  }
  if (!engine_) engine_ = make_thread_engine(*queue_, depth);
}

PageReader::~PageReader() {
  if (getpid() == process_) return;
  static_cast<void>(engine_.release());
  static_cast<void>(queue_.release());
}

std::shared_ptr<ReadJob> PageReader::submit(ReadPlan plan, Deliver deliver, bool is_demand) {
  auto job = std::make_shared<ReadJob>(std::move(plan), std::move(deliver));
  queue_->push(job, is_demand);
  engine_->wake();
  return job;
}

}  // namespace colonnade
