#include "isa.h"

#include <atomic>
#include <stdexcept>

namespace colonnade {

namespace {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> available;
#if defined(__x86_64__) && !defined(COLONNADE_ONLY_PORTABLE)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    available.push_back(&avx512::kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    available.push_back(&avx2::kernels);
#endif
  available.push_back(&portable::kernels);
  return available;
}

std::atomic<const Kernels*>& chosen() noexcept {
  static std::atomic<const Kernels*> kernels{available_kernels().front()};
  return kernels;
}

}  // namespace

const Kernels& kernels() noexcept {
  return *chosen().load(std::memory_order_relaxed);
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const auto* kernels : available_kernels()) names.emplace_back(kernels->name);
  return names;
}

void set_isa(const std::string& name) {
  std::string known;
  for (const auto* kernels : available_kernels()) {
    if (name == kernels->name) {
      chosen().store(kernels, std::memory_order_relaxed);
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(kernels->name);
  }
  throw std::invalid_argument("isa: got '" + name + "', this processor has " + known);
}

}  // namespace colonnade
