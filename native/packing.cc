#include "packing.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

#include "hash.h"
#include "vocabulary.h"

namespace colonnade {
namespace {

constexpr std::size_t kBlock = 128;
using Wide = unsigned __int128;

int width_of(std::span<const std::uint64_t> values) {
  std::uint64_t any = 0;
  for (const auto value : values) any |= value;
  return std::bit_width(any);
}

constexpr std::size_t bytes_of(std::size_t count, int width) {
  return (count * static_cast<std::size_t>(width) + 7) / 8;
}

// First hash of owner `place`: the smallest h with scale_down(h, num_owners) == place.
Wide first_hash(std::int64_t place, std::int64_t num_owners) {
  const auto n = static_cast<Wide>(num_owners);
  return ((static_cast<Wide>(place) << 64) + n - 1) / n;
}

constexpr std::uint64_t zigzag(std::int64_t value) {
  return static_cast<std::uint64_t>(value) << 1 ^ static_cast<std::uint64_t>(value >> 63);
}
constexpr std::int64_t unzigzag(std::uint64_t value) {
  return static_cast<std::int64_t>(value >> 1 ^ (0 - (value & 1)));
}

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("message of ids: got " + what);
}

// Eight numbers of W bits are W bytes, so the compiler knows all shifts. Words are read and written whole: up to kSlack
// bytes beyond the last group.
constexpr int kGroup = 8, kWidest = 32;
constexpr std::size_t kSlack = 7;

template <int W>
constexpr int kWords = (W + 7) / 8;

template <int W>
void pack_groups(const std::uint64_t* values, std::size_t groups, std::uint8_t* out) {
  for (; groups; --groups, values += kGroup, out += W) {
    std::uint64_t words[kWords<W> + 1] = {};
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; ++i) {
      const int word = i * W / 64, shift = i * W % 64;
      words[word] |= values[i] << shift;
      if (shift + W > 64) words[word + 1] |= values[i] >> (64 - shift);
    }
    for (int k = 0; k < kWords<W>; ++k) {
      for (int b = 0; b < 8; ++b) out[8 * k + b] = static_cast<std::uint8_t>(words[k] >> 8 * b);
    }
  }
}

template <int W>
void unpack_groups(const std::uint8_t* data, std::size_t groups, std::uint64_t* values) {
  constexpr std::uint64_t kMask = (std::uint64_t{1} << W) - 1;
  for (; groups; --groups, values += kGroup, data += W) {
    std::uint64_t words[kWords<W> + 1] = {};
    for (int k = 0; k < kWords<W>; ++k) {
      std::uint64_t word = 0;
      for (int b = 0; b < 8; ++b) word |= static_cast<std::uint64_t>(data[8 * k + b]) << 8 * b;
      words[k] = word;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; ++i) {
      const int word = i * W / 64, shift = i * W % 64;
      std::uint64_t value = words[word] >> shift;
      if (shift + W > 64) value |= words[word + 1] << (64 - shift);
      values[i] = value & kMask;
    }
  }
}

template <int... W>
constexpr auto packers(std::integer_sequence<int, W...>) {
  return std::array{pack_groups<W + 1>...};
}
template <int... W>
constexpr auto unpackers(std::integer_sequence<int, W...>) {
  return std::array{unpack_groups<W + 1>...};
}
constexpr auto kPack = packers(std::make_integer_sequence<int, kWidest>());  // of 1 bit and more
constexpr auto kUnpack = unpackers(std::make_integer_sequence<int, kWidest>());

}  // namespace

std::size_t varint_bytes(std::uint64_t value) {
  return value ? static_cast<std::size_t>(std::bit_width(value) + 6) / 7 : 1;
}

std::size_t numbers_bytes(std::span<const std::uint64_t> values) {
  std::size_t size = 0;
  for (std::size_t i = 0; i < values.size(); i += kBlock) {
    const auto block = values.subspan(i, std::min(kBlock, values.size() - i));
    size += 1 + bytes_of(block.size(), width_of(block));
  }
  return size;
}

void Packer::varint(std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out_.push_back(static_cast<std::uint8_t>(value | 0x80));
  out_.push_back(static_cast<std::uint8_t>(value));
}

