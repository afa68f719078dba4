#include "bags.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "packing.h"

namespace colonnade {
namespace {

constexpr std::uint64_t kMaxSamples = std::uint64_t{1} << 24;
constexpr std::uint64_t kMaxLookups = std::uint64_t{1} << 40;
constexpr std::uint8_t kWeighted = 128;
constexpr std::uint8_t kListed = 0, kDistinct = 1;
constexpr std::array<int, 6> kBits = {1, 2, 4, 8, 16, 32};  // of a length

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("got " + what); }

// The lookups of a batch that one rank has the rows of.
class Message {
 public:
  Message(const Lookups& lookups, const Plan& plan, const Dealt& dealt, const Lookups::ByTable& by_table,
          std::int64_t batch_size, std::vector<std::uint8_t>& out)
      : lookups_(lookups), plan_(plan), dealt_(dealt), by_table_(by_table), size_(batch_size), out_(out), packer_(out) {}

  // mine: positions, ascending. places (T,): the rank's.
  void pack(std::span<const std::int32_t> mine, std::span<const std::int64_t> places,
            std::span<const std::uint8_t> is_weighted, const std::optional<std::span<const std::uint8_t>>& codes) {
    packer_.varint(static_cast<std::uint64_t>(size_));
    out_.push_back(codes.has_value());
    columns_.assign(static_cast<std::size_t>(lookups_.num_features()), {});
    auto at = mine.begin();
    for (std::int64_t c = 0; c < lookups_.num_features(); ++c) {
      const auto end = std::lower_bound(at, mine.end(), lookups_.last(c), [](auto a, auto b) { return a < b; });
      auto& column = columns_[static_cast<std::size_t>(c)];
      column = std::span(at, end);
      at = end;
      if (places[static_cast<std::size_t>(lookups_.table(c))] >= 0) lengths(c, column, is_weighted[static_cast<std::size_t>(c)]);
    }
    std::size_t block = 0;
    for (std::size_t t = 0; t < dealt_.table_rows.size(); ++t) {
      if (places[t] >= 0) ids(t, places[t], block + static_cast<std::size_t>(places[t]));
      block += static_cast<std::size_t>(dealt_.num_owners[t]);
    }
    if (const auto& weights = lookups_.weights()) {
      const auto item = static_cast<std::size_t>(item_bytes(weights->dtype));
      const auto* all = static_cast<const std::uint8_t*>(weights->data);
      for (std::size_t c = 0; c < columns_.size(); ++c) {
        if (!is_weighted[c]) continue;
        for (const auto e : columns_[c]) {
          const auto* one = all + static_cast<std::size_t>(e) * item;
          out_.insert(out_.end(), one, one + item);
        }
      }
    }
    if (codes) {
      numbers_.clear();
      for (const auto e : mine) numbers_.push_back((*codes)[static_cast<std::size_t>(e)]);
      packer_.numbers(numbers_);
    }
  }

 private:
  void lengths(std::int64_t c, std::span<const std::int32_t> column, bool is_weighted) {
    const std::int32_t* rows = lookups_.bags(c) ? lookups_.output_rows() : nullptr;
    numbers_.assign(static_cast<std::size_t>(size_), 0);
    for (const auto e : column) ++numbers_[static_cast<std::size_t>(rows ? rows[e] : e - lookups_.first(c))];
    const auto [least, most] = std::minmax_element(numbers_.begin(), numbers_.end());
    const std::uint8_t flag = is_weighted ? kWeighted : 0;
    if (numbers_.empty() || *least == *most) {
      out_.push_back(flag);
      packer_.varint(numbers_.empty() ? 0 : *most);
      return;
    }
    const int needed = std::bit_width(*most);
    const int bits = *std::find_if(kBits.begin(), kBits.end(), [&](int b) { return b >= needed; });
    out_.push_back(static_cast<std::uint8_t>(flag | bits));
    packer_.bits(numbers_, bits);
  }

