// Bindings of interactions of vectors at any addresses.
#include <algorithm>

#include "bind/arrays.h"
#include "interaction.h"

namespace colonnade {

namespace {

template <class T>
constexpr Dtype dtype_of = sizeof(T) == 4 ? Dtype::float32 : Dtype::float64;

[[noreturn]] void refuse(const char* name, size_t i, const auto& array, const std::string& wanted) {
  throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "]: got " +
                              describe(array.dtype(), array.ndim(), array.shape_ptr()) + ", wanted " +
                              wanted);
}

// Vectors of one array (B, k, D), one after another.
template <class Array, class Place>
void add_places(const Array& array, std::vector<Place>& places) {
  const auto bytes = static_cast<int64_t>(array.dtype().bits / 8);
  auto* base = static_cast<decltype(Place::base)>(array.data());
  for (size_t k = 0; k < array.shape(1); ++k) {
    places.push_back({base + static_cast<int64_t>(k) * array.stride(1) * bytes, array.stride(0) * bytes});
  }
}

template <class Array>
void check(const char* name, size_t i, const Array& array, const Vectors& wanted) {
  const bool fits = array.device_type() == nb::device::cpu::value && array.ndim() == 3 &&
                    array.dtype() ==
                        (wanted.dtype == Dtype::float32 ? nb::dtype<float>() : nb::dtype<double>()) &&
                    static_cast<int64_t>(array.shape(0)) == wanted.num_samples &&
                    static_cast<int64_t>(array.shape(2)) == wanted.dim &&
                    (array.stride(2) == 1 || wanted.dim <= 1 || array.size() == 0);
  if (!fits) {
    refuse(name, i, array,
           "CPU " + std::string(name_of(wanted.dtype)) + " (" + std::to_string(wanted.num_samples) +
               ", any, " + std::to_string(wanted.dim) + ") whose last stride is 1");
  }
  check_memory(array, (std::string(name) + "[" + std::to_string(i) + "]").c_str());
}

Vectors vectors_of(const std::vector<In>& arrays) {
  if (arrays.empty()) throw std::invalid_argument("vectors: got none, wanted at least one array (B, k, D)");
  const In& first = arrays[0];
  const bool is_double = first.dtype() == nb::dtype<double>();
  if (first.ndim() != 3 || !(is_double || first.dtype() == nb::dtype<float>())) {
    refuse("vectors", 0, first, "CPU float32 or float64 (B, k, D)");
  }
  Vectors vectors{{},
                  static_cast<int64_t>(first.shape(0)),
                  static_cast<int64_t>(first.shape(2)),
                  is_double ? Dtype::float64 : Dtype::float32};
  for (size_t i = 0; i < arrays.size(); ++i) {
    check("vectors", i, arrays[i], vectors);
    add_places(arrays[i], vectors.places);
  }
  return vectors;
}

// Terms of all vectors, or none.
std::span<const Term> terms_of(const std::vector<uint8_t>& terms, const Vectors& vectors) {
  const bool is_known = std::ranges::all_of(terms, [](uint8_t term) { return term <= uint8_t(Term::squares); });
  if (!is_known || (!terms.empty() && static_cast<int64_t>(terms.size()) != vectors.num_vectors())) {
    throw std::invalid_argument("terms: got " + std::to_string(terms.size()) + " numbers, wanted one of 0 to 2 for each of " +
                                std::to_string(vectors.num_vectors()) + " vectors, or none");
  }
  return {reinterpret_cast<const Term*>(terms.data()), terms.size()};
}

// Address of each vector's gradient.
std::vector<TargetPlace> targets_of(const std::vector<std::optional<Out>>& out, const std::vector<In>& arrays,
                                    const Vectors& vectors) {
  if (out.size() != arrays.size()) {
    throw std::invalid_argument("out: got " + std::to_string(out.size()) + " arrays, wanted " +
                                std::to_string(arrays.size()));
  }
  std::vector<TargetPlace> places;
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i]) {
      check("out", i, *out[i], vectors);
      if (out[i]->shape(1) != arrays[i].shape(1)) {
        refuse("out", i, *out[i], std::to_string(arrays[i].shape(1)) + " vectors");
      }
      add_places(*out[i], places);
    } else {
      places.resize(places.size() + arrays[i].shape(1), {nullptr, 0});
    }
  }
  return places;
}

