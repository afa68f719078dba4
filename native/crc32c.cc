#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace colonnade {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: result of byte b after k more zero bytes ("slicing by 8").
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (int k = 1; k < 8; ++k) {
    for (std::uint32_t b = 0; b < 256; ++b) {
      const std::uint32_t crc = tables[k - 1][b];
      tables[k][b] = (crc >> 8) ^ tables[0][crc & 255];
    }
  }
  return tables;
}
constexpr Tables kTables = make_tables();

std::uint32_t portable(std::uint32_t crc, const unsigned char* at, std::size_t n) noexcept {
  for (; n >= 8; n -= 8, at += 8) {
    std::uint32_t next = 0;
    for (int k = 0; k < 4; ++k) {
      next ^= kTables[7 - k][at[k] ^ ((crc >> (8 * k)) & 255)] ^ kTables[3 - k][at[4 + k]];
    }
    crc = next;
  }
  for (; n; --n, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 255];
  return crc;
}

#if defined(__x86_64__)

// The instruction takes three cycles, and one can start every cycle, so three lanes run in parallel.
constexpr std::size_t kLaneBytes = 1024;

// lane_shift[k][b]: result of byte k of a checksum with value b after kLaneBytes zero bytes. The map is linear over
// GF(2), so 32 single bits define it.
using Shift = std::array<std::array<std::uint32_t, 256>, 4>;

Shift make_lane_shift() noexcept {
  std::array<std::uint32_t, 32> of_bit{};
  for (int bit = 0; bit < 32; ++bit) {
    std::uint32_t crc = 1u << bit;
    for (std::size_t i = 0; i < kLaneBytes; ++i) crc = (crc >> 8) ^ kTables[0][crc & 255];
    of_bit[bit] = crc;
  }
  Shift shift{};
  for (int k = 0; k < 4; ++k) {
    for (std::uint32_t b = 0; b < 256; ++b) {
      for (int bit = 0; bit < 8; ++bit) shift[k][b] ^= b >> bit & 1 ? of_bit[8 * k + bit] : 0;
    }
  }
  return shift;
}

std::uint64_t word(const unsigned char* at) noexcept {
  std::uint64_t value;
  std::memcpy(&value, at, 8);
  return value;
}

__attribute__((target("sse4.2"))) std::uint32_t sse42(std::uint32_t crc, const unsigned char* at,
                                                      std::size_t n) noexcept {
  static const Shift shift = make_lane_shift();
  const auto shifted = [](std::uint32_t c) {
    return shift[0][c & 255] ^ shift[1][c >> 8 & 255] ^ shift[2][c >> 16 & 255] ^ shift[3][c >> 24];
  };
  for (; n >= 3 * kLaneBytes; n -= 3 * kLaneBytes, at += 3 * kLaneBytes) {
    std::uint64_t a = crc, b = 0, c = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += 8) {
      a = _mm_crc32_u64(a, word(at + i));
      b = _mm_crc32_u64(b, word(at + kLaneBytes + i));
      c = _mm_crc32_u64(c, word(at + 2 * kLaneBytes + i));
    }
    crc = shifted(shifted(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^
          static_cast<std::uint32_t>(c);
  }
  std::uint64_t rest = crc;
  for (; n >= 8; n -= 8, at += 8) rest = _mm_crc32_u64(rest, word(at));
  crc = static_cast<std::uint32_t>(rest);
  if (n >= 4) {
    std::uint32_t value;
    std::memcpy(&value, at, 4);
    crc = _mm_crc32_u32(crc, value);
    n -= 4, at += 4;
  }
  for (; n; --n, ++at) crc = _mm_crc32_u8(crc, *at);
  return crc;
}

#endif

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t n) noexcept {
  const auto* at = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~sse42(~crc, at, n);
#endif
  return ~portable(~crc, at, n);
}

}  // namespace colonnade
