// Arguments for what must refuse wrong ones: right ones, a little damage, and memory of exactly their size,
// so that the address sanitizer sees who leaves it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <vector>

#include "../scalar.h"
#include "../slab.h"
#include "check.h"

namespace colonnade {

class Fuzz : public Random {
 public:
  using Random::Random;
  bool one_in(std::uint64_t n) { return below(n) == 0; }
  template <class T>
  T pick(std::initializer_list<T> from) {
    return from.begin()[below(from.size())];
  }
  // Around both ends of int64, around 0, or anything.
  std::int64_t id() {
    constexpr auto kLeast = std::numeric_limits<std::int64_t>::min(),
                   kMost = std::numeric_limits<std::int64_t>::max();
    const auto near = static_cast<std::int64_t>(below(3));
    return pick({kLeast + near, kMost - near, near - 1, static_cast<std::int64_t>(next())});
  }

  // One element more, less or changed.
  template <class T>
  void damage(std::vector<T>& values) {
    const auto what = below(7);
    if (values.empty() || what == 0) {
      values.push_back(values.empty() ? T{} : values.back());
    } else if (what == 1) {
      values.pop_back();
    } else {
      change(values[below(values.size())], what);
    }
    values = std::vector<T>(values.begin(), values.end());  // of exactly its size again
  }
  template <class T>
  void change(T& value, std::uint64_t what) {
    using Bits = std::make_unsigned_t<T>;
    if (what == 2) value = std::numeric_limits<T>::min();
    if (what == 3) value = std::numeric_limits<T>::max();
    if (what == 4) value = static_cast<T>(static_cast<Bits>(value) + 1u);
    if (what == 5) value = static_cast<T>(static_cast<Bits>(value) - 1u);
    if (what == 6) value = static_cast<T>(-1);
  }
};

// n bytes from a cache line's beginning on, and not one more.
class Block {
 public:
  explicit Block(std::size_t bytes, std::byte content = std::byte{0x5a})
      : data_(new (std::align_val_t{64}) std::byte[bytes]), size_(bytes) {
    std::fill_n(data_.get(), size_, content);
  }
  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::int64_t address() const { return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(data())); }
  bool is_untouched() const {
    return std::all_of(data(), data() + size_, [](std::byte b) { return b == std::byte{0x5a}; });
  }

 private:
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte[], Delete> data_;
  std::size_t size_;
};

// Element i of elements of any type, as a double.
inline double element(const std::byte* at, std::int64_t i, Dtype dtype) {
  const auto as = [&]<class T>(T value) {
    std::memcpy(&value, at + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    return value;
  };
  if (dtype == Dtype::float64) return as(double{});
  if (dtype == Dtype::float32) return as(float{});
  const std::uint16_t bits = as(std::uint16_t{});
  if (dtype == Dtype::bfloat16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return exponent == 31 ? std::numeric_limits<double>::quiet_NaN() : bits >> 15 ? -size : size;
}

// A number between -1 and 1 there; of 16 bits, a power of two.
inline void set_element(std::byte* at, std::int64_t i, Dtype dtype, Fuzz& fuzz) {
  const auto put = [&](auto value) {
    std::memcpy(at + i * static_cast<std::int64_t>(sizeof value), &value, sizeof value);
  };
  if (dtype == Dtype::float64) return put(fuzz.real());
  if (dtype == Dtype::float32) return put(static_cast<float>(fuzz.real()));
  const auto exponent = static_cast<std::uint16_t>((dtype == Dtype::bfloat16 ? 127 : 15) - fuzz.below(8));
  put(static_cast<std::uint16_t>(fuzz.below(2) << 15 | exponent << (dtype == Dtype::bfloat16 ? 7 : 10)));
}

// False if it threw what a wrong argument throws.
template <class Call>
bool is_accepted(const Call& call) {
  try {
    call();
    return true;
  } catch (const std::invalid_argument&) {
  } catch (const std::out_of_range&) {
  } catch (const NoRoom&) {
  }
  return false;
}

inline void run_anywhere(Fuzz& fuzz) {
  const auto isas = available_isas();
  set_isa(isas[fuzz.below(isas.size())]);
  set_num_threads(static_cast<int>(fuzz.below(3)) + 1);
}

// visit(seed) for seeds 0 .. n - 1, or those of the arguments: first, last. Says which one ended the program.
template <class Visit>
void for_each_seed(int argc, char** argv, std::uint64_t n, const Visit& visit) {
  static std::uint64_t seed, end;
  const auto argument = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  seed = argc > 1 ? argument(1) : 0;
  end = argc > 2 ? argument(2) : argc > 1 ? seed + 1 : n;
  std::atexit([] {
    if (seed < end) std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
  });
  for (; seed < end; ++seed) visit(seed);
  set_num_threads(0);
}

}  // namespace colonnade
