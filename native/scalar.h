// Element types of rows and outputs.
#pragma once

#include <cstdint>
#include <string_view>

namespace colonnade {

enum class Dtype : std::uint8_t { float32, float64, bfloat16, float16 };

constexpr std::int64_t item_bytes(Dtype dtype) {
  return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}
constexpr std::string_view name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float64:
      return "float64";
    case Dtype::bfloat16:
      return "bfloat16";
    case Dtype::float16:
      return "float16";
    default:
      return "float32";
  }
}
// Element type of sums, lookup weights and optimizer state.
constexpr Dtype compute_dtype(Dtype dtype) {
  return dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32;
}

}  // namespace colonnade
