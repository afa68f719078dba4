#include "parts.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace colonnade {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument(message);
}

std::string number(std::int64_t n) {
  return std::to_string(n);
}

}  // namespace

Parts::Parts(std::span<const std::int32_t> tables, std::span<const std::int32_t> columns,
             std::span<const std::int32_t> dims, std::span<const std::int32_t> states)
    : first_{0} {
  if (columns.size() != tables.size() || dims.size() != tables.size() || states.size() != tables.size())
    refuse("parts: tables, columns, dims and states must have one element for each part");
  for (std::size_t p = 0; p < tables.size(); ++p) {
    const auto part = [&] { return "parts: part " + number(static_cast<std::int64_t>(p)); };
    const std::int64_t last = std::max<std::int64_t>(0, num_tables() - 1), next = num_tables();
    if (tables[p] != last && tables[p] != next)
      refuse(part() + " is of table " + number(tables[p]) + ", wanted " +
             (last == next ? "" : number(last) + " or ") + number(next) +
             ": tables ascend, each with at least one part");
    if (dims[p] < 1) refuse(part() + " has dim " + number(dims[p]) + ", wanted 1 or more");
    if (states[p] < 0) refuse(part() + " has state " + number(states[p]) + ", wanted 0 or more");
    if (tables[p] == next) first_.push_back(first_.back());
    const std::int64_t wanted = width(tables[p]);
    if (columns[p] != wanted)
      refuse(part() + " starts at column " + number(columns[p]) + ", wanted " + number(wanted) +
             ": parts lie side by side");
    parts_.push_back({tables[p], columns[p], dims[p], states[p]});
    ++first_.back();
  }
}

Reads::Reads(std::span<const std::int32_t> features, std::span<const std::int32_t> columns,
             std::span<const std::int32_t> dims) {
  if (columns.size() != features.size() || dims.size() != features.size())
    refuse("reads: features, columns and dims must have one element for each read");
  for (std::size_t r = 0; r < features.size(); ++r) {
    if (features[r] < 0 || columns[r] < 0 || dims[r] < 1) {
      refuse("reads: read " + number(static_cast<std::int64_t>(r)) + " is of feature " + number(features[r]) +
             ", column " + number(columns[r]) + ", dim " + number(dims[r]) +
             ", wanted 0 or more, 0 or more, 1 or more");
    }
    reads_.push_back({features[r], columns[r], dims[r]});
  }
}

}  // namespace colonnade
