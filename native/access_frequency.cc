#include "access_frequency.h"

#include <cmath>

namespace colonnade {

const std::array<std::uint32_t, access_frequency::kGains + 1> access_frequency::kGain = [] {
  std::array<std::uint32_t, kGains + 1> gains{};
  for (int i = 0; i < kGains; ++i)
    gains[i] = static_cast<std::uint32_t>(65536.0 * kDoubling * std::log2(1.0 + std::exp2(-(i + 0.5) / 32)));
  return gains;
}();

const std::array<std::uint32_t, 256> next_use::kBatches = [] {
  std::array<std::uint32_t, 256> batches{};
  for (int code = 1; code < 256; ++code) {
    const double exact = std::exp2((code - 1) / 8.0);
    batches[code] = exact >= 0x1p31 ? 1u << 31 : static_cast<std::uint32_t>(std::ceil(exact));
  }
  return batches;
}();

}  // namespace colonnade
