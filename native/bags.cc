#include "bags.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "buffer.h"
#include "distinct.h"
#include "packing.h"
#include "row_order.h"

namespace colonnade {
namespace {

constexpr std::uint64_t kMaxSamples = std::uint64_t{1} << 24;
constexpr std::uint64_t kMaxLookups = std::uint64_t{1} << 40;
constexpr std::uint8_t kWeighted = 128;
constexpr std::uint8_t kListed = 0, kDistinct = 1;
constexpr std::array<int, 6> kBits = {1, 2, 4, 8, 16, 32};  // of a length

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("got " + what); }

// Parts of the message that only one rank receives.
struct Message {
  std::vector<std::uint8_t> lengths;                      // in the order of their columns' tables
  std::vector<std::pair<std::size_t, std::size_t>> runs;  // (C,) range of each column in `lengths`
  std::vector<std::uint8_t> ids, weights;
  std::vector<std::uint64_t> codes;
};

// Distributes a batch's lookups to the ranks that own their rows, table after table, and packs them.
class Sender {
 public:
  Sender(const Lookups& lookups, const Dealt& dealt, std::span<const std::int64_t> places, bool keeps_ranks)
      : lookups_(lookups),
        dealt_(dealt),
        places_(places),
        by_table_(lookups.by_table(static_cast<std::int64_t>(dealt.table_rows.size()))),
        size_(static_cast<std::size_t>(lookups.batch_size())),
        messages_(dealt.table_rows.empty() ? 0 : places.size() / dealt.table_rows.size()) {
    for (auto& message : messages_) message.runs.resize(static_cast<std::size_t>(lookups.num_features()));
    std::size_t longest = 0;
    for (std::size_t t = 0; t < dealt.table_rows.size(); ++t) longest = std::max(longest, count(t));
    keys_ = Buffer<std::uint64_t>(longest);
    dealt_keys_ = Buffer<std::uint64_t>(longest);
    numbers_ = Buffer<std::uint64_t>(longest);
    owners_ = Buffer<std::uint32_t>(longest);
    if (keeps_ranks) rank_of_ = Buffer<std::uint32_t>(static_cast<std::size_t>(lookups.num_lookups()));
  }

  void deal(std::span<const std::uint8_t> is_weighted) {
    for (std::size_t t = 0; t < dealt_.table_rows.size(); ++t) {
      if (by_table_.first[t] < by_table_.first[t + 1]) deal(t, is_weighted);
    }
  }

  void add_weights(std::span<const std::uint8_t> is_weighted) {
    const auto item = static_cast<std::size_t>(item_bytes(lookups_.weights()->dtype));
    const auto* const all = static_cast<const std::uint8_t*>(lookups_.weights()->data);
    for (std::int64_t c = 0; c < lookups_.num_features(); ++c) {
      if (!is_weighted[static_cast<std::size_t>(c)]) continue;
      for (auto e = lookups_.first(c); e < lookups_.last(c); ++e) {
        const auto* const one = all + static_cast<std::size_t>(e) * item;
        auto& out = messages_[rank_of_[static_cast<std::size_t>(e)]].weights;
        out.insert(out.end(), one, one + item);
      }
    }
  }

  void add_codes(std::span<const std::uint8_t> codes) {
    for (std::size_t e = 0; e < codes.size(); ++e) messages_[rank_of_[e]].codes.push_back(codes[e]);
  }

  PackedBags pack(bool has_codes) const {
    PackedBags result;
    std::size_t bytes = 0;
    for (const auto& m : messages_) {
      bytes += 16 + m.lengths.size() + m.ids.size() + m.weights.size() + m.codes.size() * 65 / 64;
    }
    result.bytes.reserve(bytes);
    Packer packer(result.bytes);
    const auto add = [&](const auto& part) { result.bytes.insert(result.bytes.end(), part.begin(), part.end()); };
    for (const auto& message : messages_) {
      packer.varint(size_);
      result.bytes.push_back(has_codes);
      for (const auto& [begin, end] : message.runs) add(std::span(message.lengths).subspan(begin, end - begin));
      add(message.ids);
      add(message.weights);
      if (has_codes) packer.numbers(message.codes);
      result.ends.push_back(static_cast<std::int64_t>(result.bytes.size()));
    }
    return result;
  }

