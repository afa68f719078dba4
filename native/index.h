// A hash map from any 64-bit id to a number, in buckets of one cache line.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "hash.h"
#include "slab.h"

namespace colonnade {

// A full bucket overflows into the next one and counts who passed, so that a search stops at the first
// bucket nobody passed and erasing needs no tombstones. Not thread-safe; concurrent `find` is.
template <class Value>
class HashIndex {
 public:
  static constexpr int kWays = (64 - 4) / (8 + sizeof(Value));
  static constexpr double kMaxLoad = 0.76;
  static constexpr std::int64_t kBlock = 32;  // ids whose buckets are fetched together

  std::int64_t size() const { return size_; }
  std::int64_t bytes() const { return static_cast<std::int64_t>(num_buckets_ * sizeof(Bucket)); }

  // Room for `entries` in all; afterwards, inserting up to there cannot fail. Throws NoRoom: nothing changed.
  void reserve(std::int64_t entries) {
    const auto wanted = buckets_for(entries);
    if (wanted > num_buckets_) rebuild(std::max(wanted, num_buckets_ * 2));
  }

  // Always inlined: compilers take a function that only prefetches for one that does nothing, and drop the
  // call.
  COLONNADE_INLINE_MEMBER void prefetch(std::int64_t id) const {
    __builtin_prefetch(&buckets_[home(id)], 0, 2);
  }

  // The value's place, or null.
  const Value* find(std::int64_t id) const {
    for (std::uint64_t b = home(id);; b = next(b)) {
      const Bucket& bucket = buckets_[b];
      if (const unsigned hit = bucket.matches(id)) return &bucket.values[std::countr_zero(hit)];
      if (bucket.passed == 0) return nullptr;
    }
  }
  Value* find(std::int64_t id) { return const_cast<Value*>(std::as_const(*this).find(id)); }

  // `id` must be absent and room reserved.
  void insert(std::int64_t id, Value value) noexcept {
    std::uint64_t b = home(id);
    while (buckets_[b].used == kFull) {
      if (buckets_[b].passed != kManyPassed) ++buckets_[b].passed;
      b = next(b);
    }
    Bucket& bucket = buckets_[b];
    const int way = std::countr_one(bucket.used);
    bucket.ids[way] = id;
    bucket.values[way] = value;
    bucket.used |= static_cast<std::uint16_t>(1u << way);
    ++size_;
  }

  bool erase(std::int64_t id) noexcept {
    std::uint64_t b = home(id);
    unsigned hit = 0;
    while ((hit = buckets_[b].matches(id)) == 0) {
      if (buckets_[b].passed == 0) return false;
      b = next(b);
    }
    buckets_[b].used &= static_cast<std::uint16_t>(~(1u << std::countr_zero(hit)));
    for (std::uint64_t p = home(id); p != b; p = next(p)) {
      if (buckets_[p].passed != kManyPassed) --buckets_[p].passed;
    }
    --size_;
    return true;
  }

  template <class Visit>  // visit(id, value), in no particular order
  void for_each(Visit visit) const {
    for (std::uint64_t b = 0; b < num_buckets_; ++b) {
      for (unsigned left = buckets_[b].used; left; left &= left - 1) {
        const int way = std::countr_zero(left);
        visit(buckets_[b].ids[way], buckets_[b].values[way]);
      }
    }
  }

  HashIndex() { rebuild(buckets_for(0)); }

 private:
  static constexpr std::uint16_t kFull = (1u << kWays) - 1;
  static constexpr std::uint16_t kManyPassed = 0xffff;  // stays: a search then goes on for nothing, at worst

  struct alignas(64) Bucket {
    std::int64_t ids[kWays];
    Value values[kWays];
    std::uint16_t used;    // bit per way
    std::uint16_t passed;  // entries that live further on because this bucket was full

    unsigned matches(std::int64_t id) const {
      unsigned hits = 0;
      for (int way = 0; way < kWays; ++way) hits |= static_cast<unsigned>(ids[way] == id) << way;
      return hits & used;
    }
  };
  static_assert(sizeof(Bucket) == 64);

  static std::uint64_t buckets_for(std::int64_t entries) {
    return static_cast<std::uint64_t>(static_cast<double>(entries) / (kMaxLoad * kWays)) + 4;
  }

  // The hash's low half comes first: its high bits are the same for all rows of one rank of an open table.
  std::uint64_t home(std::int64_t id) const {
    return scale_down(std::rotl(mix64(static_cast<std::uint64_t>(id)), 32), num_buckets_);
  }
  std::uint64_t next(std::uint64_t b) const { return b + 1 == num_buckets_ ? 0 : b + 1; }

  void rebuild(std::uint64_t num_buckets) {
    Slab slab(checked_bytes(sizeof(Bucket), num_buckets));
    slab.ask_for_huge_pages();
    HashIndex old(slab, num_buckets);
    std::swap(*this, old);
    // Homes are monotonic in the hash for any number of buckets: both sides are walked in address order.
    old.for_each([this](std::int64_t id, Value value) { insert(id, value); });
  }

  HashIndex(Slab& slab, std::uint64_t num_buckets)
      : slab_(std::move(slab)),
        buckets_(reinterpret_cast<Bucket*>(slab_.data())),
        num_buckets_(num_buckets) {}

  Slab slab_;
  Bucket* buckets_ = nullptr;
  std::uint64_t num_buckets_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace colonnade
