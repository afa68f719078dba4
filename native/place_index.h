// Index of one table's stored rows: 40 bits of place, 8 bits of access frequency.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "dense_blocks.h"
#include "hash.h"
#include "slab.h"

namespace colonnade {

struct PlaceEntry {
  std::uint64_t place;
  std::uint8_t frequency;
};
inline constexpr std::uint64_t kNoPlace = ~std::uint64_t{0};
inline constexpr PlaceEntry kNoEntry{kNoPlace, 0};

// Entry of six bytes in an index.
inline constexpr std::uint32_t kEntryBytes = 6;
inline PlaceEntry load_entry(const std::uint8_t* at) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, kEntryBytes);
  return {word >> 8, static_cast<std::uint8_t>(word)};
}
inline void store_entry(std::uint8_t* at, PlaceEntry entry) {
  const std::uint64_t word = entry.place << 8 | entry.frequency;
  std::memcpy(at, &word, kEntryBytes);
}

// Index by row number. A group has 64 rows: a bitmap of its rows, and a block with just their entries. A group's header
// and its block's owner take 0.25 bytes a row; headers become memory when touched.
class VocabularyPlaces {
 public:
  explicit VocabularyPlaces(std::int64_t rows);

  PlaceEntry find(std::int64_t row) const {
    const Group& group = group_of(row);
    const std::uint64_t bits = group.bits(), bit = bit_of(row);
    if ((bits & bit) == 0) return kNoEntry;
    return load_entry(entries(group) + kEntryBytes * rank(bits, bit));
  }
  void put(std::int64_t row, PlaceEntry entry);  // NoRoom: nothing changed
  // Insert n absent rows: row_of(i) ascending, entry_of(i). Allocates a group's block once, unlike `put` for each row.
  // NoRoom: some rows are inserted.
  template <class RowOf, class EntryOf>
  void add(std::size_t n, const RowOf& row_of, const EntryOf& entry_of) {
    for (std::size_t begin = 0, end = 0; begin < n; begin = end) {
      const std::int64_t group = row_of(begin) >> 6;
      std::uint64_t bits = 0;
      for (; end < n && row_of(end) >> 6 == group; ++end) bits |= bit_of(row_of(end));
      constexpr std::size_t kAhead = 16;
      if (end + kAhead < n) prefetch_group(row_of(end + kAhead));
      std::size_t next = begin;
      grow(group, bits, [&] { return entry_of(next++); });
    }
  }
  void erase(std::int64_t row);
  void prefetch_group(std::int64_t row) const { __builtin_prefetch(&group_of(row), 0, 3); }
  // For a group in the cache.
  void prefetch_entry(std::int64_t row) const {
    const Group& group = group_of(row);
    const std::uint64_t bits = group.bits(), bit = bit_of(row);
    if (bits & bit) __builtin_prefetch(entries(group) + kEntryBytes * rank(bits, bit), 0, 3);
  }
  std::int64_t size() const { return size_; }
  std::int64_t bytes() const;

 private:
  struct Group {
    std::uint32_t low, high;
    std::uint32_t number;  // number of its block
    std::uint64_t bits() const { return static_cast<std::uint64_t>(high) << 32 | low; }
    void set_bits(std::uint64_t bits) {
      low = static_cast<std::uint32_t>(bits);
      high = static_cast<std::uint32_t>(bits >> 32);
    }
  };
  static_assert(sizeof(Group) == 12);

  static std::uint64_t bit_of(std::int64_t row) { return std::uint64_t{1} << (row & 63); }
  static std::uint32_t rank(std::uint64_t bits, std::uint64_t bit) {
    return static_cast<std::uint32_t>(std::popcount(bits & (bit - 1)));
  }
  Group& group_of(std::int64_t row) const { return groups()[row >> 6]; }
  Group* groups() const { return reinterpret_cast<Group*>(groups_.data()); }
  std::uint8_t* entries(const Group& group) const {
    return blocks_.at(static_cast<std::uint32_t>(std::popcount(group.bits())), group.number);
  }
  void remove_block(std::uint32_t n, std::uint32_t number) {
    blocks_.remove(n, number, [this](std::uint32_t owner, std::uint32_t now) { groups()[owner].number = now; });
  }
  // Insert rows `bits` of a group, all absent, with entries from next_entry() in ascending order.
  template <class NextEntry>
  void grow(std::int64_t number, std::uint64_t bits, const NextEntry& next_entry) {
    Group& group = groups()[number];
    const std::uint64_t old = group.bits(), all = old | bits;
    const auto n = static_cast<std::uint32_t>(std::popcount(old)), m = static_cast<std::uint32_t>(std::popcount(all));
    const std::uint32_t block = blocks_.add(m, static_cast<std::uint32_t>(number));
    std::uint8_t* to = blocks_.at(m, block);
    const std::uint8_t* from = n > 0 ? blocks_.at(n, group.number) : nullptr;
    for (std::uint64_t rest = all; rest; rest &= rest - 1, to += kEntryBytes) {
      if (old & rest & (0 - rest)) {
        std::memcpy(to, from, kEntryBytes);
        from += kEntryBytes;
      } else {
        store_entry(to, next_entry());
      }
    }
    if (n > 0) remove_block(n, group.number);
    group.set_bits(all);
    group.number = block;
    size_ += m - n;
    touch(number);
  }
  void touch(std::int64_t group);

