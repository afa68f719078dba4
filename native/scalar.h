// The element types of tables.
#pragma once

#include <cstdint>
#include <string_view>

namespace colonnade {

enum class Dtype : std::uint8_t { float32, float64 };

constexpr std::int64_t item_bytes(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 8;
}
constexpr std::string_view name_of(Dtype dtype) {
  return dtype == Dtype::float32 ? "float32" : "float64";
}

}  // namespace colonnade