 private:
  std::span<const std::int32_t> columns(std::size_t t) const {
    return std::span(by_table_.features)
        .subspan(static_cast<std::size_t>(by_table_.first[t]),
                 static_cast<std::size_t>(by_table_.first[t + 1] - by_table_.first[t]));
  }
  std::size_t count(std::size_t t) const {
    std::int64_t num_lookups = 0;
    for (const auto c : columns(t)) num_lookups += lookups_.last(c) - lookups_.first(c);
    return static_cast<std::size_t>(num_lookups);
  }

  void deal(std::size_t t, std::span<const std::uint8_t> is_weighted) {
    const std::int64_t rows = dealt_.table_rows[t];
    const auto num_owners = static_cast<std::size_t>(dealt_.num_owners[t]);
    ranks_.assign(num_owners, messages_.size());
    for (std::size_t r = 0; r < messages_.size(); ++r) {
      const auto place = places_[r * dealt_.table_rows.size() + t];
      if (place >= 0) ranks_[static_cast<std::size_t>(place)] = r;
    }
    for (std::size_t p = 0; p < num_owners; ++p) {
      if (ranks_[p] == messages_.size()) {
        throw std::invalid_argument("places: owner " + std::to_string(p) + " of table " + std::to_string(t) + " is no rank");
      }
    }
    counts_.assign(num_owners, 0);
    if (rows) check_inside(lookups_, columns(t), static_cast<std::int64_t>(t), rows);
    if (num_owners == 1) {
      deal(t, is_weighted, [](std::int64_t id) { return std::pair(std::uint32_t{0}, static_cast<std::uint64_t>(id)); });
    } else if (rows) {
      deal(t, is_weighted, [of = VocabularyDeal(static_cast<std::uint32_t>(num_owners))](std::int64_t id) {
        return of(static_cast<std::uint64_t>(id));
      });
    } else {
      deal(t, is_weighted, [n = static_cast<std::uint32_t>(num_owners)](std::int64_t id) {
        return std::pair(open_owner(id, n), static_cast<std::uint64_t>(id));
      });
    }
    starts_.assign(num_owners + 1, 0);
    for (std::size_t p = 0; p < num_owners; ++p) starts_[p + 1] = starts_[p] + counts_[p];
    const std::uint64_t* keys = keys_.data();
    if (num_owners > 1) {
      next_.assign(starts_.begin(), starts_.end() - 1);
      for (std::size_t i = 0; i < starts_.back(); ++i) dealt_keys_[next_[owners_[i]]++] = keys_[i];
      keys = dealt_keys_.data();
    }
    for (std::size_t p = 0; p < num_owners; ++p) {
      if (!counts_[p]) continue;
      const IdSpace space{rows, static_cast<std::int64_t>(num_owners), static_cast<std::int64_t>(p)};
      auto& out = messages_[ranks_[p]].ids;
      const std::span mine(keys + starts_[p], counts_[p]);
      rows ? pack_rows(mine, space, out) : pack_ids(mine, space, out);
    }
  }

