// Deduplication of a list of keys: unique keys in ascending order, and the index of each key among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace colonnade {

// Dense keys are marked in a bitmap and counted from there; others go through a hash table, and only unique keys are
// sorted. Reuses its memory between calls.
class Distinct {
 public:
  // Return the unique keys, valid until the next call. limit: exclusive bound of vocabulary rows; 0: any 64 bits, mixed
  // like a hash.
  std::span<const std::uint64_t> find(std::span<const std::uint64_t> keys, std::uint64_t limit);
  // Write the index of each key of that call among the unique keys to numbers (n,).
  void number(std::span<const std::uint64_t> keys, std::span<std::uint64_t> numbers) const;

 private:
  void mark(std::span<const std::uint64_t> keys, std::uint64_t limit);
  void hash(std::span<const std::uint64_t> keys);
  void sort(std::uint64_t limit);

  std::vector<std::uint64_t> unique_;
  bool is_marked_ = false;
  std::vector<std::uint64_t> marks_;   // one bit per row
  std::vector<std::uint32_t> before_;  // number of marks in earlier words
  std::vector<std::uint32_t> slots_;   // hash table: 1 + index among unique keys in order of arrival; 0: free
  std::vector<std::uint32_t> came_;    // (n,) index of each key in order of arrival
  std::vector<std::uint32_t> place_;   // (U,) rank of each of these in ascending order
  std::vector<std::uint64_t> words_, sorted_;
};

}  // namespace colonnade
