// What stores on disk need: row index, segments, checksums.
#include "bind/arrays.h"
#include "crc32c.h"
#include "row_index.h"
#include "segment_reader.h"

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

// One batch of segment reads under way; holds its arrays until the last worker is done with them.
class SegmentRead {
 public:
  SegmentRead(SegmentReader& reader, In ids, In places, Out out, In segments, In fds)
      : arrays_{ids, places, segments, fds}, out_(out) {
    const auto i = elements<const int64_t>(ids, "ids", {-1});
    const auto n = static_cast<int64_t>(i.size());
    const auto p = elements<const int64_t>(places, "places", {n});
    const auto o = elements<uint8_t>(out, "out", {n, -1});
    const auto s = elements<const int64_t>(segments, "segments", {-1});
    const auto f = elements<const int32_t>(fds, "fds", {static_cast<int64_t>(s.size())});
    job_ = reader.read({i.data(), p.data(), o.data(), i.size(), out.shape(1), s.data(), f.data(), s.size()});
  }
  ~SegmentRead() {
    if (job_) job_->wait();  // a worker may still be writing to `out`
  }
  SegmentRead(SegmentRead&&) = default;

  std::optional<std::tuple<const char*, int64_t, int>> wait() {
    static constexpr const char* kKinds[] = {"system", "truncated", "checksum", "other_id"};
    const std::optional<ReadFault> fault = job_->wait();
    if (!fault) return std::nullopt;
    return std::tuple{kKinds[static_cast<int>(fault->kind)], fault->place, fault->error};
  }

 private:
  std::vector<In> arrays_;
  Out out_;
  std::shared_ptr<ReadJob> job_;
};

void bind_segments(nb::module_& m) {
  m.def(
      "frame_records",
      [](In ids, std::optional<In> records, size_t record_bytes, uint64_t first_place, Out frames) {
        const auto i = elements<const int64_t>(ids, "ids", {-1});
        const auto n = static_cast<int64_t>(i.size());
        const auto stride = static_cast<int64_t>(frame_stride(record_bytes));
        const uint8_t* r = nullptr;
        if (records)
          r = elements<const uint8_t>(*records, "records", {n, static_cast<int64_t>(record_bytes)}).data();
        const auto f = elements<uint8_t>(frames, "frames", {n, stride});
        nb::gil_scoped_release release;
        frame_records(i.data(), r, i.size(), record_bytes, first_place, f.data());
      },
      "ids"_a, "records"_a.none(), "record_bytes"_a, "first_place"_a, "frames"_a);
  m.def(
      "check_records",
      [](In frames, size_t record_bytes, uint64_t first_place) {
        const auto stride = static_cast<int64_t>(frame_stride(record_bytes));
        const auto f = elements<const uint8_t>(frames, "frames", {-1, stride});
        const auto n = frames.shape(0);
        nb::gil_scoped_release release;
        return check_records(f.data(), n, record_bytes, first_place);
      },
      "frames"_a, "record_bytes"_a, "first_place"_a);
  nb::class_<SegmentRead>(m, "SegmentRead")
      .def("wait", &SegmentRead::wait, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<SegmentReader>(m, "SegmentReader")
      .def(nb::init<int>(), "num_threads"_a)
      .def(
          "read",
          [](SegmentReader& self, In ids, In places, Out out, In segments, In fds) {
            return SegmentRead(self, ids, places, out, segments, fds);
          },
          "ids"_a, "places"_a, "out"_a, "segments"_a, "fds"_a, nb::keep_alive<0, 1>());
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
        const auto* bytes = data.data();
        const auto size = data.nbytes();
        nb::gil_scoped_release release;
        return crc32c(0, bytes, size);
      },
      "data"_a);
  bind_row_index(m);
  bind_segments(m);
}

}  // namespace colonnade
