#include "threshold.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace colonnade {
namespace {

constexpr std::int64_t kGroup = 32;  // elements that are compared at once
constexpr float kMost = 0x1.fep+127f;  // largest bfloat16
constexpr Slot kNaN = 0x7fc0u;

std::uint16_t round_to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(std::clamp(value, -kMost, kMost));
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float widen_bfloat16(Slot bits) { return std::bit_cast<float>(bits << 16); }

// Store values + residual * scale in `wanted`; list the offsets of those at or above the threshold.
std::int64_t list_passing(const float* values, const float* residual, float scale, float threshold,
                          std::int64_t size, float* wanted, std::uint16_t* offsets) {
  std::int64_t num_passed = 0;
  for (std::int64_t first = 0; first < size; first += kGroup) {
    const std::int64_t last = std::min(size, first + kGroup);
    int any = 0;
    for (std::int64_t i = first; i < last; ++i) {
      wanted[i] = values[i] + residual[i] * scale;
      any |= !(std::fabs(wanted[i]) < threshold);  // true for NaN
    }
    if (!any) continue;
    for (std::int64_t i = first; i < last; ++i) {
      offsets[num_passed] = static_cast<std::uint16_t>(i);
      num_passed += !(std::fabs(wanted[i]) < threshold);
    }
  }
  return num_passed;
}

}  // namespace

std::int64_t ThresholdBlocks::num_slots() const {
  std::int64_t sum = 0;
  for (const auto count : slots) sum += count;
  return sum;
}

void encode_thresholded(const ThresholdBlocks& blocks, const float* values, const float* residual, float scale,
                        const float* thresholds, std::int64_t step, float* new_residual, std::int64_t* num_passed,
                        Slot* message) {
  std::vector<std::uint16_t> offsets(65536 + 1);  // the last is written, never read
  Slot* const begin = message;
  std::fill_n(begin, blocks.num_slots(), Slot{0});
  const float largest = std::numeric_limits<float>::max() * std::min(scale, 1.0f);  // more is inf as a residual
  for (std::size_t b = 0; b < blocks.slots.size(); ++b) {
    const std::int64_t start = blocks.starts[b], size = blocks.starts[b + 1] - start;
    float* const wanted = new_residual + start;
    const float threshold = std::clamp(thresholds[b], std::numeric_limits<float>::denorm_min(), largest);
    const std::int64_t passed =
        list_passing(values + start, residual + start, scale, threshold, size, wanted, offsets.data());
    num_passed[b] = passed;
    const auto has_bad = [&](std::uint16_t offset) { return !(std::fabs(wanted[offset]) <= largest); };
    if (std::any_of(offsets.begin(), offsets.begin() + passed, has_bad)) {
      std::fill_n(begin, blocks.num_slots(), Slot{0});
      *begin = kNaN;
      std::copy_n(residual, blocks.starts.back(), new_residual);
      return;
    }
    const std::int64_t num_sent = std::min(passed, blocks.slots[b]);
    const std::int64_t first = passed > num_sent ? step * num_sent % passed : 0;
    for (std::int64_t i = 0; i < num_sent; ++i) {
      const std::uint16_t offset = offsets[static_cast<std::size_t>((first + i) % passed)];
      const std::uint16_t half = round_to_bfloat16(wanted[offset]);
      message[i] = static_cast<Slot>(offset) << 16 | half;
      wanted[offset] -= widen_bfloat16(half);
    }
    message += blocks.slots[b];
    if (scale != 1.0f) {
      for (std::int64_t i = 0; i < size; ++i) wanted[i] /= scale;
    }
  }
}

void decode_thresholded(const ThresholdBlocks& blocks, const Slot* message, float* values) {
  std::fill_n(values, blocks.starts.back(), 0.0f);
  for (std::size_t b = 0; b < blocks.slots.size(); ++b) {
    const std::int64_t start = blocks.starts[b], size = blocks.starts[b + 1] - start;
    for (std::int64_t i = 0; i < blocks.slots[b]; ++i) {
      const std::int64_t offset = message[i] >> 16;
      if (offset >= size) {
        throw std::invalid_argument("message: got offset " + std::to_string(offset) + " in a block of " +
                                    std::to_string(size) + " elements, wanted bytes of encode_thresholded");
      }
      values[start + offset] += widen_bfloat16(message[i]);
    }
    message += blocks.slots[b];
  }
}

}  // namespace colonnade
