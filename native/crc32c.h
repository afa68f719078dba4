// CRC-32C (Castagnoli, RFC 3720): checksum of all stored data.
#pragma once

#include <cstddef>
#include <cstdint>

namespace colonnade {

// Return the checksum of `n` bytes that follow bytes with checksum `crc` (0 for none). crc32c(0, "123456789", 9) ==
// 0xe3069283.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t n) noexcept;

}  // namespace colonnade
