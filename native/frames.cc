#include "frames.h"

#include "crc32c.h"

namespace colonnade {

std::uint32_t frame_crc(const std::uint8_t* frame, std::size_t stride, std::uint64_t place, std::int64_t id) noexcept {
  std::uint8_t implied[16];
  std::memcpy(implied, &place, 8);
  std::memcpy(implied + 8, &id, 8);
  const std::uint32_t crc = crc32c(0, implied, sizeof implied);
  return crc32c(crc, frame + kFrameHeadBytes, stride - kFrameHeadBytes);
}

void frame_records(const std::int64_t* ids, const std::uint8_t* records, std::size_t n,
                   std::size_t record_bytes, std::uint64_t first_place, std::uint8_t* frames) noexcept {
  const std::size_t stride = frame_stride(record_bytes);
  for (std::size_t i = 0; i < n; ++i) {
    std::uint8_t* frame = frames + i * stride;
    std::uint8_t* payload = frame + kFrameHeadBytes;
    std::memcpy(payload, records + i * record_bytes, record_bytes);
    std::memset(payload + record_bytes, 0, stride - kFrameHeadBytes - record_bytes);
    const std::uint32_t crc = frame_crc(frame, stride, first_place + i, ids[i]);
    std::memcpy(frame, &crc, sizeof crc);
  }
}

std::int64_t check_records(const std::int64_t* ids, const std::uint8_t* frames, std::size_t n, std::size_t record_bytes,
                           std::uint64_t first_place) noexcept {
  const std::size_t stride = frame_stride(record_bytes);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint8_t* frame = frames + i * stride;
    if (crc_in(frame) != frame_crc(frame, stride, first_place + i, ids[i])) return static_cast<std::int64_t>(i);
  }
  return -1;
}

bool is_whole(const std::uint8_t* frame, std::size_t stride, std::int64_t place, std::int64_t id) noexcept {
  return crc_in(frame) == frame_crc(frame, stride, static_cast<std::uint64_t>(place), id);
}

}  // namespace colonnade
