// Codecs of rows in messages. src/colonnade/wire/codec.py defines the formats, codec_reference.py the exact bits in
// PyTorch.
#pragma once

#include <cstdint>
#include <span>

namespace colonnade {

enum class RowCodec : std::uint8_t { bf16, fp16, int8 };

struct CodedRows {
  RowCodec codec;
  std::int64_t rows;
  std::span<const std::int32_t> dims;  // of a row's parts, which are adjacent

  std::int64_t width() const;      // elements of a row
  std::int64_t row_bytes() const;  // encoded size
};

// Random bits for stochastic rounding: those of kernels/rounding.h, with the step in place of a clock.
struct CodecDraw {
  std::span<const std::int64_t> ids;  // (rows,)
  std::uint64_t seed, step;
};

// Encode and decode rows. values (rows, width), coded (rows, row_bytes); draw null: round to nearest.
void encode_rows(const CodedRows& shape, const float* values, const CodecDraw* draw, std::uint8_t* coded);
void decode_rows(const CodedRows& shape, const std::uint8_t* coded, float* values);

}  // namespace colonnade
