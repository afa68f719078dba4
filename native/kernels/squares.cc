// Squares of the vectors of bags, and gradients of lookups whose vectors and squares were pooled.
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
template <class T>
void pool_squares(const SquaresTask& task) {
  using R = Register<T>;
  const T *rows = static_cast<const T*>(task.rows), *weights = static_cast<const T*>(task.weights);
  for (std::int64_t b = task.begin; b < task.end; ++b) {
    const auto bag = Bag<T>::of(task.bags, task.divisor, b);
    T* const out = reinterpret_cast<T*>(task.out + b * task.out_stride);
    std::int64_t d = 0;
    for (; d + R::kLanes <= task.dim; d += R::kLanes) {
      typename R::Value sum = {};
      for (std::int64_t e = bag.first; e < bag.last; ++e) {
        const auto value = R::load(rows + e * task.dim + d) * bag.factor(weights, e);
        sum = sum + value * value;
      }
      R::store(out + d, sum);
    }
    for (; d < task.dim; ++d) {
      T sum = 0;
      for (std::int64_t e = bag.first; e < bag.last; ++e) {
        const T value = rows[e * task.dim + d] * bag.factor(weights, e);
        sum = sum + value * value;
      }
      out[d] = sum;
    }
  }
}
template void pool_squares<float>(const SquaresTask&);
template void pool_squares<double>(const SquaresTask&);

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
