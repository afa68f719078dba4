#include "plan.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hash.h"
#include "radix.h"
#include "row_order.h"
#include "threads.h"

namespace colonnade {

namespace {

constexpr std::uint32_t kStartsRow = std::uint32_t{1} << 31;  // flag bit of a lookup; there are fewer lookups
constexpr std::int64_t kFew = 32;                             // sorted by comparison
constexpr std::int64_t kSharedTable = 1 << 15;                // lookups from which threads share one table
constexpr int kPrefixBits = 8;  // hash bits beyond those that count the lookups: 1 in 256 collides

void check_owners(std::int64_t num_owners) {
  if (num_owners < 1 || num_owners > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("num_owners: got " + std::to_string(num_owners) + ", wanted 1 .. 2^31 - 1");
  }
}

struct Range {
  std::int64_t begin, end;
};

struct TableOrder {
  std::span<const std::int32_t> features;
  std::vector<Range> lookups;  // adjacent ones joined
  std::int64_t rows, num_owners;
  std::int64_t first_block;         // in the plan
  std::int64_t begin = 0, end = 0;  // the table's entries in the plan
  bool out_of_range = false;
  std::int64_t num_unique = -1;  // -1: not counted yet
  std::int64_t first_unique = 0;

  std::int64_t size() const { return end - begin; }
};

// Run of a table's entries, written by one thread.
struct Run {
  std::int64_t table, begin, end;
  std::int64_t rows_begun = 0, rows_before = 0;  // rows that begin in the run, and in the table before it
  bool is_written = false;
};

// Working memory for the sort of one table.
struct Desk {
  std::uint64_t* words;
  std::uint64_t* spare;
  std::span<Counters> chunks;
};

template <class Visit>
void for_each_chunk(std::size_t chunks, const Visit& visit) noexcept {
  if (chunks == 1) {
    visit(0);
  } else {
    for_each_unit(static_cast<std::int64_t>(chunks), visit);
  }
}

class Planner {
 public:
  Planner(const Lookups& lookups, std::span<const std::int64_t> table_rows, std::span<const std::int64_t> num_owners)
      : lookups_(lookups),
        ids_(lookups.ids().data()),
        by_table_(lookups.by_table(static_cast<std::int64_t>(table_rows.size()))),
        tables_(table_rows.size()) {
    std::int64_t next = 0;
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      auto& table = tables_[t];
      table.features = std::span(by_table_.features)
                           .subspan(by_table_.first[t], by_table_.first[t + 1] - by_table_.first[t]);
      table.rows = table_rows[t];
      table.num_owners = num_owners[t];
      table.first_block = num_blocks_;
      num_blocks_ += num_owners[t];
      table.begin = next;
      for (const auto f : table.features) {
        const Range range{lookups.first(f), lookups.last(f)};
        if (range.begin == range.end) continue;
        if (!table.lookups.empty() && table.lookups.back().end == range.begin) {
          table.lookups.back().end = range.end;
        } else {
          table.lookups.push_back(range);
        }
        next += range.end - range.begin;
      }
      table.end = next;
    }
    // Longest first, so that the threads finish together; similar ones in the order in which they are written.
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      if (tables_[t].size() > 0) {
        order_.push_back(t);
      } else {
        tables_[t].num_unique = 0;
      }
    }
    std::ranges::stable_sort(order_, std::greater<>(), [this](auto t) {
      return std::bit_width(static_cast<std::uint64_t>(tables_[t].size()));
    });
  }

  Plan make() {
    const auto num_lookups = lookups_.num_lookups();
    const auto num_tables = static_cast<std::int64_t>(tables_.size());
    Plan plan{Buffer<std::int64_t>(num_lookups), Buffer<std::int64_t>(num_blocks_ + 1),
              Buffer<std::int32_t>(num_lookups), Buffer<std::int32_t>(num_lookups + 1),
              Buffer<std::int32_t>(num_lookups)};
    entries_ = reinterpret_cast<std::uint32_t*>(plan.entries.data());
    sort_and_write(plan);
    for (std::int64_t t = 0; t < num_tables; ++t) {
      if (tables_[t].out_of_range) refuse(t);
    }
    for_each_unit(static_cast<std::int64_t>(runs_.size()), [&](std::int64_t r) {
      if (!runs_[r].is_written) write(plan, runs_[r]);
    });
    plan.unique_ids.shrink(next_unique_);
    plan.segment_offsets.shrink(next_unique_ + 1);
    plan.segment_offsets[next_unique_] = static_cast<std::int32_t>(num_lookups);
    count_blocks(plan);
    return plan;
  }

