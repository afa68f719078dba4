#include "rows.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {

namespace {

// Rows on the way while one is read.
constexpr std::int64_t kAhead = 32;
constexpr std::int64_t kBlock = 4;  // vectors of a column block: registers left for AVX2

// A task's fields as values: stores to the output may alias anything that is reached through a reference.
template <class T, int kVectors>
struct Bags {
  const std::byte* rows;
  std::int64_t row_stride, dim, last;
  const std::uint32_t* index;
  const T* weights;
  bool is_mean, is_streamed;

  explicit Bags(const PoolTask& task)
      : rows(task.rows),
        row_stride(task.row_stride),
        dim(task.dim),
        last(task.last),
        index(task.index),
        weights(static_cast<const T*>(task.weights)),
        is_mean(task.is_mean),
        is_streamed(task.is_streamed) {}

  COLONNADE_INLINE_MEMBER const T* row(std::int64_t lookup) const {
    return reinterpret_cast<const T*>(rows + static_cast<std::int64_t>(index[lookup]) * row_stride);
  }
  COLONNADE_INLINE_MEMBER void fetch(std::int64_t lookup) const {
    const T* at = row(lookup);
    if constexpr (kVectors) {
      for (int v = 0; v < kVectors; ++v) COLONNADE_ISA::fetch(at + v * kLanes<T>);
    } else {
      fetch_row(at, dim * static_cast<std::int64_t>(sizeof(T)));
    }
  }
  COLONNADE_INLINE_MEMBER void fetch_ahead(std::int64_t lookup) const {
    if (lookup + kAhead < last) fetch(lookup + kAhead);
  }
  template <int kStored>
  COLONNADE_INLINE_MEMBER void write(T* out, const Vector<T> (&values)[kStored]) const {
    for (int v = 0; v < kStored; ++v) {
      if (is_streamed) {
        stream(out + v * kLanes<T>, values[v]);
      } else {
        store(out + v * kLanes<T>, values[v]);
      }
    }
  }
};

// kSummed vectors from `column` of one output row. The first row is copied and the others added in lookup
// order; no lookups: zeros.
template <int kSummed, bool kIsWeighted, class T, int kVectors>
COLONNADE_INLINE void pool_vectors(const Bags<T, kVectors>& bags, std::int64_t lo, std::int64_t hi,
                                   std::int64_t column, T* out) {
  Vector<T> sums[kSummed] = {};
  for (std::int64_t i = lo; i < hi; ++i) {
    if (column == 0) bags.fetch_ahead(i);
    const T* row = bags.row(i) + column;
    for (int v = 0; v < kSummed; ++v) {
      Vector<T> term = load(row + v * kLanes<T>);
      if constexpr (kIsWeighted) term = term * bags.weights[i];
      sums[v] = i == lo ? term : sums[v] + term;
    }
  }
  if (bags.is_mean && hi - lo > 1) {
    for (auto& sum : sums) sum = sum / static_cast<T>(hi - lo);
  }
  bags.write(out + column, sums);
}

// The columns that do not fill a vector.
template <bool kIsWeighted, class T, int kVectors>
COLONNADE_INLINE void pool_rest(const Bags<T, kVectors>& bags, std::int64_t lo, std::int64_t hi,
                                std::int64_t column, T* out) {
  const std::int64_t width = bags.dim - column;
  T sums[kLanes<T>] = {};
  for (std::int64_t i = lo; i < hi; ++i) {
    if (column == 0) bags.fetch_ahead(i);
    const T* row = bags.row(i) + column;
    for (std::int64_t j = 0; j < width; ++j) {
      T term = row[j];
      if constexpr (kIsWeighted) term = term * bags.weights[i];
      sums[j] = i == lo ? term : sums[j] + term;
    }
  }
  const bool is_divided = bags.is_mean && hi - lo > 1;
  for (std::int64_t j = 0; j < width; ++j) {
    out[column + j] = is_divided ? sums[j] / static_cast<T>(hi - lo) : sums[j];
  }
}

// kVectors: of a whole row; 0: any dim.
template <bool kIsWeighted, class T, int kVectors>
COLONNADE_INLINE void pool_row(const Bags<T, kVectors>& bags, std::int64_t lo, std::int64_t hi, T* out) {
  if constexpr (kVectors) {
    pool_vectors<kVectors, kIsWeighted>(bags, lo, hi, 0, out);
  } else {
    std::int64_t column = 0;
    for (; column + kBlock * kLanes<T> <= bags.dim; column += kBlock * kLanes<T>) {
      pool_vectors<kBlock, kIsWeighted>(bags, lo, hi, column, out);
    }
    for (; column + kLanes<T> <= bags.dim; column += kLanes<T>) {
      pool_vectors<1, kIsWeighted>(bags, lo, hi, column, out);
    }
    if (column < bags.dim) pool_rest<kIsWeighted>(bags, lo, hi, column, out);
  }
}

template <class T, int kVectors, bool kIsWeighted>
void pool_rows(const PoolTask& task) {
  const Bags<T, kVectors> bags(task);
  const std::int64_t* const bounds = task.bags;
  const std::int64_t first = task.first, out_stride = task.out_stride, begin = task.begin, end = task.end;
  std::byte* const out = task.out;
  const std::int64_t start = bounds ? bounds[begin] : first + begin;
  for (std::int64_t i = start; i < start + kAhead && i < bags.last; ++i) bags.fetch(i);
  if (bounds) {
    for (std::int64_t b = begin; b < end; ++b) {
      pool_row<kIsWeighted>(bags, bounds[b], bounds[b + 1], reinterpret_cast<T*>(out + b * out_stride));
    }
  } else {
    for (std::int64_t b = begin; b < end; ++b) {
      pool_row<kIsWeighted>(bags, first + b, first + b + 1, reinterpret_cast<T*>(out + b * out_stride));
    }
  }
  if (bags.is_streamed) stream_end();
}

template <class T, bool kIsWeighted>
void pool_by_dim(const PoolTask& task) {
  switch (task.dim % kLanes<T> ? 0 : task.dim / kLanes<T>) {
    case 1:
      return pool_rows<T, 1, kIsWeighted>(task);
    case 2:
      return pool_rows<T, 2, kIsWeighted>(task);
    case 4:
      return pool_rows<T, 4, kIsWeighted>(task);
    case 8:
      return pool_rows<T, 8, kIsWeighted>(task);
    default:
      return pool_rows<T, 0, kIsWeighted>(task);
  }
}

}  // namespace

template <class T>
void pool(const PoolTask& task) {
  task.weights ? pool_by_dim<T, true>(task) : pool_by_dim<T, false>(task);
}
template void pool<float>(const PoolTask&);
template void pool<double>(const PoolTask&);

}  // namespace colonnade::COLONNADE_ISA
