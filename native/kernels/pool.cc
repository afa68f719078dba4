#include "rows.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {

namespace {

// Rows on the way while one is read; more for rows of several cache lines, few enough to stay in the cache.
constexpr std::int64_t kAhead = 32;
constexpr std::int64_t kBlock = 4;  // vectors of a column block: registers left for AVX2

template <class T>
struct Bags {
  const PoolTask& task;
  const T* weights = static_cast<const T*>(task.weights);
  std::int64_t row_bytes = task.dim * static_cast<std::int64_t>(sizeof(T));

  const T* row(std::int64_t lookup) const {
    return reinterpret_cast<const T*>(task.rows + static_cast<std::int64_t>(task.index[lookup]) * task.row_stride);
  }
  void fetch_ahead(std::int64_t lookup) const {
    if (lookup + kAhead < task.last) fetch_row(row(lookup + kAhead), row_bytes);
  }
};

// Columns [column, column + kVectors * kLanes) of one output row. The first row is copied and the others
// added in lookup order; no lookups: zeros.
template <class T, int kVectors, bool kIsWeighted>
COLONNADE_INLINE void pool_vectors(const Bags<T>& bags, std::int64_t lo, std::int64_t hi, std::int64_t column,
                                   bool is_first, T* out) {
  Vector<T> sums[kVectors] = {};
  for (std::int64_t i = lo; i < hi; ++i) {
    if (is_first) bags.fetch_ahead(i);
    const T* row = bags.row(i) + column;
    for (int v = 0; v < kVectors; ++v) {
      Vector<T> term = load(row + v * kLanes<T>);
      if constexpr (kIsWeighted) term = term * bags.weights[i];
      sums[v] = i == lo ? term : sums[v] + term;
    }
  }
  if (bags.task.is_mean && hi - lo > 1) {
    for (auto& sum : sums) sum = sum / static_cast<T>(hi - lo);
  }
  for (int v = 0; v < kVectors; ++v) {
    if (bags.task.is_streamed) {
      stream(out + column + v * kLanes<T>, sums[v]);
    } else {
      store(out + column + v * kLanes<T>, sums[v]);
    }
  }
}

// The columns that do not fill a vector.
template <class T, bool kIsWeighted>
COLONNADE_INLINE void pool_rest(const Bags<T>& bags, std::int64_t lo, std::int64_t hi, std::int64_t column, T* out) {
  const std::int64_t width = bags.task.dim - column;
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
  const bool is_divided = bags.task.is_mean && hi - lo > 1;
  for (std::int64_t j = 0; j < width; ++j) {
    out[column + j] = is_divided ? sums[j] / static_cast<T>(hi - lo) : sums[j];
  }
}

// kVectors: of a whole row; 0: any dim.
template <class T, int kVectors, bool kIsWeighted>
void pool_rows(const PoolTask& task) {
  const Bags<T> bags{task};
  const auto bound = [&](std::int64_t b) { return task.bags ? task.bags[b] : task.first + b; };
  const std::int64_t start = bound(task.begin), warm_end = start + kAhead < task.last ? start + kAhead : task.last;
  for (std::int64_t i = start; i < warm_end; ++i) fetch_row(bags.row(i), bags.row_bytes);
  for (std::int64_t b = task.begin; b < task.end; ++b) {
    const std::int64_t lo = bound(b), hi = bound(b + 1);
    T* out = reinterpret_cast<T*>(task.out + b * task.out_stride);
    if constexpr (kVectors) {
      pool_vectors<T, kVectors, kIsWeighted>(bags, lo, hi, 0, true, out);
    } else {
      std::int64_t column = 0;
      for (; column + kBlock * kLanes<T> <= task.dim; column += kBlock * kLanes<T>) {
        pool_vectors<T, kBlock, kIsWeighted>(bags, lo, hi, column, column == 0, out);
      }
      for (; column + kLanes<T> <= task.dim; column += kLanes<T>) {
        pool_vectors<T, 1, kIsWeighted>(bags, lo, hi, column, column == 0, out);
      }
      if (column < task.dim) pool_rest<T, kIsWeighted>(bags, lo, hi, column, out);
    }
  }
  if (task.is_streamed) stream_end();
}

template <class T, bool kIsWeighted>
void pool_by_dim(const PoolTask& task) {
  switch (task.dim % kLanes<T> ? 0 : task.dim / kLanes<T>) {
    case 1: return pool_rows<T, 1, kIsWeighted>(task);
    case 2: return pool_rows<T, 2, kIsWeighted>(task);
    case 4: return pool_rows<T, 4, kIsWeighted>(task);
    case 8: return pool_rows<T, 8, kIsWeighted>(task);
    default: return pool_rows<T, 0, kIsWeighted>(task);
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