  // Owner and key of each lookup, in the order of the table's columns, and each sample's bag lengths at each owner.
  // Key: the local row; in an open table the id.
  template <class Deal>
  void deal(std::size_t t, std::span<const std::uint8_t> is_weighted, const Deal& owner_and_key) {
    const std::size_t num_owners = counts_.size();
    std::size_t at = 0;
    for (const auto c : columns(t)) {
      const auto first = lookups_.first(c), last = lookups_.last(c);
      const std::int64_t* const bags = lookups_.bags(c);
      if (!bags && last - first != lookups_.batch_size()) {
        throw std::invalid_argument("column " + std::to_string(c) + " is a sequence, which is not pooled");
      }
      lengths_.assign(num_owners * size_, 0);
      const std::size_t begin = at;
      at = deal_ids(lookups_.ids().subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first)), begin,
                    num_owners > 1, owner_and_key);
      const std::uint32_t* owner = owners_.data() + begin;
      for (std::size_t b = 0; b < size_; ++b) {
        const std::int64_t length = bags ? bags[b + 1] - bags[b] : 1;
        if (num_owners == 1) {
          lengths_[b] = static_cast<std::uint64_t>(length);
          continue;
        }
        for (const auto* const end = owner + length; owner < end; ++owner) ++lengths_[*owner * size_ + b];
      }
      for (std::size_t p = 0; p < num_owners; ++p) {
        for (std::size_t b = 0; b < size_; ++b) counts_[p] += lengths_[p * size_ + b];
      }
      if (rank_of_.size()) {
        for (auto e = first; e < last; ++e) {
          const auto owner = num_owners == 1 ? 0 : owners_[begin + static_cast<std::size_t>(e - first)];
          rank_of_[static_cast<std::size_t>(e)] = static_cast<std::uint32_t>(ranks_[owner]);
        }
      }
      for (std::size_t p = 0; p < num_owners; ++p) {
        auto& message = messages_[ranks_[p]];
        const std::size_t before = message.lengths.size();
        tell_lengths(std::span<const std::uint64_t>(lengths_).subspan(p * size_, size_),
                     is_weighted[static_cast<std::size_t>(c)], message.lengths);
        message.runs[static_cast<std::size_t>(c)] = {before, message.lengths.size()};
      }
    }
  }

  // Continue from lookup `at` of the table; return the number of lookups after it. Uses local copies, because stores
  // may alias anything reached through a reference.
  template <class Deal>
  std::size_t deal_ids(std::span<const std::int64_t> ids, std::size_t at, bool keeps_owners, Deal owner_and_key) {
    std::uint64_t* const keys = keys_.data() + at;
    std::uint32_t* const owners = owners_.data() + at;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto [owner, key] = owner_and_key(ids[i]);
      keys[i] = key;
      if (keeps_owners) owners[i] = owner;
    }
    return at + ids.size();
  }

  static void tell_lengths(std::span<const std::uint64_t> lengths, bool is_weighted, std::vector<std::uint8_t>& out) {
    Packer packer(out);
    const std::uint8_t flag = is_weighted ? kWeighted : 0;
    const std::uint64_t first = lengths.empty() ? 0 : lengths.front();
    std::uint64_t any = 0, differing = 0;
    for (const auto length : lengths) any |= length, differing |= length ^ first;
    if (!differing) {
      out.push_back(flag);
      return packer.varint(first);
    }
    const int needed = std::bit_width(any);
    const int bits = *std::find_if(kBits.begin(), kBits.end(), [&](int b) { return b >= needed; });
    out.push_back(static_cast<std::uint8_t>(flag | bits));
    packer.bits(lengths, bits);
  }

  // Measure both forms and pack the shorter one: an estimate would need to know how ids are distributed.
  void pack_rows(std::span<const std::uint64_t> rows, const IdSpace& space, std::vector<std::uint8_t>& out) {
    Packer packer(out);
    const auto limit = static_cast<std::uint64_t>((space.rows - 1) / space.num_owners + 1);
    const auto unique = distinct_.find(rows, limit);
    distances_.resize(unique.size());
    std::uint64_t next = 0;
    for (std::size_t i = 0; i < unique.size(); ++i) {
      distances_[i] = unique[i] - next;
      next = unique[i] + 1;
    }
    const std::size_t list = varint_bytes(unique.size()) + numbers_bytes(distances_);
    const std::size_t row_bytes = numbers_bytes(rows), listed = varint_bytes(rows.size()) + row_bytes;
    const bool is_full = unique.size() == limit;  // a row is its own index
    if (is_full ? list + row_bytes < listed : is_shorter(rows, list, listed)) {
      out.push_back(kDistinct);
      packer.varint(unique.size());
      packer.numbers(distances_);
      return packer.numbers(is_full ? rows : numbers(rows.size()));
    }
    out.push_back(kListed);
    packer.varint(rows.size());
    packer.numbers(rows);
  }

  void pack_ids(std::span<const std::uint64_t> ids, const IdSpace& space, std::vector<std::uint8_t>& out) {
    Packer packer(out);
    hashes_.resize(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) hashes_[i] = mix64(ids[i]);
    const auto unique = distinct_.find(hashes_, 0);
    unique_.resize(unique.size());
    for (std::size_t i = 0; i < unique.size(); ++i) unique_[i] = static_cast<std::int64_t>(unmix64(unique[i]));
    unique_message_.clear();
    Packer(unique_message_).list(unique_, space, true);
    listed_.assign(ids.begin(), ids.end());
    listed_message_.clear();
    Packer(listed_message_).list(listed_, space, false);
    if (is_shorter(hashes_, unique_message_.size(), listed_message_.size())) {
      out.push_back(kDistinct);
      out.insert(out.end(), unique_message_.begin(), unique_message_.end());
      return packer.numbers(numbers(ids.size()));
    }
    out.push_back(kListed);
    out.insert(out.end(), listed_message_.begin(), listed_message_.end());
  }

  // Return whether a list of unique keys, of this many bytes, and the indices of keys in it take fewer bytes; computes
  // the indices if that is possible.
  bool is_shorter(std::span<const std::uint64_t> keys, std::size_t list, std::size_t listed) {
    if (list + (keys.size() + 127) / 128 >= listed) return false;  // a block of numbers takes at least one byte
    const std::span row_numbers(numbers_.data(), keys.size());
    distinct_.number(keys, row_numbers);
    return list + numbers_bytes(row_numbers) < listed;
  }
  std::span<const std::uint64_t> numbers(std::size_t count) const { return {numbers_.data(), count}; }

  const Lookups& lookups_;
  const Dealt& dealt_;
  std::span<const std::int64_t> places_;
  const Lookups::ByTable by_table_;
  std::size_t size_;
  std::vector<Message> messages_;  // by rank
  // Of one table: by lookup; by owner.
  Buffer<std::uint64_t> keys_, dealt_keys_, numbers_;
  Buffer<std::uint32_t> owners_;
  std::vector<std::size_t> ranks_, counts_, starts_, next_;
  std::vector<std::uint64_t> lengths_;  // (N, B) of one column
  Buffer<std::uint32_t> rank_of_;       // (E,) destination of weights or codes; else empty
  Distinct distinct_;
  std::vector<std::uint64_t> distances_, hashes_;
  std::vector<std::int64_t> unique_, listed_;
  std::vector<std::uint8_t> unique_message_, listed_message_;
};

