#include "pending.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kRun = 1024;

[[noreturn]] void refuse(const char* what) {
  throw std::invalid_argument(std::string("pending sums: ") + what);
}

// Check that every row is in its table's slots.
template <class Table>
void check_slots(std::span<const Table> tables, std::span<const std::int64_t> counts,
                 std::span<const std::int64_t> slots) {
  if (tables.empty() || counts.size() % tables.size() != 0) refuse("blocks are not of all tables");
  std::size_t row = 0;
  for (std::size_t b = 0; b < counts.size(); ++b) {
    if (counts[b] < 0 || static_cast<std::size_t>(counts[b]) > slots.size() - row)
      refuse("more rows are counted than there are slots");
    const auto last = static_cast<std::uint64_t>(tables[b % tables.size()].num_slots);
    for (const auto slot : slots.subspan(row, counts[b]))
      if (static_cast<std::uint64_t>(slot) >= last) refuse("a slot that the table does not have");
    row += counts[b];
  }
  if (row != slots.size()) refuse("fewer rows are counted than there are slots");
}

template <class T>
void check_sum(const BatchSums<T>& batch, std::size_t row, std::int64_t width) {
  if (row >= batch.index.size() ||
      batch.index[row] + static_cast<std::size_t>(width) > batch.elements.size())
    refuse("a row without a sum");
}

}  // namespace

void name_slots(std::span<const SlotNames> tables, std::span<const std::int64_t> counts,
                std::span<const std::int64_t> slots, std::span<const std::int64_t> ids, std::span<std::uint8_t> has) {
  check_slots(tables, counts, slots);
  if (ids.size() != slots.size() || has.size() != slots.size()) refuse("rows are not said of alike");
  std::size_t row = 0;
  for (std::size_t b = 0; b < counts.size(); ++b) {
    const auto& table = tables[b % tables.size()];
    for (const std::size_t last = row + counts[b]; row < last; ++row) {
      table.ids[slots[row]] = ids[row];
      has[row] = table.ticks[slots[row]] > 0;
    }
  }
}

template <class T>
void add_pending(std::span<const Pending<T>> tables, std::span<const std::int64_t> counts, const BatchSums<T>& batch,
                 std::span<const std::uint8_t> leaves) {
  check_slots(tables, counts, batch.slots);
  if (counts.size() != tables.size() || leaves.size() != batch.slots.size() ||
      batch.index.size() != batch.slots.size())
    refuse("rows of a batch are not said of alike");
  std::size_t first = 0;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    for (std::int64_t i = 0; i < counts[t]; ++i) check_sum(batch, first + i, tables[t].width);
    first += counts[t];
  }
  first = 0;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const auto& table = tables[t];
    for_each_run(counts[t], kRun, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = static_cast<std::int64_t>(first) + begin; i < static_cast<std::int64_t>(first) + end; ++i) {
        if (leaves[i]) continue;
        const auto slot = batch.slots[i];
        T* const row = table.sums + slot * table.width;
        const T* const sum = batch.elements.data() + batch.index[i];
        if (table.ticks[slot]++ > 0) {
          for (std::int64_t k = 0; k < table.width; ++k) row[k] += sum[k];
        } else {  // do not add even 0: it would turn -0 into 0
          std::copy_n(sum, table.width, row);
        }
      }
    });
    first += counts[t];
  }
}

template <class T>
void take_pending(std::span<const Pending<T>> tables, std::span<const std::int64_t> counts,
                  std::span<const std::int64_t> slots, std::span<const std::int64_t> origin, const BatchSums<T>& batch,
                  std::span<T> out) {
  check_slots(tables, counts, slots);
  if (origin.size() != slots.size()) refuse("rows are not said of alike");
  std::size_t first = 0;
  std::int64_t element = 0;
  for (std::size_t b = 0; b < counts.size(); ++b) {
    const auto width = tables[b % tables.size()].width;
    for (std::int64_t i = 0; i < counts[b]; ++i)
      if (origin[first + i] >= 0) check_sum(batch, origin[first + i], width);
    first += counts[b];
    element += counts[b] * width;
  }
  if (static_cast<std::size_t>(element) != out.size()) refuse("there is no room for them, or too much");
  first = 0;
  element = 0;
  for (std::size_t b = 0; b < counts.size(); ++b) {
    const auto& table = tables[b % tables.size()];
    for_each_run(counts[b], kRun, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const auto slot = slots[first + i], mine = origin[first + i];
        const T* const row = table.sums + slot * table.width;
        T* const sent = out.data() + element + i * table.width;
        const bool has_some = table.ticks[slot] > 0;
        table.ticks[slot] = 0;
        if (mine < 0) {
          std::copy_n(row, table.width, sent);
          continue;
        }
        const T* const sum = batch.elements.data() + batch.index[mine];
        if (has_some) {
          for (std::int64_t k = 0; k < table.width; ++k) sent[k] = sum[k] + row[k];
        } else {
          std::copy_n(sum, table.width, sent);
        }
      }
    });
    first += counts[b];
    element += counts[b] * table.width;
  }
}

template void add_pending(std::span<const Pending<float>>, std::span<const std::int64_t>, const BatchSums<float>&,
                          std::span<const std::uint8_t>);
template void add_pending(std::span<const Pending<double>>, std::span<const std::int64_t>, const BatchSums<double>&,
                          std::span<const std::uint8_t>);
template void take_pending(std::span<const Pending<float>>, std::span<const std::int64_t>,
                           std::span<const std::int64_t>, std::span<const std::int64_t>, const BatchSums<float>&,
                           std::span<float>);
template void take_pending(std::span<const Pending<double>>, std::span<const std::int64_t>,
                           std::span<const std::int64_t>, std::span<const std::int64_t>, const BatchSums<double>&,
                           std::span<double>);

}  // namespace colonnade
