// Pooling of the rows of bags with their squares, and gradients of lookups whose vectors and squares were pooled.
#include "convert.h"
#include "rows.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {

namespace {

template <class T>
COLONNADE_INLINE T root(T value) {
  if constexpr (sizeof(T) == 4) {
    return __builtin_sqrtf(value);
  } else {
    return __builtin_sqrt(value);
  }
}

// Lookups of an output, and what each vector is multiplied by beside its weight.
template <class T>
struct Bag {
  std::int64_t first, last;
  T share;

  COLONNADE_INLINE_MEMBER static Bag of(const std::int64_t* bags, Divisor divisor, std::int64_t b) {
    if (!bags) return {b, b + 1, 1};
    const T length = static_cast<T>(bags[b + 1] - bags[b]);
    const T share = divisor == Divisor::n ? 1 / length : divisor == Divisor::sqrt_n ? 1 / root(length) : 1;
    return {bags[b], bags[b + 1], share};
  }
  COLONNADE_INLINE_MEMBER T factor(const T* weights, std::int64_t e) const {
    return weights ? weights[e] * share : share;
  }
};

template <class T>
COLONNADE_INLINE const T* row_of(const VectorPlace& place, std::int64_t b) {
  return place.base ? reinterpret_cast<const T*>(place.base + b * place.stride) : nullptr;
}

}  // namespace

// Lookups are added in order, each element by itself.
template <class Row>
void pool_squares(const PoolSquaresTask& task) {
  using T = Compute<Row>;
  constexpr std::int64_t kAhead = 24;  // lookups
  const auto* const weights = static_cast<const T*>(task.weights);
  auto* const copies = static_cast<T*>(task.copies);
  const std::int64_t dim = task.dim, first = task.first, row_bytes = dim * static_cast<std::int64_t>(sizeof(Row));
  const auto row_at = [&](std::int64_t e) COLONNADE_INLINE_LAMBDA {
    return reinterpret_cast<const Row*>(task.rows + std::int64_t{task.index[e]} * task.row_stride);
  };
  const auto bound_of = [&](std::int64_t b) COLONNADE_INLINE_LAMBDA { return task.bags ? task.bags[b] : first + b; };
  const std::int64_t last = bound_of(task.end);
  for (std::int64_t e = bound_of(task.begin); e < last && e < bound_of(task.begin) + kAhead; ++e) {
    fetch_row(reinterpret_cast<const std::byte*>(row_at(e)), row_bytes);
  }
  for (std::int64_t b = task.begin; b < task.end; ++b) {
    const auto bag = task.bags ? Bag<T>::of(task.bags, task.divisor, b) : Bag<T>{first + b, first + b + 1, 1};
    T* const sums = task.sums.base ? reinterpret_cast<T*>(task.sums.base + b * task.sums.stride) : nullptr;
    T* const squares = task.squares.base ? reinterpret_cast<T*>(task.squares.base + b * task.squares.stride) : nullptr;
    if (bag.first == bag.last && (!sums || task.adds_sums) && (!squares || task.adds_squares)) continue;
    for (std::int64_t e = bag.first; e < bag.last && e + kAhead < last; ++e) {
      fetch_row(reinterpret_cast<const std::byte*>(row_at(e + kAhead)), row_bytes);
    }
    const T length = static_cast<T>(bag.last - bag.first);
    const bool is_divided = task.divisor != Divisor::one && bag.last - bag.first > 1;
    const T divisor = !is_divided ? 1 : task.divisor == Divisor::n ? length : root(length);
    // The elements from d on, as many as `load` returns.
    const auto pool_elements = [&](std::int64_t d, const auto& load, const auto& add, const auto& keep)
                                   COLONNADE_INLINE_LAMBDA {
      auto sum = load(nullptr), sum_of_squares = sum;
      for (std::int64_t e = bag.first; e < bag.last; ++e) {
        const auto value = load(row_at(e) + d);
        if (copies) keep(copies + (e - first) * dim + d, value);
        const auto term = weights ? value * weights[e] : value;
        sum = e == bag.first ? term : sum + term;
        if (!squares) continue;
        const auto scaled = value * bag.factor(weights, e);
        sum_of_squares = sum_of_squares + scaled * scaled;
      }
      if (is_divided) sum = sum / divisor;
      if (sums) add(sums + d, sum, task.adds_sums);
      if (squares) add(squares + d, sum_of_squares, task.adds_squares);
    };
    std::int64_t d = 0;
    for (; d + kLanes<T> <= dim; d += kLanes<T>) {
      pool_elements(
          d, [](const Row* at) COLONNADE_INLINE_LAMBDA { return at ? load_as(at) : Vector<T>{}; },
          [](T* at, const Vector<T>& value, bool adds) COLONNADE_INLINE_LAMBDA {
            store(at, adds ? load(at) + value : value);
          },
          [](T* at, const Vector<T>& value) COLONNADE_INLINE_LAMBDA { store(at, value); });
    }
    for (; d < dim; ++d) {
      pool_elements(
          d, [](const Row* at) COLONNADE_INLINE_LAMBDA { return at ? widen(*at) : T{0}; },
          [](T* at, T value, bool adds) COLONNADE_INLINE_LAMBDA { *at = adds ? *at + value : value; },
          [](T* at, T value) COLONNADE_INLINE_LAMBDA { *at = value; });
    }
  }
}
template void pool_squares<float>(const PoolSquaresTask&);
template void pool_squares<double>(const PoolSquaresTask&);
template void pool_squares<Bfloat16>(const PoolSquaresTask&);
template void pool_squares<Float16>(const PoolSquaresTask&);

// A lookup's vector v with factor x receives x g of the pooled gradient g, and 2 v (x g) x of the squares'.
template <class T>
void square_gradients(const SquareGradientTask& task) {
  using R = Register<T>;
  const T *rows = static_cast<const T*>(task.rows), *weights = static_cast<const T*>(task.weights);
  T* const out = static_cast<T*>(task.out);
  for (std::int64_t b = task.begin; b < task.end; ++b) {
    const auto bag = Bag<T>::of(task.bags, task.divisor, b);
    const T *const gradient = row_of<T>(task.gradient, b), *const of_squares = row_of<T>(task.of_squares, b);
    for (std::int64_t e = bag.first; e < bag.last; ++e) {
      const T x = bag.factor(weights, e);
      const T* const row = rows + e * task.dim;
      T* const result = out + e * task.dim;
      std::int64_t d = 0;
      for (; d + R::kLanes <= task.dim; d += R::kLanes) {
        typename R::Value total = {};
        if (gradient) total = R::load(gradient + d) * x;
        if (of_squares) {
          const auto term = R::load(row + d) * T{2} * (R::load(of_squares + d) * x * x);
          total = gradient ? total + term : term;
        }
        R::store(result + d, total);
      }
      for (; d < task.dim; ++d) {
        T total = 0;
        if (gradient) total = gradient[d] * x;
        if (of_squares) {
          const T term = row[d] * T{2} * (of_squares[d] * x * x);
          total = gradient ? total + term : term;
        }
        result[d] = total;
      }
    }
  }
}
template void square_gradients<float>(const SquareGradientTask&);
template void square_gradients<double>(const SquareGradientTask&);

}  // namespace colonnade::COLONNADE_ISA
