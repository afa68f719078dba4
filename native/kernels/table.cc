#include "rows.h"

#define COLONNADE_QUOTE(name) #name
#define COLONNADE_NAME(name) COLONNADE_QUOTE(name)

namespace colonnade::COLONNADE_ISA {

namespace {
template <class T>
constexpr RowKernels<T> row_kernels() {
  return {pool<T>,       sum<T>,  update_sgd<T>,    update_rowwise_adagrad<T>, birth<T>, all_finite<T>, dots<T>,
          dots_gradient<T>, fm<T>, fm_gradient<T>, cross<T>, cross_gradient<T>};
}
}  // namespace

constinit const Kernels kernels{COLONNADE_NAME(COLONNADE_ISA), row_kernels<float>(), row_kernels<double>()};

}  // namespace colonnade::COLONNADE_ISA
