#include "plan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "hash.h"
#include "radix.h"
#include "threads.h"

namespace colonnade {

namespace {

constexpr std::uint64_t kStartsRow = std::uint64_t{1} << 63;

void check_ranks(std::int64_t num_ranks) {
  if (num_ranks < 1 || num_ranks > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("num_ranks: got " + std::to_string(num_ranks) + ", wanted 1 .. 2^31 - 1");
  }
}

// A vocabulary table's rows in order: owner by owner, local row by local row.
struct VocabularyOrder {
  std::uint64_t rows, num_ranks, share;  // share: most rows of one rank

  VocabularyOrder(std::int64_t rows, std::int64_t num_ranks)
      : rows(static_cast<std::uint64_t>(rows)),
        num_ranks(static_cast<std::uint64_t>(num_ranks)),
        share((this->rows - 1) / this->num_ranks + 1) {}

  int key_bits() const { return std::bit_width(num_ranks * share - 1); }
  std::uint64_t key(std::int64_t id) const {
    const auto row = static_cast<std::uint64_t>(id);
    if (num_ranks == 1) return row;
    return vocabulary_owner(row, static_cast<std::uint32_t>(num_ranks)) * share + row / num_ranks;
  }
};

struct TableOrder {
  std::span<const std::int32_t> features;
  std::int64_t rows;
  std::int64_t begin = 0, end = 0;  // the table's entries in the plan
  std::uint64_t* sorted = nullptr;  // lookup of each entry, | kStartsRow
  std::int64_t num_unique = 0;
  std::int64_t first_unique = 0;
  bool out_of_range = false;
};

class Planner {
 public:
  Planner(const Lookups& lookups, std::span<const std::int64_t> table_rows, std::int64_t num_ranks)
      : lookups_(lookups),
        ids_(lookups.ids().data()),
        num_ranks_(num_ranks),
        by_table_(lookups.by_table(static_cast<std::int64_t>(table_rows.size()))),
        lookup_bits_(
            std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(lookups.num_lookups(), 1)))),
        lookup_mask_((std::uint64_t{1} << lookup_bits_) - 1),
        words_(lookups.ids().size()),
        spare_(lookups.ids().size()) {
    tables_.resize(table_rows.size());
    std::int64_t next = 0;
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      auto& table = tables_[t];
      table.features = std::span(by_table_.features)
                           .subspan(by_table_.first[t], by_table_.first[t + 1] - by_table_.first[t]);
      table.rows = table_rows[t];
      table.begin = next;
      for (const auto f : table.features) next += lookups.last(f) - lookups.first(f);
      table.end = next;
    }
    // Longest first: the threads finish together.
    largest_first_.resize(tables_.size());
    std::iota(largest_first_.begin(), largest_first_.end(), 0);
    std::ranges::stable_sort(largest_first_, [this](auto a, auto b) {
      return tables_[a].end - tables_[a].begin > tables_[b].end - tables_[b].begin;
    });
  }

  Plan make() {
    const auto num_tables = static_cast<std::int64_t>(tables_.size());
    for_each_unit(num_tables, [this](std::int64_t i) { sort(tables_[largest_first_[i]]); });
    std::int64_t num_unique = 0;
    for (std::int64_t t = 0; t < num_tables; ++t) {
      if (tables_[t].out_of_range) refuse(t);
      tables_[t].first_unique = num_unique;
      num_unique += tables_[t].num_unique;
    }
    const auto num_lookups = lookups_.ids().size();
    Plan plan{Buffer<std::int64_t>(num_unique), Buffer<std::int64_t>(num_tables * num_ranks_ + 1),
              Buffer<std::int32_t>(num_lookups), Buffer<std::int32_t>(num_unique + 1),
              Buffer<std::int32_t>(num_lookups)};
    std::fill_n(plan.block_offsets.data(), plan.block_offsets.size(), 0);
    plan.segment_offsets[num_unique] = static_cast<std::int32_t>(num_lookups);
    for_each_unit(num_tables, [&](std::int64_t i) { write(plan, largest_first_[i]); });
    for (std::size_t b = 1; b < plan.block_offsets.size(); ++b)
      plan.block_offsets[b] += plan.block_offsets[b - 1];
    return plan;
  }

 private:
  // fill(lookup): the word of each lookup of the table, in ascending order.
  template <class Word>
  void fill(const TableOrder& table, const Word& word) {
    std::uint64_t* out = words_.data() + table.begin;
    for (const auto f : table.features) {
      for (std::int64_t e = lookups_.first(f); e < lookups_.last(f); ++e) *out++ = word(e);
    }
  }

  void sort(TableOrder& table) noexcept {
    if (table.begin == table.end) return;
    if (table.rows == 0) {
      sort_open(table);
    } else {
      sort_vocabulary(table, VocabularyOrder(table.rows, num_ranks_));
    }
  }

  void sort_vocabulary(TableOrder& table, const VocabularyOrder& order) noexcept {
    const std::int64_t n = table.end - table.begin;
    bool out_of_range = false;
    if (order.key_bits() + lookup_bits_ > 64) {  // a vocabulary of more than 2^33 rows: compare instead
      fill(table, [&](std::int64_t e) {
        out_of_range |= static_cast<std::uint64_t>(ids_[e]) >= order.rows;
        return static_cast<std::uint64_t>(e);
      });
      table.sorted = words_.data() + table.begin;
      std::sort(table.sorted, table.sorted + n, [&](std::uint64_t a, std::uint64_t b) {
        const auto x = order.key(ids_[a]), y = order.key(ids_[b]);
        return x != y ? x < y : a < b;
      });
      mark_changes_of_id(table, 0, n);
    } else {
      // An id out of range overflows its word; the words are dropped then.
      fill(table, [&](std::int64_t e) {
        out_of_range |= static_cast<std::uint64_t>(ids_[e]) >= order.rows;
        return order.key(ids_[e]) << lookup_bits_ | static_cast<std::uint64_t>(e);
      });
      if (!out_of_range) {
        table.sorted = radix_sort(words_.data() + table.begin, spare_.data() + table.begin, n, lookup_bits_,
                                  lookup_bits_ + order.key_bits());
        std::uint64_t before = ~table.sorted[0];
        for (std::int64_t i = 0; i < n; ++i) {
          const std::uint64_t word = table.sorted[i];
          const bool starts = ((word ^ before) & ~lookup_mask_) != 0;
          table.sorted[i] = (word & lookup_mask_) | (starts ? kStartsRow : 0);
          table.num_unique += starts;
          before = word;
        }
      }
    }
    table.out_of_range = out_of_range;
  }

  void sort_open(TableOrder& table) noexcept {
    const std::int64_t n = table.end - table.begin;
    // Eight bits more than the lookups need: about 1 in 256 then meets another id with the same prefix.
    const int prefix_bits =
        std::min(64 - lookup_bits_, static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n))) + 8);
    const std::uint64_t prefix = ~(~std::uint64_t{0} >> prefix_bits);
    fill(table, [&](std::int64_t e) { return (hash(e) & ~lookup_mask_) | static_cast<std::uint64_t>(e); });
    table.sorted =
        radix_sort(words_.data() + table.begin, spare_.data() + table.begin, n, 64 - prefix_bits, 64);
    std::uint64_t* const sorted = table.sorted;
    for (std::int64_t i = 0, end; i < n; i = end) {
      for (end = i + 1; end < n && ((sorted[end] ^ sorted[i]) & prefix) == 0;) ++end;
      if (end - i == 1) {
        sorted[i] = (sorted[i] & lookup_mask_) | kStartsRow;
        ++table.num_unique;
        continue;
      }
      bool is_one_id = true;
      const std::int64_t id = ids_[sorted[i] & lookup_mask_];
      for (std::int64_t j = i; j < end; ++j) {
        sorted[j] &= lookup_mask_;
        is_one_id &= ids_[sorted[j]] == id;
      }
      if (is_one_id) {
        sorted[i] |= kStartsRow;
        ++table.num_unique;
      } else {
        std::sort(sorted + i, sorted + end, [this](std::uint64_t a, std::uint64_t b) {
          return ids_[a] != ids_[b] ? hash(a) < hash(b) : a < b;
        });
        mark_changes_of_id(table, i, end);
      }
    }
  }

  void mark_changes_of_id(TableOrder& table, std::int64_t begin, std::int64_t end) noexcept {
    for (std::int64_t i = begin, before = 0; i < end; ++i) {
      const std::int64_t id = ids_[table.sorted[i]];
      if (i == begin || id != before) {
        table.sorted[i] |= kStartsRow;
        ++table.num_unique;
      }
      before = id;
    }
  }

  void write(Plan& plan, std::int64_t t) noexcept {
    const TableOrder& table = tables_[t];
    std::int64_t u = table.first_unique - 1;
    for (std::int64_t i = table.begin; i < table.end; ++i) {
      const std::uint64_t word = table.sorted[i - table.begin];
      const auto e = static_cast<std::int32_t>(word & ~kStartsRow);
      if (word & kStartsRow) {
        ++u;
        plan.unique_ids[u] = ids_[e];
        plan.segment_offsets[u] = static_cast<std::int32_t>(i);
      }
      plan.inverse[e] = static_cast<std::int32_t>(u);
      plan.entries[i] = e;
    }
    std::int64_t* const counts = plan.block_offsets.data() + 1 + t * num_ranks_;
    if (num_ranks_ == 1) {
      counts[0] = table.num_unique;
      return;
    }
    const auto num_ranks = static_cast<std::uint32_t>(num_ranks_);
    for (std::int64_t v = table.first_unique; v <= u; ++v) {
      const std::int64_t id = plan.unique_ids[v];
      ++counts[table.rows == 0 ? open_owner(id, num_ranks)
                               : vocabulary_owner(static_cast<std::uint64_t>(id), num_ranks)];
    }
  }

  std::uint64_t hash(std::uint64_t e) const { return mix64(static_cast<std::uint64_t>(ids_[e])); }

  [[noreturn]] void refuse(std::int64_t t) const {
    const TableOrder& table = tables_[t];
    for (const auto f : table.features) {
      for (std::int64_t e = lookups_.first(f); e < lookups_.last(f); ++e) {
        if (static_cast<std::uint64_t>(ids_[e]) >= static_cast<std::uint64_t>(table.rows)) {
          throw std::out_of_range("table " + std::to_string(t) + " feature " + std::to_string(f) +
                                  " position " + std::to_string(e - lookups_.first(f)) + " id " +
                                  std::to_string(ids_[e]) + " rows " + std::to_string(table.rows));
        }
      }
    }
    throw std::logic_error("an id was out of range and is no longer: the batch changed under the plan");
  }

  const Lookups& lookups_;
  const std::int64_t* ids_;
  std::int64_t num_ranks_;
  Lookups::ByTable by_table_;
  int lookup_bits_;  // a word is key or hash prefix | lookup
  std::uint64_t lookup_mask_;
  Buffer<std::uint64_t> words_, spare_;
  std::vector<TableOrder> tables_;
  std::vector<std::size_t> largest_first_;
};

}  // namespace

