// Bindings of eviction orders, admission sketches and row norms of open tables.
#include "retention.h"

#include "bind/arrays.h"
#include "row_norms.h"
#include "sketch.h"

namespace colonnade {

namespace {

LeaveBy order_named(const std::string& name) {
  if (name == "recency") return LeaveBy::recency;
  if (name == "frequency") return LeaveBy::frequency;
  if (name == "norm") return LeaveBy::norm;
  throw std::invalid_argument("by: got '" + name + "', choose from frequency, norm, recency");
}

auto columns(const std::vector<RetainedRow>& rows) {
  std::vector<int64_t> ids;
  std::vector<int32_t> steps, values;
  {
    nb::gil_scoped_release release;
    ids.reserve(rows.size());
    steps.reserve(rows.size());
    values.reserve(rows.size());
    for (const RetainedRow& row : rows) {
      ids.push_back(row.id);
      steps.push_back(static_cast<int32_t>(row.step));
      values.push_back(static_cast<int32_t>(row.value));
    }
  }
  return std::tuple(tensor(std::move(ids)), tensor(std::move(steps)), tensor(std::move(values)));
}

auto state(const Retention& self) {
  std::vector<RetainedRow> rows;
  {
    nb::gil_scoped_release release;
    rows = self.rows();
  }
  return columns(rows);
}

auto save_some(Retention& self, int64_t most) {
  std::vector<RetainedRow> rows;
  {
    nb::gil_scoped_release release;
    rows = self.save_some(most);
  }
  return columns(rows);
}

void restore(Retention& self, In ids, In steps, In values) {
  const auto i = elements<const int64_t>(ids, "ids", {-1});
  const auto s = unsigned_bits(elements<const int32_t>(steps, "steps", {length(i)}));
  const auto v = unsigned_bits(elements<const int32_t>(values, "values", {length(i)}));
  nb::gil_scoped_release release;
  std::vector<RetainedRow> rows;
  for (size_t k = 0; k < i.size(); ++k) rows.push_back({i[k], s[k], v[k]});
  self.restore(std::move(rows));
}

}  // namespace

void bind_retention(nb::module_& m) {
  nb::class_<Retention>(m, "Retention")
      .def(
          "__init__",
          [](Retention* self, const std::string& by, int64_t max_rows, int64_t max_age, int64_t halve_steps,
             int64_t num_shares) {
            new (self) Retention({order_named(by), max_rows, max_age, halve_steps, num_shares});
          },
          "by"_a, "max_rows"_a, "max_age"_a, "halve_steps"_a, "num_shares"_a)
      .def(
          "record_updates",
          [](Retention& self, In ids, std::optional<In> norms, int64_t step) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            std::span<const double> n;
            if (norms) n = elements<const double>(*norms, "norms", {length(i)});
            std::vector<int64_t> left;
            {
              nb::gil_scoped_release release;
              left = self.record_updates(i, n, step);
            }
            return tensor(std::move(left));
          },
          "ids"_a, "norms"_a.none(), "step"_a)
      .def(
          "remove",
          [](Retention& self, In ids) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            nb::gil_scoped_release release;
            self.remove(i);
          },
          "ids"_a)
      .def("state", &state)
      .def("begin_snapshot", &Retention::begin_snapshot, nb::call_guard<nb::gil_scoped_release>())
      .def("save_some", &save_some, "most"_a)
      .def("restore", &restore, "ids"_a, "steps"_a, "values"_a)
      .def("__len__", &Retention::size)
      .def_prop_ro("bytes", &Retention::bytes)
      .def_prop_ro("work", &Retention::work);

  nb::class_<CountMinSketch>(m, "CountMinSketch")
      .def(
          "__init__",
          [](CountMinSketch* self, int64_t threshold, int64_t depth, int64_t width, int64_t num_blocks,
             int64_t first_block, int64_t end_block, int64_t halve_steps) {
            new (self) CountMinSketch({threshold, depth, width, num_blocks, first_block, end_block, halve_steps});
          },
          "threshold"_a, "depth"_a, "width"_a, "num_blocks"_a, "first_block"_a, "end_block"_a, "halve_steps"_a)
      .def(
          "record_updates",
          [](CountMinSketch& self, In ids, int64_t step) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            std::vector<uint8_t> result;
            {
              nb::gil_scoped_release release;
              result = self.record_updates(i, step);
            }
            return tensor(std::move(result));
          },
          "ids"_a, "step"_a)
      .def_prop_ro("counters",
                   [](nb::handle handle) {
                     auto counters = nb::cast<CountMinSketch&>(handle).counters();
                     return Made<uint8_t>(counters.data(), {counters.size()}, handle);
                   })
      .def_prop_rw("step", &CountMinSketch::step, &CountMinSketch::set_step)
      .def("begin_snapshot", &CountMinSketch::begin_snapshot, nb::call_guard<nb::gil_scoped_release>())
      .def("saved",
           [](CountMinSketch& self) {
             auto* owned = new Buffer<uint8_t>();
             nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Buffer<uint8_t>*>(p); });
             {
               nb::gil_scoped_release release;
               *owned = self.saved();
             }
             return Made<uint8_t>(owned->data(), {owned->size()}, owner);
           })
      .def_prop_ro("work", &CountMinSketch::work);

  m.def(
      "squared_norms",
      [](intptr_t address, int64_t stride_bytes, int64_t dim, const std::string& dtype, In slots) {
        const auto s = unsigned_bits(elements<const int32_t>(slots, "slots", {-1}));
        const Dtype kind = dtype_named(dtype);
        std::vector<double> result;
        {
          nb::gil_scoped_release release;
          result = squared_norms(reinterpret_cast<const std::byte*>(address), stride_bytes, dim, kind, s);
        }
        return tensor(std::move(result));
      },
      "address"_a, "stride_bytes"_a, "dim"_a, "dtype"_a, "slots"_a);
}

}  // namespace colonnade
