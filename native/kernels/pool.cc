#include "convert.h"
#include "rows.h"

namespace colonnade::COLONNADE_ISA {

namespace {

constexpr std::int64_t kBlock = 4;  // vectors of a column block: registers left for AVX2

// Rows on the way while one is read.
constexpr std::int64_t kAhead = 32;

COLONNADE_INLINE float square_root(float value) {
  return __builtin_sqrtf(value);
}
COLONNADE_INLINE double square_root(double value) {
  return __builtin_sqrt(value);
}

// A task's fields as values: stores to the output may alias anything that is reached through a reference.
// kVectors: of a whole row; 0: any dim.
template <class Row, int kVectors>
struct Bags {
  using T = Compute<Row>;
  const std::byte* rows;
  std::int64_t row_stride, dim, last;
  const std::uint32_t* index;
  const T* weights;
  Divisor divisor;
  Rounding rounding;
  bool is_streamed, may_straddle;

  explicit Bags(const PoolTask& task)
      : rows(task.rows),
        row_stride(task.row_stride),
        dim(task.dim),
        last(task.bags ? task.bags[task.end] : task.first + task.end),
        index(task.index),
        weights(static_cast<const T*>(task.weights)),
        divisor(task.divisor),
        rounding(task.rounding),
        is_streamed(task.is_streamed) {
    // Rows start at multiples of `step` from row 0; the furthest one into a cache line decides.
    const std::int64_t bytes = dim * static_cast<std::int64_t>(sizeof(Row));
    const std::int64_t step = row_stride % 64 ? row_stride & -row_stride : 64;
    const std::int64_t start = reinterpret_cast<std::intptr_t>(rows) % step;
    may_straddle = start + 64 - step + bytes > (bytes + 63) / 64 * 64;
  }

  COLONNADE_INLINE_MEMBER const Row* row(std::int64_t lookup) const {
    return reinterpret_cast<const Row*>(rows + static_cast<std::int64_t>(index[lookup]) * row_stride);
  }
  COLONNADE_INLINE_MEMBER void fetch(std::int64_t lookup) const {
    const Row* const at = row(lookup);
    constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(Row));
    const std::int64_t width = kVectors ? kVectors * kLanes<T> : dim;
    for (std::int64_t j = 0; j < width; j += kLine) COLONNADE_ISA::fetch(at + j);
    if (may_straddle) COLONNADE_ISA::fetch(reinterpret_cast<const std::byte*>(at + width) - 1);
  }
  COLONNADE_INLINE_MEMBER void fetch_ahead(std::int64_t lookup) const {
    if (lookup + kAhead < last) fetch(lookup + kAhead);
  }

  // The sum of n rows, divided.
  template <class Sum>
  COLONNADE_INLINE_MEMBER Sum divided(Sum sum, std::int64_t n) const {
    if (divisor == Divisor::one || n < 2) return sum;
    const T count = static_cast<T>(n);
    return sum / (divisor == Divisor::n ? count : square_root(count));
  }

