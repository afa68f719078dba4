// Initial values of rows.
#include "convert.h"
#include "rows.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {

namespace {

// Return a word's top bits as a number in [-1, 1), exact: 24 bits for float32, 53 for float64.
COLONNADE_INLINE float centred(std::uint64_t word, float) {
  return static_cast<float>(static_cast<std::int32_t>(word >> 40)) * 0x1p-23f - 1.0f;
}
COLONNADE_INLINE double centred(std::uint64_t word, double) {
  return static_cast<double>(static_cast<std::int64_t>(word >> 11)) * 0x1p-52 - 1.0;
}

COLONNADE_INLINE bool is_special(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return (bits & 0x7f800000u) == 0x7f800000u;
}
COLONNADE_INLINE bool is_special(double value) {
  std::uint64_t bits;
  __builtin_memcpy(&bits, &value, 8);
  return (bits & 0x7ff0000000000000u) == 0x7ff0000000000000u;
}

// Call put(j, value) for each of the task's columns. The value of column j of a row is word j + 1 of the splitmix64
// stream that starts at a hash of (seed, id).
template <class T, class Put>
COLONNADE_INLINE void for_each_value(const InitialValuesTask& task, std::int64_t id, const Put& put) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const std::uint64_t start = mix64(mix64(static_cast<std::uint64_t>(id)) ^ task.seed);
  const T scale = static_cast<T>(task.scale);
  for (std::int64_t j = 0; j < task.dim; ++j) {
    const std::uint64_t word = mix64(start + static_cast<std::uint64_t>(task.column + j + 1) * kGolden);
    put(j, centred(word, T{}) * scale);
  }
}

}  // namespace

template <class T>
void initial_values(const InitialValuesTask& task, std::int64_t id, T* out) {
  for_each_value<T>(task, id, [=](std::int64_t j, T value) { out[j] = value; });
}
template void initial_values<float>(const InitialValuesTask&, std::int64_t, float*);
template void initial_values<double>(const InitialValuesTask&, std::int64_t, double*);

void initial_values_bfloat16(const InitialValuesTask& task, std::int64_t id, std::uint16_t* out) {
  for_each_value<float>(task, id,
                        [=](std::int64_t j, float value) { out[j] = narrow<Bfloat16>(value).bits; });
}

void initial_values_float16(const InitialValuesTask& task, std::int64_t id, std::uint16_t* out) {
  for_each_value<float>(task, id,
                        [=](std::int64_t j, float value) { out[j] = narrow<Float16>(value).bits; });
}

// Halves are rounded up, unlike above, so that the signed low half can always store the rest.
void initial_values_split(const InitialValuesTask& task, std::int64_t id, std::uint16_t* highs, std::uint16_t* lows) {
  for_each_value<float>(task, id, [=](std::int64_t j, float value) {
    const std::uint32_t bits = bits_of(value);
    highs[j] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    if (lows) lows[j] = static_cast<std::uint16_t>(bits);
  });
}

template <class T>
bool all_finite(const T* values, std::int64_t n) {
  unsigned specials = 0;
  for (std::int64_t i = 0; i < n; ++i) specials |= is_special(values[i]);
  return specials == 0;
}
template bool all_finite<float>(const float*, std::int64_t);
template bool all_finite<double>(const double*, std::int64_t);

}  // namespace colonnade::COLONNADE_ISA
