// Bindings of stored rows: logs, and reads of their pages.
#include <cstring>

#include "bind/arrays.h"
#include "page_reader.h"
#include "row_log.h"

namespace colonnade {

namespace {

using Chunk = std::shared_ptr<LogChunk>;
struct BoundChunk {
  Chunk chunk;
};

Made<bool> stored_flags(const std::vector<RowAt>& locations) {
  auto* flags = new Buffer<bool>(locations.size());
  nb::capsule owner(flags, [](void* p) noexcept { delete static_cast<Buffer<bool>*>(p); });
  for (size_t i = 0; i < locations.size(); ++i) (*flags)[i] = locations[i] != RowAt::nowhere;
  return Made<bool>(flags->data(), {flags->size()}, owner);
}

// Calls a log without the GIL, because its lock may be held for a while.
template <class Ask>
auto without_gil(const Ask& ask) {
  nb::gil_scoped_release released;
  return ask();
}

// Pending reads of a batch; keeps its output alive until the reader is done.
class LogRead {
 public:
  LogRead(RowLog& log, PageReader& reader, const In& ids, Out out, bool is_demand) : out_(std::move(out)) {
    const auto i = elements<const int64_t>(ids, "ids", {-1});
    const auto n = static_cast<int64_t>(i.size());
    const auto width = static_cast<size_t>(log.record_bytes());
    uint8_t* const rows = elements<uint8_t>(out_, "out", {n, log.record_bytes()}).data();
    const Deliver deliver = [rows, width](uint32_t position, const uint8_t* payload) {
      std::memcpy(rows + position * width, payload, width);
    };
    nb::gil_scoped_release release;
    std::vector<uint32_t> positions(i.size());
    for (size_t p = 0; p < positions.size(); ++p) positions[p] = static_cast<uint32_t>(p);
    locations_.resize(i.size());
    ReadPlan plan;
    log.plan_reads(i, positions, 0, plan, deliver, locations_, {});
    job_ = reader.submit(std::move(plan), deliver, is_demand);
  }
  ~LogRead() {
    if (!job_) return;
    nb::gil_scoped_release release;
    job_->wait();  // the reader may still be writing to `out`
  }
  LogRead(const LogRead&) = delete;
  LogRead& operator=(const LogRead&) = delete;

  bool is_done() const { return job_->is_done(); }
  std::pair<Made<bool>, std::optional<std::tuple<const char*, int64_t, int>>> wait() {
    static constexpr const char* kKinds[] = {"system", "truncated", "checksum"};
    std::optional<ReadFault> fault;
    {
      nb::gil_scoped_release release;
      fault = job_->wait();
    }
    if (!fault) return {stored_flags(locations_), std::nullopt};
    return {stored_flags(locations_), std::tuple{kKinds[static_cast<int>(fault->kind)], fault->place, fault->error}};
  }

 private:
  Out out_;
  std::vector<RowAt> locations_;
  std::shared_ptr<ReadJob> job_;
};

void bind_reader(nb::module_& m) {
  nb::class_<LogRead>(m, "LogRead").def("wait", &LogRead::wait).def("is_done", &LogRead::is_done);
  nb::class_<PageReader>(m, "PageReader")
      .def(nb::init<const std::string&, int>(), "kind"_a = "auto", "depth"_a = 64)
      .def_prop_ro("kind", &PageReader::kind)
      .def("counts", [](const PageReader& self) {
        const ReadCounts counts = self.counts();
        nb::dict all;
        all["reads"] = counts.reads;
        all["pages"] = counts.pages;
        all["bytes"] = counts.bytes;
        all["rows"] = counts.rows;
        all["busy_seconds"] = counts.busy_seconds;
        return all;
      });
}

void bind_chunk(nb::module_& m) {
  nb::class_<BoundChunk>(m, "Chunk")
      .def_prop_ro("segment", [](const BoundChunk& self) { return self.chunk->segment; })
      .def_prop_ro("offset", [](const BoundChunk& self) { return self.chunk->offset; })
      .def_prop_ro("is_last", [](const BoundChunk& self) { return self.chunk->is_last; })
      .def_prop_ro("data", [](const BoundChunk& self) {
        auto* owned = new Chunk(self.chunk);
        nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Chunk*>(p); });
        const nb::ndarray<nb::numpy, uint8_t> array((*owned)->bytes.data(), {static_cast<size_t>((*owned)->num_bytes)}, owner);
        return nb::module_::import_("builtins").attr("memoryview")(nb::cast(array));
      });
}

