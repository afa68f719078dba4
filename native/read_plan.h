// What is to be read from files: which records, and where they go.
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

// A segment's open file. Its descriptor stays open until nobody uses it: whoever closes it waits for that first.
class SegmentFile {
 public:
  // mapped: the file's bytes in memory, or null.
  SegmentFile(int fd, const std::uint8_t* mapped) : fd_(fd), mapped_(mapped) {}
  int fd() const { return fd_; }
  const std::uint8_t* mapped() const { return mapped_; }
  // Blocks until nobody uses it. Only after it has been taken from where users find it.
  void wait_unused() const {
    for (int users; (users = users_.load()) != 0;) users_.wait(users);
  }

 private:
  friend class FileUse;
  int fd_;
  const std::uint8_t* mapped_;
  std::atomic<int> users_{0};
};

// Holds a file open.
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

// Gets the payload of the row at `position`, checked. The pointer is good for the call.
using Deliver = std::function<void(std::uint32_t position, const std::uint8_t* payload)>;

// Records to read, of any number of logs.
struct ReadPlan {
  struct File {
    FileUse use;
    std::int64_t segment;
    std::size_t stride;
    std::uint32_t source;  // the log, as its caller numbers it
  };
  struct Item {
    std::uint32_t file, record;
    std::uint32_t position;  // what `Deliver` is told
    std::int64_t id;         // whose row the record must be
  };
  std::vector<File> files;
  std::vector<Item> items;
  std::optional<ReadFault> fault;  // of what was read from a mapped file while planning

  void fail(const ReadFault& found) {
    if (!fault || std::pair(found.source, found.place) < std::pair(fault->source, fault->place)) fault = found;
  }
};

}  // namespace colonnade
