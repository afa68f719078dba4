// What a row looks like while it travels, in fewer bits. The formats are told, and defined in plain PyTorch, in
// src/colonnade/wire/codec.py and codec_reference.py.
#pragma once

#include <cstdint>
#include <span>

namespace colonnade {

enum class RowCodec : std::uint8_t { bf16, fp16, int8 };

struct CodedRows {
  RowCodec codec;
  std::int64_t rows;
  std::span<const std::int32_t> dims;  // of a row's parts, side by side

  std::int64_t width() const;      // elements of a row
  std::int64_t row_bytes() const;  // coded
};

// Random bits to round with: those of kernels/rounding.h, step in place of a clock.
struct CodecDraw {
  std::span<const std::int64_t> ids;  // (rows,)
  std::uint64_t seed, step;
};

// values (rows, width), coded (rows, row_bytes); draw null: to nearest.
void encode_rows(const CodedRows& shape, const float* values, const CodecDraw* draw, std::uint8_t* coded);
void decode_rows(const CodedRows& shape, const std::uint8_t* coded, float* values);

}  // namespace colonnade