 private:
  // Threads share a table that would occupy one of them alone; other tables are sorted by one thread each.
  void sort_and_write(Plan& plan) {
    const std::int64_t num_lookups = lookups_.num_lookups(), threads = num_threads();
    std::vector<std::size_t> whole;
    std::int64_t longest = 0;
    for (const auto t : order_) {
      const std::int64_t n = tables_[t].size();
      if (threads > 1 && n >= kSharedTable && n * threads * 2 > num_lookups) {
        sort_shared(t, threads);
      } else {
        whole.push_back(t);
        longest = std::max(longest, n);
      }
    }

    const std::size_t first_run = runs_.size();
    for (const auto t : whole)
      runs_.push_back({static_cast<std::int64_t>(t), tables_[t].begin, tables_[t].end});
    // One desk per thread, so that its memory stays in that processor's cache. For the same reason the thread that
    // sorted a table writes it, once the tables before it are counted.
    const auto num_desks = std::min<std::int64_t>(threads, static_cast<std::int64_t>(whole.size()));
    Buffer<std::uint64_t> words(2 * longest * num_desks);
    Buffer<Counters> counters(num_desks);
    std::vector<std::vector<Run*>> waiting(num_desks);
    for (auto& runs : waiting) runs.reserve(whole.size());
    std::atomic<std::size_t> next{0};
    for_each_unit(num_desks, [&](std::int64_t d) {
      const Desk desk{
          words.data() + 2 * d * longest, words.data() + (2 * d + 1) * longest, {counters.data() + d, 1}};
      for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < whole.size();) {
        auto& table = tables_[whole[i]];
        auto& run = runs_[first_run + i];
        run.rows_begun = sort(table, desk);
        if (table.out_of_range) continue;  // later tables stay unwritten, and the plan is rejected
        waiting[d].push_back(&run);
        const std::int64_t num_counted = publish(table, run.rows_begun);
        std::erase_if(waiting[d], [&](Run* of) {
          if (of->table >= num_counted) return false;
          write(plan, *of);
          return true;
        });
      }
    });
  }

  void sort_shared(std::size_t t, std::int64_t threads) {
    auto& table = tables_[t];
    Buffer<std::uint64_t> words(2 * table.size());
    Buffer<Counters> counters(threads);
    sort(table, {words.data(), words.data() + table.size(), {counters.data(), counters.size()}});
    if (table.out_of_range) return;
    const std::size_t first_run = runs_.size();
    for (std::int64_t c = 0; c < threads; ++c) {
      runs_.push_back({static_cast<std::int64_t>(t), table.begin + cut(table.size(), threads, c),
                       table.begin + cut(table.size(), threads, c + 1)});
    }
    for_each_unit(threads, [&](std::int64_t c) {
      auto& run = runs_[first_run + c];
      run.rows_begun = count_rows(run.begin, run.end);
    });
    std::int64_t num_rows = 0;
    for (std::int64_t c = 0; c < threads; ++c) {
      auto& run = runs_[first_run + c];
      run.rows_before = num_rows;
      num_rows += run.rows_begun;
    }
    publish(table, num_rows);
  }

  // Record that a table's rows are counted. Return the number of tables that are counted with all before them: the
  // positions of their first unique rows are known.
  std::int64_t publish(TableOrder& table, std::int64_t num_rows) noexcept {
    const std::scoped_lock lock(mutex_);
    table.num_unique = num_rows;
    for (; num_counted_ < tables_.size() && tables_[num_counted_].num_unique >= 0; ++num_counted_) {
      tables_[num_counted_].first_unique = next_unique_;
      next_unique_ += tables_[num_counted_].num_unique;
    }
    return static_cast<std::int64_t>(num_counted_);
  }

  // Return the beginning of chunk c of n items.
  static std::int64_t cut(std::int64_t n, std::int64_t chunks, std::int64_t c) {
    return static_cast<std::int64_t>(static_cast<unsigned __int128>(n) * c / chunks);
  }

  // Write entries[table.begin, table.end): its lookups in the plan's order, | kStartsRow. Return their number of rows,
  // if the desk has one chunk.
  std::int64_t sort(TableOrder& table, const Desk& desk) noexcept {
    if (table.rows == 0) return sort(table, desk, HashOrder{});
    if (table.num_owners == 1) return sort(table, desk, DirectOrder{static_cast<std::uint64_t>(table.rows)});
    return sort(table, desk, DealtOrder(table.rows, table.num_owners));
  }

  template <class Order>
  std::int64_t sort(TableOrder& table, const Desk& desk, const Order& order) noexcept {
    const std::int64_t n = table.size();
    const int position_bits = std::bit_width(
        static_cast<std::uint64_t>(table.lookups.back().end - table.lookups.front().begin - 1));
    int bits = order.key_bits();
    if constexpr (std::is_same_v<Order, HashOrder>)
      bits = std::min(static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n - 1))) + kPrefixBits,
                      2 * kMaxDigitBits);
    bits = std::min({bits, kMaxKeyBits, 64 - position_bits});
    return bits + position_bits <= 32 ? sort_words<std::uint32_t>(table, desk, order, position_bits, bits)
                                      : sort_words<std::uint64_t>(table, desk, order, position_bits, bits);
  }

  // Sort by the highest `bits` of the keys; rows with equal bits are compared afterwards.
  template <class Word, class Order>
  std::int64_t sort_words(TableOrder& table, const Desk& desk, const Order& order, int position_bits,
                          int bits) noexcept {
    const std::int64_t n = table.size(), first = table.lookups.front().begin;
    const int dropped = order.key_bits() - bits;
    const Digits digits(n, bits);
    const std::size_t values = digits.values();
    const auto num_chunks = desk.chunks.size();
    const auto chunk_of = [&](std::int64_t c) {
      return Range{cut(n, num_chunks, c), cut(n, num_chunks, c + 1)};
    };
    auto* words = reinterpret_cast<Word*>(desk.words);
    auto* spare = reinterpret_cast<Word*>(desk.spare);

    std::atomic<bool> out_of_range{false};
    for_each_chunk(num_chunks, [&](std::int64_t c) {
      const auto [begin, end] = chunk_of(c);
      auto& counts = desk.chunks[c].counts;
      std::fill_n(counts, values, 0);
      bool all_inside = true;
      Word* out = words + begin;
      for_each_range(table, begin, end, [&](std::int64_t lo, std::int64_t hi) {
        for (std::int64_t e = lo; e < hi; ++e) {
          const std::int64_t id = ids_[e];
          all_inside &= order.has(id);
          const std::uint64_t key = order.key(id) >> dropped;
          ++counts[key & (values - 1)];
          *out++ = static_cast<Word>(key << position_bits | static_cast<std::uint64_t>(e - first));
        }
      });
      if (!all_inside) out_of_range = true;
    });
    table.out_of_range = out_of_range;
    if (table.out_of_range) return 0;  // its words have overflowed

    if (n <= kFew) {
      std::sort(words, words + n);
    } else {
      for (int p = 0, shift = position_bits; p < digits.passes; ++p, shift += digits.width) {
        if (p > 0) {
          for_each_chunk(num_chunks, [&](std::int64_t c) {
            const auto [begin, end] = chunk_of(c);
            count_digits<Word>({words + begin, words + end}, shift, values, desk.chunks[c]);
          });
        }
        place_digits(desk.chunks, values);
        for_each_chunk(num_chunks, [&](std::int64_t c) {
          const auto [begin, end] = chunk_of(c);
          scatter<Word>({words + begin, words + end}, shift, values, desk.chunks[c], spare);
        });
        std::swap(words, spare);
      }
    }
    const Word position_mask = static_cast<Word>((std::uint64_t{1} << position_bits) - 1);
    std::uint32_t* const entries = entries_ + table.begin;
    std::int64_t num_rows = 0;
    for_each_chunk(num_chunks, [&](std::int64_t c) {
      const auto [begin, end] = chunk_of(c);
      std::uint32_t rows_begun = 0;
      Word before = begin > 0 ? words[begin - 1] : static_cast<Word>(~words[0]);
      for (std::int64_t i = begin; i < end; ++i) {
        const Word word = words[i];
        const bool starts = (word ^ std::exchange(before, word)) > position_mask;
        entries[i] = static_cast<std::uint32_t>((word & position_mask) + first) | (starts ? kStartsRow : 0);
        rows_begun += starts;
      }
      if (num_chunks == 1) num_rows = rows_begun;
    });
    return dropped > 0 ? num_rows + tell_apart(table, order, num_chunks) : num_rows;
  }

  // Sort runs of lookups that share a prefix of their keys by key, if they have different rows. Return the number of
  // additional rows.
  template <class Order>
  std::int64_t tell_apart(const TableOrder& table, const Order& order, std::size_t num_chunks) noexcept {
    std::uint32_t* const entries = entries_ + table.begin;
    const auto id_of = [this](std::uint32_t entry) { return ids_[entry & ~kStartsRow]; };
    const auto first_run = [&](std::int64_t i) {  // the first that begins at i or later
      while (i < table.size() && !(entries[i] & kStartsRow)) ++i;
      return i;
    };
    std::vector<std::int64_t> bounds(num_chunks + 1);
    for (std::size_t c = 0; c <= num_chunks; ++c) bounds[c] = first_run(cut(table.size(), num_chunks, c));
    std::atomic<std::int64_t> more{0};
    for_each_chunk(num_chunks, [&](std::int64_t c) {
      std::int64_t before = 0;
      for (std::int64_t i = bounds[c]; i < bounds[c + 1]; ++i) {
        const std::uint32_t entry = entries[i];
        const std::int64_t id = id_of(entry);
        const bool is_other = id != std::exchange(before, id);
        if (!(is_other & !(entry & kStartsRow))) [[likely]] continue;
        std::int64_t begin = i;
        while (!(entries[begin] & kStartsRow)) --begin;
        i = first_run(i);
        for (std::int64_t j = begin; j < i; ++j) entries[j] &= ~kStartsRow;
        std::sort(entries + begin, entries + i, [&](std::uint32_t a, std::uint32_t b) {
          return ids_[a] != ids_[b] ? order.key(ids_[a]) < order.key(ids_[b]) : a < b;
        });
        for (std::int64_t j = i - 1; j > begin; --j) {
          if (id_of(entries[j]) == id_of(entries[j - 1])) continue;
          entries[j] |= kStartsRow;
          more.fetch_add(1, std::memory_order_relaxed);
        }
        entries[begin] |= kStartsRow;
        before = id_of(entries[--i]);
      }
    });
    return more;
  }

  // Call visit(begin, end) for the lookups of a table's positions [begin, end).
  template <class Visit>
  static void for_each_range(const TableOrder& table, std::int64_t begin, std::int64_t end,
                             const Visit& visit) {
    std::int64_t position = 0;
    for (const auto& range : table.lookups) {
      const std::int64_t past = range.begin - position;  // offset from position to lookup
      const std::int64_t lo = std::max(begin, position);
      position += range.end - range.begin;
      const std::int64_t hi = std::min(end, position);
      if (lo < hi) visit(past + lo, past + hi);
    }
  }

  std::int64_t count_rows(std::int64_t begin, std::int64_t end) const noexcept {
    std::uint32_t rows = 0;
    for (std::int64_t i = begin; i < end; ++i) rows += entries_[i] / kStartsRow;
    return rows;
  }

  // The run may begin within a row of the previous run.
  void write(Plan& plan, Run& run) noexcept {
    const std::int64_t first_unique = tables_[run.table].first_unique + run.rows_before;
    std::int64_t lead = run.begin;
    std::int32_t* const inverse = plan.inverse.data();
    for (; lead < run.end && !(entries_[lead] & kStartsRow); ++lead)
      inverse[entries_[lead]] = static_cast<std::int32_t>(first_unique - 1);
    // Backwards, so that a row's first entry is written last.
    std::int64_t u = first_unique + run.rows_begun - 1;
    std::int32_t* const segment_offsets = plan.segment_offsets.data();
    for (std::int64_t i = run.end; i-- > lead;) {
      const std::uint32_t entry = entries_[i], e = entry & ~kStartsRow;
      entries_[i] = e;
      inverse[e] = static_cast<std::int32_t>(u);
      segment_offsets[u] = static_cast<std::int32_t>(i);
      u -= entry / kStartsRow;
    }
    std::int64_t* const unique_ids = plan.unique_ids.data();
    for (u = first_unique; u < first_unique + run.rows_begun; ++u)
      unique_ids[u] = ids_[entries_[segment_offsets[u]]];
    run.is_written = true;
  }

  // Add to counts[r] the number of ids of owner r; ids are ordered by owner.
  template <class Owner>
  static void count_owners(std::span<const std::int64_t> ids, const Owner& owner, std::int64_t* counts) {
    if (ids.empty()) return;
    const auto first = owner(ids.front());
    if (first == owner(ids.back())) {
      counts[first] += static_cast<std::int64_t>(ids.size());
      return;
    }
    count_owners(ids.first(ids.size() / 2), owner, counts);
    count_owners(ids.subspan(ids.size() / 2), owner, counts);
  }

  void count_blocks(Plan& plan) noexcept {
    std::int64_t* const offsets = plan.block_offsets.data();
    std::fill_n(offsets, plan.block_offsets.size(), 0);
    const auto num_tables = static_cast<std::int64_t>(tables_.size());
    for_each_unit(num_blocks_ > num_tables ? num_tables : 0, [&](std::int64_t t) {
      const auto& table = tables_[t];
      if (table.num_owners == 1) return;
      const auto num_owners = static_cast<std::uint32_t>(table.num_owners);
      const std::span<const std::int64_t> ids(plan.unique_ids.data() + table.first_unique, table.num_unique);
      std::int64_t* const counts = offsets + table.first_block + 1;
      if (table.rows == 0) {
        count_owners(ids, [=](std::int64_t id) { return open_owner(id, num_owners); }, counts);
      } else {
        const VocabularyDeal deal(num_owners);
        count_owners(
            ids, [&](std::int64_t id) { return deal(static_cast<std::uint64_t>(id)).first; }, counts);
      }
    });
    for (const auto& table : tables_) {
      if (table.num_owners == 1) offsets[table.first_block + 1] = table.num_unique;
    }
    for (std::size_t b = 1; b < plan.block_offsets.size(); ++b) offsets[b] += offsets[b - 1];
  }

  [[noreturn]] void refuse(std::int64_t t) const {
    const TableOrder& table = tables_[t];
    check_inside(lookups_, table.features, t, table.rows);
    throw std::logic_error("an id was out of range and is no longer: the batch changed under the plan");
  }

  const Lookups& lookups_;
  const std::int64_t* ids_;
  std::int64_t num_blocks_ = 0;
  Lookups::ByTable by_table_;
  std::vector<TableOrder> tables_;
  std::vector<std::size_t> order_;  // of tables with lookups
  std::vector<Run> runs_;
  std::uint32_t* entries_ = nullptr;  // of the plan
  std::mutex mutex_;
  std::size_t num_counted_ = 0;
  std::int64_t next_unique_ = 0;
};

}  // namespace

Plan make_plan(const Lookups& lookups, std::span<const std::int64_t> table_rows,
               std::span<const std::int64_t> num_owners) {
  if (num_owners.size() != table_rows.size()) {
    throw std::invalid_argument("num_owners: got " + std::to_string(num_owners.size()) + " elements, wanted one for each of " +
                                std::to_string(table_rows.size()) + " tables");
  }
  for (const auto owners : num_owners) check_owners(owners);
  for (std::size_t t = 0; t < table_rows.size(); ++t) {
    if (table_rows[t] < 0) {
      throw std::invalid_argument("table_rows: got " + std::to_string(table_rows[t]) + " for table " +
                                  std::to_string(t) + ", wanted 0 (open) or more");
    }
  }
  return Planner(lookups, table_rows, num_owners).make();
}

void owner_of(std::span<const std::int64_t> ids, std::int64_t rows, std::int64_t num_owners,
              std::span<std::int32_t> out) {
  check_owners(num_owners);
  const auto n = static_cast<std::uint32_t>(num_owners);
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
