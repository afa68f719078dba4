// Factorization machines: forward and backward.
#include "registers.h"
#include "rows.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {

namespace {

// From element d of a vector: a register, or what is left and then zeros.
template <bool kIsWhole, class T>
COLONNADE_INLINE typename Register<T>::Value load_from(const VectorPlace& place, std::int64_t sample,
                                                       std::int64_t d, std::int64_t dim) {
  const T* at = reinterpret_cast<const T*>(place.base + sample * place.stride) + d;
  if constexpr (kIsWhole) return Register<T>::load(at);
  T lanes[Register<T>::kLanes] = {};
  for (std::int64_t i = 0; i < dim - d; ++i) lanes[i] = at[i];
  return Register<T>::load(lanes);
}

template <bool kIsWhole, class T>
COLONNADE_INLINE void add_elements(const FMTask& task, std::int64_t sample, std::int64_t d, T* totals) {
  typename Register<T>::Value sum = {}, squares = {};
  for (std::int64_t v = 0; v < task.num_vectors; ++v) {
    const auto x = load_from<kIsWhole, T>(task.vectors[v], sample, d, task.dim);
    const Term term = task.terms ? task.terms[v] : Term::both;
    if (term != Term::squares) sum = sum + x;
    if (term != Term::vector) squares = squares + (term == Term::both ? x * x : x);
  }
  T* const total = totals + d % kLanes<T>;
  Register<T>::store(total, Register<T>::load(total) + (sum * sum - squares));
}

template <bool kIsWhole, class T>
COLONNADE_INLINE void write_elements(const FMGradientTask& task, std::int64_t sample, std::int64_t d) {
  const std::int64_t num_vectors = task.num_vectors, dim = task.dim;
  const T gradient = static_cast<const T*>(task.gradient)[sample];
  typename Register<T>::Value sum = {};
  for (std::int64_t v = 0; v < num_vectors; ++v) {
    if (task.terms && task.terms[v] == Term::squares) continue;
    sum = sum + load_from<kIsWhole, T>(task.vectors[v], sample, d, dim);
  }
  for (std::int64_t v = 0; v < num_vectors; ++v) {
    if (!task.out[v].base) continue;
    typename Register<T>::Value value;
    if (const Term term = task.terms ? task.terms[v] : Term::both; term == Term::squares) {
      value = typename Register<T>::Value{} - gradient / 2;
    } else {
      value = (term == Term::vector ? sum : sum - load_from<kIsWhole, T>(task.vectors[v], sample, d, dim)) * gradient;
    }
    T* const out = reinterpret_cast<T*>(task.out[v].base + sample * task.out[v].stride) + d;
    if constexpr (!kIsWhole) {
      __builtin_memcpy(out, &value, static_cast<std::size_t>(dim - d) * sizeof(T));
    } else if (task.is_streamed) {
      Register<T>::stream(out, value);
    } else {
      Register<T>::store(out, value);
    }
  }
}

}  // namespace

// By lane of 64 bytes (sum v)^2 - sum v^2, vectors ascending, and these summed, elements ascending; then the tree
// over lanes.
template <class T>
void fm(const FMTask& task) {
  for (std::int64_t b = task.begin; b < task.end; ++b) {
    if (b + 2 < task.end) fetch_vectors<T>(task.vectors, task.num_vectors, task.dim, b + 2);
    T totals[kLanes<T>] = {};
    std::int64_t d = 0;
    for (; d + Register<T>::kLanes <= task.dim; d += Register<T>::kLanes) {
      add_elements<true>(task, b, d, totals);
    }
    if (d < task.dim) add_elements<false>(task, b, d, totals);
    static_cast<T*>(task.out)[b] = tree_sum<T>(load(totals)) / 2;
  }
}
template void fm<float>(const FMTask&);
template void fm<double>(const FMTask&);

// Vector v receives g (sum of all vectors - v), or what its term of these is; squares receive -g / 2.
template <class T>
void fm_gradient(const FMGradientTask& task) {
  for (std::int64_t b = task.begin; b < task.end; ++b) {
    if (b + 2 < task.end) fetch_vectors<T>(task.vectors, task.num_vectors, task.dim, b + 2);
    std::int64_t d = 0;
    for (; d + Register<T>::kLanes <= task.dim; d += Register<T>::kLanes) write_elements<true, T>(task, b, d);
    if (d < task.dim) write_elements<false, T>(task, b, d);
  }
  if (task.is_streamed) stream_end();
}
template void fm_gradient<float>(const FMGradientTask&);
template void fm_gradient<double>(const FMGradientTask&);

}  // namespace colonnade::COLONNADE_ISA
