// The different ones of a list of keys, ascending, and which of them each key is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace colonnade {

// Keys that are dense enough are marked, a bit each, and counted from there; others go through a hash table, and only the
// different ones are sorted. Keeps its memory from call to call.
class Distinct {
 public:
  // limit: of vocabulary rows, which are below it; 0: any 64 bits, as mixed as a hash. Returns the different keys, valid
  // until the next call.
  std::span<const std::uint64_t> find(std::span<const std::uint64_t> keys, std::uint64_t limit);
  // Of the keys of that call. numbers (n,): which of the different ones each is.
  void number(std::span<const std::uint64_t> keys, std::span<std::uint64_t> numbers) const;

 private:
  void mark(std::span<const std::uint64_t> keys, std::uint64_t limit);
  void hash(std::span<const std::uint64_t> keys);
  void sort(std::uint64_t limit);

  std::vector<std::uint64_t> unique_;
  bool is_marked_ = false;
  std::vector<std::uint64_t> marks_;   // a bit for each row
  std::vector<std::uint32_t> before_;  // marks in the words before each
  std::vector<std::uint32_t> slots_;   // of the hash table: 1 + which of the different ones as they came; 0: free
  std::vector<std::uint32_t> came_;    // (n,) as which of these each key came
  std::vector<std::uint32_t> place_;   // (U,) of these, ascending
  std::vector<std::uint64_t> words_, sorted_;
};

}  // namespace colonnade
