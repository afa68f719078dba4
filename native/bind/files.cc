// What files of rows need: an index of ids, frames, checksums.
#include "bind/arrays.h"
#include "crc32c.h"
#include "frames.h"
#include "row_index.h"

namespace colonnade {

namespace {

void bind_row_index(nb::module_& m) {
  nb::class_<RowIndex>(m, "RowIndex")
      .def(nb::init<>())
      .def(
          "put",
          [](RowIndex& self, In ids, In values) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto v = elements<const int64_t>(values, "values", {static_cast<int64_t>(i.size())});
            nb::gil_scoped_release release;
            self.put(i, v);
          },
          "ids"_a, "values"_a)
      .def(
          "get",
          [](const RowIndex& self, In ids, Out out) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto o = elements<int64_t>(out, "out", {static_cast<int64_t>(i.size())});
            nb::gil_scoped_release release;
            self.get(i, o);
          },
          "ids"_a, "out"_a)
      .def(
          "erase",
          [](RowIndex& self, In ids) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            nb::gil_scoped_release release;
            self.erase(i);
          },
          "ids"_a)
      .def("items",
           [](const RowIndex& self) {
             std::vector<int64_t> ids, values;
             {
               nb::gil_scoped_release release;
               for (const auto& [id, value] : self.items()) {
                 ids.push_back(id);
                 values.push_back(value);
               }
             }
             return std::pair(tensor(std::move(ids)), tensor(std::move(values)));
           })
      .def("__len__", &RowIndex::size);
}

void bind_frames(nb::module_& m) {
  m.def(
      "frame_records",
      [](In ids, In records, size_t record_bytes, uint64_t first_place, Out frames) {
        const auto i = elements<const int64_t>(ids, "ids", {-1});
        const auto n = static_cast<int64_t>(i.size());
        const auto stride = static_cast<int64_t>(frame_stride(record_bytes));
        const auto r = elements<const uint8_t>(records, "records", {n, static_cast<int64_t>(record_bytes)});
        const auto f = elements<uint8_t>(frames, "frames", {n, stride});
        nb::gil_scoped_release release;
        frame_records(i.data(), r.data(), i.size(), record_bytes, first_place, f.data());
      },
      "ids"_a, "records"_a, "record_bytes"_a, "first_place"_a, "frames"_a);
  m.def(
      "check_records",
      [](In ids, In frames, size_t record_bytes, uint64_t first_place) {
        const auto stride = static_cast<int64_t>(frame_stride(record_bytes));
        const auto i = elements<const int64_t>(ids, "ids", {-1});
        const auto f = elements<const uint8_t>(frames, "frames", {static_cast<int64_t>(i.size()), stride});
        nb::gil_scoped_release release;
        return check_records(i.data(), f.data(), i.size(), record_bytes, first_place);
      },
      "ids"_a, "frames"_a, "record_bytes"_a, "first_place"_a);
}

}  // namespace

void bind_files(nb::module_& m) {
  m.def(
      "crc32c",
      [](In data) {
        int64_t step = 1;
        for (size_t i = data.ndim(); i-- > 0; step *= static_cast<int64_t>(data.shape(i))) {
          if (data.shape(i) > 1 && data.stride(i) != step && data.size()) {
            throw std::invalid_argument("data: got a strided array, wanted a contiguous one");
          }
        }
        check_memory(data, "data");
        const auto* bytes = data.data();
        const auto size = data.nbytes();
        nb::gil_scoped_release release;
        return crc32c(0, bytes, size);
      },
      "data"_a);
  bind_row_index(m);
  bind_frames(m);
}

}  // namespace colonnade
