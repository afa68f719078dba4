#include "row_norms.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace colonnade {

namespace {

struct Bfloat {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

double wide(float value) { return value; }
double wide(double value) { return value; }
double wide(Bfloat value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }
double wide(Half value) {
  const int exponent = value.bits >> 10 & 31, fraction = value.bits & 1023;  // the sign is squared away
  if (exponent == 31) return fraction ? NAN : INFINITY;
  return std::ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
}

template <class T>
double squared_norm(const std::byte* row, std::int64_t dim) {
  constexpr std::int64_t kLanes = 8;
  double sums[kLanes] = {};
  for (std::int64_t i = 0; i < dim; ++i) {
    T element;
    std::memcpy(&element, row + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    const double value = wide(element);
    sums[i % kLanes] += value * value;
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

}  // namespace

std::vector<double> squared_norms(const std::byte* base, std::int64_t stride, std::int64_t dim, Dtype dtype,
                                  std::span<const std::uint32_t> slots) {
  const auto of = dtype == Dtype::float64    ? &squared_norm<double>
                  : dtype == Dtype::bfloat16 ? &squared_norm<Bfloat>
                  : dtype == Dtype::float16  ? &squared_norm<Half>
                                             : &squared_norm<float>;
  std::vector<double> norms(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i)
    norms[i] = of(base + static_cast<std::int64_t>(slots[i]) * stride, dim);
  return norms;
}

}  // namespace colonnade
