// Loops over rows, compiled once per instruction set. They use plain values, allocate nothing, throw nothing, and run
// on one thread each.
//
// This header and everything in this folder is compiled with different flags for each instruction set, so it must not
// use anything of the standard library that the linker could share between them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../clock.h"
#include "../scalar.h"

namespace colonnade {

// Divisor of the sum of a bag of n rows, and how the quotient is rounded.
enum class Divisor : std::uint8_t { one, n, sqrt_n };
enum class Rounding : std::uint8_t { none, bfloat16, float16 };

// Pooling of output rows [begin, end) of one read.
struct PoolTask {
  const std::byte* rows;    // the read's first column of row 0
  std::int64_t row_stride;  // bytes
  std::int64_t dim;
  const std::uint32_t* index;  // row of each lookup
  const void* weights;         // element of each lookup in the type of computation, or null
  const std::int64_t* bags;    // output b sums lookups [bags[b], bags[b + 1]); null: it is lookup first + b
  std::int64_t first;          // the feature's first lookup
  const std::int32_t* order;   // without bags: the i-th output computed is that of lookup order[i]; null: ascending
  Divisor divisor;
  Rounding rounding;
  bool is_streamed;         // non-temporal stores; rows are whole, aligned cache lines
  std::byte* out;           // output row 0
  std::int64_t out_stride;  // bytes
  std::int64_t begin, end;  // the task's outputs, or positions in `order`
};

// Gradients of the outputs of one feature for a part.
struct FeatureGradients {
  std::int64_t first, last;         // its lookups
  const std::byte* base;            // the part's first column in output row 0; null: the feature does not read it
  std::int64_t stride;              // bytes
  const std::int32_t* output_rows;  // by lookup; null: lookup e has row e - first
  const std::int64_t* bags;         // bounds of the bags if pooled by mean or sqrtn, else null
  bool is_sqrtn;
};

// One part of unique rows [begin, end) of one table, with the gradients of each.
struct SumTask {
  const std::int32_t* segment_offsets;
  const std::int32_t* entries;
  std::int64_t begin, end;
  std::int64_t dim;  // of the part

  Dtype gradient_dtype;
  const FeatureGradients* features;  // of this table, ascending; every entry is in one of them
  const std::int32_t* output_rows;   // of the features that have some, or null
  const void* weights;               // element of each lookup, or null
  const std::uint32_t* index;        // alternative: entry e is the row at base + index[e] elements
  const std::byte* base;
  bool is_straddling;  // a gradient may touch one cache line more than its size requires
  bool is_plain;       // one feature, with lookup e alone in output row e - first: no bags, no weights

  void* scratch;  // two rows of dim elements, each rounded up to 64 bytes; aligned to 64 bytes

