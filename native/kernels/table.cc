// Table of the functions of one compilation.
#include "optimizer_list.h"
#include "rows.h"

#define COLONNADE_QUOTE(name) #name
#define COLONNADE_NAME(name) COLONNADE_QUOTE(name)

namespace colonnade::COLONNADE_ISA {

namespace {
template <class T>
constexpr RowKernels<T> row_kernels() {
  return {sum<T>,
          initial_values<T>,
          all_finite<T>,
          squared_norm<T>,
          dots<T>,
          dots_gradient<T>,
          fm<T>,
          fm_gradient<T>,
          cross<T>,
          cross_gradient<T>,
          square_gradients<T>};
}

#define COLONNADE_ADDRESS(name) &name##_kernel,
constexpr const OptimizerKernel* kOptimizers[] = {COLONNADE_OPTIMIZERS(COLONNADE_ADDRESS)};
#undef COLONNADE_ADDRESS
}  // namespace

constinit const Kernels kernels{COLONNADE_NAME(COLONNADE_ISA),
                                {pool<float>, pool<double>, pool<Bfloat16>, pool<Float16>},
                                {pool_squares<float>, pool_squares<double>, pool_squares<Bfloat16>, pool_squares<Float16>},
                                kOptimizers,
                                sizeof(kOptimizers) / sizeof(kOptimizers[0]),
                                row_kernels<float>(),
                                row_kernels<double>(),
                                initial_values_bfloat16,
                                initial_values_float16,
                                initial_values_split};

}  // namespace colonnade::COLONNADE_ISA
