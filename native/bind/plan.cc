// Bindings of lookups and plans.
#include "bind/arrays.h"
#include "parts.h"
#include "plan.h"

namespace colonnade {

void bind_plan(nb::module_& m) {
  nb::class_<HeldLookups>(m, "Lookups")
      .def(nb::init<In, In, In, In, int64_t, std::optional<In>, std::optional<In>>(), "ids"_a,
           "feature_offsets"_a, "feature_tables"_a, "poolings"_a, "batch_size"_a, "bag_offsets"_a.none(),
           "weights"_a.none())
      .def_prop_ro("num_lookups", [](const HeldLookups& self) { return self.lookups->num_lookups(); });

  const auto numbers = [](const In& array, const char* name) {
    return elements<const int32_t>(array, name, {-1});
  };
  nb::class_<Parts>(m, "Parts")
      .def(
          "__init__",
          [numbers](Parts* self, In tables, In columns, In dims, In states) {
            new (self) Parts(numbers(tables, "tables"), numbers(columns, "columns"), numbers(dims, "dims"),
                             numbers(states, "states"));
          },
          "tables"_a, "columns"_a, "dims"_a, "states"_a);
  nb::class_<Reads>(m, "Reads")
      .def(
          "__init__",
          [numbers](Reads* self, In features, In columns, In dims) {
            new (self) Reads(numbers(features, "features"), numbers(columns, "columns"), numbers(dims, "dims"));
          },
          "features"_a, "columns"_a, "dims"_a);

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
      [](const HeldLookups& lookups, In table_rows, In num_owners) {
        const auto rows = elements<const int64_t>(table_rows, "table_rows", {-1});
        const auto owners = elements<const int64_t>(num_owners, "num_owners", {length(rows)});
        nb::gil_scoped_release release;
        return make_plan(*lookups.lookups, rows, owners);
      },
      "lookups"_a, "table_rows"_a, "num_owners"_a);
  m.def(
      "owner_of",
      [](In ids, int64_t rows, int64_t num_owners) {
        const auto i = elements<const int64_t>(ids, "ids", {-1});
        std::vector<int32_t> owners(i.size());
        {
          nb::gil_scoped_release release;
          owner_of(i, rows, num_owners, owners);
        }
        return tensor(std::move(owners));
      },
      "ids"_a, "rows"_a, "num_owners"_a);
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

}  // namespace colonnade
