// Clock of a row: how often it was updated, and whether its weights were loaded.
//
// 0 means that the row was never updated: it is not stored, because it can be initialised again. So loading weights
// counts as an update. But the optimizer's state is then that of a new row, so a bit says that its steps are one fewer.
#pragma once

#include <algorithm>
#include <cstdint>

namespace colonnade {

typedef std::uint32_t Clock;

inline constexpr Clock kIsLoaded = Clock{1} << 31;
inline constexpr Clock kLastUpdate = kIsLoaded - 1;  // the count stops here
inline constexpr std::uint64_t kIsLoadedInRecord = std::uint64_t{1} << 62;

// Inlined always: a copy shared by the linker would be compiled for one instruction set.
[[gnu::always_inline]] constexpr Clock count_updates(Clock clock) { return clock & kLastUpdate; }
[[gnu::always_inline]] constexpr Clock count_steps(Clock clock) { return count_updates(clock) - (clock >> 31); }
[[gnu::always_inline]] constexpr Clock next_clock(Clock clock) { return clock + (count_updates(clock) != kLastUpdate); }

// A record's clock has 64 bits.
constexpr std::uint64_t pack_clock(Clock clock) {
  return count_updates(clock) | (clock & kIsLoaded ? kIsLoadedInRecord : 0);
}
constexpr Clock unpack_clock(std::uint64_t clock) {
  return static_cast<Clock>(std::min<std::uint64_t>(clock & ~kIsLoadedInRecord, kLastUpdate)) |
         (clock & kIsLoadedInRecord ? kIsLoaded : 0);
}

}  // namespace colonnade
