// Index of a table's rows: any 64-bit id -> slot. The row stores its id, not the index.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <span>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "hash.h"
#include "slab.h"

namespace colonnade {

// Buckets of one cache line hold twelve entries (8 bits of the hash, slot). A full bucket overflows to the next bucket
// and counts the entries that passed it. A search stops at the first bucket that no entry passed, and erasing needs no
// tombstones.
//
// Homes are monotonic in the hash, so the index grows in hash order: rows below a frontier are in an array a fifth
// larger, the others still in the smaller array, whose memory is freed behind the frontier. Each insertion advances the
// frontier by the buckets it needs. So the index takes 6.8 bytes a row at any time and never pauses; growth by a fifth
// moves each row once, which is five moves for each inserted row.
//
// `ids` finds a slot's id: ids(slot) -> int64, ids.fetch(slot) prefetches it. Not thread-safe, except for concurrent
// searches.
class SlotIndex {
  struct Bucket;

 public:
  static constexpr std::uint32_t kAbsent = 0xffffffff;
  static constexpr std::int64_t kBlock = 64;  // ids with cache lines being fetched at a time
  static constexpr std::uint64_t kFill = 942;  // entries in 100 buckets: 78.5 % full, 6.8 bytes a row

  // num_shares: number of equal parts of the hash range, of which this index has one (the ranks, for an open table); 0:
  // any ids. fill: entries in 100 buckets. foreseen: expected number of rows for long, so that no growth is half done
  // at that size: the smaller array is fuller until then.
  explicit SlotIndex(std::uint64_t num_shares, std::uint64_t fill = kFill, std::int64_t foreseen = 0)
      : num_shares_(num_shares), fill_(fill), now_(first_size(foreseen)) {}

  // Reserve memory for `entries` in all. NoRoom: nothing changed. Call `grow` before inserting.
  void reserve(std::int64_t entries) {
    target_ = buckets_for(entries);
    if (target_ <= now_.size) return;
    if (next_.size == 0) next_ = Array(std::max(grown(now_.size), target_));
    if (target_ > next_.size && target_ > last_.size) last_ = Array(std::max(grown(next_.size), target_));
  }

  // Advance the frontier to the position that `reserve` requires.
  template <class Ids>
  void grow(const Ids& ids) noexcept {
    while (target_ > now_.size) {
      const std::uint64_t goal =
          target_ >= next_.size ? now_.size
                                : scale((target_ - now_.size), now_.size, next_.size - now_.size) + 1;
      walk(std::min(goal, now_.size), ids);
      if (frontier_ < now_.size) return;
      now_ = std::exchange(next_, std::exchange(last_, Array()));
      frontier_ = boundary_ = given_back_ = next_touched_ = 0;
    }
  }

  // Return the slot of `id`, or kAbsent.
  template <class Ids>
  std::uint32_t find(std::int64_t id, const Ids& ids) const {
    return find(probe(id), id, ids);
  }

  // Call visit(i, slot or kAbsent) for all of wanted, in order. `visit` may insert and erase, but not grow.
  template <class Ids, class Visit>
  void for_each(std::span<const std::int64_t> wanted, const Ids& ids, const Visit& visit) const {
    constexpr std::uint64_t kAhead = kBlock / 4;
    Probe probes[kBlock];
    const Bucket* overflows[kBlock];  // next bucket, if only that can contain it
    const std::size_t n = wanted.size();
    const auto fetch_bucket = [&](std::uint64_t i) COLONNADE_INLINE_LAMBDA {
      if (i >= n) return;
      probes[i % kBlock] = probe(wanted[i]);
      __builtin_prefetch(probes[i % kBlock].bucket, 0, 3);
    };
    const auto fetch_ids_in = [&](const Bucket* bucket, std::uint8_t tag) COLONNADE_INLINE_LAMBDA {
      unsigned hits = bucket->matches(tag);
      const bool is_hit = hits != 0;
      for (; hits; hits &= hits - 1) ids.fetch(bucket->slots[std::countr_zero(hits)]);
      return is_hit;
    };
    const auto fetch_ids = [&](std::uint64_t i) COLONNADE_INLINE_LAMBDA {
      if (i >= n) return;
      const auto [bucket, tag] = probes[i % kBlock];
      const bool is_further = !fetch_ids_in(bucket, tag) && bucket->passed;
      overflows[i % kBlock] = is_further ? bucket + 1 : nullptr;
      if (is_further) __builtin_prefetch(bucket + 1, 0, 3);
    };
    const auto fetch_overflow = [&](std::uint64_t i) COLONNADE_INLINE_LAMBDA {
      if (i < n && overflows[i % kBlock]) fetch_ids_in(overflows[i % kBlock], probes[i % kBlock].tag);
    };
    for (std::uint64_t i = 0; i < 3 * kAhead; ++i) fetch_bucket(i);
    for (std::uint64_t i = 0; i < 2 * kAhead; ++i) fetch_ids(i);
    for (std::uint64_t i = 0; i < kAhead; ++i) fetch_overflow(i);
    for (std::uint64_t i = 0; i < n; ++i) {
      fetch_bucket(i + 3 * kAhead);
      fetch_ids(i + 2 * kAhead);
      fetch_overflow(i + kAhead);
      visit(static_cast<std::int64_t>(i), find(probes[i % kBlock], wanted[i], ids));
    }
  }

