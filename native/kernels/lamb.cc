// Optimizers that need a whole row before they step: LAMB and row-wise Adam.
#include "moments.h"
#include "optimizer_list.h"

namespace colonnade::COLONNADE_ISA {

namespace {

// State: first moment of each column, then one second moment.
template <class T>
struct RowwiseAdam {
  static constexpr bool kIsDecayAdded = true;
  static constexpr SettingGroup kSettings = SettingGroup::moments;
  static constexpr std::int64_t state_elements(std::int64_t dim) { return dim + 1; }
  Moments<T> moments;
  explicit RowwiseAdam(const OptimizerSettings& s) : moments(s) {}

  template <int kVectors>
  COLONNADE_INLINE_MEMBER void step(RowValues<T, kVectors>& w, const RowValues<T, kVectors>& g, T* state,
                                    std::int64_t dim, std::uint64_t steps) const {
    const auto corrections = moments.corrections(moments.lr, steps);
    const T s = moments.second(state[dim], sum_squares(g, dim) / static_cast<T>(dim));
    state[dim] = s;
    const T step = corrections.step / (root(s) * corrections.inverse_root + moments.eps);
    for (std::int64_t v = 0; v < w.num_vectors(); ++v) {
      w.set(v, w.get(v) - moments.next_first(state, v, dim, g.get(v)) * step);
    }
  }
};

// State: first moment, then second moment, of each column.
template <class T>
struct Lamb {
  static constexpr bool kIsDecayAdded = false;
  static constexpr SettingGroup kSettings = SettingGroup::moments;
  static constexpr std::int64_t state_elements(std::int64_t dim) { return 2 * dim; }
  Moments<T> moments;
  T lr, weight_decay;
  explicit Lamb(const OptimizerSettings& s)
      : moments(s), lr(static_cast<T>(s.lr)), weight_decay(static_cast<T>(s.weight_decay)) {}

  template <int kVectors>
  COLONNADE_INLINE_MEMBER void step(RowValues<T, kVectors>& w, RowValues<T, kVectors>& g, T* state,
                                    std::int64_t dim, std::uint64_t steps) const {
    const auto corrections = moments.corrections(1.0, steps);
    for (std::int64_t v = 0; v < w.num_vectors(); ++v) {
      const Vector<T> m = moments.next_first(state, v, dim, g.get(v));
      const Vector<T> s = moments.next_second(state, v, dim, g.get(v));
      g.set(v, m * corrections.step / (roots<T>(s) * corrections.inverse_root + moments.eps));
    }
    if (weight_decay != 0) {
      for (std::int64_t v = 0; v < w.num_vectors(); ++v) g.set(v, g.get(v) + w.get(v) * weight_decay);
    }
    const T row_norm = root(sum_squares(w, dim)), step_norm = root(sum_squares(g, dim));
    const T rate = lr * (row_norm > 0 && step_norm > 0 ? row_norm / step_norm : T{1});
    for (std::int64_t v = 0; v < w.num_vectors(); ++v) w.set(v, w.get(v) - g.get(v) * rate);
  }
};

}  // namespace

constinit const OptimizerKernel rowwise_adam_kernel = optimizer_kernel<RowwiseAdam>("rowwise_adam");
constinit const OptimizerKernel lamb_kernel = optimizer_kernel<Lamb>("lamb");

}  // namespace colonnade::COLONNADE_ISA
