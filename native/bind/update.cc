// Bindings of gradient sums and updates.
#include "bind/arrays.h"
#include "gradients.h"
#include "page_order.h"
#include "update.h"

namespace colonnade {

namespace {

// RowGradients with the array that they refer to.
struct HeldRowGradients {
  In index;
  RowGradients gradients;
  HeldRowGradients(int64_t base, In index_, const std::string& dtype)
      : index(std::move(index_)),
        gradients(base, unsigned_bits(elements<const int32_t>(index, "index", {-1})), dtype_named(dtype)) {}
};

const GradientSource& source_of(nb::handle source) {
  const OutputGradients* outputs = nullptr;
  if (nb::try_cast(source, outputs) && outputs) return *outputs;
  const HeldRowGradients* rows = nullptr;
  if (nb::try_cast(source, rows) && rows) return rows->gradients;
  throw nb::type_error("source: wanted OutputGradients or RowGradients");
}

}  // namespace

void bind_update(nb::module_& m) {
  nb::class_<OutputGradients>(m, "OutputGradients")
      .def(
          "__init__",
          [](OutputGradients* self, const HeldLookups& lookups, const Reads& reads, In bases, In strides,
             const std::string& dtype) {
            const auto b = elements<const int64_t>(bases, "bases", {-1});
            const auto s = elements<const int64_t>(strides, "strides", {-1});
            const auto elements = dtype_named(dtype);
            nb::gil_scoped_release release;
            new (self) OutputGradients(*lookups.lookups, reads, b, s, elements);
          },
          nb::keep_alive<1, 2>(), "lookups"_a, "reads"_a, "bases"_a, "strides"_a, "dtype"_a);
  nb::class_<HeldRowGradients>(m, "RowGradients")
      .def(nb::init<int64_t, In, const std::string&>(), "base"_a, "index"_a, "dtype"_a);

  m.attr("OPTIMIZERS") = nb::tuple(nb::cast(optimizer_names()));
  m.def("optimizer_state_elements", &optimizer_state_elements, "kind"_a, "dim"_a);
  m.def(
      "sum_rows",
      [](In segment_offsets, In entries, nb::handle source, In offsets, const Parts& parts,
         int64_t out_base, In out_index, const std::string& dtype) {
        const auto& gradients = source_of(source);
        const Segments segments{elements<const int64_t>(offsets, "offsets", {-1}),
                                elements<const int32_t>(segment_offsets, "segment_offsets", {-1}),
                                elements<const int32_t>(entries, "entries", {-1})};
        const auto places = unsigned_bits(elements<const int32_t>(out_index, "out_index", {-1}));
        const auto sums = dtype_named(dtype);
        nb::gil_scoped_release release;
        sum_rows(segments, gradients, parts, out_base, places, sums);
      },
      "segment_offsets"_a, "entries"_a, "source"_a, "offsets"_a, "parts"_a, "out_base"_a, "out_index"_a,
      "dtype"_a);
  m.def(
      "squared_norm",
      [](int64_t base, int64_t num_elements, const std::string& dtype) {
        const auto elements = dtype_named(dtype);
        nb::gil_scoped_release release;
        return squared_norm(reinterpret_cast<const void*>(base), num_elements, elements);
      },
      "base"_a, "num_elements"_a, "dtype"_a);
  m.def(
      "by_page",
      [](In slots, In offsets, In segment_offsets, In entries)
          -> std::optional<std::tuple<Made<int32_t>, Made<int32_t>, Made<int32_t>>> {
        const auto rows = unsigned_bits(elements<const int32_t>(slots, "slots", {-1}));
        const Segments segments{elements<const int64_t>(offsets, "offsets", {-1}),
                                elements<const int32_t>(segment_offsets, "segment_offsets", {-1}),
                                elements<const int32_t>(entries, "entries", {-1})};
        std::optional<PageOrder> order;
        {
          nb::gil_scoped_release release;
          order.emplace(rows, segments);
        }
        if (!order->is_moved()) return std::nullopt;
        return std::tuple(tensor(order->take_slots()), tensor(order->take_offsets()), tensor(order->take_entries()));
      },
      "slots"_a, "offsets"_a, "segment_offsets"_a, "entries"_a);
  m.def(
      "update",
      [](Dram& dram, In slots, In offsets, In segment_offsets, In entries, nb::handle source,
         const Parts& parts, In optimizers, In settings) {
        const auto& gradients = source_of(source);
        const Segments segments{elements<const int64_t>(offsets, "offsets", {-1}),
                                elements<const int32_t>(segment_offsets, "segment_offsets", {-1}),
                                elements<const int32_t>(entries, "entries", {-1})};
        const auto rows = unsigned_bits(elements<const int32_t>(slots, "slots", {-1}));
        const auto kinds = elements<const int32_t>(optimizers, "optimizers", {-1});
        const auto numbers = elements<const double>(settings, "settings", {-1, kSettings});
        nb::gil_scoped_release release;
        update(dram, rows, segments, gradients, parts, kinds, numbers);
      },
      "dram"_a, "slots"_a, "offsets"_a, "segment_offsets"_a, "entries"_a, "source"_a, "parts"_a,
      "optimizers"_a, "settings"_a);
}

}  // namespace colonnade
