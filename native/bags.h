// Lookups as they travel to the ranks that pool them, packed by the sender, joined to one batch by the owner of the rows.
//
// message   varint B: samples of the sender
//           a byte: 1 where codes follow, else 0
//           of each column of lookups whose table has rows there, a byte: 128 where it has weights, plus the bits of a
//             length: 0 where all bags are as long, then varint that length; else B lengths of so many bits
//           of each table with lookups there, ascending: a byte 0 and the list of all its ids as they come; or a byte 1, the
//             ascending list of the different ones, and numbers: which of them each lookup is. Whichever is shorter
//           weights of the columns that have them, column by column
//           numbers: codes of all lookups
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "buffer.h"
#include "lookups.h"

namespace colonnade {

// Who has rows of T tables.
struct Dealt {
  std::span<const std::int64_t> table_rows;  // (T,) 0: an open table
  std::span<const std::int64_t> num_owners;  // (T,)
};

// Messages by rank, one after the other, and where each ends. places (N, T): as which of a table's owners a rank has rows;
// -1: it has none. is_weighted (C,): other columns' weights do not travel. codes (E,). out_of_range for an id outside its
// vocabulary table, invalid_argument for more samples than a message can tell of.
struct PackedBags {
  std::vector<std::uint8_t> bytes;
  std::vector<std::int64_t> ends;
};
PackedBags pack_bags(const Lookups& lookups, const Dealt& dealt, std::span<const std::int64_t> places,
                     std::span<const std::uint8_t> is_weighted, std::optional<std::span<const std::uint8_t>> codes);

// All ranks' samples as one batch, in rank order: C columns, G samples, E lookups.
struct JoinedBags {
  Buffer<std::int64_t> ids;                   // (E,)
  std::vector<std::int64_t> feature_offsets;  // (C + 1,)
  Buffer<std::int64_t> bag_offsets;           // (C * G + 1,); empty where each bag has one lookup
  std::vector<std::uint8_t> weights;          // (E,) elements, 1 in columns of ranks without; empty: nobody has any
  std::vector<std::uint8_t> codes;            // (E,) 0 of ranks that know none; empty: nobody does
  std::vector<std::int64_t> sizes;            // (N,) samples
};
// messages: by rank, for the owner `places` (T,). tables (C,): of the columns whose table has rows here. dtype: of weights.
// invalid_argument naming the rank whose message is none; what a message can make it take is bounded.
JoinedBags join_bags(std::span<const std::span<const std::uint8_t>> messages, std::span<const std::int32_t> tables,
                     const Dealt& dealt, std::span<const std::int64_t> places, Dtype dtype);

}  // namespace colonnade
