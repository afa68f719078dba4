// FTRL-proximal. State: n, the sum of squares, then z, of each column.
#include "optimizer_list.h"
#include "optimizers.h"

namespace colonnade::COLONNADE_ISA {

namespace {

template <class T>
struct Ftrl {
  static constexpr bool kIsDecayAdded = false;
  static constexpr SettingGroup kSettings = SettingGroup::proximal;
  static constexpr std::int64_t state_elements(std::int64_t dim) { return 2 * dim; }
  T inverse_lr, l1, l2, beta;
  explicit Ftrl(const OptimizerSettings& s)
      : inverse_lr(static_cast<T>(1 / s.lr)),
        l1(static_cast<T>(s.l1)),
        l2(static_cast<T>(s.l2)),
        beta(static_cast<T>(s.beta)) {}

  template <int kVectors>
  COLONNADE_INLINE_MEMBER void step(RowValues<T, kVectors>& w, const RowValues<T, kVectors>& g, T* state,
                                    std::int64_t dim, std::uint64_t) const {
    for (std::int64_t v = 0; v < w.num_vectors(); ++v) {
      const Vector<T> n = load_columns(state, v, dim), next = n + g.get(v) * g.get(v);
      const Vector<T> next_root = roots<T>(next), sigma = (next_root - roots<T>(n)) * inverse_lr;
      const Vector<T> z = load_columns(state + dim, v, dim) + (g.get(v) - sigma * w.get(v));
      store_columns(state, v, dim, next);
      store_columns(state + dim, v, dim, z);
      const auto is_above = [](auto lanes) COLONNADE_INLINE_LAMBDA { return lanes > 0; };
      const auto is_short = [l1 = l1](auto lanes) COLONNADE_INLINE_LAMBDA { return (lanes <= l1) & (lanes >= -l1); };
      const Vector<T> bound = where(z, is_above, splat(l1), splat(-l1));
      const Vector<T> value = (bound - z) / ((next_root + beta) * inverse_lr + l2);
      w.set(v, where(z, is_short, Vector<T>{}, value));  // a NaN stays
    }
  }
};

}  // namespace

constinit const OptimizerKernel ftrl_kernel = optimizer_kernel<Ftrl>("ftrl");

}  // namespace colonnade::COLONNADE_ISA
