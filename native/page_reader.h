// Reader of records from any number of logs, page by page.
#pragma once

#include <memory>
#include <string>

#include "read_queue.h"

namespace colonnade {

// One per rank. Any thread may submit.
class PageReader {
 public:
  // Engine that reads runs from the queue on its own threads, until the queue is stopped and empty.
  class Engine {
   public:
    virtual ~Engine() = default;
    virtual void wake() {}  // there may be more to read
    virtual const char* name() const = 0;
  };

  // kind: "ring" (io_uring), "threads" (pread), or "auto": the first that this system supports. depth: largest number
  // of reads in flight. invalid_argument: unknown kind, or a depth outside 1..1024; runtime_error: no io_uring here.
  PageReader(const std::string& kind, int depth);
  ~PageReader();  // completes all requested reads; does nothing in a child of fork
  PageReader(const PageReader&) = delete;
  PageReader& operator=(const PageReader&) = delete;

  // Submit a plan and return at once. `deliver` is called once for each item with a valid frame (crc, place, id), on
  // the reader's threads, possibly on several at once; it must not throw. Files may be open with O_DIRECT.
  std::shared_ptr<ReadJob> submit(ReadPlan plan, Deliver deliver, bool is_demand);

  std::string kind() const { return engine_->name(); }
  ReadCounts counts() const { return queue_->counts(); }

 private:
  std::unique_ptr<ReadQueue> queue_;
  std::unique_ptr<Engine> engine_;
  int process_;  // process that owns the engine's threads
};

// Null on a system without io_uring.
std::unique_ptr<PageReader::Engine> make_ring_engine(ReadQueue& queue, int depth);
std::unique_ptr<PageReader::Engine> make_thread_engine(ReadQueue& queue, int depth);

}  // namespace colonnade
