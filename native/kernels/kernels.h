// Loops over rows, compiled once per instruction set. Plain values in, no allocation, no exception, one
// thread each.
//
// This header and everything in this folder is compiled with different flags for each path, so it may not
// use anything of the standard library that the linker could share between them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace colonnade {

// Output rows [begin, end) of one feature.
struct PoolTask {
  const std::byte* rows;    // row 0 of the table
  std::int64_t row_stride;  // bytes
  std::int64_t dim;
  const std::uint32_t* index;  // row of each lookup
  const void* weights;         // element of each lookup, or null
  const std::int64_t* bags;    // output b sums lookups [bags[b], bags[b + 1]); null: it is lookup first + b
  std::int64_t first, last;    // the feature's lookups
  bool is_mean;
  bool is_streamed;         // write around the cache; rows are whole, aligned cache lines
  std::byte* out;           // output row 0
  std::int64_t out_stride;  // bytes
  std::int64_t begin, end;
};

// Gradients of one feature's outputs.
struct FeatureGradients {
  std::int64_t first, last;         // its lookups
  const std::byte* base;            // output row 0
  std::int64_t stride;              // bytes
  const std::int32_t* output_rows;  // by lookup; null: lookup e has row e - first
  const std::int64_t* mean_bags;    // bounds of the bags if pooled by mean, else null
};

// Unique rows [begin, end) of one table: the sum of each row's gradients, and what becomes of it.
struct SumTask {
  const std::int32_t* segment_offsets;
  const std::int32_t* entries;
  std::int64_t begin, end;
  std::int64_t dim;

  const FeatureGradients* features;  // of this table, ascending; every entry lies in one of them
  const void* weights;               // element of each lookup, or null
  const std::uint32_t* index;        // or: entry e is the row at base + index[e] elements
  const std::byte* base;

  void* scratch;  // dim elements rounded up to 64 bytes, aligned to 64 bytes

  void* sums;  // sums: row u goes to sums + sum_index[u] elements
  const std::uint32_t* sum_index;
  const std::uint32_t* slots;  // updates: row u is slot slots[u]
  std::byte* rows;
  std::int64_t row_stride;    // bytes
  std::byte* states;          // state elements, then padding, then a uint32 clock in the last 4 bytes
  std::int64_t state_stride;  // bytes
  double learning_rate, weight_decay, eps;
};

// First values of some columns of a row.
struct BirthTask {
  std::uint64_t seed;
  double scale;
  std::int64_t column, dim;
};

template <class T>
struct RowKernels {
  void (*pool)(const PoolTask&);
  void (*sum)(const SumTask&);
  void (*update_sgd)(const SumTask&);
  void (*update_rowwise_adagrad)(const SumTask&);
  void (*birth)(const BirthTask&, std::int64_t id, T* out);
  bool (*all_finite)(const T* values, std::int64_t n);
};

struct Kernels {
  const char* name;
  RowKernels<float> float32;
  RowKernels<double> float64;
  // 16-bit rows are born as float32 and rounded. Split ones are what their masters' high halves are; lows may be
  // null.
  void (*birth_bfloat16)(const BirthTask&, std::int64_t id, std::uint16_t* out);
  void (*birth_float16)(const BirthTask&, std::int64_t id, std::uint16_t* out);
  void (*birth_split)(const BirthTask&, std::int64_t id, std::uint16_t* highs, std::uint16_t* lows);
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
