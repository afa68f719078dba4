// Reserved address space that becomes memory as it is touched.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <utility>

namespace colonnade {

// Out of memory, or of slots; MemoryError in Python.
class NoRoom final : public std::bad_alloc {
 public:
  explicit NoRoom(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// Zeroed bytes at a fixed address.
class Slab {
 public:
  Slab() = default;
  explicit Slab(std::size_t bytes);  // throws NoRoom; 0 bytes: no memory
  // Use an anonymous file in `directory`, deleted with the slab: memory mounted as files, or the page cache. Allocates
  // its blocks at once, because otherwise a full disk would be detected only by a touch. Throws NoRoom.
  Slab(std::size_t bytes, const std::string& directory);
  // Use huge pages from here on: a first touch allocates 2 MiB at once, twice as fast for random accesses, and wasteful
  // if only a little will be touched.
  void ask_for_huge_pages(std::size_t touched_bytes = 0) const noexcept;  // bytes perhaps touched in small pages
  // Free whole pages in bytes [begin, end); their content is lost.
  void give_back(std::size_t begin, std::size_t end) const noexcept;
  ~Slab();
  Slab(Slab&& other) noexcept { swap(other); }
  Slab& operator=(Slab&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  void swap(Slab& other) noexcept {
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void* mapping_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Return bytes per item * items, or throw NoRoom if that overflows.
std::size_t checked_bytes(std::size_t item_bytes, std::size_t items);

}  // namespace colonnade
