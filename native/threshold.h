// Messages of thresholded sums: the elements of large magnitude, and errors that later messages make up for.
// src/colonnade/wire/thresholded.py defines the rule, tests/references/threshold_reference.py the exact bits.
#pragma once

#include <cstdint>
#include <span>

namespace colonnade {

// Slot of a message: an offset within the block in the upper 16 bits, the value in bfloat16 in the lower ones. 0 is an
// empty slot, because it adds 0 to the first element.
using Slot = std::uint32_t;

// Blocks of at most 65,536 elements that lie side by side, each with a threshold and slots of its own.
struct ThresholdBlocks {
  std::span<const std::int64_t> starts;  // (blocks + 1,) ascending from 0
  std::span<const std::int64_t> slots;   // (blocks,) slots of each in the message

  std::int64_t num_slots() const;
};

// Encode values * 1 + residual * scale: of each block the elements whose magnitude is not below its threshold (those
// that are not 0, if that is 0), at most as many as it has slots. Where more pass, a window that moves with the step is
// taken, so that no element waits for ever. new_residual: what is not sent, over scale. num_passed (blocks,): elements
// at or above the threshold. If an element or its
// residual would be NaN or inf, the message has one NaN alone, and residuals stay.
void encode_thresholded(const ThresholdBlocks& blocks, const float* values, const float* residual, float scale,
                        const float* thresholds, std::int64_t step, float* new_residual, std::int64_t* num_passed,
                        Slot* message);

// Decode a message to values, those without a slot 0. Throws std::invalid_argument for an offset outside its block.
void decode_thresholded(const ThresholdBlocks& blocks, const Slot* message, float* values);

}  // namespace colonnade
