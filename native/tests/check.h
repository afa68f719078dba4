// CHECK stays on in release builds. Random numbers are mix64 of a counter: the same everywhere.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "../hash.h"
#include "../isa.h"
#include "../threads.h"

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)

#define CHECK_THROWS(expression, Exception, message)                                                \
  do {                                                                                              \
    std::string what = "nothing";                                                                   \
    try {                                                                                           \
      expression;                                                                                   \
    } catch (const Exception& exception) {                                                          \
      what = exception.what();                                                                      \
    }                                                                                               \
    if (what.find(message) == std::string::npos) {                                                  \
      std::fprintf(stderr, "%s:%d: %s threw: %s\n", __FILE__, __LINE__, #expression, what.c_str()); \
      std::exit(1);                                                                                 \
    }                                                                                               \
  } while (false)

namespace colonnade {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() { return mix64(state_ += 0x9e3779b97f4a7c15u); }
  std::uint64_t below(std::uint64_t n) { return scale_down(next(), n); }
  double real() { return static_cast<double>(next() >> 11) * 0x1p-52 - 1.0; }

 private:
  std::uint64_t state_;
};

// visit() on every instruction set, with one and three threads.
template <class Visit>
void everywhere(const Visit& visit) {
  for (const auto& isa : available_isas()) {
    set_isa(isa);
    for (const int threads : {1, 3}) {
      set_num_threads(threads);
      visit();
    }
  }
  set_num_threads(0);
}

}  // namespace colonnade
