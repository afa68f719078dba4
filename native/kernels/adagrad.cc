// Adagrad, with a sum of squares per column or one per row.
#include "optimizer_list.h"
#include "optimizers.h"

namespace colonnade::COLONNADE_ISA {

namespace {

// State: sum of squares of each column.
template <class T>
struct Adagrad {
  static constexpr bool kIsDecayAdded = true;
  static constexpr SettingGroup kSettings = SettingGroup::common;
  static constexpr std::int64_t state_elements(std::int64_t dim) { return dim; }
  T lr, eps;
  explicit Adagrad(const OptimizerSettings& s) : lr(static_cast<T>(s.lr)), eps(static_cast<T>(s.eps)) {}

  template <int kVectors>
  COLONNADE_INLINE_MEMBER void step(RowValues<T, kVectors>& w, const RowValues<T, kVectors>& g, T* state,
                                    std::int64_t dim, std::uint64_t) const {
    for (std::int64_t v = 0; v < w.num_vectors(); ++v) {
      const Vector<T> sum = load_columns(state, v, dim) + g.get(v) * g.get(v);
      store_columns(state, v, dim, sum);
      w.set(v, w.get(v) - g.get(v) * lr / (roots<T>(sum) + eps));
    }
  }
};

// State: one sum of mean squares.
template <class T>
struct RowwiseAdagrad {
  static constexpr bool kIsDecayAdded = true;
  static constexpr SettingGroup kSettings = SettingGroup::common;
  static constexpr std::int64_t state_elements(std::int64_t) { return 1; }
  T lr, eps;
  explicit RowwiseAdagrad(const OptimizerSettings& s) : lr(static_cast<T>(s.lr)), eps(static_cast<T>(s.eps)) {}

  template <int kVectors>
  COLONNADE_INLINE_MEMBER void step(RowValues<T, kVectors>& w, const RowValues<T, kVectors>& g, T* state,
                                    std::int64_t dim, std::uint64_t) const {
    const T sum = state[0] + sum_squares(g, dim) / static_cast<T>(dim);
    state[0] = sum;
    const T step = lr / (root(sum) + eps);
    for (std::int64_t v = 0; v < w.num_vectors(); ++v) w.set(v, w.get(v) - g.get(v) * step);
  }
};

}  // namespace

constinit const OptimizerKernel adagrad_kernel = optimizer_kernel<Adagrad>("adagrad");
constinit const OptimizerKernel rowwise_adagrad_kernel = optimizer_kernel<RowwiseAdagrad>("rowwise_adagrad");

}  // namespace colonnade::COLONNADE_ISA
