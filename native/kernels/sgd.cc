// SGD and momentum SGD.
#include "optimizer_list.h"
#include "optimizers.h"

namespace colonnade::COLONNADE_ISA {

namespace {

template <class T>
struct Sgd {
  static constexpr bool kIsDecayAdded = true;
  static constexpr SettingGroup kSettings = SettingGroup::common;
  static constexpr std::int64_t state_elements(std::int64_t) { return 0; }
  T lr;
  explicit Sgd(const OptimizerSettings& s) : lr(static_cast<T>(s.lr)) {}

  template <int kVectors>
  COLONNADE_INLINE_MEMBER void step(RowValues<T, kVectors>& w, const RowValues<T, kVectors>& g, T*, std::int64_t,
                                    std::uint64_t) const {
    for (std::int64_t v = 0; v < w.num_vectors(); ++v) w.set(v, w.get(v) - g.get(v) * lr);
  }
};

// State: momentum of each column.
template <class T>
struct Momentum {
  static constexpr bool kIsDecayAdded = true;
  static constexpr SettingGroup kSettings = SettingGroup::momentum;
  static constexpr std::int64_t state_elements(std::int64_t dim) { return dim; }
  T lr, momentum;
  bool is_nesterov;
  explicit Momentum(const OptimizerSettings& s)
      : lr(static_cast<T>(s.lr)), momentum(static_cast<T>(s.beta1)), is_nesterov(s.is_nesterov) {}

  template <int kVectors>
  COLONNADE_INLINE_MEMBER void step(RowValues<T, kVectors>& w, const RowValues<T, kVectors>& g, T* state,
                                    std::int64_t dim, std::uint64_t) const {
    for (std::int64_t v = 0; v < w.num_vectors(); ++v) {
      const Vector<T> m = load_columns(state, v, dim) * momentum + g.get(v);
      store_columns(state, v, dim, m);
      w.set(v, w.get(v) - (is_nesterov ? g.get(v) + m * momentum : m) * lr);
    }
  }
};

}  // namespace

constinit const OptimizerKernel sgd_kernel = optimizer_kernel<Sgd>("sgd");
constinit const OptimizerKernel momentum_kernel = optimizer_kernel<Momentum>("momentum");

}  // namespace colonnade::COLONNADE_ISA