void Packer::numbers(std::span<const std::uint64_t> values) {
  for (std::size_t i = 0; i < values.size(); i += kBlock) {
    const auto block = values.subspan(i, std::min(kBlock, values.size() - i));
    const int width = width_of(block);
    out_.push_back(static_cast<std::uint8_t>(width));
    if (width) bits(block, width);
  }
}

void Packer::bits(std::span<const std::uint64_t> values, int width) {
  std::size_t at = out_.size();
  const std::size_t end = at + bytes_of(values.size(), width);
  if (width <= kWidest) {
    const std::size_t groups = values.size() / kGroup;
    out_.resize(end + kSlack);
    kPack[static_cast<std::size_t>(width - 1)](values.data(), groups, out_.data() + at);
    at += groups * static_cast<std::size_t>(width);
    values = values.subspan(groups * kGroup);
  }
  out_.resize(end);
  Wide held = 0;
  int bits = 0;
  for (const auto value : values) {
    held |= static_cast<Wide>(value) << bits;
    for (bits += width; bits >= 64; bits -= 64, held >>= 64, at += 8) {
      const auto word = static_cast<std::uint64_t>(held);
      for (int b = 0; b < 8; ++b) out_[at + static_cast<std::size_t>(b)] = static_cast<std::uint8_t>(word >> 8 * b);
    }
  }
  for (; bits > 0; bits -= 8, held >>= 8) out_[at++] = static_cast<std::uint8_t>(held);
}

void Packer::list(std::span<const std::int64_t> ids, const IdSpace& space, bool is_ascending) {
  varint(ids.size());
  if (ids.empty()) return;
  keys_.resize(ids.size());
  if (space.rows) {
    const VocabularyShare share(space.rows, space.num_owners, space.place);
    std::uint64_t next = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::uint64_t row = share.place_of(ids[i]);
      keys_[i] = is_ascending ? row - next : row;
      next = row + 1;
    }
    return numbers(keys_);
  }
  const std::int64_t least = *std::min_element(ids.begin(), ids.end());
  offsets_.resize(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    offsets_[i] = static_cast<std::uint64_t>(ids[i]) - static_cast<std::uint64_t>(least);
  }
  if (is_ascending) {
    auto next = static_cast<std::uint64_t>(first_hash(space.place, space.num_owners));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::uint64_t hash = mix64(static_cast<std::uint64_t>(ids[i]));
      keys_[i] = hash - next;
      next = hash + 1;
    }
    if (numbers_bytes(keys_) <= numbers_bytes(offsets_) + 1) {
      out_.push_back(0);
      return numbers(keys_);
    }
  }
  out_.push_back(1);
  varint(zigzag(least));
  numbers(offsets_);
}

std::uint8_t Unpacker::byte() {
  if (position_ >= data_.size()) refuse("an end after " + std::to_string(data_.size()) + " bytes, wanted more");
  return data_[position_++];
}

std::uint64_t Unpacker::varint() {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const std::uint8_t part = byte();
    if (shift == 63 && part > 1) refuse("a number of more than 64 bits");
    value |= static_cast<std::uint64_t>(part & 0x7f) << shift;
    if (part < 0x80) return value;
  }
}

void Unpacker::numbers(std::span<std::uint64_t> values) {
  for (std::size_t i = 0; i < values.size(); i += kBlock) {
    const auto block = values.subspan(i, std::min(kBlock, values.size() - i));
    const int width = byte();
    if (width > 64) refuse("numbers of " + std::to_string(width) + " bits, wanted at most 64");
    if (width) {
      bits(block, width);
    } else {
      std::fill(block.begin(), block.end(), 0);
    }
  }
}

std::span<const std::uint8_t> Unpacker::raw(std::size_t size) {
  if (size > data_.size() - position_) {
    refuse(std::to_string(data_.size() - position_) + " more bytes, wanted " + std::to_string(size));
  }
  position_ += size;
  return data_.subspan(position_ - size, size);
}

