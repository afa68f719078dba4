// Plan of reads from files: records, and where to deliver them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "frames.h"

namespace colonnade {

// Open file of a segment. Its descriptor stays open while it is in use: closing waits for all users.
class SegmentFile {
 public:
  explicit SegmentFile(int fd) : fd_(fd) {}
  int fd() const { return fd_; }
  // Block until it is not in use. Call it only after removing it from where users find it.
  void wait_unused() const {
    for (int users; (users = users_.load()) != 0;) users_.wait(users);
  }

 private:
  friend class FileUse;
  int fd_;
  std::atomic<int> users_{0};
};

// Guard that keeps a file open.
class FileUse {
 public:
  explicit FileUse(std::shared_ptr<SegmentFile> file) : file_(std::move(file)) { file_->users_.fetch_add(1); }
  ~FileUse() {
    if (file_ && file_->users_.fetch_sub(1) == 1) file_->users_.notify_all();
  }
  FileUse(FileUse&&) = default;
  FileUse& operator=(FileUse&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  const SegmentFile* operator->() const { return file_.get(); }

 private:
  std::shared_ptr<SegmentFile> file_;
};

// Receives the checked payload of the row at `position`. The pointer is valid during the call.
using Deliver = std::function<void(std::uint32_t position, const std::uint8_t* payload)>;

// Records to read, from any number of logs.
struct ReadPlan {
  struct File {
    FileUse use;
    std::int64_t segment;
    std::size_t stride;
    std::uint32_t source;  // the log, as its caller numbers it
  };
  struct Item {
    std::uint32_t file, record;
    std::uint32_t position;  // passed to `Deliver`
    std::int64_t id;         // id of the row that the record must contain
  };
  std::vector<File> files;
  std::vector<Item> items;
  std::optional<ReadFault> fault;  // the first read that failed

  void fail(const ReadFault& other) {
    if (!fault || std::pair(other.source, other.place) < std::pair(fault->source, fault->place)) fault = other;
  }
};

}  // namespace colonnade
