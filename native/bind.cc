// The only file that knows Python: it checks what it is given, lets go of the GIL and calls the core.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "crc32c.h"
#include "dram.h"
#include "gradients.h"
#include "isa.h"
#include "lookups.h"
#include "plan.h"
#include "pool.h"
#include "row_index.h"
#include "segment_reader.h"
#include "threads.h"
#include "update.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace colonnade;

namespace {

using In = nb::ndarray<nb::ro>;
using Out = nb::ndarray<>;
template <class T>
using Made = nb::ndarray<nb::pytorch, T>;

std::string describe(nb::dlpack::dtype dtype, size_t ndim, const int64_t* shape) {
  static constexpr const char* kCodes[] = {"int", "uint", "float"};
  std::string text =
      dtype.code < 3 ? kCodes[dtype.code] : "dtype code " + std::to_string(dtype.code) + " of ";
  text += std::to_string(dtype.bits) + " (";
  for (size_t i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

// The elements of a contiguous CPU array of T. wanted: its shape; -1 stands for any extent.
template <class T, class Array>
std::span<T> elements(const Array& array, const char* name, std::initializer_list<int64_t> wanted) {
  bool fits = array.device_type() == nb::device::cpu::value &&
              array.dtype() == nb::dtype<std::remove_const_t<T>>() && array.ndim() == wanted.size();
  int64_t step = 1;
  for (size_t i = wanted.size(); fits && i-- > 0;) {
    const auto extent = static_cast<int64_t>(array.shape(i)), want = wanted.begin()[i];
    fits = (want < 0 || want == extent) && (extent <= 1 || array.stride(i) == step || array.size() == 0);
    step *= extent;
  }
  if (!fits) {
    throw std::invalid_argument(std::string(name) + ": got " +
                                describe(array.dtype(), array.ndim(), array.shape_ptr()) +
                                (array.device_type() == nb::device::cpu::value ? "" : " on another device") +
                                ", wanted contiguous CPU " +
                                describe(nb::dtype<std::remove_const_t<T>>(), wanted.size(), wanted.begin()) +
                                ", where -1 is any number");
  }
  return {static_cast<T*>(array.data()), array.size()};
}

// For properties whose array already says what keeps it alive.
constexpr auto kOwned = nb::rv_policy::automatic;

// A tensor that owns `values`.
template <class T>
Made<T> tensor(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Made<T>(kept->data(), {kept->size()}, owner);
}

// A tensor that looks into `owner` and keeps it alive.
template <class T>
Made<T> view(const Buffer<T>& values, nb::handle owner) {
  return Made<T>(const_cast<T*>(values.data()), {values.size()}, owner);
}

std::span<const uint32_t> unsigned_bits(std::span<const int32_t> values) {
  return {reinterpret_cast<const uint32_t*>(values.data()), values.size()};
}

Dtype dtype_named(const std::string& name) {
  if (name == "float32") return Dtype::float32;
  if (name == "float64") return Dtype::float64;
  throw std::invalid_argument("dtype: got '" + name + "', choose from float32, float64");
}

std::byte* row_bytes(const Out& rows, const char* name, Dtype dtype, int64_t num_rows, int64_t dim) {
  return dtype == Dtype::float32
             ? reinterpret_cast<std::byte*>(elements<float>(rows, name, {num_rows, dim}).data())
             : reinterpret_cast<std::byte*>(elements<double>(rows, name, {num_rows, dim}).data());
}

int64_t length(auto span) {
  return static_cast<int64_t>(span.size());
}

// Lookups, and the arrays they look into.
struct HeldLookups {
  In ids, feature_offsets, feature_tables, poolings, bag_offsets, weights;
  std::unique_ptr<Lookups> lookups;

  HeldLookups(In ids_, In feature_offsets_, In feature_tables_, In poolings_, int64_t batch_size,
              std::optional<In> bag_offsets_, std::optional<In> weights_)
      : ids(std::move(ids_)),
        feature_offsets(std::move(feature_offsets_)),
        feature_tables(std::move(feature_tables_)),
        poolings(std::move(poolings_)) {
    std::optional<std::span<const int64_t>> bags;
    std::optional<Weights> factors;
    if (bag_offsets_) {
      bag_offsets = *std::move(bag_offsets_);
      bags = elements<const int64_t>(bag_offsets, "bag_offsets", {-1});
    }
    if (weights_) {
      weights = *std::move(weights_);
      if (weights.dtype() == nb::dtype<double>()) {
        const auto span = elements<const double>(weights, "weights", {-1});
        factors = Weights{span.data(), length(span), Dtype::float64};
      } else {
        const auto span = elements<const float>(weights, "weights", {-1});
        factors = Weights{span.data(), length(span), Dtype::float32};
      }
    }
    const auto i = elements<const int64_t>(ids, "ids", {-1});
    const auto o = elements<const int64_t>(feature_offsets, "feature_offsets", {-1});
    const auto t = elements<const int32_t>(feature_tables, "feature_tables", {-1});
    const auto p = elements<const uint8_t>(poolings, "poolings", {-1});
    nb::gil_scoped_release release;
    lookups = std::make_unique<Lookups>(i, o, t, p, batch_size, bags, factors);
  }
};

void bind_plan(nb::module_& m) {
  nb::class_<HeldLookups>(m, "Lookups")
      .def(nb::init<In, In, In, In, int64_t, std::optional<In>, std::optional<In>>(), "ids"_a,
           "feature_offsets"_a, "feature_tables"_a, "poolings"_a, "batch_size"_a, "bag_offsets"_a.none(),
           "weights"_a.none())
      .def_prop_ro("num_lookups", [](const HeldLookups& self) { return self.lookups->num_lookups(); });

  nb::class_<Plan>(m, "Plan")
      .def_prop_ro("num_unique", &Plan::num_unique)
      .def_prop_ro(
          "unique_ids", [](nb::handle self) { return view(nb::cast<Plan&>(self).unique_ids, self); }, kOwned)
      .def_prop_ro(
          "block_offsets", [](nb::handle self) { return view(nb::cast<Plan&>(self).block_offsets, self); },
          kOwned)
      .def_prop_ro(
          "inverse", [](nb::handle self) { return view(nb::cast<Plan&>(self).inverse, self); }, kOwned)
      .def_prop_ro(
          "segment_offsets",
          [](nb::handle self) { return view(nb::cast<Plan&>(self).segment_offsets, self); }, kOwned)
      .def_prop_ro(
          "entries", [](nb::handle self) { return view(nb::cast<Plan&>(self).entries, self); }, kOwned);

  m.def(
      "make_plan",
      [](const HeldLookups& lookups, In table_rows, int64_t num_ranks) {
        const auto rows = elements<const int64_t>(table_rows, "table_rows", {-1});
        nb::gil_scoped_release release;
        return make_plan(*lookups.lookups, rows, num_ranks);
      },
      "lookups"_a, "table_rows"_a, "num_ranks"_a);
  m.def(
      "owner_of",
      [](In ids, int64_t rows, int64_t num_ranks) {
        const auto i = elements<const int64_t>(ids, "ids", {-1});
        std::vector<int32_t> owners(i.size());
        {
          nb::gil_scoped_release release;
          owner_of(i, rows, num_ranks, owners);
        }
        return tensor(std::move(owners));
      },
      "ids"_a, "rows"_a, "num_ranks"_a);
  m.def(
      "take",
      [](In values, In index, Out out) {
        const auto v = elements<const int32_t>(values, "values", {-1});
        const auto i = elements<const int32_t>(index, "index", {-1});
        const auto o = elements<int32_t>(out, "out", {length(i)});
        nb::gil_scoped_release release;
        take(v, i, o);
      },
      "values"_a, "index"_a, "out"_a);
}

void bind_pool(nb::module_& m) {
  m.def(
      "pool",
      [](const HeldLookups& lookups, In index, In bases, In strides, In dims, In out_bases, In out_strides,
         const std::string& dtype) {
        const auto rows = unsigned_bits(elements<const int32_t>(index, "index", {-1}));
        const PoolPlaces places{elements<const int64_t>(bases, "bases", {-1}),
                                elements<const int64_t>(strides, "strides", {-1}),
                                elements<const int32_t>(dims, "dims", {-1}),
                                elements<const int64_t>(out_bases, "out_bases", {-1}),
                                elements<const int64_t>(out_strides, "out_strides", {-1})};
        nb::gil_scoped_release release;
        pool(*lookups.lookups, rows, places, dtype_named(dtype));
      },
      "lookups"_a, "index"_a, "bases"_a, "strides"_a, "dims"_a, "out_bases"_a, "out_strides"_a, "dtype"_a);
  m.def(
      "all_finite",
      [](intptr_t base, int64_t num_elements, const std::string& dtype) {
        nb::gil_scoped_release release;
        return all_finite(reinterpret_cast<const void*>(base), num_elements, dtype_named(dtype));
      },
      "base"_a, "num_elements"_a, "dtype"_a);
}

// RowGradients, and the array they look into.
struct HeldRowGradients {
  In index;
  RowGradients gradients;
  HeldRowGradients(int64_t base, In index_)
      : index(std::move(index_)),
        gradients(base, unsigned_bits(elements<const int32_t>(index, "index", {-1}))) {}
};

const GradientSource& source_of(nb::handle source) {
  const OutputGradients* outputs = nullptr;
  if (nb::try_cast(source, outputs) && outputs) return *outputs;
  const HeldRowGradients* rows = nullptr;
  if (nb::try_cast(source, rows) && rows) return rows->gradients;
  throw nb::type_error("source: wanted OutputGradients or RowGradients");
}

void bind_update(nb::module_& m) {
  nb::class_<OutputGradients>(m, "OutputGradients")
      .def(
          "__init__",
          [](OutputGradients* self, const HeldLookups& lookups, In bases, In strides) {
            const auto b = elements<const int64_t>(bases, "bases", {-1});
            const auto s = elements<const int64_t>(strides, "strides", {-1});
            nb::gil_scoped_release release;
            new (self) OutputGradients(*lookups.lookups, b, s);
          },
          nb::keep_alive<1, 2>(), "lookups"_a, "bases"_a, "strides"_a);
  nb::class_<HeldRowGradients>(m, "RowGradients").def(nb::init<int64_t, In>(), "base"_a, "index"_a);

  m.def(
      "sum_rows",
      [](In segment_offsets, In entries, nb::handle source, In offsets, In dims, int64_t out_base,
         In out_index, const std::string& dtype) {
        const auto& gradients = source_of(source);
        const Segments segments{elements<const int64_t>(offsets, "offsets", {-1}),
                                elements<const int32_t>(segment_offsets, "segment_offsets", {-1}),
                                elements<const int32_t>(entries, "entries", {-1})};
        const auto widths = elements<const int32_t>(dims, "dims", {-1});
        const auto places = unsigned_bits(elements<const int32_t>(out_index, "out_index", {-1}));
        nb::gil_scoped_release release;
        sum_rows(segments, gradients, widths, out_base, places, dtype_named(dtype));
      },
      "segment_offsets"_a, "entries"_a, "source"_a, "offsets"_a, "dims"_a, "out_base"_a, "out_index"_a,
      "dtype"_a);
  m.def(
      "update",
      [](Dram& dram, In slots, In offsets, In segment_offsets, In entries, nb::handle source, In optimizers,
         In settings) {
        const auto& gradients = source_of(source);
        const Segments segments{elements<const int64_t>(offsets, "offsets", {-1}),
                                elements<const int32_t>(segment_offsets, "segment_offsets", {-1}),
                                elements<const int32_t>(entries, "entries", {-1})};
        const auto rows = unsigned_bits(elements<const int32_t>(slots, "slots", {-1}));
        const auto kinds = elements<const int32_t>(optimizers, "optimizers", {-1});
        const auto numbers = elements<const double>(settings, "settings", {-1, kSettings});
        nb::gil_scoped_release release;
        update(dram, rows, segments, gradients, kinds, numbers);
      },
      "dram"_a, "slots"_a, "offsets"_a, "segment_offsets"_a, "entries"_a, "source"_a, "optimizers"_a,
      "settings"_a);
}

void make_dram(Dram* self, const std::vector<int64_t>& dims, const std::vector<int64_t>& state_elements,
               const std::vector<int64_t>& rows, const std::vector<int64_t>& capacity_rows,
               const std::vector<uint64_t>& seeds, const std::vector<double>& init_scales,
               const std::vector<double>& initial_states, const std::string& dtype, int64_t num_ranks) {
  const auto n = dims.size();
  if (state_elements.size() != n || rows.size() != n || capacity_rows.size() != n || seeds.size() != n ||
      init_scales.size() != n || initial_states.size() != n) {
    throw std::invalid_argument("Dram: every list needs one element for each of " + std::to_string(n) +
                                " tables");
  }
  std::vector<TableSettings> tables;
  for (size_t t = 0; t < n; ++t) {
    tables.push_back(
        {dims[t], state_elements[t], rows[t], capacity_rows[t], seeds[t], init_scales[t], initial_states[t]});
  }
  new (self) Dram(tables, dtype_named(dtype), num_ranks);
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

void bind_dram(nb::module_& m) {
  nb::class_<Acquired>(m, "Acquired")
      .def_prop_ro(
          "missing", [](const Acquired& self) { return tensor(self.missing); }, kOwned)
      .def_prop_ro(
          "evicted_offsets", [](const Acquired& self) { return tensor(self.evicted_offsets); }, kOwned)
      .def_prop_ro(
          "evicted_ids", [](const Acquired& self) { return tensor(self.evicted_ids); }, kOwned)
      .def_prop_ro(
          "evicted_records",
          [](nb::handle handle) {
            auto& self = nb::cast<Acquired&>(handle);
            nb::list records;
            for (size_t t = 0; t < self.evicted_records.size(); ++t) {
              const auto rows = static_cast<size_t>(self.evicted_offsets[t + 1] - self.evicted_offsets[t]);
              records.append(Made<uint8_t>(self.evicted_records[t].data(),
                                           {rows, static_cast<size_t>(self.record_bytes[t])}, handle));
            }
            return records;
          })
      .def_ro("num_evicted", &Acquired::num_evicted);

  nb::class_<Dram>(m, "Dram")
      .def("__init__", &make_dram, "dims"_a, "state_elements"_a, "rows"_a, "capacity_rows"_a, "seeds"_a,
           "init_scales"_a, "initial_states"_a, "dtype"_a, "num_ranks"_a)
      .def(
          "acquire",
          [](Dram& self, In ids, In offsets, Out slots, bool birth) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto o = elements<const int64_t>(offsets, "offsets", {-1});
            const auto s = elements<int32_t>(slots, "slots", {length(i)});
            nb::gil_scoped_release release;
            return self.acquire(i, o, {reinterpret_cast<uint32_t*>(s.data()), s.size()}, birth);
          },
          "ids"_a, "offsets"_a, "slots"_a, "birth"_a)
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
          "birth",
          [](Dram& self, In ids, In slots, int64_t table) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            const auto s = unsigned_bits(elements<const int32_t>(slots, "slots", {length(i)}));
            nb::gil_scoped_release release;
            self.birth(table, i, s);
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
          "birth_values",
          [](const Dram& self, int64_t table, In ids, Out out) {
            const auto i = elements<const int64_t>(ids, "ids", {-1});
            auto* o = row_bytes(out, "out", self.dtype(), length(i), self.layout(table).dim);
            nb::gil_scoped_release release;
            self.birth_values(table, i, o);
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
            self.erase(table, i);
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
      .def("num_rows", &Dram::num_rows, nb::call_guard<nb::gil_scoped_release>(), "table"_a)
      .def("resident_bytes", &Dram::resident_bytes, nb::call_guard<nb::gil_scoped_release>());
}

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

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // objects that live until the interpreter ends are no mistake of the user's
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("available_isas", &available_isas);
  m.def("set_isa", &set_isa, "name"_a);
  m.def("set_num_threads", &set_num_threads, "n"_a);
  m.def("num_threads", &num_threads);
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
  bind_plan(m);
  bind_dram(m);
  bind_pool(m);
  bind_update(m);
  bind_row_index(m);
  bind_segments(m);
}
