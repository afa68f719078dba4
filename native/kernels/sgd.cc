// SGD and momentum SGD.
#include "optimizers.h"
#include "rows.h"

namespace colonnade::COLONNADE_ISA {

namespace {

template <class T>
struct Sgd {
  static constexpr bool kIsDecayAdded = true;
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

template <class T>
void update_sgd(const UpdateTask& task) {
  run_updates<T, Sgd>(task);
}
template <class T>
void update_momentum(const UpdateTask& task) {
  run_updates<T, Momentum>(task);
}
template void update_sgd<float>(const UpdateTask&);
template void update_sgd<double>(const UpdateTask&);
template void update_momentum<float>(const UpdateTask&);
template void update_momentum<double>(const UpdateTask&);

}  // namespace colonnade::COLONNADE_ISA
