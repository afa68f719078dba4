// Reads records of any number of logs, page by page.
#pragma once

#include <memory>
#include <string>

#include "read_queue.h"

namespace colonnade {

// One per rank. Any thread may submit.
class PageReader {
 public:
  // Reads what the queue gives, on threads of its own, until the queue is stopped and empty.
  class Engine {
   public:
    virtual ~Engine() = default;
    virtual void wake() {}  // there may be more to read
    virtual const char* name() const = 0;
  };

  // kind: "ring" (io_uring), "threads" (pread), or "auto": the first that this system has. depth: reads in flight at
  // most. invalid_argument: not a kind, or a depth outside 1..1024; runtime_error: no io_uring here.
  PageReader(const std::string& kind, int depth);
  ~PageReader();  // finishes what was asked for; in a child of fork it does nothing
  PageReader(const PageReader&) = delete;
  PageReader& operator=(const PageReader&) = delete;

  // Returns at once. `deliver` is called for every item whose frame is as it should be (crc, place, id), on the
  // reader's threads, perhaps on several at once, each item once; it must not throw. Files may be open with O_DIRECT.
  std::shared_ptr<ReadJob> submit(ReadPlan plan, Deliver deliver, bool is_demand);

  std::string kind() const { return engine_->name(); }
  ReadCounts counts() const { return queue_->counts(); }

 private:
  std::unique_ptr<ReadQueue> queue_;
  std::unique_ptr<Engine> engine_;
  int process_;  // that has the engine's threads
};

// Null where the system has no io_uring.
std::unique_ptr<PageReader::Engine> make_ring_engine(ReadQueue& queue, int depth);
std::unique_ptr<PageReader::Engine> make_thread_engine(ReadQueue& queue, int depth);

}  // namespace colonnade
