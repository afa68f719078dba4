// Reusable memory blocks: a fresh page takes longer than the sort that fills it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "slab.h"

namespace colonnade {

// Blocks of a power of two bytes. Thread-safe. Freed blocks are retained, up to 256 MiB in all.
Slab take_block(std::size_t bytes);  // throws NoRoom; content undefined
void give_block(Slab block) noexcept;

// Array of n elements, content undefined.
template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Buffer() = default;
  explicit Buffer(std::size_t n) : block_(take_block(checked_bytes(sizeof(T), n))), size_(n) {}
  ~Buffer() { give_block(std::move(block_)); }
  Buffer(Buffer&& other) noexcept : block_(std::move(other.block_)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(size_, other.size_);
    return *this;
  }

  T* data() { return reinterpret_cast<T*>(block_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(block_.data()); }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  void shrink(std::size_t n) { size_ = std::min(size_, n); }

 private:
  Slab block_;
  std::size_t size_ = 0;
};

}  // namespace colonnade