  // Write the slot of wanted[i], or kAbsent, to slots[i]. Works block by block, in loops without branches that are hard
  // to predict: they check one bucket, or the second if only that can contain the id, which settles nine ids in ten.
  // May call ids(0) even if there is no row.
  template <class Ids>
  void find_all(std::span<const std::int64_t> wanted, const Ids& ids, std::uint32_t* slots) const {
    Probe probes[2][kBlock];           // of two blocks, alternating
    const Bucket* buckets[2][kBlock];  // bucket being checked
    std::uint16_t others[kBlock];      // ids of a block that need a full search
    const auto n = static_cast<std::int64_t>(wanted.size());
    const auto count = [&](std::int64_t begin) { return std::clamp<std::int64_t>(n - begin, 0, kBlock); };
    const auto probe_block = [&](std::int64_t begin, Probe* at) COLONNADE_INLINE_LAMBDA {
      for (std::int64_t k = 0, end = count(begin); k < end; ++k) {
        at[k] = probe(wanted[begin + k]);
        __builtin_prefetch(at[k].bucket, 0, 3);
      }
    };
    const auto pass_block = [&](std::int64_t begin, const Probe* at, const Bucket** to) COLONNADE_INLINE_LAMBDA {
      for (std::int64_t k = 0, end = count(begin); k < end; ++k) {
        const Bucket* const bucket = at[k].bucket;
        const unsigned is_none = bucket->matches(at[k].tag) == 0, is_further = bucket->passed != 0;
        to[k] = bucket + (is_none & is_further);
        __builtin_prefetch(to[k], 0, 3);
      }
    };
    const auto guess_block = [&](std::int64_t begin, const Probe* at, const Bucket** in) COLONNADE_INLINE_LAMBDA {
      for (std::int64_t k = 0, end = count(begin); k < end; ++k) {
        const unsigned hits = in[k]->matches(at[k].tag), is_none = hits == 0;
        const std::uint32_t none = 0u - is_none, first = in[k]->slots[std::countr_zero(hits | is_none)];
        ids.fetch(first & ~none);
        slots[begin + k] = first | none;
      }
    };
    const auto settle_block = [&](std::int64_t begin, const Probe* at, const Bucket** in) COLONNADE_INLINE_LAMBDA {
      std::int64_t num_others = 0;
      for (std::int64_t k = 0, end = count(begin); k < end; ++k) {
        const std::uint32_t slot = slots[begin + k];
        const unsigned is_none = slot == kAbsent, none = 0u - is_none;
        const unsigned is_other = ids(slot & ~none) != wanted[begin + k], is_further = in[k]->passed != 0;
        others[num_others] = static_cast<std::uint16_t>(k);
        num_others += (is_none & is_further) | (~none & is_other);
      }
      for (std::int64_t j = 0; j < num_others; ++j) {
        const std::int64_t k = others[j];
        slots[begin + k] = find(at[k], wanted[begin + k], ids);
      }
    };
    probe_block(0, probes[0]);
    for (std::int64_t begin = 0, turn = 0; begin < n + kBlock; begin += kBlock, turn ^= 1) {
      const std::int64_t other = turn ^ 1;
      pass_block(begin, probes[turn], buckets[turn]);
      if (begin > 0) settle_block(begin - kBlock, probes[other], buckets[other]);
      probe_block(begin + kBlock, probes[other]);
      guess_block(begin, probes[turn], buckets[turn]);
    }
  }

  // `id` must be absent, and memory reserved.
  void insert(std::int64_t id, std::uint32_t slot) noexcept {
    const Probe at = probe(id);
    put(const_cast<Bucket*>(at.bucket), at.tag, slot);
  }

