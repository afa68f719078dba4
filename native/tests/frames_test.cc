#include "../frames.h"

#include <vector>

#include "check.h"

using namespace colonnade;

namespace {

constexpr std::int64_t kFirstPlace = std::int64_t{7} << 32;

void every_flipped_bit_is_found(std::size_t width) {
  constexpr std::size_t kRecords = 5;
  const std::size_t stride = frame_stride(width);
  Random random(width);
  std::vector<std::int64_t> ids(kRecords);
  std::vector<std::uint8_t> records(kRecords * width), frames(kRecords * stride);
  for (auto& id : ids) id = static_cast<std::int64_t>(random.next());
  for (auto& byte : records) byte = static_cast<std::uint8_t>(random.next());
  frame_records(ids.data(), records.data(), kRecords, width, kFirstPlace, frames.data());
  CHECK(check_records(ids.data(), frames.data(), kRecords, width, kFirstPlace) == -1);
  CHECK(check_records(ids.data(), frames.data(), kRecords, width, kFirstPlace + 1) == 0);  // whole, but elsewhere
  for (std::size_t byte = 0; byte < 3 * stride; ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      frames[byte] ^= static_cast<std::uint8_t>(1 << bit);
      CHECK(check_records(ids.data(), frames.data(), kRecords, width, kFirstPlace) == static_cast<std::int64_t>(byte / stride));
      frames[byte] ^= static_cast<std::uint8_t>(1 << bit);
    }
  }
  for (std::size_t i = 0; i < kRecords; ++i) {
    const auto place = kFirstPlace + static_cast<std::int64_t>(i);
    const std::uint8_t* frame = frames.data() + i * stride;
    CHECK(is_whole(frame, stride, place, ids[i]));
    CHECK(!is_whole(frame, stride, place, ids[i] ^ 1) && !is_whole(frame, stride, place + 1, ids[i]));
  }
}

}  // namespace

int main() {
  for (const std::size_t width : {1, 9, 12, 76, 1024}) every_flipped_bit_is_found(width);
}