// Reader of one message: first the number of lookups; then, once memory for all messages is allocated, the lookups.
class Reader {
 public:
  Reader(std::span<const std::uint8_t> data, std::span<const std::int32_t> tables, const Dealt& dealt,
         std::span<const std::int64_t> places)
      : data_(data), unpacker_(data), tables_(tables), dealt_(dealt), places_(places) {}

  void read_lengths() {
    size_ = unpacker_.varint();
    if (size_ > kMaxSamples) refuse(std::to_string(size_) + " samples");
    has_codes_ = unpacker_.byte();
    if (has_codes_ > 1) refuse("a flag of " + std::to_string(has_codes_));
    for (std::size_t c = 0; c < tables_.size(); ++c) read_column();
    check_num_lookups(num_lookups());  // bounds the memory by the message's size
  }

  std::size_t size() const { return static_cast<std::size_t>(size_); }
  std::uint64_t num_lookups() const { return num_lookups_; }
  std::size_t count(std::size_t c) const { return static_cast<std::size_t>(columns_[c].count); }
  bool is_one_hot(std::size_t c) const { return columns_[c].lengths.empty() && (columns_[c].equal == 1 || !size_); }
  bool has_weights(std::size_t c) const { return columns_[c].is_weighted && columns_[c].count; }
  bool has_codes() const { return has_codes_ && num_lookups_; }

  // out (size(),): beginning of each sample's bag, starting at `at`; returns the beginning of the next bag.
  std::int64_t bags(std::size_t c, std::int64_t at, std::int64_t* out) const {
    const auto& column = columns_[c];
    for (std::size_t s = 0; s < size_; ++s) {
      out[s] = at;
      at += static_cast<std::int64_t>(column.lengths.empty() ? column.equal : column.lengths[s]);
    }
    return at;
  }

  // out: by column, one entry per lookup.
  void read_ids(std::span<const std::span<std::int64_t>> out) {
    for (std::size_t t = 0; t < places_.size(); ++t) {
      mine_.clear();
      std::uint64_t count = 0;
      for (std::size_t c = 0; c < tables_.size(); ++c) {
        if (static_cast<std::size_t>(tables_[c]) != t) continue;
        mine_.push_back(out[c]);
        count += out[c].size();
      }
      if (count) read_ids(t, count);
    }
  }