// Contiguous array of the vectors' dtype.
template <class Pointer>
Pointer data_of(const auto& array, const char* name, const Vectors& vectors,
                std::initializer_list<int64_t> shape) {
  using Bytes = std::remove_pointer_t<Pointer>;
  if (vectors.dtype == Dtype::float32) {
    return elements<std::conditional_t<std::is_const_v<Bytes>, const float, float>>(array, name, shape).data();
  }
  return elements<std::conditional_t<std::is_const_v<Bytes>, const double, double>>(array, name, shape).data();
}

}  // namespace

void bind_interaction(nb::module_& m) {
  m.def(
      "pairwise_dot",
      [](const std::vector<In>& vectors, const std::vector<int32_t>& copied, Out out) {
        const Vectors places = vectors_of(vectors);
        const int64_t width = dots_width(places, static_cast<int64_t>(copied.size()));
        void* to = data_of<void*>(out, "out", places, {places.num_samples, width});
        nb::gil_scoped_release release;
        dots(places, copied, to);
      },
      "vectors"_a, "copied"_a, "out"_a);
  m.def(
      "pairwise_dot_gradient",
      [](const std::vector<In>& vectors, const std::vector<int32_t>& copied, In gradient,
         const std::vector<std::optional<Out>>& out) {
        const Vectors places = vectors_of(vectors);
        const auto targets = targets_of(out, vectors, places);
        const int64_t width = dots_width(places, static_cast<int64_t>(copied.size()));
        const auto* from = data_of<const void*>(gradient, "gradient", places, {places.num_samples, width});
        nb::gil_scoped_release release;
        dots_gradient(places, copied, from, targets);
      },
      "vectors"_a, "copied"_a, "gradient"_a, "out"_a);
  m.def(
      "fm",
      [](const std::vector<In>& vectors, Out out, const std::vector<uint8_t>& terms) {
        const Vectors places = vectors_of(vectors);
        const auto kinds = terms_of(terms, places);
        void* to = data_of<void*>(out, "out", places, {places.num_samples, 1});
        nb::gil_scoped_release release;
        fm(places, kinds, to);
      },
      "vectors"_a, "out"_a, "terms"_a = std::vector<uint8_t>());
  m.def(
      "fm_gradient",
      [](const std::vector<In>& vectors, In gradient, const std::vector<std::optional<Out>>& out,
         const std::vector<uint8_t>& terms) {
        const Vectors places = vectors_of(vectors);
        const auto kinds = terms_of(terms, places);
        const auto targets = targets_of(out, vectors, places);
        const auto* from = data_of<const void*>(gradient, "gradient", places, {places.num_samples, 1});
        nb::gil_scoped_release release;
        fm_gradient(places, kinds, from, targets);
      },
      "vectors"_a, "gradient"_a, "out"_a, "terms"_a = std::vector<uint8_t>());
  m.def(
      "cross",
      [](In first, In factor, In input, Out out) {
        const auto run = [&]<class T>(T) {
          const auto x = elements<const T>(first, "first", {-1, -1});
          const auto rows = static_cast<int64_t>(first.shape(0));
          const auto columns = static_cast<int64_t>(first.shape(1));
          const auto u = elements<const T>(factor, "factor", {rows, columns});
          const auto y = elements<const T>(input, "input", {rows, columns});
          const auto z = elements<T>(out, "out", {rows, columns});
          nb::gil_scoped_release release;
          cross(x.data(), u.data(), y.data(), z.data(), length(x), dtype_of<T>);
        };
        first.dtype() == nb::dtype<double>() ? run(double{}) : run(float{});
      },
      "first"_a, "factor"_a, "input"_a, "out"_a);
  m.def(
      "cross_gradient",
      [](In first, In factor, In gradient, Out of_first, Out of_factor) {
        const auto run = [&]<class T>(T) {
          const auto x = elements<const T>(first, "first", {-1, -1});
          const auto rows = static_cast<int64_t>(first.shape(0));
          const auto columns = static_cast<int64_t>(first.shape(1));
          const auto u = elements<const T>(factor, "factor", {rows, columns});
          const auto g = elements<const T>(gradient, "gradient", {rows, columns});
          const auto dx = elements<T>(of_first, "of_first", {rows, columns});
          const auto du = elements<T>(of_factor, "of_factor", {rows, columns});
          nb::gil_scoped_release release;
          cross_gradient(x.data(), u.data(), g.data(), dx.data(), du.data(), length(x), dtype_of<T>);
        };
        first.dtype() == nb::dtype<double>() ? run(double{}) : run(float{});
      },
      "first"_a, "factor"_a, "gradient"_a, "of_first"_a, "of_factor"_a);
}

}  // namespace colonnade