  void ids(std::size_t t, std::int64_t place, std::size_t block) {
    const IdSpace space{dealt_.table_rows[t], dealt_.num_owners[t], place};
    listed_.clear();
    numbers_.clear();
    const std::int64_t first = plan_.block_offsets[block], last = plan_.block_offsets[block + 1];
    if (first == last) return;
    for (auto i = by_table_.first[t]; i < by_table_.first[t + 1]; ++i) {
      for (const auto e : columns_[static_cast<std::size_t>(by_table_.features[static_cast<std::size_t>(i)])]) {
        listed_.push_back(lookups_.ids()[static_cast<std::size_t>(e)]);
        numbers_.push_back(static_cast<std::uint64_t>(plan_.inverse[static_cast<std::size_t>(e)] - first));
      }
    }
    // Both are made, and the longer is forgotten: a guess would have to know how ids lie.
    const std::size_t begin = out_.size();
    out_.push_back(kListed);
    packer_.list(listed_, space, false);
    const std::size_t middle = out_.size();
    out_.push_back(kDistinct);
    packer_.list({plan_.unique_ids.data() + first, static_cast<std::size_t>(last - first)}, space, true);
    packer_.numbers(numbers_);
    const std::size_t distinct = out_.size() - middle;
    if (distinct < middle - begin) {
      std::memmove(out_.data() + begin, out_.data() + middle, distinct);
      out_.resize(begin + distinct);
    } else {
      out_.resize(middle);
    }
  }

  const Lookups& lookups_;
  const Plan& plan_;
  const Dealt& dealt_;
  const Lookups::ByTable& by_table_;
  std::int64_t size_;
  std::vector<std::uint8_t>& out_;
  Packer packer_;
  std::vector<std::span<const std::int32_t>> columns_;
  std::vector<std::uint64_t> numbers_;
  std::vector<std::int64_t> listed_;
};

// What one message says.
struct Part {
  std::uint64_t size = 0;                          // samples
  std::vector<std::uint8_t> is_weighted;           // (C,)
  std::vector<std::vector<std::uint64_t>> lengths;  // (C,) of each bag; empty where all are `equal`
  std::vector<std::uint64_t> equal, starts;        // (C,), (C + 1,): lookups before each column
  std::vector<std::int64_t> ids;                   // column by column
  std::vector<std::span<const std::uint8_t>> weights;  // (C,)
  std::vector<std::uint64_t> codes;                    // empty: it knows none

  std::uint64_t length(std::size_t c, std::uint64_t sample) const { return lengths[c].empty() ? equal[c] : lengths[c][sample]; }
};

class Reader {
 public:
  Reader(std::span<const std::uint8_t> data, std::span<const std::int32_t> tables, const Dealt& dealt,
         std::span<const std::int64_t> places, std::size_t item)
      : data_(data), unpacker_(data), tables_(tables), dealt_(dealt), places_(places), item_(item), of_table_(places.size()) {}

  Part read() {
    Part part;
    part.size = unpacker_.varint();
    if (part.size > kMaxSamples) refuse(std::to_string(part.size) + " samples");
    const auto has_codes = unpacker_.byte();
    if (has_codes > 1) refuse("a flag of " + std::to_string(has_codes));
    part.starts.push_back(0);
    for (std::size_t c = 0; c < tables_.size(); ++c) lengths(part);
    for (std::size_t t = 0; t < places_.size(); ++t) ids(part, t);
    sort_ids(part);  // all that were told of are there, so a message bounds the memory it takes
    for (std::size_t c = 0; c < tables_.size(); ++c) {
      part.weights.push_back(unpacker_.raw(part.is_weighted[c] ? (part.starts[c + 1] - part.starts[c]) * item_ : 0));
    }
    if (has_codes) {
      part.codes = numbers(part.ids.size());
      for (const auto code : part.codes) {
        if (code > 255) refuse("a code of more than 8 bits");
      }
    }
    if (unpacker_.position() != data_.size()) {
      refuse(std::to_string(data_.size() - unpacker_.position()) + " bytes after its end");
    }
    return part;
  }

 private:
  void lengths(Part& part) {
    const auto head = unpacker_.byte();
    const int bits = head & ~kWeighted;
    std::vector<std::uint64_t> found;
    std::uint64_t count = 0;
    if (!bits) {
      part.equal.push_back(unpacker_.varint());
      if (part.equal.back() >= kMaxLookups) refuse("bags of " + std::to_string(part.equal.back()) + " lookups");
      count = part.size * part.equal.back();
    } else {
      if (std::find(kBits.begin(), kBits.end(), bits) == kBits.end()) refuse("lengths of " + std::to_string(bits) + " bits");
      if (part.size > 8 * (data_.size() - unpacker_.position())) refuse(std::to_string(part.size) + " lengths at its end");
      found.resize(part.size);
      unpacker_.bits(found, bits);
      for (const auto length : found) count += length;
      part.equal.push_back(0);
    }
    if (count >= kMaxLookups) refuse(std::to_string(count) + " lookups");
    part.is_weighted.push_back(head & kWeighted ? 1 : 0);
    part.lengths.push_back(std::move(found));
    part.starts.push_back(part.starts.back() + count);
  }

