// Running moments of Adam and related optimizers, with their bias corrections.
#pragma once

#include "optimizers.h"

namespace colonnade::COLONNADE_ISA {
namespace {

template <class T>
struct Moments {
  double lr;
  const double *powers1, *powers2;
  T rate1, beta2, rate2, eps;
  explicit Moments(const OptimizerSettings& s)
      : lr(s.lr),
        powers1(s.powers1),
        powers2(s.powers2),
        rate1(static_cast<T>(1 - s.beta1)),
        beta2(static_cast<T>(s.beta2)),
        rate2(static_cast<T>(1 - s.beta2)),
        eps(static_cast<T>(s.eps)) {}

  // At the row's step t = steps + 1: lr / (1 - beta1^t), and 1 / sqrt(1 - beta2^t).
  struct Corrections {
    T step, inverse_root;
  };
  COLONNADE_INLINE_MEMBER Corrections corrections(double lr, std::uint64_t steps) const {
    return {static_cast<T>(lr / (1 - power(powers1, steps + 1))),
            static_cast<T>(1 / root(1 - power(powers2, steps + 1)))};
  }
  template <class Value>
  COLONNADE_INLINE_MEMBER Value first(Value m, Value g) const {
    return m + (g - m) * rate1;
  }
  template <class Value>
  COLONNADE_INLINE_MEMBER Value second(Value v, Value square) const {
    return v * beta2 + square * rate2;
  }
  COLONNADE_INLINE_MEMBER Vector<T> next_first(T* state, std::int64_t v, std::int64_t dim, Vector<T> g) const {
    const Vector<T> m = first(load_columns(state, v, dim), g);
    store_columns(state, v, dim, m);
    return m;
  }
  COLONNADE_INLINE_MEMBER Vector<T> next_second(T* state, std::int64_t v, std::int64_t dim, Vector<T> g) const {
    const Vector<T> s = second(load_columns(state + dim, v, dim), g * g);
    store_columns(state + dim, v, dim, s);
    return s;
  }
};

}  // namespace
}  // namespace colonnade::COLONNADE_ISA
