// Compiled once, for any processor, because the network is the bottleneck.
#include "codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "kernels/rounding.h"

namespace colonnade {
namespace {

using namespace COLONNADE_ISA;

constexpr std::int64_t kWide = 16;
constexpr std::uint32_t kInfinity = 0x7f800000u;
// Largest number with 8 binary digits: every codec can represent it, so smaller values do not round to inf.
constexpr float kMost = 0x1.fep+127f;

// Return the largest magnitude, or a NaN if there is one.
float largest_of(const float* part, std::int64_t dim) {
  std::uint32_t bits = 0;
  for (std::int64_t i = 0; i < dim; ++i) bits = std::max(bits, std::bit_cast<std::uint32_t>(part[i]) & 0x7fffffffu);
  return std::bit_cast<float>(bits);
}

bool is_finite(float value) { return (std::bit_cast<std::uint32_t>(value) & 0x7fffffffu) < kInfinity; }

float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23); }

// Call visit(v, values times scale, random halves) for 16 elements at a time; elements past the end are zeros.
template <class Visit>
void in_vectors(const float* part, std::int64_t dim, float scale, const std::uint64_t* start, std::int64_t column,
                const Visit& visit) {
  for (std::int64_t v = 0; v * kWide < dim; ++v) {
    float lanes[kWide] = {};
    std::copy_n(part + v * kWide, std::min(kWide, dim - v * kWide), lanes);
    const Vector<float> value = load(lanes) * scale;
    visit(v, value, start ? random_halves(*start, column + v * kWide) : Halves{});
  }
}

template <class Half>
void encode_halves(const float* part, std::int64_t dim, float scale, const std::uint64_t* start, std::int64_t column,
                   std::uint8_t* out) {
  in_vectors(part, dim, scale, start, column, [&](std::int64_t v, Vector<float> value, Halves random) {
    const Halves halves = start ? round_at_random<Half>(value, random) : narrow_lanes<Half>(value);
    store_halves(reinterpret_cast<std::byte*>(out), v, dim, halves);
  });
}

template <class Half>
void decode_halves(const std::uint8_t* coded, std::int64_t dim, float scale, float* part) {
  for (std::int64_t i = 0; i < dim; ++i) {
    Half half;
    __builtin_memcpy(&half, coded + 2 * i, 2);
    part[i] = widen(half) * scale;
  }
}

void encode_steps(const float* part, std::int64_t dim, float scale, const std::uint64_t* start, std::int64_t column,
                  std::uint8_t* out) {
  const auto step = [](float value) { return static_cast<std::uint8_t>(static_cast<std::int8_t>(value)); };
  if (!is_finite(scale) || scale == 0) {  // one step of inf or NaN; none for zero
    std::fill_n(out, dim, step(scale == 0 ? 0.0f : 1.0f));
    return;
  }
  for (std::int64_t v = 0; v * kWide < dim; ++v) {
    const std::int64_t rest = std::min(kWide, dim - v * kWide);
    std::uint16_t random[kWide];
    if (start) {
      const Halves halves = random_halves(*start, column + v * kWide);
      __builtin_memcpy(random, &halves, sizeof random);
    }
    for (std::int64_t j = 0; j < rest; ++j) {
      const float steps = part[v * kWide + j] / scale;
      const float whole =
          start ? std::floor(steps + static_cast<float>(random[j]) * 0x1p-16f) : std::nearbyint(steps);
      out[v * kWide + j] = step(std::clamp(whole, -127.0f, 127.0f));
    }
  }
}

}  // namespace

std::int64_t CodedRows::width() const {
  std::int64_t sum = 0;
  for (const auto dim : dims) sum += dim;
  return sum;
}

std::int64_t CodedRows::row_bytes() const {
  const auto parts = static_cast<std::int64_t>(dims.size());
  if (codec == RowCodec::int8) return width() + 4 * parts;
  return 2 * width() + (codec == RowCodec::fp16 ? 2 * parts : 0);
}

void encode_rows(const CodedRows& shape, const float* values, const CodecDraw* draw, std::uint8_t* coded) {
  std::vector<float> within;
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    std::uint64_t word = 0;
    const std::uint64_t* start = nullptr;
    if (draw) {
      word = stream_start(draw->seed, draw->ids[static_cast<std::size_t>(row)], draw->step);
      start = &word;
    }
    std::int64_t column = 0;
    for (const std::int64_t dim : shape.dims) {
      const float* part = values;
      float largest = largest_of(values, dim);
      if (largest > kMost && is_finite(largest)) {
        within.assign(values, values + dim);
        for (float& value : within) value = std::clamp(value, -kMost, kMost);
        part = within.data();
        largest = kMost;
      }
      if (shape.codec == RowCodec::bf16) {
        encode_halves<Bfloat16>(part, dim, 1.0f, start, column, coded);
        coded += 2 * dim;
      } else if (shape.codec == RowCodec::fp16) {
        int exponent = 0;
        if (is_finite(largest)) {
          (void)std::frexp(largest, &exponent);
          exponent = std::max(exponent - 14, -126);
        }
        const auto coded_exponent = static_cast<std::int16_t>(exponent);
        __builtin_memcpy(coded, &coded_exponent, 2);
        encode_halves<Float16>(part, dim, power_of_two(-exponent), start, column, coded + 2);
        coded += 2 + 2 * dim;
      } else {
        const float scale = largest / 127.0f;
        __builtin_memcpy(coded, &scale, 4);
        encode_steps(part, dim, scale, start, column, coded + 4);
        coded += 4 + dim;
      }
      values += dim;
      column += dim;
    }
  }
}

void decode_rows(const CodedRows& shape, const std::uint8_t* coded, float* values) {
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    for (const std::int64_t dim : shape.dims) {
      if (shape.codec == RowCodec::bf16) {
        decode_halves<Bfloat16>(coded, dim, 1.0f, values);
        coded += 2 * dim;
      } else if (shape.codec == RowCodec::fp16) {
        std::int16_t exponent;
        __builtin_memcpy(&exponent, coded, 2);
        // Bytes from another rank may have any value.
        decode_halves<Float16>(coded + 2, dim, power_of_two(std::clamp<int>(exponent, -126, 127)), values);
        coded += 2 + 2 * dim;
      } else {
        float scale;
        __builtin_memcpy(&scale, coded, 4);
        for (std::int64_t i = 0; i < dim; ++i) {
          values[i] = static_cast<float>(static_cast<std::int8_t>(coded[4 + i])) * scale;
        }
        coded += 4 + dim;
      }
      values += dim;
    }
  }
}

}  // namespace colonnade