  // Then weights (count(c),) of item bytes for each column that has them, and finally codes (num_lookups(),).
  std::span<const std::uint8_t> read_weights(std::size_t c, std::size_t item) {
    return unpacker_.raw(columns_[c].is_weighted ? count(c) * item : 0);
  }
  std::vector<std::uint64_t> read_codes() {
    std::vector<std::uint64_t> codes;
    if (has_codes_) {
      check_num_lookups(num_lookups_);
      codes.resize(num_lookups_);
      unpacker_.numbers(codes);
      for (const auto code : codes) {
        if (code > 255) refuse("a code of more than 8 bits");
      }
    }
    if (unpacker_.position() != data_.size()) {
      refuse(std::to_string(data_.size() - unpacker_.position()) + " bytes after its end");
    }
    return codes;
  }

 private:
  struct Column {
    std::vector<std::uint64_t> lengths;  // of each bag; empty if all are `equal`
    std::uint64_t equal = 0, count = 0;
    bool is_weighted = false;
  };

  void read_column() {
    Column column;
    const auto head = unpacker_.byte();
    const int bits = head & ~kWeighted;
    if (!bits) {
      column.equal = unpacker_.varint();
      if (column.equal >= kMaxLookups) refuse("bags of " + std::to_string(column.equal) + " lookups");
      column.count = size_ * column.equal;
    } else {
      if (std::find(kBits.begin(), kBits.end(), bits) == kBits.end()) refuse("lengths of " + std::to_string(bits) + " bits");
      if (size_ > 8 * (data_.size() - unpacker_.position())) refuse(std::to_string(size_) + " lengths at its end");
      column.lengths.resize(size_);
      unpacker_.bits(column.lengths, bits);
      for (const auto length : column.lengths) column.count += length;
    }
    if (column.count >= kMaxLookups) refuse(std::to_string(column.count) + " lookups");
    column.is_weighted = head & kWeighted;
    num_lookups_ += column.count;
    columns_.push_back(std::move(column));
  }

  // A block of 128 numbers takes at least one byte.
  void check_num_lookups(std::uint64_t count) const {
    const std::uint64_t left = data_.size() - unpacker_.position();
    if (count > left * 128) refuse(std::to_string(count) + " lookups in " + std::to_string(left) + " bytes");
  }

  // Columns of table t, as `mine_`: in place if the table has one column.
  void read_ids(std::size_t t, std::uint64_t count) {
    const IdSpace space{dealt_.table_rows[t], dealt_.num_owners[t], places_[t]};
    const auto kind = unpacker_.byte();
    if (kind > kDistinct) refuse("ids of kind " + std::to_string(kind));
    const std::uint64_t num_ids = unpacker_.count();
    if (mine_.size() > 1) listed_.resize(count);
    const std::span<std::int64_t> ids = mine_.size() > 1 ? std::span(listed_) : mine_.front();
    if (kind == kListed) {
      if (num_ids != count) refuse(std::to_string(num_ids) + " ids, wanted " + std::to_string(count));
      unpacker_.ids(space, false, ids);
    } else {
      different_.resize(num_ids);
      unpacker_.ids(space, true, different_);
      check_num_lookups(count);
      which_.resize(count);
      unpacker_.numbers(which_);
      const std::uint64_t highest = *std::max_element(which_.begin(), which_.end());
      if (highest >= num_ids) refuse("id " + std::to_string(highest) + " of " + std::to_string(num_ids));
      for (std::size_t i = 0; i < count; ++i) ids[i] = different_[which_[i]];
    }
    if (mine_.size() < 2) return;
    auto from = listed_.begin();
    for (const auto& column : mine_) {
      const auto end = from + static_cast<std::ptrdiff_t>(column.size());
      std::copy(from, end, column.begin());
      from = end;
    }
  }

  std::span<const std::uint8_t> data_;
  Unpacker unpacker_;
  std::span<const std::int32_t> tables_;
  const Dealt& dealt_;
  std::span<const std::int64_t> places_;
  std::uint64_t size_ = 0, num_lookups_ = 0;
  std::uint8_t has_codes_ = 0;
  std::vector<Column> columns_;
  // Of one table.
  std::vector<std::span<std::int64_t>> mine_;  // its columns
  std::vector<std::int64_t> listed_, different_;
  std::vector<std::uint64_t> which_;
};

void fill_ones(std::span<std::uint8_t> weights, Dtype dtype) {
  const auto fill = [&](auto one) {
    for (std::size_t i = 0; i < weights.size(); i += sizeof one) std::memcpy(weights.data() + i, &one, sizeof one);
  };
  dtype == Dtype::float64 ? fill(1.0) : fill(1.0F);
}

}  // namespace