  template <class Out>
  COLONNADE_INLINE_MEMBER void write(Out* out, Vector<T> value) const {
    is_streamed ? stream_as(out, value) : store_as(out, value);
  }
  COLONNADE_INLINE_MEMBER void write(std::byte* out, std::int64_t column, Vector<T> value) const {
    if constexpr (sizeof(T) == 4) {
      if (rounding == Rounding::bfloat16) return write(reinterpret_cast<Bfloat16*>(out) + column, value);
      if (rounding == Rounding::float16) return write(reinterpret_cast<Float16*>(out) + column, value);
    }
    write(reinterpret_cast<T*>(out) + column, value);
  }
  COLONNADE_INLINE_MEMBER void write(std::byte* out, std::int64_t column, T value) const {
    if constexpr (sizeof(T) == 4) {
      if (rounding == Rounding::bfloat16) {
        reinterpret_cast<Bfloat16*>(out)[column] = narrow<Bfloat16>(value);
        return;
      }
      if (rounding == Rounding::float16) {
        reinterpret_cast<Float16*>(out)[column] = narrow<Float16>(value);
        return;
      }
    }
    reinterpret_cast<T*>(out)[column] = value;
  }
};

// kSummed vectors from `column` of one output row. The first row is copied and the others added in lookup
// order; no lookups: zeros.
template <int kSummed, bool kIsWeighted, class Row, int kVectors>
COLONNADE_INLINE void pool_vectors(const Bags<Row, kVectors>& bags, std::int64_t lo, std::int64_t hi,
                                   std::int64_t column, std::byte* out) {
  using T = Compute<Row>;
  Vector<T> sums[kSummed] = {};
  for (std::int64_t i = lo; i < hi; ++i) {
    if (column == 0) bags.fetch_ahead(i);
    const Row* row = bags.row(i) + column;
    for (int v = 0; v < kSummed; ++v) {
      Vector<T> term = load_as(row + v * kLanes<T>);
      if constexpr (kIsWeighted) term = term * bags.weights[i];
      sums[v] = i == lo ? term : sums[v] + term;
    }
  }
  for (int v = 0; v < kSummed; ++v) {
    bags.write(out, column + v * kLanes<T>, bags.divided(sums[v], hi - lo));
  }
}

// The columns that do not fill a vector.
template <bool kIsWeighted, class Row, int kVectors>
COLONNADE_INLINE void pool_rest(const Bags<Row, kVectors>& bags, std::int64_t lo, std::int64_t hi,
                                std::int64_t column, std::byte* out) {
  using T = Compute<Row>;
  const std::int64_t width = bags.dim - column;
  T sums[kLanes<T>] = {};
  for (std::int64_t i = lo; i < hi; ++i) {
    if (column == 0) bags.fetch_ahead(i);
    const Row* row = bags.row(i) + column;
    for (std::int64_t j = 0; j < width; ++j) {
      T term = widen(row[j]);
      if constexpr (kIsWeighted) term = term * bags.weights[i];
      sums[j] = i == lo ? term : sums[j] + term;
    }
  }
  for (std::int64_t j = 0; j < width; ++j) bags.write(out, column + j, bags.divided(sums[j], hi - lo));
}

template <bool kIsWeighted, class Row, int kVectors>
COLONNADE_INLINE void pool_row(const Bags<Row, kVectors>& bags, std::int64_t lo, std::int64_t hi,
                               std::byte* out) {
  constexpr std::int64_t kWidth = kLanes<Compute<Row>>;
  if constexpr (kVectors) {
    pool_vectors<kVectors, kIsWeighted>(bags, lo, hi, 0, out);
  } else {
    std::int64_t column = 0;
    for (; column + kBlock * kWidth <= bags.dim; column += kBlock * kWidth) {
      pool_vectors<kBlock, kIsWeighted>(bags, lo, hi, column, out);
    }
    for (; column + kWidth <= bags.dim; column += kWidth) {
      pool_vectors<1, kIsWeighted>(bags, lo, hi, column, out);
    }
    if (column < bags.dim) pool_rest<kIsWeighted>(bags, lo, hi, column, out);
  }
}

template <class Row, int kVectors, bool kIsWeighted>
void pool_rows(const PoolTask& task) {
  const Bags<Row, kVectors> bags(task);
  const std::int64_t* const bounds = task.bags;
  const std::int64_t first = task.first, out_stride = task.out_stride, begin = task.begin, end = task.end;
  std::byte* const out = task.out;
  const std::int64_t start = bounds ? bounds[begin] : first + begin;
  for (std::int64_t i = start; i < start + kAhead && i < bags.last; ++i) bags.fetch(i);
  if (bounds) {
    for (std::int64_t b = begin; b < end; ++b) {
      pool_row<kIsWeighted>(bags, bounds[b], bounds[b + 1], out + b * out_stride);
    }
  } else {
    for (std::int64_t b = begin; b < end; ++b) {
      pool_row<kIsWeighted>(bags, first + b, first + b + 1, out + b * out_stride);
    }
  }
  if (bags.is_streamed) stream_end();
}

template <class Row, bool kIsWeighted>
void pool_by_dim(const PoolTask& task) {
  constexpr std::int64_t kWidth = kLanes<Compute<Row>>;
  switch (task.dim % kWidth ? 0 : task.dim / kWidth) {
    case 1:
      return pool_rows<Row, 1, kIsWeighted>(task);
    case 2:
      return pool_rows<Row, 2, kIsWeighted>(task);
    case 4:
      return pool_rows<Row, 4, kIsWeighted>(task);
    case 8:
      return pool_rows<Row, 8, kIsWeighted>(task);
    default:
      return pool_rows<Row, 0, kIsWeighted>(task);
  }
}

}  // namespace

template <class Row>
void pool(const PoolTask& task) {
  task.weights ? pool_by_dim<Row, true>(task) : pool_by_dim<Row, false>(task);
}
template void pool<float>(const PoolTask&);
template void pool<double>(const PoolTask&);
template void pool<Bfloat16>(const PoolTask&);
template void pool<Float16>(const PoolTask&);

}  // namespace colonnade::COLONNADE_ISA
