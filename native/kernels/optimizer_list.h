// Registry of the optimizers. The kind of an optimizer, by which rows name it, is its position in this list. Kinds are
// never stored: Python reads the list when it starts.
#pragma once

#include "kernels.h"

#define COLONNADE_OPTIMIZERS(X) \
  X(sgd)                        \
  X(rowwise_adagrad)            \
  X(momentum)                   \
  X(adagrad)                    \
  X(adam)                       \
  X(rowwise_adam)               \
  X(adamw)                      \
  X(ftrl)                       \
  X(lamb)

namespace colonnade::COLONNADE_ISA {

// Each is defined in the file of its optimizer, see `optimizer_kernel`.
#define COLONNADE_DECLARE(name) extern const OptimizerKernel name##_kernel;
COLONNADE_OPTIMIZERS(COLONNADE_DECLARE)
#undef COLONNADE_DECLARE

}  // namespace colonnade::COLONNADE_ISA
