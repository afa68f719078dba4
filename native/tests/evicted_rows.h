// Where rows that leave a Dram go in tests.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "../dram.h"

namespace colonnade {

inline const TableSink nowhere = [](std::int64_t, const EvictedRows&) {};

// What left, by table.
struct Left {
  struct Rows {
    std::vector<std::int64_t> ids;
    std::vector<std::byte> records;
    std::vector<std::uint8_t> frequencies;
    std::vector<bool> is_for_commit;
  };
  std::vector<Rows> tables;
  std::mutex mutex;

  explicit Left(const Dram& dram) : tables(static_cast<std::size_t>(dram.num_tables())) {}
  TableSink sink() {
    return [this](std::int64_t t, const EvictedRows& rows) {
      const std::scoped_lock lock(mutex);
      Rows& mine = tables[t];
      const auto stride = static_cast<std::size_t>(rows.layout->record_bytes());
      for (std::size_t i = 0; i < rows.ids.size(); ++i) {
        mine.ids.push_back(rows.ids[i]);
        mine.frequencies.push_back(rows.frequencies[i]);
        mine.is_for_commit.push_back(rows.is_for_commit);
        mine.records.resize(mine.records.size() + stride);
        rows.pack(i, mine.records.data() + mine.records.size() - stride);
      }
    };
  }
};

}  // namespace colonnade
