// Array arguments and results that the binding files share, and errors for invalid ones.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/tensors.h"
#include "buffer.h"
#include "lookups.h"
#include "scalar.h"

namespace colonnade {

using namespace nb::literals;

inline std::string describe(nb::dlpack::dtype dtype, size_t ndim, const int64_t* shape) {
  static constexpr const char* kCodes[] = {"int", "uint", "float"};
  std::string text = dtype.code < 3    ? kCodes[dtype.code]
                     : dtype.code == 4 ? "bfloat"
                                       : "dtype code " + std::to_string(dtype.code) + " of ";
  text += std::to_string(dtype.bits) + " (";
  for (size_t i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

// ValueError for a non-empty array without memory: a tensor with freed storage keeps its shape.
template <class Array>
void check_memory(const Array& array, const char* name) {
  if (array.data() || array.size() == 0) return;
  throw std::invalid_argument(std::string(name) + ": got " +
                              describe(array.dtype(), array.ndim(), array.shape_ptr()) +
                              " without memory, wanted one whose storage was not freed");
}

// ValueError unless it is a contiguous CPU array of this element type. wanted: its shape; -1 accepts any extent.
template <class Array>
void check_elements(const Array& array, const char* name, nb::dlpack::dtype dtype,
                    std::initializer_list<int64_t> wanted) {
  bool fits = array.device_type() == nb::device::cpu::value && array.dtype() == dtype &&
              array.ndim() == wanted.size();
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
                                describe(dtype, wanted.size(), wanted.begin()) +
                                ", where -1 is any number");
  }
  check_memory(array, name);
}

// Elements of such an array.
template <class T, class Array>
std::span<T> elements(const Array& array, const char* name, std::initializer_list<int64_t> wanted) {
  check_elements(array, name, nb::dtype<std::remove_const_t<T>>(), wanted);
  return {static_cast<T*>(array.data()), array.size()};
}

// For properties with an array that already keeps its owner alive.
inline constexpr auto kOwned = nb::rv_policy::automatic;

// Return a tensor that owns `values`.
template <class T>
Made<T> tensor(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Made<T>(owned->data(), {owned->size()}, owner);
}

template <class T>
Made<T> tensor(Buffer<T> values) {
  auto* owned = new Buffer<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Buffer<T>*>(p); });
  return Made<T>(owned->data(), {owned->size()}, owner);
}

// Return a tensor that refers to memory of `owner` and keeps it alive.
template <class T>
Made<T> view(const Buffer<T>& values, nb::handle owner) {
  return Made<T>(const_cast<T*>(values.data()), {values.size()}, owner);
}

inline std::span<const uint32_t> unsigned_bits(std::span<const int32_t> values) {
  return {reinterpret_cast<const uint32_t*>(values.data()), values.size()};
}

inline Dtype dtype_named(const std::string& name) {
  if (name == "float32") return Dtype::float32;
  if (name == "float64") return Dtype::float64;
  if (name == "bfloat16") return Dtype::bfloat16;
  if (name == "float16") return Dtype::float16;
  throw std::invalid_argument("dtype: got '" + name + "', choose from bfloat16, float16, float32, float64");
}

inline std::byte* row_bytes(const Out& rows, const char* name, Dtype dtype, int64_t num_rows, int64_t dim) {
  const auto code = dtype == Dtype::bfloat16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
  const auto bits = static_cast<uint8_t>(8 * item_bytes(dtype));
  check_elements(rows, name, {static_cast<uint8_t>(code), bits, 1}, {num_rows, dim});
  return static_cast<std::byte*>(rows.data());
}

inline int64_t length(auto span) {
  return static_cast<int64_t>(span.size());
}

// Lookups with the arrays that they refer to.
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

void bind_bags(nb::module_& m);
void bind_directory(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_dram(nb::module_& m);
void bind_pool(nb::module_& m);
void bind_retention(nb::module_& m);
void bind_tiered(nb::module_& m);
void bind_update(nb::module_& m);
void bind_files(nb::module_& m);
void bind_interaction(nb::module_& m);
void bind_log(nb::module_& m);
void bind_mapped_rows(nb::module_& m);
void bind_packing(nb::module_& m);
void bind_pending(nb::module_& m);

}  // namespace colonnade
