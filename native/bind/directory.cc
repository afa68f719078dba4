// Bindings of the directory of cached rows.
#include "directory.h"

#include "bind/arrays.h"

namespace colonnade {

namespace {

CachePolicy policy_named(const std::string& name) {
  if (name == "lru") return CachePolicy::lru;
  if (name == "lfu") return CachePolicy::lfu;
  if (name == "lookahead") return CachePolicy::lookahead;
  throw std::invalid_argument("policy: got '" + name + "', choose from lfu, lookahead, lru");
}

auto columns(const std::vector<DirectoryRow>& rows) {
  std::vector<int64_t> ids(rows.size());
  std::vector<int32_t> slots(rows.size()), copied(rows.size()), ticks(rows.size()), uses(rows.size()), stamps(rows.size()), scores(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    ids[i] = rows[i].id;
    slots[i] = static_cast<int32_t>(rows[i].slot);
    copied[i] = static_cast<int32_t>(rows[i].copied);
    ticks[i] = static_cast<int32_t>(rows[i].ticks);
    uses[i] = static_cast<int32_t>(rows[i].uses);
    stamps[i] = static_cast<int32_t>(rows[i].stamp);
    scores[i] = static_cast<int32_t>(rows[i].score);
  }
  return std::tuple(tensor(std::move(ids)), tensor(std::move(slots)), tensor(std::move(copied)),
                    tensor(std::move(ticks)), tensor(std::move(uses)), tensor(std::move(stamps)), tensor(std::move(scores)));
}

DirectoryStep step(Directory& self, In ids, std::optional<In> next_uses, std::optional<In> entering, int64_t window) {
  const auto i = elements<const int64_t>(ids, "ids", {-1});
  std::span<const int32_t> n;
  std::span<const int64_t> c;
  if (next_uses) n = elements<const int32_t>(*next_uses, "next_uses", {length(i)});
  if (entering) c = elements<const int64_t>(*entering, "entering", {-1});
  nb::gil_scoped_release release;
  return self.step(i, n, c, window);
}

// Read-only property that refers to the step: a numpy array, which takes a third of a tensor's time to create.
template <class T, auto Member>
auto array() {
  return [](nb::handle handle) {
    auto& values = nb::cast<DirectoryStep&>(handle).*Member;
    return nb::ndarray<nb::numpy, T>(values.data(), {values.size()}, handle);
  };
}

}  // namespace

void bind_directory(nb::module_& m) {
  nb::class_<DirectoryStep>(m, "DirectoryStep")
      .def_ro("number", &DirectoryStep::number)
      .def_prop_ro("slots", array<int32_t, &DirectoryStep::slots>(), kOwned)
      .def_prop_ro("outcomes", array<uint8_t, &DirectoryStep::outcomes>(), kOwned)
      .def_prop_ro("ages", array<int32_t, &DirectoryStep::ages>(), kOwned)
      .def_prop_ro("ticks", array<int32_t, &DirectoryStep::ticks>(), kOwned)
      .def_prop_ro("pushed", array<bool, &DirectoryStep::pushed>(), kOwned)
      .def_prop_ro("leaving", array<bool, &DirectoryStep::leaving>(), kOwned)
      .def_prop_ro("evicted_ids", array<int64_t, &DirectoryStep::evicted_ids>(), kOwned)
      .def_prop_ro("evicted_slots", array<int32_t, &DirectoryStep::evicted_slots>(), kOwned)
      .def_prop_ro("evicted_ticks", array<int32_t, &DirectoryStep::evicted_ticks>(), kOwned);

  nb::class_<DirectoryClock>(m, "DirectoryClock")
      .def(
          "__init__",
          [](DirectoryClock* self, int64_t read_bound, int64_t write_bound, double write_share, int64_t step_bound) {
            if (read_bound < 0 || write_bound < 0 || !(write_share >= 0 && write_share <= 1) || step_bound < 0)
              throw std::invalid_argument("got bounds " + std::to_string(read_bound) + ", " + std::to_string(write_bound) +
                                          ", write_share " + std::to_string(write_share) + ", step_bound " +
                                          std::to_string(step_bound) + "; wanted 0 or more, a share of at most 1");
            new (self) DirectoryClock{read_bound, write_bound, write_share, step_bound};
          },
          "read_bound"_a, "write_bound"_a, "write_share"_a, "step_bound"_a);
  nb::class_<Directory>(m, "Directory")
      .def(
          "__init__",
          [](Directory* self, int64_t capacity, const DirectoryClock& clock, const std::string& policy) {
            if (capacity < 0)
              throw std::invalid_argument("got capacity " + std::to_string(capacity) + "; wanted 0 or more");
            new (self) Directory({capacity, clock, policy_named(policy)});
          },
          "capacity"_a, "clock"_a, "policy"_a)
      .def("step", &step, "ids"_a, "next_uses"_a.none(), "entering"_a.none(), "window"_a)
      .def(
          "undo",
          [](Directory& self, In ids, const DirectoryStep& done) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            nb::gil_scoped_release release;
            self.undo(i, done);
          },
          "ids"_a, "done"_a)
      .def(
          "flush",
          [](Directory& self, int64_t above) {
            std::vector<DirectoryRow> rows;
            {
              nb::gil_scoped_release release;
              rows = self.flush(above);
            }
            return columns(rows);
          },
          "above"_a)
      .def("set_clock", &Directory::set_clock, "clock"_a)
      .def("rows",
           [](const Directory& self) {
             std::vector<DirectoryRow> rows;
             {
               nb::gil_scoped_release release;
               rows = self.rows();
             }
             return columns(rows);
           })
      .def(
          "load",
          [](Directory& self, In ids, In slots, In copied, In ticks, In uses, In stamps, In scores, int64_t number, uint64_t time) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto s = unsigned_bits(elements<const int32_t>(slots, "slots", {length(i)}));
            const auto c = unsigned_bits(elements<const int32_t>(copied, "copied", {length(i)}));
            const auto t = unsigned_bits(elements<const int32_t>(ticks, "ticks", {length(i)}));
            const auto u = unsigned_bits(elements<const int32_t>(uses, "uses", {length(i)}));
            const auto p = unsigned_bits(elements<const int32_t>(stamps, "stamps", {length(i)}));
            const auto w = unsigned_bits(elements<const int32_t>(scores, "scores", {length(i)}));
            nb::gil_scoped_release release;
            std::vector<DirectoryRow> rows;
            rows.reserve(i.size());
            for (size_t k = 0; k < i.size(); ++k) rows.push_back({i[k], s[k], c[k], t[k], u[k], p[k], w[k]});
            self.load(rows, number, time);
          },
          "ids"_a, "slots"_a, "copied"_a, "ticks"_a, "uses"_a, "stamps"_a, "scores"_a, "number"_a, "time"_a)
      .def("__len__", &Directory::size)
      .def_prop_ro("number", &Directory::number)
      .def_prop_ro("time", &Directory::time)
      .def_prop_ro("num_slots", &Directory::num_slots)
      .def_prop_ro("capacity", [](const Directory& self) { return self.settings().capacity; })
      .def_prop_ro("bytes", &Directory::bytes);
}

}  // namespace colonnade
