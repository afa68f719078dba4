// Allocator of blocks of exact size, packed without gaps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "hash.h"
#include "slab.h"

namespace colonnade {

// A block has 1 to `most` entries and an owner, which stores the block's size and its number among blocks of that size.
// All blocks of a size form a dense array on pages that the sizes share: if a block is removed, the last one of its
// size takes its number, and its owner is notified. So the only free space is at the ends of arrays and pages, after
// any sequence of calls. Not thread-safe, except for concurrent reads.
class DenseBlocks {
 public:
  DenseBlocks(std::uint32_t entry_bytes, std::uint32_t most) : sizes_(most + 1) {
    for (std::uint32_t n = 1; n <= most; ++n) {
      sizes_[n].block_bytes = kOwnerBytes + n * entry_bytes;
      sizes_[n].per_page = kPage / sizes_[n].block_bytes;
      sizes_[n].reciprocal = ~std::uint64_t{0} / sizes_[n].per_page + 1;  // 0 for one per page, which scale_down cannot divide by
    }
  }

  // Entries of a block.
  std::uint8_t* at(std::uint32_t n, std::uint32_t number) const { return start(sizes_[n], number) + kOwnerBytes; }
  void prefetch(std::uint32_t n, std::uint32_t number) const { __builtin_prefetch(at(n, number), 0, 3); }

  // Reserve memory so that `adds` calls of `add` succeed. NoRoom: nothing changed.
  void reserve(std::size_t adds) {
    while (free_.size() < adds) {
      slabs_.emplace_back(kPage * kPagesOfSlab);
      for (std::size_t i = kPagesOfSlab; i-- > 0;)
        free_.push_back(reinterpret_cast<std::uint8_t*>(slabs_.back().data()) + i * kPage);
    }
  }
  // Add a block; content undefined.
  std::uint32_t add(std::uint32_t n, std::uint32_t owner) {
    Size& size = sizes_[n];
    if (size.num_blocks == size.pages.size() * size.per_page) {
      reserve(1);
      size.pages.push_back(free_.back());
      free_.pop_back();
      ++num_pages_;
    }
    const std::uint32_t number = size.num_blocks++;
    std::memcpy(start(size, number), &owner, kOwnerBytes);
    return number;
  }
  // moved(owner, number): that owner's block of size n got another number.
  template <class Moved>
  void remove(std::uint32_t n, std::uint32_t number, const Moved& moved) {
    Size& size = sizes_[n];
    const std::uint32_t last = --size.num_blocks;
    if (number != last) {
      std::uint8_t* const hole = start(size, number);
      std::memcpy(hole, start(size, last), size.block_bytes);
      std::uint32_t owner;
      std::memcpy(&owner, hole, kOwnerBytes);
      moved(owner, number);
    }
    if (last % size.per_page == 0) {
      free_.push_back(size.pages.back());
      size.pages.pop_back();
      --num_pages_;
    }
  }

  std::int64_t bytes() const { return num_pages_ * static_cast<std::int64_t>(kPage); }

 private:
  static constexpr std::uint32_t kOwnerBytes = 4;
  static constexpr std::uint32_t kPage = 8192;
  static constexpr std::size_t kPagesOfSlab = 256;

  struct Size {
    std::vector<std::uint8_t*> pages;
    std::uint64_t reciprocal;
    std::uint32_t num_blocks = 0, per_page, block_bytes;
  };
  static std::uint8_t* start(const Size& size, std::uint32_t number) {
    const auto page = size.reciprocal ? static_cast<std::uint32_t>(scale_down(number, size.reciprocal)) : number;
    return size.pages[page] + (number - page * size.per_page) * size.block_bytes;
  }

  std::vector<Size> sizes_;  // by number of entries of a block
  std::vector<Slab> slabs_;
  std::vector<std::uint8_t*> free_;  // pages; used ones are taken first
  std::int64_t num_pages_ = 0;
};

}  // namespace colonnade