  void* sums;  // `sum` only: row u goes to sums + sum_index[u] elements
  const std::uint32_t* sum_index;
};

// Settings of one part's optimizer; optimizers.h defines them.
struct OptimizerSettings {
  double lr, weight_decay, eps, beta1, beta2, l1, l2, beta, max_norm, clip_value, weight_bound, gradient_scale;
  bool is_nesterov;
  const double *powers1, *powers2;  // of beta1 and beta2: 4 x 256, see `power`
};

// Addresses of the rows to update: as RowLayout, from the part's first column and state element on.
struct UpdateTask {
  SumTask sum;
  OptimizerSettings settings;
  const std::uint32_t* slots;  // row u is slot slots[u]
  Dtype dtype;
  bool is_split;
  std::byte* rows;
  std::int64_t row_stride;  // bytes
  std::byte* states;
  std::int64_t state_stride;  // bytes
  std::byte *lows, *clocks;   // at the stride of states
  bool is_last;               // last of the table's parts: advances the clock
  std::int64_t column;        // the part's first
  std::uint64_t seed;
  const std::byte* ids;
  std::int64_t ids_stride;
  std::uint64_t num_owners, place;
};

// What an optimizer reads of OptimizerSettings beside lr, weight_decay and eps. update.cc checks the limits.
enum class SettingGroup : std::uint8_t {
  common,
  momentum,  // beta1 is its momentum
  moments,   // beta1, beta2
  proximal,  // l1, l2, beta; lr is a divisor
};

// An optimizer, defined in its own file.
struct OptimizerKernel {
  const char* name;
  std::int64_t (*state_elements)(std::int64_t dim);  // of a row's part
  SettingGroup settings;
  void (*update_float32)(const UpdateTask&);
  void (*update_float64)(const UpdateTask&);
};

// Initial values of some columns of a row.
struct InitialValuesTask {
  std::uint64_t seed;
  double scale;
  std::int64_t column, dim;
};

// One vector of every sample: that of sample b begins at base + b * stride.
struct VectorPlace {
  const std::byte* base;
  std::int64_t stride;  // bytes
};
struct TargetPlace {
  std::byte* base;  // null: not needed
  std::int64_t stride;
};

// Samples [begin, end): the copied vectors, adjacent, then the dot products <v_i, v_j> of all pairs j < i, by i, then j.
struct DotsTask {
  const VectorPlace* vectors;
  std::int64_t num_vectors, dim;
  const std::int32_t* copied;
  std::int64_t num_copied;
  void* out;  // samples are adjacent
  std::int64_t begin, end;
  void* scratch;           // dots_scratch elements, cleared
  const std::byte** rows;  // scratch: num_vectors + 3
};
inline constexpr std::int64_t kDotsOverrun = 8;
constexpr std::int64_t dots_scratch(std::int64_t num_vectors, std::int64_t dim) {
  return ((num_vectors + 15) / 16 * 16 + 1) * dim + num_vectors * (num_vectors - 1) / 2 + kDotsOverrun;
}

// Gradients of the vectors of samples [begin, end).
struct DotsGradientTask {
  const VectorPlace* vectors;
  std::int64_t num_vectors, dim;
  const std::int32_t* copied_at;  // by vector: its index among the copied ones, or -1
  std::int64_t num_copied;
  const void* gradient;       // as DotsTask::out
  const TargetPlace* out;     // by vector
  bool is_streamed;           // non-temporal stores; rows of `out` are whole, aligned cache lines
  std::int64_t begin, end;
  void* scratch;           // num_vectors * 64 bytes, cleared
  const std::byte** rows;  // scratch: 2 * num_vectors
};

// What a factorization machine adds a vector to: the sum of vectors, that of squares (it is one), or, squared, to both.
enum class Term : std::uint8_t { both, vector, squares };

// Samples [begin, end): half of |sum of vectors|^2 - sum of |vector|^2.
struct FMTask {
  const VectorPlace* vectors;
  const Term* terms;  // by vector; null: all are `both`
  std::int64_t num_vectors, dim;
  void* out;  // an element per sample
  std::int64_t begin, end;
};

struct FMGradientTask {
  const VectorPlace* vectors;
  const Term* terms;
  std::int64_t num_vectors, dim;
  const void* gradient;    // an element per sample
  const TargetPlace* out;  // by vector
  bool is_streamed;        // as above
  std::int64_t begin, end;
};

// Elements [begin, end): out = first * factor + input. Streamed: `out` and `begin` are at cache-line boundaries.
struct CrossTask {
  const void *first, *factor, *input;
  void* out;
  bool is_streamed;
  std::int64_t begin, end;
};

// of_first = gradient * factor, of_factor = gradient * first.
struct CrossGradientTask {
  const void *first, *factor, *gradient;
  void *of_first, *of_factor;
  bool is_streamed;
  std::int64_t begin, end;
};

// Pooling of output rows [begin, end) of one read in one pass over its rows: their sums, sums of their squares (x v)^2,
// where x is the lookup's weight times the bag's share, and copies of them. Base null: not wanted.
struct PoolSquaresTask {
  const std::byte* rows;  // this and what follows as in PoolTask
  std::int64_t row_stride, dim;
  const std::uint32_t* index;
  const void* weights;
  const std::int64_t* bags;
  std::int64_t first;
  Divisor divisor;
  TargetPlace sums, squares;
  bool adds_sums, adds_squares;  // to what the output has
  void* copies;                  // (the feature's lookups, dim) in the type of computation
  std::int64_t begin, end;
};

// Gradients of the lookups of outputs [begin, end). gradient, of_squares: of the outputs that pooled the vectors, and of
// those that pooled their squares; base null: there are none.
struct SquareGradientTask {
  const void* rows;
  const void* weights;
  const std::int64_t* bags;
  Divisor divisor;
  std::int64_t dim;
  VectorPlace gradient, of_squares;
  void* out;  // (lookups, dim)
  std::int64_t begin, end;
};

template <class T>
struct RowKernels {
  void (*sum)(const SumTask&);
  void (*initial_values)(const InitialValuesTask&, std::int64_t id, T* out);
  bool (*all_finite)(const T* values, std::int64_t n);
  double (*squared_norm)(const T* values, std::int64_t n);
  void (*dots)(const DotsTask&);
  void (*dots_gradient)(const DotsGradientTask&);
  void (*fm)(const FMTask&);
  void (*fm_gradient)(const FMGradientTask&);
  void (*cross)(const CrossTask&);
  void (*cross_gradient)(const CrossGradientTask&);
  void (*square_gradients)(const SquareGradientTask&);
};

struct Kernels {
  const char* name;
  void (*pool[4])(const PoolTask&);  // by Dtype of the rows
  void (*pool_squares[4])(const PoolSquaresTask&);
  const OptimizerKernel* const* optimizers;  // by kind, see optimizer_list.h
  std::int32_t num_optimizers;
  RowKernels<float> float32;
  RowKernels<double> float64;
  // 16-bit rows are initialised as float32 and rounded. Split ones get the high halves of their masters; lows may be
  // null.
  void (*initial_values_bfloat16)(const InitialValuesTask&, std::int64_t id, std::uint16_t* out);
  void (*initial_values_float16)(const InitialValuesTask&, std::int64_t id, std::uint16_t* out);
  void (*initial_values_split)(const InitialValuesTask&, std::int64_t id, std::uint16_t* highs, std::uint16_t* lows);
};

namespace portable {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

}  // namespace colonnade