Plan make_plan(const Lookups& lookups, std::span<const std::int64_t> table_rows, std::int64_t num_ranks) {
  check_ranks(num_ranks);
  for (std::size_t t = 0; t < table_rows.size(); ++t) {
    if (table_rows[t] < 0) {
      throw std::invalid_argument("table_rows: got " + std::to_string(table_rows[t]) + " for table " +
                                  std::to_string(t) + ", wanted 0 (open) or more");
    }
  }
  return Planner(lookups, table_rows, num_ranks).make();
}

void owner_of(std::span<const std::int64_t> ids, std::int64_t rows, std::int64_t num_ranks,
              std::span<std::int32_t> out) {
  check_ranks(num_ranks);
  const auto n = static_cast<std::uint32_t>(num_ranks);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (rows == 0) {
      out[i] = static_cast<std::int32_t>(open_owner(ids[i], n));
      continue;
    }
    if (static_cast<std::uint64_t>(ids[i]) >= static_cast<std::uint64_t>(rows)) {
      throw std::out_of_range("position " + std::to_string(i) + " id " + std::to_string(ids[i]) + " rows " +
                              std::to_string(rows));
    }
    out[i] = static_cast<std::int32_t>(vocabulary_owner(static_cast<std::uint64_t>(ids[i]), n));
  }
}

void take(std::span<const std::int32_t> values, std::span<const std::int32_t> index,
          std::span<std::int32_t> out) {
  constexpr std::int64_t kRun = 1 << 15;
  std::atomic<bool> is_outside{false};
  for_each_run(static_cast<std::int64_t>(index.size()), kRun, [&](std::int64_t begin, std::int64_t end) {
    bool outside = false;
    for (std::int64_t i = begin; i < end; ++i)
      outside |= static_cast<std::uint32_t>(index[i]) >= values.size();
    if (outside) {
      is_outside = true;
      return;
    }
    for (std::int64_t i = begin; i < end; ++i) out[i] = values[index[i]];
  });
  if (is_outside) {
    throw std::out_of_range("take: an index is outside [0, " + std::to_string(values.size()) + ")");
  }
}

}  // namespace colonnade