  // Of all columns of table t.
  void ids(Part& part, std::size_t t) {
    std::uint64_t count = 0;
    for (std::size_t c = 0; c < tables_.size(); ++c) {
      if (static_cast<std::size_t>(tables_[c]) == t) count += part.starts[c + 1] - part.starts[c];
    }
    if (!count) return;
    const IdSpace space{dealt_.table_rows[t], dealt_.num_owners[t], places_[t]};
    const auto kind = unpacker_.byte();
    if (kind > kDistinct) refuse("ids of kind " + std::to_string(kind));
    auto& found = of_table_[t];
    std::vector<std::uint64_t> which;
    const auto told = static_cast<std::uint64_t>(unpacker_.list(space, kind == kDistinct, found));
    if (kind == kListed && told != count) refuse(std::to_string(told) + " ids, wanted " + std::to_string(count));
    if (kind == kDistinct) {
      which = numbers(count);
      for (const auto index : which) {
        if (index >= told) refuse("id " + std::to_string(index) + " of " + std::to_string(told));
      }
    }
    if (kind == kListed) return;
    std::vector<std::int64_t> listed(count);
    for (std::size_t i = 0; i < count; ++i) listed[i] = found[which[i]];
    found.swap(listed);
  }

  // From table by table to column by column.
  void sort_ids(Part& part) {
    std::vector<std::size_t> next(places_.size());
    part.ids.reserve(part.starts.back());
    for (std::size_t c = 0; c < tables_.size(); ++c) {
      const auto t = static_cast<std::size_t>(tables_[c]);
      const auto count = part.starts[c + 1] - part.starts[c];
      const auto from = of_table_[t].begin() + static_cast<std::ptrdiff_t>(next[t]);
      part.ids.insert(part.ids.end(), from, from + static_cast<std::ptrdiff_t>(count));
      next[t] += count;
    }
  }

  std::vector<std::uint64_t> numbers(std::uint64_t count) {
    const std::uint64_t left = data_.size() - unpacker_.position();
    if (count > left * 128) refuse(std::to_string(count) + " lookups in " + std::to_string(left) + " bytes");
    std::vector<std::uint64_t> found(count);
    unpacker_.numbers(found);
    return found;
  }

  std::span<const std::uint8_t> data_;
  Unpacker unpacker_;
  std::span<const std::int32_t> tables_;
  const Dealt& dealt_;
  std::span<const std::int64_t> places_;
  std::size_t item_;
  std::vector<std::vector<std::int64_t>> of_table_;  // ids by lookup
};

void fill_ones(std::span<std::uint8_t> weights, Dtype dtype) {
  const auto fill = [&](auto one) {
    for (std::size_t i = 0; i < weights.size(); i += sizeof one) std::memcpy(weights.data() + i, &one, sizeof one);
  };
  dtype == Dtype::float64 ? fill(1.0) : fill(1.0F);
}

}  // namespace

