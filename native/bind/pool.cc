// Bindings of pooling.
#include "bind/arrays.h"
#include "pool.h"

namespace colonnade {

void bind_pool(nb::module_& m) {
  m.def(
      "pool",
      [](const HeldLookups& lookups, In index, In bases, In strides, const Reads& reads, In out_bases,
         In out_strides, const std::string& dtype, const std::string& out_dtype, std::optional<In> order) {
        const auto rows = unsigned_bits(elements<const int32_t>(index, "index", {-1}));
        const PoolPlaces places{elements<const int64_t>(bases, "bases", {-1}),
                                elements<const int64_t>(strides, "strides", {-1}),
                                elements<const int64_t>(out_bases, "out_bases", {-1}),
                                elements<const int64_t>(out_strides, "out_strides", {-1})};
        const Dtype row = dtype_named(dtype), out = dtype_named(out_dtype);
        const auto lookups_in_order = order ? elements<const int32_t>(*order, "order", {-1}) : std::span<const int32_t>();
        nb::gil_scoped_release release;
        pool(*lookups.lookups, rows, reads, places, row, out, lookups_in_order);
      },
      "lookups"_a, "index"_a, "bases"_a, "strides"_a, "reads"_a, "out_bases"_a, "out_strides"_a, "dtype"_a,
      "out_dtype"_a, "order"_a = nb::none());
  m.def(
      "all_finite",
      [](intptr_t base, int64_t num_elements, const std::string& dtype) {
        nb::gil_scoped_release release;
        return all_finite(reinterpret_cast<const void*>(base), num_elements, dtype_named(dtype));
      },
      "base"_a, "num_elements"_a, "dtype"_a);
}

}  // namespace colonnade
