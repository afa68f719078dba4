// Column ranges of rows: parts of tables, and the ranges that features read.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace colonnade {

// Range of a table's columns with its own optimizer.
struct Part {
  std::int32_t table, column, dim;
  std::int32_t state;  // first state element in the row's state
};

// Parts of all tables.
class Parts {
 public:
  // (P,) each. invalid_argument unless tables ascend and a table's parts are adjacent from column 0.
  Parts(std::span<const std::int32_t> tables, std::span<const std::int32_t> columns,
        std::span<const std::int32_t> dims, std::span<const std::int32_t> states);

  std::span<const Part> all() const { return parts_; }
  std::int64_t num_tables() const { return static_cast<std::int64_t>(first_.size()) - 1; }
  std::span<const Part> of(std::int64_t table) const {
    return std::span(parts_).subspan(first_[table], first_[table + 1] - first_[table]);
  }
  std::int64_t first(std::int64_t table) const { return first_[table]; }  // number of its first part
  std::int64_t width(std::int64_t table) const {                          // elements of a row
    const auto parts = of(table);
    return parts.empty() ? 0 : std::int64_t{parts.back().column} + parts.back().dim;
  }

 private:
  std::vector<Part> parts_;
  std::vector<std::int64_t> first_;  // by table
};

// Range of columns that a feature reads: one output.
struct Read {
  std::int32_t feature, column, dim;
};

class Reads {
 public:
  // (R,) each. invalid_argument if lengths differ, a number is negative or a dim is 0.
  Reads(std::span<const std::int32_t> features, std::span<const std::int32_t> columns,
        std::span<const std::int32_t> dims);

  std::span<const Read> all() const { return reads_; }
  std::int64_t size() const { return static_cast<std::int64_t>(reads_.size()); }

 private:
  std::vector<Read> reads_;
};

}  // namespace colonnade
