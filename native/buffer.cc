#include "buffer.h"

#include <bit>
#include <mutex>
#include <vector>

namespace colonnade {

namespace {

constexpr std::size_t kSmallestBlock = 4096;
constexpr std::size_t kMostCachedBytes = std::size_t{256} << 20;

struct BlockCache {
  std::mutex mutex;
  std::vector<Slab> by_size[64];
  std::size_t bytes = 0;
};

// Never destroyed: a plan may outlive static objects when the interpreter ends.
BlockCache& block_cache() {
  static BlockCache* const blocks = new BlockCache;
  return *blocks;
}

}  // namespace

Slab take_block(std::size_t bytes) {
  bytes = std::bit_ceil(std::max(bytes, kSmallestBlock));
  {
    const std::scoped_lock lock(block_cache().mutex);
    auto& blocks = block_cache().by_size[std::countr_zero(bytes)];
    if (!blocks.empty()) {
      Slab block = std::move(blocks.back());
      blocks.pop_back();
      block_cache().bytes -= bytes;
      return block;
    }
  }
  Slab block(bytes);
  block.ask_for_huge_pages();
  return block;
}

void give_block(Slab block) noexcept {
  if (block.size() == 0) return;
  const std::scoped_lock lock(block_cache().mutex);
  if (block_cache().bytes + block.size() > kMostCachedBytes) return;
  try {
    auto& blocks = block_cache().by_size[std::countr_zero(block.size())];
    blocks.push_back(std::move(block));
    block_cache().bytes += blocks.back().size();
  } catch (const std::bad_alloc&) {
    // not retained, then
  }
}

}  // namespace colonnade
