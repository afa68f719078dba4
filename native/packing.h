// Compact encoding of numbers and lists of ids in messages. Decoding never reads beyond a message's end.
//
// numbers   blocks of 128 (the last may be shorter): a byte w, 0 .. 64, then the block's numbers of w bits each,
//           the first in the lowest bits of the first byte; bits after the last are 0
// varint    7 bits a byte, the lowest first; the top bit means that more follow
// list      varint n; then, if n > 0:
//             vocabulary, ascending   numbers: local rows, each as its distance from the previous one, less 1
//             vocabulary, any order   numbers: local rows
//             open table, the shorter of:
//               a byte 0 (only ascending): numbers: distances of hashes, the first from the beginning of the owner's
//                                       hash range, the others less 1
//               a byte 1: varint: the smallest id, as 2x or -2x - 1; numbers: ids less that
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace colonnade {

// Ids of a table that one owner has: rows 0 = open table; the owner is number `place` of `num_owners`.
struct IdSpace {
  std::int64_t rows, num_owners, place;
};

// Return x for mix64(x): its steps in reverse.
constexpr std::uint64_t unmix64(std::uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642b2d24d8ec3u;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96de1b173f119089u;
  return x ^ (x >> 30) ^ (x >> 60);
}

// Result of `Packer`.
std::size_t varint_bytes(std::uint64_t value);
std::size_t numbers_bytes(std::span<const std::uint64_t> values);

// Encoder that appends to a message.
class Packer {
 public:
  explicit Packer(std::vector<std::uint8_t>& out) : out_(out) {}

  void varint(std::uint64_t value);
  void numbers(std::span<const std::uint64_t> values);
  // Append numbers of `width` bits each, 1 .. 64, without a length.
  void bits(std::span<const std::uint64_t> values, int width);
  // Append a list of ids, which must belong to the space. is_ascending: strictly, by local row or by hash, as unique
  // rows in a plan.
  void list(std::span<const std::int64_t> ids, const IdSpace& space, bool is_ascending);

 private:
  std::vector<std::uint8_t>& out_;
  std::vector<std::uint64_t> keys_, offsets_;
};

// Decoder of a Packer's bytes. Throws invalid_argument for bytes that no Packer produces: a truncated message, a number
// too wide, an id outside its space.
class Unpacker {
 public:
  explicit Unpacker(std::span<const std::uint8_t> data) : data_(data) {}

  std::size_t position() const { return position_; }
  std::uint8_t byte();
  std::span<const std::uint8_t> raw(std::size_t size);
  std::uint64_t varint();
  void numbers(std::span<std::uint64_t> values);
  void bits(std::span<std::uint64_t> values, int width);
  // Read the number of ids of a list, which fits the rest of the message; then the ids.
  std::uint64_t count();
  void ids(const IdSpace& space, bool is_ascending, std::span<std::int64_t> ids_out);
  // Read both; append to `ids` and return the number.
  std::int64_t list(const IdSpace& space, bool is_ascending, std::vector<std::int64_t>& ids);

 private:
  void rows(const IdSpace& space, bool is_ascending, std::span<std::int64_t> ids);
  void hashes(const IdSpace& space, std::span<std::int64_t> ids);
  void offsets(const IdSpace& space, std::span<std::int64_t> ids);

  std::span<const std::uint8_t> data_;
  std::size_t position_ = 0;
  std::vector<std::uint64_t> keys_;
  std::vector<std::int64_t> ids_;  // by row
};

}  // namespace colonnade
