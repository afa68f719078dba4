// Adam and AdamW. State: first moment, then second moment, of each column.
#include "moments.h"
#include "optimizer_list.h"

namespace colonnade::COLONNADE_ISA {

namespace {

template <class T>
struct Adam {
  static constexpr bool kIsDecayAdded = true;
  static constexpr SettingGroup kSettings = SettingGroup::moments;
  static constexpr std::int64_t state_elements(std::int64_t dim) { return 2 * dim; }
  Moments<T> moments;
  explicit Adam(const OptimizerSettings& s) : moments(s) {}

  template <int kVectors>
  COLONNADE_INLINE_MEMBER void step(RowValues<T, kVectors>& w, const RowValues<T, kVectors>& g, T* state,
                                    std::int64_t dim, std::uint64_t steps) const {
    const auto corrections = moments.corrections(moments.lr, steps);
    for (std::int64_t v = 0; v < w.num_vectors(); ++v) {
      const Vector<T> m = moments.next_first(state, v, dim, g.get(v));
      const Vector<T> s = moments.next_second(state, v, dim, g.get(v));
      w.set(v, w.get(v) - m * corrections.step / (roots<T>(s) * corrections.inverse_root + moments.eps));
    }
  }
};

template <class T>
struct AdamW {
  static constexpr bool kIsDecayAdded = false;
  static constexpr SettingGroup kSettings = SettingGroup::moments;
  static constexpr std::int64_t state_elements(std::int64_t dim) { return 2 * dim; }
  Adam<T> adam;
  T keep;
  explicit AdamW(const OptimizerSettings& s) : adam(s), keep(static_cast<T>(1 - s.lr * s.weight_decay)) {}

  template <int kVectors>
  COLONNADE_INLINE_MEMBER void step(RowValues<T, kVectors>& w, const RowValues<T, kVectors>& g, T* state,
                                    std::int64_t dim, std::uint64_t steps) const {
    for (std::int64_t v = 0; v < w.num_vectors(); ++v) w.set(v, w.get(v) * keep);
    adam.step(w, g, state, dim, steps);
  }
};

}  // namespace

constinit const OptimizerKernel adam_kernel = optimizer_kernel<Adam>("adam");
constinit const OptimizerKernel adamw_kernel = optimizer_kernel<AdamW>("adamw");

}  // namespace colonnade::COLONNADE_ISA