PackedBags pack_bags(const Lookups& lookups, const Plan& plan, const Dealt& dealt, std::span<const std::int64_t> places,
                     std::span<const std::uint8_t> is_weighted, std::optional<std::span<const std::uint8_t>> codes) {
  const std::size_t num_tables = dealt.table_rows.size(), num_ranks = num_tables ? places.size() / num_tables : 0;
  if (static_cast<std::uint64_t>(lookups.batch_size()) > kMaxSamples) {
    throw std::invalid_argument("a batch of " + std::to_string(lookups.batch_size()) + " samples, wanted at most " +
                                std::to_string(kMaxSamples));
  }
  // By unique row: the rank that has it.
  std::vector<std::int32_t> rank_of(static_cast<std::size_t>(plan.num_unique()));
  for (std::size_t t = 0, block = 0; t < num_tables; block += static_cast<std::size_t>(dealt.num_owners[t]), ++t) {
    for (std::size_t r = 0; r < num_ranks; ++r) {
      const auto place = places[r * num_tables + t];
      if (place < 0) continue;
      const auto k = block + static_cast<std::size_t>(place);
      std::fill(rank_of.begin() + plan.block_offsets[k], rank_of.begin() + plan.block_offsets[k + 1], static_cast<std::int32_t>(r));
    }
  }
  // Lookups rank by rank, in their order.
  const auto num_lookups = static_cast<std::size_t>(lookups.num_lookups());
  std::vector<std::size_t> ends(num_ranks + 1);
  for (std::size_t e = 0; e < num_lookups; ++e) ++ends[static_cast<std::size_t>(rank_of[static_cast<std::size_t>(plan.inverse[e])]) + 1];
  for (std::size_t r = 0; r < num_ranks; ++r) ends[r + 1] += ends[r];
  std::vector<std::int32_t> order(num_lookups);
  auto next = ends;
  for (std::size_t e = 0; e < num_lookups; ++e) {
    order[next[static_cast<std::size_t>(rank_of[static_cast<std::size_t>(plan.inverse[e])])]++] = static_cast<std::int32_t>(e);
  }
  const auto by_table = lookups.by_table(static_cast<std::int64_t>(num_tables));
  PackedBags found;
  found.bytes.reserve(num_lookups * 2 + num_ranks * 64);
  Message message(lookups, plan, dealt, by_table, lookups.batch_size(), found.bytes);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    message.pack(std::span(order).subspan(ends[r], ends[r + 1] - ends[r]), places.subspan(r * num_tables, num_tables),
                 is_weighted, codes);
    found.ends.push_back(static_cast<std::int64_t>(found.bytes.size()));
  }
  return found;
}

JoinedBags join_bags(std::span<const std::span<const std::uint8_t>> messages, std::span<const std::int32_t> tables,
                     const Dealt& dealt, std::span<const std::int64_t> places, Dtype dtype) {
  const auto item = static_cast<std::size_t>(item_bytes(dtype));
  std::vector<Part> parts;
  for (const auto message : messages) {
    try {
      parts.push_back(Reader(message, tables, dealt, places, item).read());
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("rank " + std::to_string(parts.size()) + " sent " + std::to_string(message.size()) +
                                  " bytes that are no lookups to pool (" + error.what() + ")");
    }
  }
  JoinedBags found;
  std::size_t num_lookups = 0, num_samples = 0;
  bool has_weights = false, has_codes = false, is_one_hot = true;
  for (const auto& part : parts) {
    found.sizes.push_back(static_cast<std::int64_t>(part.size));
    num_samples += part.size, num_lookups += part.ids.size();
    has_codes |= !part.codes.empty();
    for (std::size_t c = 0; c < tables.size(); ++c) {
      has_weights |= part.is_weighted[c] && !part.weights[c].empty();
      is_one_hot &= part.lengths[c].empty() && (part.equal[c] == 1 || !part.size);
    }
  }
  found.ids.reserve(num_lookups);
  found.feature_offsets.push_back(0);
  if (has_codes) found.codes.reserve(num_lookups);
  if (has_weights) {
    found.weights.resize(num_lookups * item);
    fill_ones(found.weights, dtype);
  }
  if (!is_one_hot) found.bag_offsets.reserve(tables.size() * num_samples + 1);
  std::int64_t at = 0;
  for (std::size_t c = 0; c < tables.size(); ++c) {
    for (const auto& part : parts) {
      const auto first = part.starts[c], last = part.starts[c + 1];
      if (has_weights && !part.weights[c].empty()) {
        std::memcpy(found.weights.data() + found.ids.size() * item, part.weights[c].data(), part.weights[c].size());
      }
      found.ids.insert(found.ids.end(), part.ids.begin() + static_cast<std::ptrdiff_t>(first),
                       part.ids.begin() + static_cast<std::ptrdiff_t>(last));
      if (has_codes) {
        for (auto e = first; e < last; ++e) found.codes.push_back(part.codes.empty() ? 0 : static_cast<std::uint8_t>(part.codes[e]));
      }
      if (is_one_hot) continue;
      for (std::uint64_t s = 0; s < part.size; ++s) {
        found.bag_offsets.push_back(at);
        at += static_cast<std::int64_t>(part.length(c, s));
      }
    }
    found.feature_offsets.push_back(static_cast<std::int64_t>(found.ids.size()));
  }
  if (!is_one_hot) found.bag_offsets.push_back(at);
  return found;
}

}  // namespace colonnade
