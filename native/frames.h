// Records framed as they lie in a segment file. The bytes are defined in src/colonnade/store/format.md; the asserts
// here repeat its MUSTs.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace colonnade {

static_assert(std::endian::native == std::endian::little, "the store format is little-endian");

// What stands before every payload: crc32c of place u64 | id i64 | padded payload. Place and id are known to whoever reads.
inline constexpr std::size_t kFrameHeadBytes = 4;
inline constexpr std::size_t kSegmentHeaderBytes = 64;

// A place is where a record lies: segment number << 32 | record number inside it. A negative one is nowhere.

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

// The crc that belongs in a frame of `stride` bytes at `place`, the row of `id`.
std::uint32_t frame_crc(const std::uint8_t* frame, std::size_t stride, std::uint64_t place, std::int64_t id) noexcept;

// Write n frames of records (n * record_bytes), at places first_place, first_place + 1, ...
void frame_records(const std::int64_t* ids, const std::uint8_t* records, std::size_t n,
                   std::size_t record_bytes, std::uint64_t first_place, std::uint8_t* frames) noexcept;

// The first of n frames whose checksum is wrong for its id; -1 if none.
std::int64_t check_records(const std::int64_t* ids, const std::uint8_t* frames, std::size_t n, std::size_t record_bytes,
                           std::uint64_t first_place) noexcept;

struct ReadFault {
  enum class Kind { system, truncated, checksum };
  Kind kind;
  std::int64_t place;        // the lowest place that failed, whatever the threads did
  int error;                 // errno for `system`
  std::uint32_t source = 0;  // of a job over several logs: which one; the lowest wins
};

// Whether a frame is the row of `id` at `place`.
bool is_whole(const std::uint8_t* frame, std::size_t stride, std::int64_t place, std::int64_t id) noexcept;

}  // namespace colonnade
