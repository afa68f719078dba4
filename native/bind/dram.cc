// Bindings of rows in memory.
#include "bind/arrays.h"
#include "dram.h"

namespace colonnade {

namespace {

// Result of an acquire, with the evicted rows.
struct Collected {
  Acquired acquired;
  std::vector<std::vector<int64_t>> ids;       // by table
  std::vector<std::vector<uint8_t>> records, frequencies;
  std::vector<size_t> record_bytes;

  explicit Collected(const Dram& dram) : ids(dram.num_tables()), records(dram.num_tables()), frequencies(dram.num_tables()) {
    for (int64_t t = 0; t < dram.num_tables(); ++t)
      record_bytes.push_back(static_cast<size_t>(dram.layout(t).record_bytes()));
  }
  TableSink sink() {
    return [this](int64_t t, const EvictedRows& rows) {
      const size_t before = records[t].size();
      records[t].resize(before + rows.ids.size() * record_bytes[t]);
      for (size_t i = 0; i < rows.ids.size(); ++i)
        rows.pack(i, reinterpret_cast<std::byte*>(records[t].data() + before + i * record_bytes[t]));
      ids[t].insert(ids[t].end(), rows.ids.begin(), rows.ids.end());
      frequencies[t].insert(frequencies[t].end(), rows.frequencies.begin(), rows.frequencies.end());
    };
  }
};

// For tables without a backing, which never evict a dirty row.
void nowhere(int64_t, const EvictedRows&) {}

void make_dram(Dram* self, const std::vector<TableSettings>& tables, const std::string& dtype, bool is_split) {
  for (const auto& table : tables)
    if (table.first_column < 0) throw std::invalid_argument("Dram: a first column below 0");
  new (self) Dram(tables, {dtype_named(dtype), is_split});
}

auto split(const std::vector<std::pair<int64_t, uint32_t>>& rows) {
  std::vector<int64_t> ids;
  std::vector<int32_t> slots;
  for (const auto& [id, slot] : rows) {
    ids.push_back(id);
    slots.push_back(static_cast<int32_t>(slot));
  }
  return std::pair(tensor(std::move(ids)), tensor(std::move(slots)));
}

auto dram_rows(const Dram& dram, int64_t table, bool only_dirty) {
  std::vector<std::pair<int64_t, uint32_t>> rows;
  {
    nb::gil_scoped_release release;
    rows = dram.resident(table, only_dirty);
  }
  return split(rows);
}

std::span<const uint32_t> slots_in(const In& slots) {
  return unsigned_bits(elements<const int32_t>(slots, "slots", {-1}));
}

}  // namespace

void bind_dram(nb::module_& m) {
  nb::class_<Collected>(m, "Acquired")
      .def_prop_ro(
          "missing", [](const Collected& self) { return tensor(self.acquired.missing); }, kOwned)
      .def_prop_ro("num_mapped", [](const Collected& self) { return self.acquired.num_mapped; })
      .def_prop_ro(
          "evicted_ids",
          [](const Collected& self) {
            nb::list all;
            for (const auto& ids : self.ids) all.append(tensor(ids));
            return all;
          })
      .def_prop_ro(
          "evicted_frequencies",
          [](const Collected& self) {
            nb::list all;
            for (const auto& frequencies : self.frequencies) all.append(tensor(frequencies));
            return all;
          })
      .def_prop_ro(
          "evicted_records",
          [](nb::handle handle) {
            auto& self = nb::cast<Collected&>(handle);
            nb::list all;
            for (size_t t = 0; t < self.records.size(); ++t)
              all.append(Made<uint8_t>(self.records[t].data(), {self.ids[t].size(), self.record_bytes[t]}, handle));
            return all;
          })
      .def_prop_ro("num_evicted", [](const Collected& self) { return self.acquired.num_evicted; });

  nb::class_<PartInitialValues>(m, "PartInitialValues")
      .def(
          "__init__",
          [](PartInitialValues* self, int64_t dim, int64_t state, double init_scale, double initial_state,
             int64_t initial_count) {
            new (self) PartInitialValues{dim, state, init_scale, initial_state, initial_count};
          },
          "dim"_a, "state"_a, "init_scale"_a, "initial_state"_a, "initial_count"_a);

  nb::class_<TableSettings>(m, "TableSettings")
      .def(
          "__init__",
          [](TableSettings* self, const std::vector<PartInitialValues>& parts, int64_t state_elements, int64_t rows,
             int64_t capacity_rows, uint64_t seed, bool can_evict, const std::string& directory, int64_t num_owners,
             int64_t place, int64_t first_column, int64_t most_rows) {
            new (self) TableSettings{parts,      state_elements, rows,  capacity_rows, seed,     can_evict,
                                     directory, num_owners,     place, first_column,  most_rows};
          },
          nb::kw_only(), "parts"_a, "state_elements"_a, "rows"_a, "capacity_rows"_a, "seed"_a, "can_evict"_a = true,
          "directory"_a = "", "num_owners"_a = 1, "place"_a = 0, "first_column"_a = 0, "most_rows"_a = 0);

  nb::class_<Dram>(m, "Dram")
      .def("__init__", &make_dram, "tables"_a, "dtype"_a, "is_split"_a)
      .def(
          "acquire",
          [](Dram& self, In ids, In offsets, Out slots, bool initialise, std::optional<In> next_use) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto o = elements<const int64_t>(offsets, "offsets", {-1});
            const auto s = elements<int32_t>(slots, "slots", {length(i)});
            std::span<const uint8_t> hints;
            if (next_use) hints = elements<const uint8_t>(*next_use, "next_use", {length(i)});
            nb::gil_scoped_release release;
            auto collected = std::make_unique<Collected>(self);
            collected->acquired = self.acquire(i, o, hints, {reinterpret_cast<uint32_t*>(s.data()), s.size()}, initialise,
                                               collected->sink());
            return collected;
          },
          "ids"_a, "offsets"_a, "slots"_a, "initialise"_a, "next_use"_a = nb::none())
      .def(
          "resume",
          [](Dram& self, int64_t table, In slots, In frequencies) {
            const auto s = slots_in(slots);
            const auto h = elements<const uint8_t>(frequencies, "frequencies", {length(s)});
            nb::gil_scoped_release release;
            self.resume(table, s, h);
          },
          "table"_a, "slots"_a, "frequencies"_a)
      .def(
          "recall",
          [](Dram& self, int64_t table, In slots, int64_t steps) {
            const auto s = slots_in(slots);
            nb::gil_scoped_release release;
            self.recall(table, s, steps);
          },
          "table"_a, "slots"_a, "steps"_a)
      .def(
          "release",
          [](Dram& self, In slots, In offsets, bool dirty) {
            const auto s = slots_in(slots);
            const auto o = elements<const int64_t>(offsets, "offsets", {-1});
            nb::gil_scoped_release release;
            self.release(s, o, dirty);
          },
          "slots"_a, "offsets"_a, "dirty"_a)
      .def(
          "initialise",
          [](Dram& self, In ids, In slots, int64_t table) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto s = unsigned_bits(elements<const int32_t>(slots, "slots", {length(i)}));
            nb::gil_scoped_release release;
            self.initialise(table, i, s);
          },
          "ids"_a, "slots"_a, "table"_a)
      .def(
          "pack",
          [](const Dram& self, int64_t table, In slots, Out records) {
            const auto s = slots_in(slots);
            const auto r =
                elements<uint8_t>(records, "records", {length(s), self.layout(table).record_bytes()});
            nb::gil_scoped_release release;
            self.pack(table, s, reinterpret_cast<std::byte*>(r.data()));
          },
          "table"_a, "slots"_a, "records"_a)
      .def(
          "unpack",
          [](Dram& self, int64_t table, In slots, In records) {
            const auto s = slots_in(slots);
            const auto r =
                elements<const uint8_t>(records, "records", {length(s), self.layout(table).record_bytes()});
            nb::gil_scoped_release release;
            self.unpack(table, s, reinterpret_cast<const std::byte*>(r.data()));
          },
          "table"_a, "slots"_a, "records"_a)
      .def(
          "pack_blocks",
          [](const Dram& self, In slots, In counts, In widths, Out message) {
            const auto s = slots_in(slots);
            const auto c = elements<const int64_t>(counts, "counts", {-1});
            const auto w = elements<const int64_t>(widths, "widths", {-1});
            const auto m = elements<uint8_t>(message, "message", {-1});
            nb::gil_scoped_release release;
            self.pack_blocks(s, c, w, std::as_writable_bytes(m));
          },
          "slots"_a, "counts"_a, "widths"_a, "message"_a)
      .def(
          "unpack_blocks",
          [](Dram& self, In slots, In counts, In widths, In message) {
            const auto s = slots_in(slots);
            const auto c = elements<const int64_t>(counts, "counts", {-1});
            const auto w = elements<const int64_t>(widths, "widths", {-1});
            const auto m = elements<const uint8_t>(message, "message", {-1});
            nb::gil_scoped_release release;
            self.unpack_blocks(s, c, w, std::as_bytes(m));
          },
          "slots"_a, "counts"_a, "widths"_a, "message"_a)
      .def(
          "read",
          [](const Dram& self, int64_t table, In ids, Out out) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            auto* o = row_bytes(out, "out", self.dtype(), length(i), self.layout(table).dim);
            std::vector<int32_t> absent;
            {
              nb::gil_scoped_release release;
              absent = self.read(table, i, o);
            }
            return tensor(std::move(absent));
          },
          "table"_a, "ids"_a, "out"_a)
      .def(
          "initial_values",
          [](const Dram& self, int64_t table, In ids, Out out) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            auto* o = row_bytes(out, "out", self.dtype(), length(i), self.layout(table).dim);
            nb::gil_scoped_release release;
            self.initial_values(table, i, o);
          },
          "table"_a, "ids"_a, "out"_a)
      .def(
          "dirty", [](const Dram& self, int64_t table) { return dram_rows(self, table, true); }, "table"_a)
      .def(
          "resident", [](const Dram& self, int64_t table) { return dram_rows(self, table, false); },
          "table"_a)
      .def(
          "clean",
          [](Dram& self, int64_t table, In slots) {
            const auto s = slots_in(slots);
            nb::gil_scoped_release release;
            self.clean(table, s);
          },
          "table"_a, "slots"_a)
      .def(
          "clocks",
          [](const Dram& self, int64_t table, In slots) {
            return tensor(self.clocks(table, slots_in(slots)));
          },
          "table"_a, "slots"_a)
      .def(
          "erase",
          [](Dram& self, int64_t table, In ids) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            nb::gil_scoped_release release;
            self.erase(table, i, nowhere);
          },
          "table"_a, "ids"_a)
      .def(
          "weights_address",
          [](const Dram& self, int64_t table) {
            return reinterpret_cast<intptr_t>(self.layout(table).weights);
          },
          "table"_a)
      .def(
          "stride_bytes", [](const Dram& self, int64_t table) { return self.layout(table).weights_stride; },
          "table"_a)
      .def("num_slots_examined", &Dram::num_slots_examined, nb::call_guard<nb::gil_scoped_release>(), "table"_a)
      .def("pinned_share", &Dram::pinned_share, nb::call_guard<nb::gil_scoped_release>(), "table"_a)
      .def("capacity_rows", &Dram::capacity_rows, "table"_a)
      .def("can_resize", &Dram::can_resize, "table"_a)
      .def("num_rows", &Dram::num_rows, nb::call_guard<nb::gil_scoped_release>(), "table"_a)
      .def("resident_bytes", &Dram::resident_bytes, nb::call_guard<nb::gil_scoped_release>())
      .def("mapped_bytes", &Dram::mapped_bytes, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace colonnade
