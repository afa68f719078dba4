#include "place_index.h"

#include <algorithm>
#include <array>

namespace colonnade {

namespace {

constexpr std::size_t kHeaderPage = 4096;

}  // namespace

VocabularyPlaces::VocabularyPlaces(std::int64_t rows)
    : groups_(checked_bytes(sizeof(Group), static_cast<std::size_t>((rows + 63) / 64))),
      is_touched_(groups_.size() / kHeaderPage + 1) {}

void VocabularyPlaces::put(std::int64_t row, PlaceEntry entry) {
  Group& group = group_of(row);
  const std::uint64_t bits = group.bits(), bit = bit_of(row);
  const std::uint32_t n = static_cast<std::uint32_t>(std::popcount(bits)), at = rank(bits, bit);
  if (bits & bit) return store_entry(blocks_.at(n, group.number) + kEntryBytes * at, entry);

  blocks_.reserve(1);
  const std::uint32_t number = blocks_.add(n + 1, static_cast<std::uint32_t>(row >> 6));
  std::uint8_t* const now = blocks_.at(n + 1, number);
  if (n > 0) {
    const std::uint8_t* const before = blocks_.at(n, group.number);
    std::memcpy(now, before, kEntryBytes * at);
    std::memcpy(now + kEntryBytes * (at + 1), before + kEntryBytes * at, kEntryBytes * (n - at));
    remove_block(n, group.number);
  }
  store_entry(now + kEntryBytes * at, entry);
  group.set_bits(bits | bit);
  group.number = number;
  ++size_;
  touch(row >> 6);
}

void VocabularyPlaces::touch(std::int64_t group) {
  const auto page = static_cast<std::size_t>(group) * sizeof(Group) / kHeaderPage;
  if (!is_touched_[page]) {
    is_touched_[page] = true;
    ++num_touched_;
  }
}

void VocabularyPlaces::erase(std::int64_t row) {
  Group& group = group_of(row);
  const std::uint64_t bits = group.bits(), bit = bit_of(row);
  if ((bits & bit) == 0) return;
  const std::uint32_t n = static_cast<std::uint32_t>(std::popcount(bits)), at = rank(bits, bit);
  std::uint32_t number = 0;
  if (n > 1) {
    number = blocks_.add(n - 1, static_cast<std::uint32_t>(row >> 6));
    const std::uint8_t* const before = blocks_.at(n, group.number);
    std::uint8_t* const now = blocks_.at(n - 1, number);
    std::memcpy(now, before, kEntryBytes * at);
    std::memcpy(now + kEntryBytes * at, before + kEntryBytes * (at + 1), kEntryBytes * (n - 1 - at));
  }
  remove_block(n, group.number);
  group.set_bits(bits & ~bit);
  group.number = number;
  --size_;
}

std::int64_t VocabularyPlaces::bytes() const {
  return blocks_.bytes() + num_touched_ * static_cast<std::int64_t>(kHeaderPage);
}

std::uint32_t OpenPlaces::search(const std::uint8_t* ids, std::uint32_t n, std::int64_t id) {
  for (std::uint32_t i = 0; i < n; ++i) {
    std::int64_t other;
    std::memcpy(&other, ids + kIdBytes * i, kIdBytes);
    if (other == id) return i;
  }
  return n;
}

PlaceEntry OpenPlaces::find(std::int64_t id) const {
  const Bucket& at = bucket(home(id));
  if (at.size > 0) {
    const std::uint8_t* const block = blocks_.at(at.size, at.number);
    const std::uint32_t i = search(block, at.size, id);
    if (i < at.size) return load_entry(block + kIdBytes * at.size + kEntryBytes * i);
  }
  if (!overflow_.empty()) [[unlikely]] {
    if (const auto other = overflow_.find(id); other != overflow_.end()) return other->second;
  }
  return kNoEntry;
}

void OpenPlaces::prefetch_entry(std::int64_t id) const {
  const Bucket& at = bucket(home(id));
  if (at.size == 0) return;
  const std::uint8_t* const block = blocks_.at(at.size, at.number);
  for (std::uint32_t byte = 0; byte < (kIdBytes + kEntryBytes) * at.size; byte += 64) __builtin_prefetch(block + byte, 0, 3);
}

void OpenPlaces::add_bucket() {
  if (num_buckets_ == pieces_.size() * kBucketsOfPiece) pieces_.emplace_back(sizeof(Bucket) * kBucketsOfPiece);
  bucket(num_buckets_++) = {0, 0};
}

void OpenPlaces::put(std::int64_t id, PlaceEntry entry) {
  const std::uint64_t b = home(id);
  Bucket& at = bucket(b);
  const std::uint32_t n = at.size;
  const std::uint8_t* const before = n > 0 ? blocks_.at(n, at.number) : nullptr;
  const std::uint32_t i = search(before, n, id);
  if (i < n) return store_entry(blocks_.at(n, at.number) + kIdBytes * n + kEntryBytes * i, entry);
  if (!overflow_.empty()) [[unlikely]] {
    if (const auto other = overflow_.find(id); other != overflow_.end()) {
      other->second = entry;
      return;
    }
  }
  blocks_.reserve(3);
  if (n == kMost) {
    overflow_.emplace(id, entry);
  } else {
    const std::uint32_t number = blocks_.add(n + 1, static_cast<std::uint32_t>(b));
    std::uint8_t* const now = blocks_.at(n + 1, number);
    if (n > 0) {
      std::memcpy(now, before, kIdBytes * n);
      std::memcpy(now + kIdBytes * (n + 1), before + kIdBytes * n, kEntryBytes * n);
      remove_block(n, at.number);
    }
    std::memcpy(now + kIdBytes * n, &id, kIdBytes);
    store_entry(now + kIdBytes * (n + 1) + kEntryBytes * n, entry);
    at = {number, n + 1};
  }
  ++size_;
  if (size_ > static_cast<std::int64_t>(num_buckets_) * kMeanEntries) split();
}

void OpenPlaces::erase(std::int64_t id) {
  const std::uint64_t b = home(id);
  Bucket& at = bucket(b);
  const std::uint32_t n = at.size;
  const std::uint8_t* const before = n > 0 ? blocks_.at(n, at.number) : nullptr;
  const std::uint32_t i = search(before, n, id);
  if (i == n) {
    size_ -= static_cast<std::int64_t>(overflow_.erase(id));
    return;
  }
  std::uint32_t number = 0;
  if (n > 1) {
    number = blocks_.add(n - 1, static_cast<std::uint32_t>(b));
    std::uint8_t* const now = blocks_.at(n - 1, number);
    const auto without = [&](std::uint8_t* to, const std::uint8_t* from, std::uint32_t width) {
      std::memcpy(to, from, width * i);
      std::memcpy(to + width * i, from + width * (i + 1), width * (n - 1 - i));
    };
    without(now, before, kIdBytes);
    without(now + kIdBytes * (n - 1), before + kIdBytes * n, kEntryBytes);
  }
  remove_block(n, at.number);
  at = {number, n - 1};
  --size_;
  if (num_buckets_ > 1 && 2 * size_ < static_cast<std::int64_t>(num_buckets_) * kMeanEntries) merge();
}

void OpenPlaces::split() {
  if (num_buckets_ == 2 * base_) base_ *= 2;
  const std::uint64_t from = num_buckets_ - base_, to = num_buckets_;
  add_bucket();
  Bucket& old = bucket(from);
  const std::uint32_t n = old.size;
  if (n == 0) return;
  std::array<std::uint8_t, (kIdBytes + kEntryBytes) * kMost> block;
  std::memcpy(block.data(), blocks_.at(n, old.number), (kIdBytes + kEntryBytes) * n);
  remove_block(n, old.number);
  std::array<std::uint8_t, kMost> goes;
  std::uint32_t sizes[2] = {0, 0};
  for (std::uint32_t i = 0; i < n; ++i) {
    std::int64_t id;
    std::memcpy(&id, block.data() + kIdBytes * i, kIdBytes);
    goes[i] = (hash(id) & base_) != 0;
    ++sizes[goes[i]];
  }
  for (const std::uint32_t side : {0u, 1u}) {
    const std::uint64_t b = side ? to : from;
    bucket(b) = {0, sizes[side]};
    if (sizes[side] == 0) continue;
    bucket(b).number = blocks_.add(sizes[side], static_cast<std::uint32_t>(b));
    std::uint8_t* const now = blocks_.at(sizes[side], bucket(b).number);
    for (std::uint32_t i = 0, k = 0; i < n; ++i) {
      if (goes[i] != side) continue;
      std::memcpy(now + kIdBytes * k, block.data() + kIdBytes * i, kIdBytes);
      std::memcpy(now + kIdBytes * sizes[side] + kEntryBytes * k, block.data() + kIdBytes * n + kEntryBytes * i, kEntryBytes);
      ++k;
    }
  }
}

void OpenPlaces::merge() {
  if (num_buckets_ == base_) base_ /= 2;
  const std::uint64_t from = num_buckets_ - 1, to = from - base_;
  const Bucket a = bucket(to), b = bucket(from);
  const std::uint32_t n = a.size + b.size;
  if (n > kMost) return;  // not worth moving
  if (b.size > 0) {
    const std::uint32_t number = blocks_.add(n, static_cast<std::uint32_t>(to));
    std::uint8_t* const now = blocks_.at(n, number);
    std::uint32_t done = 0;
    for (const Bucket& part : {a, b}) {
      if (part.size == 0) continue;
      const std::uint8_t* const block = blocks_.at(part.size, part.number);
      std::memcpy(now + kIdBytes * done, block, kIdBytes * part.size);
      std::memcpy(now + kIdBytes * n + kEntryBytes * done, block + kIdBytes * part.size, kEntryBytes * part.size);
      done += part.size;
    }
    // A removal renumbers another block: if `to` had none, perhaps the one just added.
    if (a.size == 0) bucket(to) = {number, n};
    remove_block(b.size, b.number);
    bucket(from) = {0, 0};
    if (a.size > 0) {
      remove_block(a.size, bucket(to).number);
      bucket(to) = {number, n};
    }
  }
  --num_buckets_;
  if (num_buckets_ + kBucketsOfPiece <= (pieces_.size() - 1) * kBucketsOfPiece) pieces_.pop_back();
}

std::int64_t OpenPlaces::bytes() const {
  constexpr std::int64_t kOverflowBytes = 48;  // a node and its share of the table
  return blocks_.bytes() + static_cast<std::int64_t>(num_buckets_ * sizeof(Bucket)) +
         static_cast<std::int64_t>(overflow_.size()) * kOverflowBytes;
}

}  // namespace colonnade
