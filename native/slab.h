// Address space that is reserved at once and becomes memory as it is touched.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <utility>

namespace colonnade {

// Out of memory, or of slots; becomes MemoryError in Python.
class NoRoom final : public std::bad_alloc {
 public:
  explicit NoRoom(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// Zeroed bytes. The address never changes.
class Slab {
 public:
  Slab() = default;
  explicit Slab(std::size_t bytes);  // throws NoRoom; 0 bytes: no memory
  // In a file of its own in `directory`, which has no name and goes with the slab: memory that is mounted as files, or
  // the page cache. Its blocks are taken at once, for a full disk would otherwise be found by a touch. Throws NoRoom.
  Slab(std::size_t bytes, const std::string& directory);
  // From here on, a first touch brings 2 MiB at once: twice as fast where accesses are random, and wasteful
  // where only a little will be touched.
  void ask_for_huge_pages(std::size_t touched_bytes = 0) const noexcept;  // touched: in small pages, perhaps
  // Whole pages in bytes [begin, end) are no longer memory; their content is lost.
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

// bytes per item * items, or NoRoom if that overflows.
std::size_t checked_bytes(std::size_t item_bytes, std::size_t items);

}  // namespace colonnade
