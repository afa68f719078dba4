// Bindings for files of rows: an index of ids, frames, checksums, mappings.
#include "bind/arrays.h"
#include "crc32c.h"
#include "file_mapping.h"
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

void* pointer(int64_t address) { return reinterpret_cast<void*>(address); }

void bind_mappings(nb::module_& m) {
  m.def(
      "map_file",
      [](int fd, size_t offset, size_t length, size_t room, bool is_random) {
        nb::gil_scoped_release release;
        const FileMapping mapping = map_file(fd, offset, length, room, is_random);
        return std::pair(reinterpret_cast<int64_t>(mapping.address), mapping.error);
      },
      "fd"_a, "offset"_a, "length"_a, "room"_a, "is_random"_a = false);
  m.def("unmap_file", [](int64_t address) { unmap_file(pointer(address)); }, "address"_a);
  m.def("is_damaged", [](int64_t address) { return is_damaged(pointer(address)); }, "address"_a);
  m.def("num_damaged", &num_damaged);
  m.def("handle_faults", &handle_faults);
  m.def(
      "unchecked_blocks",
      [](In slots, uint64_t num_rows, uint64_t begin, uint64_t stride, uint64_t block_bytes, In checked) {
        const auto s = unsigned_bits(elements<const int32_t>(slots, "slots", {-1}));
        const auto c = elements<const uint8_t>(checked, "checked", {-1});
        if (!stride || !block_bytes || (num_rows && (begin + num_rows * stride - 1) / block_bytes >= c.size())) {
          throw std::invalid_argument("checked: got fewer blocks than the rows take");
        }
        std::vector<int64_t> unchecked(256);
        {
          nb::gil_scoped_release release;
          unchecked.resize(unchecked_blocks(s.data(), s.size(), num_rows, begin, stride, block_bytes, c.data(), unchecked.data(),
                                        unchecked.size()));
        }
        return unchecked;
      },
      "slots"_a, "num_rows"_a, "begin"_a, "stride"_a, "block_bytes"_a, "checked"_a);
}

}  // namespace

void bind_files(nb::module_& m) {
  m.def(
      "crc32c",
      [](In data, uint32_t before) {
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
        return crc32c(before, bytes, size);
      },
      "data"_a, "before"_a = 0);
  bind_mappings(m);
  bind_row_index(m);
  bind_frames(m);
}

}  // namespace colonnade
