// Gradient sums of a row's entries, and the optimizers that use them.
#include "gradients.h"
#include "rows.h"

namespace colonnade::COLONNADE_ISA {

namespace {

struct Sums {
  template <class T, int kVectors, bool kIsNarrow>
  static void run(const SumTask& task) {
    const std::int64_t begin = task.begin, end = task.end, dim = columns<T, kVectors>(task.dim);
    const std::int32_t* const offsets = task.segment_offsets;
    T* const sums = static_cast<T*>(task.sums);
    const std::uint32_t* const index = task.sum_index;
    Gradients<T, kVectors, kIsNarrow> gradients(task);
    RowValues<T, kVectors> sum(task.scratch, dim);
    for (std::int64_t u = begin; u < end; ++u) {
      gradients.add_up(offsets[u], offsets[u + 1], dim, sum);
      for (std::int64_t v = 0; v < sum.num_vectors(); ++v) store_columns(sums + index[u], v, dim, sum.get(v));
    }
  }
};

}  // namespace

template <class T>
void sum(const SumTask& task) {
  run_by_dim<T, Sums>(task, task.dim, is_16_bit(task.gradient_dtype));
}
template void sum<float>(const SumTask&);
template void sum<double>(const SumTask&);

// Element i goes to lane i mod 32; the lanes are added as a tree.
template <class T>
double squared_norm(const T* values, std::int64_t n) {
  constexpr std::int64_t kWidth = 32;
  double lanes[kWidth] = {};
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    for (std::int64_t j = 0; j < kWidth; ++j) {
      const double value = static_cast<double>(values[i + j]);
      lanes[j] += value * value;
    }
  }
  for (std::int64_t j = 0; i + j < n; ++j) {
    const double value = static_cast<double>(values[i + j]);
    lanes[j] += value * value;
  }
  for (std::int64_t half = kWidth / 2; half; half /= 2) {
    for (std::int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}
template double squared_norm<float>(const float*, std::int64_t);
template double squared_norm<double>(const double*, std::int64_t);

}  // namespace colonnade::COLONNADE_ISA
