// Selection of the instruction set that kernels/ are compiled for. All give the same bits.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "kernels/kernels.h"

namespace colonnade {

const Kernels& kernels() noexcept;          // the best that this processor supports, unless set_isa selected another
std::vector<std::string> available_isas();  // best first
void set_isa(const std::string& name);      // invalid_argument if this processor lacks it

template <class T>
const RowKernels<T>& row_kernels() noexcept {
  if constexpr (std::is_same_v<T, float>) {
    return kernels().float32;
  } else {
    return kernels().float64;
  }
}

}  // namespace colonnade