  // `id` must be at `slot`.
  void erase(std::int64_t id, std::uint32_t slot) noexcept {
    const Probe at = probe(id);
    for (auto* bucket = const_cast<Bucket*>(at.bucket);; ++bucket) {
      for (unsigned hits = bucket->matches(at.tag); hits; hits &= hits - 1) {
        if (bucket->slots[std::countr_zero(hits)] == slot) {
          bucket->tags[std::countr_zero(hits)] = 0;
          return;
        }
      }
      --bucket->passed;
    }
  }

  // `id` must be at `from`.
  void move(std::int64_t id, std::uint32_t from, std::uint32_t to) noexcept {
    const Probe at = probe(id);
    for (auto* bucket = const_cast<Bucket*>(at.bucket);; ++bucket) {
      for (unsigned hits = bucket->matches(at.tag); hits; hits &= hits - 1) {
        std::uint32_t& slot = bucket->slots[std::countr_zero(hits)];
        if (slot == from) {
          slot = to;
          return;
        }
      }
    }
  }

  COLONNADE_INLINE_MEMBER void prefetch(std::int64_t id) const { __builtin_prefetch(probe(id).bucket, 0, 2); }

  // Bytes in use, in addition to whole pages.
  std::int64_t bytes() const {
    const std::uint64_t filled = frontier_ ? scale(frontier_, next_.size, now_.size) + 1 : 0;
    return static_cast<std::int64_t>((now_.size + filled) * sizeof(Bucket) - given_back_);
  }
  std::uint64_t num_moved() const { return num_moved_; }  // buckets moved so far

 private:
  static constexpr int kWays = 12;
  static constexpr unsigned kAll = (1u << kWays) - 1;
  static constexpr std::uint64_t kSmallestPart = 16384;    // buckets of an array that is freed 16 KiB at a time
  static constexpr std::uint64_t kBucketsOfPage = 4096 / 64;
  static constexpr std::uint64_t kWalkAhead = 6;           // buckets with ids fetched early

  struct alignas(64) Bucket {
    std::uint8_t tags[kWays];  // 0: free
    std::uint32_t passed;      // entries stored further on because this bucket was full
    std::uint32_t slots[kWays];

    unsigned matches(std::uint8_t tag) const {
#if defined(__SSE2__)
      const __m128i all = _mm_load_si128(reinterpret_cast<const __m128i*>(tags));
      const __m128i same = _mm_cmpeq_epi8(all, _mm_set1_epi8(static_cast<char>(tag)));
      return static_cast<unsigned>(_mm_movemask_epi8(same)) & kAll;
#else
      unsigned hits = 0;
      for (int way = 0; way < kWays; ++way) hits |= static_cast<unsigned>(tags[way] == tag) << way;
      return hits;
#endif
    }
  };
  static_assert(sizeof(Bucket) == 64);

  // First bucket of a search for an id.
  struct Probe {
    const Bucket* bucket;
    std::uint8_t tag;
  };

  // Homes are [0, size); the address space behind them could hold every entry as overflow of the last home.
  struct Array {
    Slab slab;
    Bucket* buckets = nullptr;
    std::uint64_t size = 0;

    Array() = default;
    explicit Array(std::uint64_t num)
        : slab(checked_bytes(sizeof(Bucket), 2 * num + kWalkAhead + 1)),
          buckets(reinterpret_cast<Bucket*>(slab.data())),
          size(num) {
      if (num * sizeof(Bucket) >= 2 * kHugePageBytes) slab.ask_for_huge_pages();
    }
  };

  std::uint64_t buckets_for(std::int64_t entries) const {
    return static_cast<std::uint64_t>(entries) * 100 / fill_ + 1;
  }
  static std::uint64_t grown(std::uint64_t size) { return size + size / 5 + 1; }
  // Initial size from which growth reaches the foreseen number.
  std::uint64_t first_size(std::int64_t foreseen) const {
    std::uint64_t size = std::max<std::uint64_t>(4, buckets_for(foreseen));
    while (size > 2048) size -= size / 6;
    return size;
  }
  static std::uint64_t scale(std::uint64_t x, std::uint64_t by, std::uint64_t of) {
    return static_cast<std::uint64_t>(static_cast<unsigned __int128>(x) * by / of);
  }

  // Monotonic in mix64 within a share, which is the order of an open table's rows in a plan: a batch then visits
  // buckets in address order. Without shares, mix64's low half comes first, because all the high bits may be equal.
  std::uint64_t hash(std::int64_t id) const {
    const std::uint64_t mixed = mix64(static_cast<std::uint64_t>(id));
    return num_shares_ ? mixed * num_shares_ : std::rotl(mixed, 32);
  }
  // From bits that select homes only if there are more than 2^40 of them.
  static std::uint8_t tag_of(std::uint64_t hash) {
    return static_cast<std::uint8_t>(1 + ((hash >> 8 & 0xffff) * 255 >> 16));
  }
  COLONNADE_INLINE_MEMBER Probe probe(std::int64_t id) const {
    const std::uint64_t h = hash(id);
    const Array& array = h < boundary_ ? next_ : now_;
    return {array.buckets + scale_down(h, array.size), tag_of(h)};
  }

