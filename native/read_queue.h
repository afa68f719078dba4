// Queue of read jobs, divided into runs of pages, in the order of service.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "read_plan.h"

namespace colonnade {

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kMaxRunBytes = std::size_t{64} << 10;  // except that one record is always read whole

// Run of whole pages of one file, with the items in them.
struct ReadRun {
  std::uint32_t file, first, last;  // items [first, last)
  std::uint64_t offset, bytes;      // multiples of kPageBytes
};

// Divide items into runs. `items` ascend by file and record. Pages are read once; small gaps are read too.
std::vector<ReadRun> plan_runs(std::span<const ReadPlan::Item> items, std::span<const ReadPlan::File> files);

// Number of bytes of a run that were read, and the errno if fewer than `needed`; 0 at the end of the file.
struct Arrived {
  std::uint64_t have = 0;
  int error = 0;
};
Arrived read_run(int fd, const ReadRun& run, std::uint64_t needed, std::uint8_t* bytes) noexcept;  // by pread

// Job that reads one plan. Any thread may wait.
class ReadJob {
 public:
  ReadJob(ReadPlan plan, Deliver deliver);  // sorts
  // Block until every read is done, with or without faults. Repeated calls return the same result.
  std::optional<ReadFault> wait();
  bool is_done() const { return is_done_.load(); }

  // For reading threads:
  std::span<const ReadRun> runs() const { return runs_; }
  int fd_of(const ReadRun& run) const { return plan_.files[run.file].use->fd(); }
  // Return the number of the run's bytes that its items need.
  std::uint64_t needed_bytes(const ReadRun& run) const;
  // Handle the result of reading a run. If the read failed, its items are read again one by one, so that only
  // unreadable ones are at fault.
  void arrived(const ReadRun& run, const std::uint8_t* bytes, Arrived what);

 private:
  void deliver(const ReadRun& run, const std::uint8_t* bytes, Arrived what);
  void fail(ReadFault::Kind kind, const ReadPlan::Item& item, int error) noexcept;
  void finish() noexcept;

  ReadPlan plan_;
  Deliver deliver_;
  std::vector<ReadRun> runs_;
  std::atomic<std::size_t> remaining_;
  std::atomic<bool> is_done_{false};
  std::mutex mutex_;
  std::condition_variable done_;
};

// Totals of reads so far.
struct ReadCounts {
  std::int64_t reads = 0, pages = 0, bytes = 0, rows = 0;
  double busy_seconds = 0.0;  // time with reads in flight
};

// Queue of jobs: demand reads before prefetches, earlier jobs before later ones. Thread-safe.
class ReadQueue {
 public:
  struct Work {
    std::shared_ptr<ReadJob> job;
    ReadRun run;
  };
  void push(std::shared_ptr<ReadJob> job, bool is_demand);
  // Append up to `most` runs to `out`; return whether there were any.
  bool take(std::vector<Work>& out, std::size_t most);
  // Block until a run is available; false: stopped, and none is left.
  bool wait_and_take(std::vector<Work>& out);
  void stop();
  bool is_stopped() const;
  // Call it after ReadJob::arrived, and before releasing the job.
  void done(const Work& work, std::uint64_t have) noexcept;
  ReadCounts counts() const;

 private:
  struct Waiting {
    std::shared_ptr<ReadJob> job;
    std::size_t next_run = 0;
  };
  void take_locked(std::vector<Work>& out, std::size_t most);

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Waiting> demand_, prefetch_;
  std::size_t unfinished_ = 0;  // number of runs
  std::chrono::steady_clock::time_point busy_since_;
  bool is_stopped_ = false;
  ReadCounts counts_;
};

}  // namespace colonnade