void Unpacker::bits(std::span<std::uint64_t> values, int width) {
  const auto part = raw(bytes_of(values.size(), width));
  const std::uint8_t *at = part.data(), *const end = at + part.size();
  if (width <= kWidest) {
    const std::size_t left = static_cast<std::size_t>(data_.data() + data_.size() - at), w = static_cast<std::size_t>(width);
    std::size_t groups = values.size() / kGroup;
    while (groups && groups * w + kSlack > left) --groups;
    kUnpack[w - 1](at, groups, values.data());
    at += groups * w;
    values = values.subspan(groups * kGroup);
  }
  const std::uint64_t mask = ~std::uint64_t{0} >> (64 - width);
  Wide held = 0;
  int bits = 0;
  for (auto& value : values) {
    while (bits < width) {
      if (end - at >= 8) {
        std::uint64_t word = 0;
        for (int b = 0; b < 8; ++b) word |= static_cast<std::uint64_t>(at[b]) << 8 * b;
        held |= static_cast<Wide>(word) << bits;
        at += 8, bits += 64;
      } else {
        held |= static_cast<Wide>(*at++) << bits;
        bits += 8;
      }
    }
    value = static_cast<std::uint64_t>(held) & mask;
    held >>= width;
    bits -= width;
  }
  if (held) refuse("bits after the last number");
}

std::uint64_t Unpacker::count() {
  const std::uint64_t count = varint();
  // A block of numbers takes at least one byte, so the message bounds the memory.
  const std::size_t left = data_.size() - position_;
  if (count > left * kBlock) {
    refuse(std::to_string(count) + " ids in " + std::to_string(left) + " bytes");
  }
  return count;
}

void Unpacker::ids(const IdSpace& space, bool is_ascending, std::span<std::int64_t> ids_out) {
  if (ids_out.empty()) return;
  keys_.resize(ids_out.size());
  if (space.rows) {
    rows(space, is_ascending, ids_out);
  } else if (const std::uint8_t kind = byte(); kind == 0 && is_ascending) {
    hashes(space, ids_out);
  } else if (kind == 1) {
    offsets(space, ids_out);
  } else {
    refuse("a list of kind " + std::to_string(kind));
  }
}

std::int64_t Unpacker::list(const IdSpace& space, bool is_ascending, std::vector<std::int64_t>& ids) {
  const std::size_t first = ids.size(), num_ids = count();
  ids.resize(first + num_ids);
  this->ids(space, is_ascending, std::span(ids).subspan(first));
  return static_cast<std::int64_t>(num_ids);
}

void Unpacker::rows(const IdSpace& space, bool is_ascending, std::span<std::int64_t> ids) {
  numbers(keys_);
  const VocabularyShare share(space.rows, space.num_owners, space.place);
  const auto limit = static_cast<std::uint64_t>(share.num_places());
  std::uint64_t highest = 0;
  if (is_ascending) {
    std::uint64_t next = 0;
    for (auto& key : keys_) {
      // next <= limit, so the sum cannot wrap if the distance is below it.
      if (key >= limit) refuse("a row beyond its table's");
      key += next;
      if (key >= limit) refuse("a row beyond its table's");
      next = key + 1;
    }
    highest = next - 1;
  } else {
    for (const auto key : keys_) highest = std::max(highest, key);
    if (highest >= limit) refuse("a row beyond its table's");
  }
  // Of an owner's rows only the last may be missing.
  if (share.is_outside(share.id_of(highest))) refuse("an id beyond its table's");
  if (share.is_whole()) {
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(keys_[i]);
  } else if (!is_ascending && highest < ids.size() / 2) {  // repeated rows: find each id once
    ids_.resize(highest + 1);
    for (std::uint64_t row = 0; row <= highest; ++row) ids_[row] = share.id_of(row);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = ids_[keys_[i]];
  } else {
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = share.id_of(keys_[i]);
  }
}

void Unpacker::hashes(const IdSpace& space, std::span<std::int64_t> ids) {
  numbers(keys_);
  Wide next = first_hash(space.place, space.num_owners);
  const Wide end = first_hash(space.place + 1, space.num_owners);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (keys_[i] >= end - next) refuse("a hash of another owner's");
    next += keys_[i];
    ids[i] = static_cast<std::int64_t>(unmix64(static_cast<std::uint64_t>(next)));
    ++next;
  }
}

void Unpacker::offsets(const IdSpace& space, std::span<std::int64_t> ids) {
  const auto least = static_cast<std::uint64_t>(unzigzag(varint()));
  numbers(keys_);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int64_t>(least + keys_[i]);
    if (space.num_owners > 1 && open_owner(ids[i], static_cast<std::uint32_t>(space.num_owners)) !=
                                    static_cast<std::uint32_t>(space.place)) {
      refuse("an id of another owner's");
    }
  }
}

}  // namespace colonnade