  template <class Ids>
  static std::uint32_t find(const Probe& at, std::int64_t id, const Ids& ids) {
    for (const Bucket* bucket = at.bucket;; ++bucket) {
      for (unsigned hits = bucket->matches(at.tag); hits; hits &= hits - 1) {
        const std::uint32_t slot = bucket->slots[std::countr_zero(hits)];
        if (ids(slot) == id) return slot;
      }
      if (bucket->passed == 0) return kAbsent;
    }
  }

  static void put(Bucket* bucket, std::uint8_t tag, std::uint32_t slot) noexcept {
    unsigned free;
    for (; (free = bucket->matches(0)) == 0; ++bucket) ++bucket->passed;
    bucket->tags[std::countr_zero(free)] = tag;
    bucket->slots[std::countr_zero(free)] = slot;
  }

  template <class Ids>
  void walk(std::uint64_t goal, const Ids& ids) noexcept {
    if (goal <= frontier_) return;
    const auto fetch = [&](std::uint64_t b) COLONNADE_INLINE_LAMBDA {
      const Bucket& bucket = now_.buckets[b];
      for (int way = 0; way < kWays; ++way) {
        if (bucket.tags[way]) ids.fetch(bucket.slots[way]);
      }
    };
    for (std::uint64_t b = frontier_; b < frontier_ + kWalkAhead; ++b) fetch(b);
    for (std::uint64_t b = frontier_; b < goal; ++b) {
      fetch(b + kWalkAhead);
      // Write to a page before reading it: one fault instead of two. It may contain overflow of earlier pages.
      for (const std::uint64_t end = scale(b + 1, next_.size, now_.size); next_touched_ <= end;
           next_touched_ += kBucketsOfPage)
        std::atomic_ref(next_.buckets[next_touched_].passed).fetch_add(0, std::memory_order_relaxed);
      move_home(b, ids);
    }
    num_moved_ += goal - frontier_;
    frontier_ = goal;
    boundary_ = goal == now_.size ? 0
                                  : static_cast<std::uint64_t>(
                                        ((static_cast<unsigned __int128>(goal) << 64) + now_.size - 1) / now_.size);
    // Free parts of at most a 64th, which is 0.1 bytes a row: whole huge pages in large arrays.
    const std::size_t part = std::max(std::bit_floor(now_.size), kSmallestPart) * sizeof(Bucket) / 64;
    const std::size_t behind = goal * sizeof(Bucket) / part * part;
    if (behind > given_back_) {
      now_.slab.give_back(given_back_, behind);
      given_back_ = behind;
    }
  }

  // Move all rows with home `home`, the first one remaining, to the next array. No other row is in its bucket.
  template <class Ids>
  void move_home(std::uint64_t home, const Ids& ids) noexcept {
    const auto move = [&](std::uint64_t h, std::uint8_t tag, std::uint32_t slot) {
      put(next_.buckets + scale_down(h, next_.size), tag, slot);
    };
    Bucket* const first = now_.buckets + home;
    for (int way = 0; way < kWays; ++way) {
      if (first->tags[way]) move(hash(ids(first->slots[way])), first->tags[way], first->slots[way]);
    }
    for (Bucket* bucket = first + 1; first->passed; ++bucket) {
      for (int way = 0; way < kWays; ++way) {
        if (bucket->tags[way] == 0) continue;
        const std::uint64_t h = hash(ids(bucket->slots[way]));
        if (scale_down(h, now_.size) != home) continue;
        move(h, bucket->tags[way], bucket->slots[way]);
        bucket->tags[way] = 0;
        for (Bucket* passed = first; passed != bucket; ++passed) --passed->passed;
      }
    }
  }

  std::uint64_t num_shares_, fill_;
  Array now_, next_;  // next_ is empty unless reserved
  Array last_;        // reserved for when next_ is full
  std::uint64_t target_ = 0;
  std::uint64_t frontier_ = 0;  // homes of now_ below it are empty, their rows are in next_
  std::uint64_t boundary_ = 0;  // smallest hash at or beyond the frontier
  std::size_t given_back_ = 0;  // bytes freed
  std::uint64_t next_touched_ = 0;  // in next_: first bucket of the next page to write to
  std::uint64_t num_moved_ = 0;
};

}  // namespace colonnade
