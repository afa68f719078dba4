// Bindings of pooling.
#include "bind/arrays.h"
#include "pool.h"
#include "squares.h"

namespace colonnade {

namespace {

// One part of the rows (B, columns) of an array: its last stride is 1.
template <class Array>
void check_strided(const Array& array, const char* name, const In& like, int64_t num_rows) {
  const bool fits = array.device_type() == nb::device::cpu::value && array.ndim() == 2 && array.dtype() == like.dtype() &&
                    static_cast<int64_t>(array.shape(0)) == num_rows && array.shape(1) == like.shape(1) &&
                    (array.stride(1) == 1 || array.shape(1) <= 1 || array.size() == 0);
  if (!fits) {
    throw std::invalid_argument(std::string(name) + ": got " +
                                describe(array.dtype(), array.ndim(), array.shape_ptr()) + ", wanted " +
                                std::to_string(num_rows) + " rows like the vectors', whose last stride is 1");
  }
  check_memory(array, name);
}

template <class T>
BagVectors bag_vectors(const In& rows, const std::optional<In>& offsets, uint8_t pooling,
                       const std::optional<In>& weights) {
  const auto vectors = elements<const T>(rows, "rows", {-1, -1});
  const auto count = static_cast<int64_t>(rows.shape(0));
  BagVectors result{vectors.data(), nullptr, {}, static_cast<Pooling>(pooling), count,
                    static_cast<int64_t>(rows.shape(1)), sizeof(T) == 4 ? Dtype::float32 : Dtype::float64};
  if (weights) result.weights = elements<const T>(*weights, "weights", {count}).data();
  if (offsets) {
    result.bags = elements<const int64_t>(*offsets, "offsets", {-1});
    if (result.bags.empty()) throw std::invalid_argument("offsets: got none, wanted one more than bags");
  }
  return result;
}

BagVectors bag_vectors_of(const In& rows, const std::optional<In>& offsets, uint8_t pooling,
                          const std::optional<In>& weights) {
  return rows.dtype() == nb::dtype<double>() ? bag_vectors<double>(rows, offsets, pooling, weights)
                                             : bag_vectors<float>(rows, offsets, pooling, weights);
}

int64_t row_stride(const auto& array) {
  return static_cast<int64_t>(array.stride(0)) * (array.dtype().bits / 8);
}

}  // namespace

void bind_pool(nb::module_& m) {
  m.def(
      "pool_squares",
      [](const HeldLookups& lookups, In index, In bases, In strides, const Reads& reads, In places,
         const std::string& dtype) {
        const auto rows = unsigned_bits(elements<const int32_t>(index, "index", {-1}));
        const PoolPlaces row_places{elements<const int64_t>(bases, "bases", {-1}),
                                    elements<const int64_t>(strides, "strides", {-1}), {}, {}};
        constexpr auto kNumbers = static_cast<int64_t>(sizeof(SquarePlaces) / sizeof(int64_t));
        const auto numbers = elements<const int64_t>(places, "places", {reads.size(), kNumbers});
        const std::span written(reinterpret_cast<const SquarePlaces*>(numbers.data()), reads.all().size());
        const Dtype row = dtype_named(dtype);
        nb::gil_scoped_release release;
        pool_squares(*lookups.lookups, rows, reads, row_places, written, row);
      },
      "lookups"_a, "index"_a, "bases"_a, "strides"_a, "reads"_a, "places"_a, "dtype"_a);
  m.def(
      "square_gradients",
      [](In rows, std::optional<In> offsets, uint8_t pooling, std::optional<In> weights, std::optional<In> gradient,
         std::optional<In> of_squares, Out out) {
        const BagVectors vectors = bag_vectors_of(rows, offsets, pooling, weights);
        const auto place_of = [&](const std::optional<In>& array, const char* name) {
          if (!array) return VectorPlace{nullptr, 0};
          check_strided(*array, name, rows, vectors.num_outputs());
          return VectorPlace{static_cast<const std::byte*>(array->data()), row_stride(*array)};
        };
        const auto pooled = place_of(gradient, "gradient"), squared = place_of(of_squares, "of_squares");
        check_elements(out, "out", rows.dtype(), {vectors.num_lookups, vectors.dim});
        void* const to = out.data();
        nb::gil_scoped_release release;
        square_gradients(vectors, pooled, squared, to);
      },
      "rows"_a, "offsets"_a.none(), "pooling"_a, "weights"_a.none(), "gradient"_a.none(), "of_squares"_a.none(), "out"_a);
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
