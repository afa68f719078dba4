// Frames of records in a segment file. src/colonnade/store/format.md defines the bytes; the asserts here repeat its
// MUSTs.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace colonnade {

static_assert(std::endian::native == std::endian::little, "the store format is little-endian");

// Header before each payload: crc32c of place u64 | id i64 | padded payload. Readers know place and id.
inline constexpr std::size_t kFrameHeadBytes = 4;
inline constexpr std::size_t kSegmentHeaderBytes = 64;

// Place of a record: segment number << 32 | record number in the segment. Negative: absent.

inline constexpr std::size_t frame_stride(std::size_t record_bytes) {
  return kFrameHeadBytes + (record_bytes + 3) / 4 * 4;
}
static_assert(frame_stride(9) == 16 && frame_stride(12) == 16 && frame_stride(13) == 20);

inline std::uint32_t crc_in(const std::uint8_t* frame) noexcept {
  std::uint32_t crc;
  std::memcpy(&crc, frame, sizeof crc);
  return crc;
}

inline constexpr std::uint64_t frame_offset(std::uint64_t record, std::size_t stride) {
  return kSegmentHeaderBytes + record * stride;
}

// Return the crc of a frame of `stride` bytes at `place`, with the row of `id`.
std::uint32_t frame_crc(const std::uint8_t* frame, std::size_t stride, std::uint64_t place, std::int64_t id) noexcept;

// Write n frames of records (n * record_bytes), at places first_place, first_place + 1, ...
void frame_records(const std::int64_t* ids, const std::uint8_t* records, std::size_t n,
                   std::size_t record_bytes, std::uint64_t first_place, std::uint8_t* frames) noexcept;

// Return the first of n frames with a wrong checksum for its id; -1 if none.
std::int64_t check_records(const std::int64_t* ids, const std::uint8_t* frames, std::size_t n, std::size_t record_bytes,
                           std::uint64_t first_place) noexcept;

struct ReadFault {
  enum class Kind { system, truncated, checksum };
  Kind kind;
  std::int64_t place;        // lowest place that failed, for any thread timing
  int error;                 // errno for `system`
  std::uint32_t source = 0;  // log, in a job over several logs; the lowest wins
};

// Return whether a frame is the row of `id` at `place`.
bool is_whole(const std::uint8_t* frame, std::size_t stride, std::int64_t place, std::int64_t id) noexcept;

}  // namespace colonnade
