// Elementwise part of cross layers: first * factor + input, and its gradient.
#include "registers.h"
#include "rows.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {

namespace {

template <class T>
COLONNADE_INLINE void put(T* at, typename Register<T>::Value value, bool is_streamed) {
  if (is_streamed) {
    Register<T>::stream(at, value);
  } else {
    Register<T>::store(at, value);
  }
}

}  // namespace

template <class T>
void cross(const CrossTask& task) {
  using R = Register<T>;
  const T *first = static_cast<const T*>(task.first), *factor = static_cast<const T*>(task.factor),
          *input = static_cast<const T*>(task.input);
  T* const out = static_cast<T*>(task.out);
  std::int64_t i = task.begin;
  for (; i + R::kLanes <= task.end; i += R::kLanes) {
    put(out + i, R::load(first + i) * R::load(factor + i) + R::load(input + i), task.is_streamed);
  }
  for (; i < task.end; ++i) out[i] = first[i] * factor[i] + input[i];
  if (task.is_streamed) stream_end();
}
template void cross<float>(const CrossTask&);
template void cross<double>(const CrossTask&);

template <class T>
void cross_gradient(const CrossGradientTask& task) {
  using R = Register<T>;
  const T *first = static_cast<const T*>(task.first), *factor = static_cast<const T*>(task.factor),
          *gradient = static_cast<const T*>(task.gradient);
  T *const of_first = static_cast<T*>(task.of_first), *const of_factor = static_cast<T*>(task.of_factor);
  std::int64_t i = task.begin;
  for (; i + R::kLanes <= task.end; i += R::kLanes) {
    const auto g = R::load(gradient + i);
    put(of_first + i, g * R::load(factor + i), task.is_streamed);
    put(of_factor + i, g * R::load(first + i), task.is_streamed);
  }
  for (; i < task.end; ++i) {
    of_first[i] = gradient[i] * factor[i];
    of_factor[i] = gradient[i] * first[i];
  }
  if (task.is_streamed) stream_end();
}
template void cross_gradient<float>(const CrossGradientTask&);
template void cross_gradient<double>(const CrossGradientTask&);

}  // namespace colonnade::COLONNADE_ISA