PackedBags pack_bags(const Lookups& lookups, const Dealt& dealt, std::span<const std::int64_t> places,
                     std::span<const std::uint8_t> is_weighted, std::optional<std::span<const std::uint8_t>> codes) {
  if (static_cast<std::uint64_t>(lookups.batch_size()) > kMaxSamples) {
    throw std::invalid_argument("a batch of " + std::to_string(lookups.batch_size()) + " samples, wanted at most " +
                                std::to_string(kMaxSamples));
  }
  Sender sender(lookups, dealt, places, lookups.weights() || codes);
  sender.deal(is_weighted);
  if (lookups.weights()) sender.add_weights(is_weighted);
  if (codes) sender.add_codes(*codes);
  return sender.pack(codes.has_value());
}

JoinedBags join_bags(std::span<const std::span<const std::uint8_t>> messages, std::span<const std::int32_t> tables,
                     const Dealt& dealt, std::span<const std::int64_t> places, Dtype dtype) {
  const auto item = static_cast<std::size_t>(item_bytes(dtype));
  std::vector<Reader> readers;
  for (const auto message : messages) readers.emplace_back(message, tables, dealt, places);
  const auto for_each_reader = [&](const auto& read) {
    for (std::size_t r = 0; r < readers.size(); ++r) {
      try {
        read(readers[r]);
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument("rank " + std::to_string(r) + " sent " + std::to_string(messages[r].size()) +
                                    " bytes that are no lookups to pool (" + error.what() + ")");
      }
    }
  };
  JoinedBags result;
  std::size_t num_lookups = 0, num_samples = 0;
  bool has_weights = false, has_codes = false, is_one_hot = true;
  for_each_reader([&](Reader& reader) {
    reader.read_lengths();
    result.sizes.push_back(static_cast<std::int64_t>(reader.size()));
    num_samples += reader.size(), num_lookups += reader.num_lookups();
    has_codes |= reader.has_codes();
    for (std::size_t c = 0; c < tables.size(); ++c) {
      has_weights |= reader.has_weights(c);
      is_one_hot &= reader.is_one_hot(c);
    }
  });
  result.ids = Buffer<std::int64_t>(num_lookups);
  if (!is_one_hot) result.bag_offsets = Buffer<std::int64_t>(tables.size() * num_samples + 1);
  if (has_codes) result.codes.resize(num_lookups);
  if (has_weights) {
    result.weights.resize(num_lookups * item);
    fill_ones(result.weights, dtype);
  }
  // Column by column, and in each column rank by rank.
  std::vector<std::span<std::int64_t>> ids(readers.size() * tables.size());  // (N, C)
  std::size_t at = 0, bag = 0;
  result.feature_offsets.push_back(0);
  for (std::size_t c = 0; c < tables.size(); ++c) {
    for (std::size_t r = 0; r < readers.size(); ++r) {
      ids[r * tables.size() + c] = {result.ids.data() + at, readers[r].count(c)};
      if (!is_one_hot) {
        readers[r].bags(c, static_cast<std::int64_t>(at), result.bag_offsets.data() + bag);
        bag += readers[r].size();
      }
      at += readers[r].count(c);
    }
    result.feature_offsets.push_back(static_cast<std::int64_t>(at));
  }
  if (!is_one_hot) result.bag_offsets[bag] = static_cast<std::int64_t>(at);
  auto mine = ids.begin();
  for_each_reader([&](Reader& reader) {
    const std::span of_rank(mine, tables.size());
    mine += static_cast<std::ptrdiff_t>(tables.size());
    reader.read_ids(of_rank);
    const auto first = [&](std::size_t c) { return static_cast<std::size_t>(of_rank[c].data() - result.ids.data()); };
    for (std::size_t c = 0; c < tables.size(); ++c) {
      const auto weights = reader.read_weights(c, item);
      if (!weights.empty()) std::memcpy(result.weights.data() + first(c) * item, weights.data(), weights.size());
    }
    const auto codes = reader.read_codes();
    for (std::size_t c = 0, e = 0; c < tables.size() && !codes.empty(); ++c) {
      for (std::size_t i = 0; i < of_rank[c].size(); ++i, ++e) result.codes[first(c) + i] = static_cast<std::uint8_t>(codes[e]);
    }
  });
  return result;
}

}  // namespace colonnade