void bind_row_log(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<RowLog>(m, "RowLog")
      .def(
          "__init__",
          [](RowLog* self, int64_t record_bytes, int64_t rows, int64_t num_owners, int64_t place, int64_t segment_bytes,
             int64_t chunk_bytes, int64_t num_streams, int64_t first_segment) {
            new (self) RowLog(RowLogSettings{record_bytes, rows, num_owners, place, segment_bytes, chunk_bytes, num_streams,
                                             first_segment});
          },
          "record_bytes"_a, "rows"_a, "num_owners"_a, "place"_a, "segment_bytes"_a, "chunk_bytes"_a, "num_streams"_a,
          "first_segment"_a)
      .def(
          "write",
          [](RowLog& self, In ids, In records, std::optional<In> frequencies, int64_t stream, bool for_commit) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto n = static_cast<int64_t>(i.size());
            const auto r = elements<const uint8_t>(records, "records", {n, self.record_bytes()});
            std::span<const uint8_t> h;
            if (frequencies) h = elements<const uint8_t>(*frequencies, "frequencies", {n});
            nb::gil_scoped_release released;
            const auto width = static_cast<size_t>(self.record_bytes());
            self.append(i, [&](size_t row, uint8_t* payload) { std::memcpy(payload, r.data() + row * width, width); }, h,
                        stream, for_commit);
          },
          "ids"_a, "records"_a, "frequencies"_a.none(), "stream"_a, "for_commit"_a = false)
      .def(
          "delete",
          [](RowLog& self, In ids) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            nb::gil_scoped_release released;
            return self.erase(i);
          },
          "ids"_a)
      .def(
          "places",
          [](const RowLog& self, In ids, Out out) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto o = elements<int64_t>(out, "out", {static_cast<int64_t>(i.size())});
            nb::gil_scoped_release released;
            self.places(i, o);
          },
          "ids"_a, "out"_a)
      .def(
          "frequencies",
          [](const RowLog& self, In ids, Out out) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto o = elements<uint8_t>(out, "out", {static_cast<int64_t>(i.size())});
            nb::gil_scoped_release released;
            self.frequencies(i, o);
          },
          "ids"_a, "out"_a)
      .def(
          "touch",
          [](RowLog& self, In ids, In frequencies) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto h = elements<const uint8_t>(frequencies, "frequencies", {static_cast<int64_t>(i.size())});
            nb::gil_scoped_release released;
            self.touch(i, h);
          },
          "ids"_a, "frequencies"_a)
      .def(
          "read",
          [](RowLog& self, PageReader& reader, In ids, Out out, bool demand) {
            return new LogRead(self, reader, ids, std::move(out), demand);
          },
          "reader"_a, "ids"_a, "out"_a, "demand"_a, nb::rv_policy::take_ownership, nb::keep_alive<0, 2>())
      .def("next_chunk",
           [](RowLog& self) -> std::optional<BoundChunk> {
             Chunk chunk;
             {
               nb::gil_scoped_release released;
               chunk = self.next_chunk();
             }
             if (!chunk) return std::nullopt;
             return BoundChunk{std::move(chunk)};
           })
      .def(
          "written",
          [](RowLog& self, const BoundChunk& chunk) {
            nb::gil_scoped_release released;
            self.written(chunk.chunk);
          },
          "chunk"_a)
      .def("attach", &RowLog::attach, "segment"_a, "fd"_a, release)
      .def("detach", &RowLog::detach, "segment"_a, release)
      .def("seal", &RowLog::seal, release)
      .def(
          "sealed",
          [](const RowLog& self, int64_t segment) {
            const auto sealed = without_gil([&] { return self.sealed(segment); });
            return std::tuple{sealed.num_records, sealed.num_bytes, sealed.checksum};
          },
          "segment"_a)
      .def(
          "keys",
          [](const RowLog& self, int64_t segment) {
            std::vector<int64_t> keys;
            {
              nb::gil_scoped_release released;
              keys = self.keys(segment);
            }
            return tensor(std::move(keys));
          },
          "segment"_a)
      .def("forget_keys", &RowLog::forget_keys, "segment"_a, release)
      .def("segments",
           [](const RowLog& self) {
             std::vector<int64_t> numbers, records, live;
             std::vector<uint8_t> sealed;
             for (const auto& use : without_gil([&] { return self.segments(); })) {
               numbers.push_back(use.number);
               records.push_back(use.num_records);
               live.push_back(use.num_live);
               sealed.push_back(use.is_sealed);
             }
             return std::tuple{tensor(std::move(numbers)), tensor(std::move(records)), tensor(std::move(live)),
                               tensor(std::move(sealed))};
           })
      .def("live", [](const RowLog& self, int64_t segment) {
             return tensor(without_gil([&] { return self.live(segment); }));
           },
           "segment"_a)
      .def("freeze", &RowLog::freeze, release)
      .def("frozen_live", [](const RowLog& self, int64_t segment) {
             return tensor(without_gil([&] { return self.frozen_live(segment); }));
           },
           "segment"_a)
      .def("frozen_segments", &RowLog::frozen_segments, release)
      .def("thaw", &RowLog::thaw, release)
      .def(
          "load",
          [](RowLog& self, int64_t segment, In ids, In live, int fd) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto bits = elements<const uint8_t>(live, "live", {-1});
            nb::gil_scoped_release released;
            self.load(segment, i, bits, fd);
          },
          "segment"_a, "ids"_a, "live"_a, "fd"_a)
      .def(
          "rewrite",
          [](RowLog& self, int64_t segment, In ids, In frames, int64_t first_record, int64_t stream, int64_t hot_stream) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto f = elements<const uint8_t>(frames, "frames", {static_cast<int64_t>(i.size()), self.stride()});
            nb::gil_scoped_release released;
            return self.rewrite(segment, i, f, first_record, stream, hot_stream);
          },
          "segment"_a, "ids"_a, "frames"_a, "first_record"_a, "stream"_a, "hot_stream"_a)
      .def("forget", &RowLog::forget, "segment"_a, release)
      .def_prop_ro("pending_bytes", &RowLog::pending_bytes)
      .def_prop_ro("num_rows", &RowLog::num_rows)
      .def_prop_ro("index_bytes", &RowLog::index_bytes)
      .def("counts", [](const RowLog& self) {
        const auto counts = without_gil([&] { return self.counts(); });
        nb::dict all;
        all["rows_written"] = counts.rows_written;
        all["rows_rewritten"] = counts.rows_rewritten;
        all["rows_deleted"] = counts.rows_deleted;
        all["bytes_framed"] = counts.bytes_framed;
        all["rows_copied"] = counts.rows_copied;
        all["rows_planned"] = counts.rows_planned;
        all["rows_absent"] = counts.rows_absent;
        return all;
      });
}

}  // namespace

void bind_log(nb::module_& m) {
  bind_reader(m);
  bind_chunk(m);
  bind_row_log(m);
}

}  // namespace colonnade
