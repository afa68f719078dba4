// Messages of lookups to the ranks that pool them: packed by the sender, joined to one batch by the rows' owner.
//
// message   varint B: samples of the sender
//           a byte: 1 if codes follow, else 0
//           for each column of lookups of a table with rows on the receiver, a byte: 128 if it has weights, plus the
//             bits of a length: 0 if all bags have the same length, then varint that length; else B lengths of that many bits
//           for each table with lookups for the receiver, ascending, the shorter of: a byte 0 and the list of its ids in order;
//             or a byte 1, the ascending list of its unique ids, and numbers: index of each lookup's id among them
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

// Rows and owners of T tables.
struct Dealt {
  std::span<const std::int64_t> table_rows;  // (T,) 0: open table
  std::span<const std::int64_t> num_owners;  // (T,)
};

// Pack messages by rank, one after the other, with the end of each. places (N, T): index of a rank among a table's
// owners, -1 if it is none. is_weighted (C,): columns that send weights. codes (E,). out_of_range for an id outside its
// vocabulary table, invalid_argument for more samples than a message can hold.
struct PackedBags {
  std::vector<std::uint8_t> bytes;
  std::vector<std::int64_t> ends;
};
PackedBags pack_bags(const Lookups& lookups, const Dealt& dealt, std::span<const std::int64_t> places,
                     std::span<const std::uint8_t> is_weighted, std::optional<std::span<const std::uint8_t>> codes);

// Batch that joins all ranks' samples in rank order: C columns, G samples, E lookups.
struct JoinedBags {
  Buffer<std::int64_t> ids;                   // (E,)
  std::vector<std::int64_t> feature_offsets;  // (C + 1,)
  Buffer<std::int64_t> bag_offsets;           // (C * G + 1,); empty if each bag has one lookup
  std::vector<std::uint8_t> weights;          // (E,) elements, 1 in columns sent without weights; empty: none sent
  std::vector<std::uint8_t> codes;            // (E,) 0 for ranks without codes; empty: none sent
  std::vector<std::int64_t> sizes;            // (N,) number of samples
};
// Join the messages of all ranks. messages: by rank, for the owner `places` (T,). tables (C,): table of each column
// with rows here. dtype: of weights. invalid_argument, with the rank, for an invalid message; memory is bounded even
// then.
JoinedBags join_bags(std::span<const std::span<const std::uint8_t>> messages, std::span<const std::int32_t> tables,
                     const Dealt& dealt, std::span<const std::int64_t> places, Dtype dtype);

}  // namespace colonnade
