// A delay of so many nanoseconds, in which the calling thread computes nothing and its processor stays busy, as one that
// waits for a load does. A shared library, which Python calls without its lock.
#include <chrono>
#include <cstdint>

extern "C" void spin(std::int64_t nanoseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanoseconds);
  while (std::chrono::steady_clock::now() < end) {
  }
}
