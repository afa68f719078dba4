// Bindings of rows in memory over logs.
#include "bind/arrays.h"
#include "tiered_rows.h"

namespace colonnade {

namespace {

using Job = std::shared_ptr<AcquireJob>;
struct BoundJob {
  Job job;
};
// (table, kind, place, errno)
using Fault = std::optional<std::tuple<uint32_t, const char*, int64_t, int>>;

Fault fault_tuple(const std::optional<ReadFault>& fault) {
  static constexpr const char* kKinds[] = {"system", "truncated", "checksum"};
  if (!fault) return std::nullopt;
  return std::tuple{fault->source, kKinds[static_cast<int>(fault->kind)], fault->place, fault->error};
}

std::span<const uint32_t> slots_in(const In& slots) {
  return unsigned_bits(elements<const int32_t>(slots, "slots", {-1}));
}

}  // namespace

void bind_tiered(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<BoundJob>(m, "AcquireJob")
      .def_prop_ro("is_done", [](const BoundJob& self) { return self.job->is_done(); })
      .def("counts", [](const BoundJob& self) {
        const auto& counts = self.job->counts();
        nb::dict all;
        all["resident"] = counts.resident;
        all["mapped"] = counts.mapped;
        all["read"] = counts.read;
        all["copied"] = counts.copied;
        all["born"] = counts.born;
        all["evicted_clean"] = counts.evicted_clean;
        all["evicted_dirty"] = counts.evicted_dirty;
        all["bytes_read"] = counts.bytes_read;
        all["bytes_mapped"] = counts.bytes_mapped;
        all["bytes_evicted"] = counts.bytes_evicted;
        return all;
      });
  nb::class_<TieredRows>(m, "TieredRows")
      .def(
          "__init__",
          [](TieredRows* self, Dram& dram, const nb::list& logs, PageReader& reader, int64_t steps, Dram* cache) {
            std::vector<RowLog*> all;
            for (const auto& log : logs) all.push_back(log.is_none() ? nullptr : &nb::cast<RowLog&>(log));
            new (self) TieredRows(dram, std::move(all), reader, steps, cache);
          },
          "dram"_a, "logs"_a, "reader"_a, "steps"_a = 0, "cache"_a.none() = nb::none(), nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 6>())
      .def(
          "acquire",
          [](TieredRows& self, In ids, In offsets, Out slots, std::optional<In> next_use) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto o = elements<const int64_t>(offsets, "offsets", {-1});
            const auto s = elements<int32_t>(slots, "slots", {length(i)});
            std::span<const uint8_t> hints;
            if (next_use) hints = elements<const uint8_t>(*next_use, "next_use", {length(i)});
            nb::gil_scoped_release released;
            return BoundJob{self.acquire(i, o, hints, {reinterpret_cast<uint32_t*>(s.data()), s.size()})};
          },
          "ids"_a, "offsets"_a, "slots"_a, "next_use"_a = nb::none())
      .def(
          "wait",
          [](TieredRows& self, const BoundJob& job) {
            std::optional<ReadFault> fault;
            {
              nb::gil_scoped_release released;
              fault = self.wait(*job.job);
            }
            return fault_tuple(fault);
          },
          "job"_a)
      .def("settle",
           [](TieredRows& self) {
             std::optional<ReadFault> fault;
             {
               nb::gil_scoped_release released;
               fault = self.settle();
             }
             return fault_tuple(fault);
           })
      .def("fault", [](const TieredRows& self) { return fault_tuple(self.fault()); })
      .def(
          "read",
          [](TieredRows& self, int64_t table, In ids, Out out) {
            const Dram& dram = self.dram();
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            auto* o = row_bytes(out, "out", dram.dtype(), length(i), dram.layout(table).dim);
            std::optional<ReadFault> fault;
            {
              nb::gil_scoped_release released;
              fault = self.read(table, i, o);
            }
            return fault_tuple(fault);
          },
          "table"_a, "ids"_a, "out"_a)
      .def(
          "erase",
          [](TieredRows& self, int64_t table, In ids) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            nb::gil_scoped_release released;
            self.erase(table, i);
          },
          "table"_a, "ids"_a)
      .def(
          "write",
          [](TieredRows& self, int64_t table, In ids, In records) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto r = elements<const uint8_t>(records, "records", {length(i), self.dram().layout(table).record_bytes()});
            nb::gil_scoped_release released;
            self.write(table, i, reinterpret_cast<const std::byte*>(r.data()));
          },
          "table"_a, "ids"_a, "records"_a)
      .def("cache_counts",
           [](const TieredRows& self) {
             const auto counts = self.cache_counts();
             nb::dict all;
             all["hits"] = counts.hits;
             all["misses"] = counts.misses;
             all["rows_inserted"] = counts.rows_inserted;
             all["bytes_read"] = counts.bytes_read;
             all["bytes_inserted"] = counts.bytes_inserted;
             return all;
           })
      .def("resize", &TieredRows::resize, "table"_a, "capacity"_a, release)
      .def("write_dirty", &TieredRows::write_dirty, "table"_a, "rows"_a, release)
      .def("begin_snapshot", &TieredRows::begin_snapshot, release)
      .def(
          "before_update",
          [](TieredRows& self, In slots, In offsets) {
            const auto s = slots_in(slots);
            const auto o = elements<const int64_t>(offsets, "offsets", {-1});
            nb::gil_scoped_release released;
            self.before_update(s, o);
          },
          "slots"_a, "offsets"_a)
      .def("save_some", &TieredRows::save_some, "rows"_a, release)
      .def("end_snapshot", &TieredRows::end_snapshot, release);
}

}  // namespace colonnade