  Slab groups_;
  std::vector<bool> is_touched_;  // pages of groups_
  std::int64_t num_touched_ = 0;
  DenseBlocks blocks_{kEntryBytes, 64};
  std::int64_t size_ = 0;
};

// Index by any id: a hash table that grows and shrinks bucket by bucket (linear hashing: Litwin 1980). A bucket is a
// block of exactly its ids and entries, 24 on average: 14 bytes a row, one more for bucket and block, and free space at
// pages' ends.
class OpenPlaces {
 public:
  OpenPlaces() { add_bucket(); }

  PlaceEntry find(std::int64_t id) const;
  void put(std::int64_t id, PlaceEntry entry);  // NoRoom: nothing changed
  void erase(std::int64_t id);
  void prefetch_group(std::int64_t id) const { __builtin_prefetch(&bucket(home(id)), 0, 3); }
  void prefetch_entry(std::int64_t id) const;
  std::int64_t size() const { return size_; }
  std::int64_t bytes() const;

 private:
  static constexpr std::uint32_t kMost = 255;      // entries of a bucket; further ones go to overflow_
  static constexpr std::int64_t kMeanEntries = 24;
  static constexpr std::uint32_t kIdBytes = 8;
  static constexpr std::uint64_t kBucketsOfPiece = 1 << 16;

  struct Bucket {
    std::uint32_t number, size;
  };
  static std::uint64_t hash(std::int64_t id) { return mix64(static_cast<std::uint64_t>(id)); }
  std::uint64_t home(std::int64_t id) const {
    const std::uint64_t h = hash(id), wide = h & (2 * base_ - 1);
    return wide < num_buckets_ ? wide : wide - base_;
  }
  Bucket& bucket(std::uint64_t b) const {
    return reinterpret_cast<Bucket*>(pieces_[b / kBucketsOfPiece].data())[b % kBucketsOfPiece];
  }
  void add_bucket();
  void remove_block(std::uint32_t n, std::uint32_t number) {
    blocks_.remove(n, number, [this](std::uint32_t owner, std::uint32_t now) { bucket(owner).number = now; });
  }
  // Return the index of `id` among n ids; n if it is absent.
  static std::uint32_t search(const std::uint8_t* ids, std::uint32_t n, std::int64_t id);
  void split();
  void merge();

  std::vector<Slab> pieces_;  // of the buckets
  std::uint64_t base_ = 1;    // a power of two: base_ <= num_buckets_ < 2 base_, after a split
  std::uint64_t num_buckets_ = 0;
  DenseBlocks blocks_{kIdBytes + kEntryBytes, kMost};
  std::unordered_map<std::int64_t, PlaceEntry> overflow_;  // for ids with deliberately equal hashes
  std::int64_t size_ = 0;
};

// Index of either kind, as the table needs.
class PlaceIndex {
 public:
  explicit PlaceIndex(std::int64_t rows) : is_open_(rows == 0), vocabulary_(rows) {}  // keys 0..rows-1; 0: any
  PlaceEntry find(std::int64_t key) const { return is_open_ ? open_.find(key) : vocabulary_.find(key); }
  void put(std::int64_t key, PlaceEntry entry) { is_open_ ? open_.put(key, entry) : vocabulary_.put(key, entry); }
  // For a vocabulary; see VocabularyPlaces.
  template <class KeyOf, class EntryOf>
  void add(std::size_t n, const KeyOf& key_of, const EntryOf& entry_of) {
    vocabulary_.add(n, key_of, entry_of);
  }
  void erase(std::int64_t key) { is_open_ ? open_.erase(key) : vocabulary_.erase(key); }
  std::int64_t size() const { return is_open_ ? open_.size() : vocabulary_.size(); }
  std::int64_t bytes() const { return is_open_ ? open_.bytes() : vocabulary_.bytes(); }

  // Call visit(i, key, entry) for the keys key_of(0), ..., key_of(n - 1) in order; `visit` may change the index.
  template <class KeyOf, class Visit>
  void for_each(std::size_t n, const KeyOf& key_of, const Visit& visit) const {
    if (is_open_) {
      walk(open_, n, key_of, visit);
    } else {
      walk(vocabulary_, n, key_of, visit);
    }
  }

 private:
  template <class Places, class KeyOf, class Visit>
  static void walk(const Places& places, std::size_t n, const KeyOf& key_of, const Visit& visit) {
    constexpr std::size_t kAhead = 12;  // entries being fetched, and as many groups before them
    for (std::size_t i = 0; i < n + 2 * kAhead; ++i) {
      if (i < n) places.prefetch_group(key_of(i));
      if (i >= kAhead && i - kAhead < n) places.prefetch_entry(key_of(i - kAhead));
      if (i >= 2 * kAhead) {
        const std::size_t at = i - 2 * kAhead;
        const std::int64_t key = key_of(at);
        visit(at, key, places.find(key));
      }
    }
  }

  bool is_open_;
  VocabularyPlaces vocabulary_;
  OpenPlaces open_;
};

}  // namespace colonnade
