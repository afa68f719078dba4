#include "isa.h"

#include <atomic>
#include <stdexcept>

namespace colonnade {

namespace {

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__) && !defined(COLONNADE_ONLY_PORTABLE)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(&avx512::kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    found.push_back(&avx2::kernels);
#endif
  found.push_back(&portable::kernels);
  return found;
}

std::atomic<const Kernels*>& chosen() noexcept {
  static std::atomic<const Kernels*> kernels{available().front()};
  return kernels;
}

}  // namespace

const Kernels& kernels() noexcept {
  return *chosen().load(std::memory_order_relaxed);
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const auto* kernels : available()) names.emplace_back(kernels->name);
  return names;
}

void set_isa(const std::string& name) {
  std::string known;
  for (const auto* kernels : available()) {
    if (name == kernels->name) {
      chosen().store(kernels, std::memory_order_relaxed);
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(kernels->name);
  }
  throw std::invalid_argument("isa: got '" + name + "', this processor has " + known);
}

}  // namespace colonnade
