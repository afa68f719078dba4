// Pooling of a bag's rows to its output.
#include "convert.h"
#include "rows.h"

namespace colonnade::COLONNADE_ISA {

namespace {

constexpr std::int64_t kBlock = 4;  // vectors of a column block: leaves registers for AVX2

// Rows prefetched while one is read: about 16 KiB of them.
COLONNADE_INLINE std::int64_t rows_ahead(std::int64_t row_bytes) {
  const std::int64_t rows = 16384 / row_bytes;
  return rows < 16 ? 16 : rows > 128 ? 128 : rows;
}

COLONNADE_INLINE float square_root(float value) {
  return __builtin_sqrtf(value);
}
COLONNADE_INLINE double square_root(double value) {
  return __builtin_sqrt(value);
}

// A copy of the task's fields: stores to the output may alias anything reached through a reference. kVectors: of a
// whole row; 0: any dim.
template <class Row, int kVectors>
struct Bags {
  using T = Compute<Row>;
  const std::byte* rows;
  std::int64_t row_stride, dim;
  const std::uint32_t* index;
  const T* weights;
  Divisor divisor;
  Rounding rounding;
  bool is_streamed, may_straddle;

  explicit Bags(const PoolTask& task)
      : rows(task.rows),
        row_stride(task.row_stride),
        dim(kVectors ? kVectors * kLanes<T> : task.dim),
        index(task.index),
        weights(static_cast<const T*>(task.weights)),
        divisor(task.divisor),
        rounding(task.rounding),
        is_streamed(task.is_streamed) {
    // Rows start at multiples of `step` from row 0; the one with the largest offset in a cache line decides.
    const std::int64_t step = row_stride % 64 ? row_stride & -row_stride : 64;
    const std::int64_t start = reinterpret_cast<std::intptr_t>(rows) & (step - 1);
    may_straddle = start + 64 - step + row_bytes() > (row_bytes() + 63) / 64 * 64;
  }

  COLONNADE_INLINE_MEMBER std::int64_t row_bytes() const {
    return dim * static_cast<std::int64_t>(sizeof(Row));
  }
  COLONNADE_INLINE_MEMBER const Row* row(std::int64_t lookup) const {
    return reinterpret_cast<const Row*>(rows + static_cast<std::int64_t>(index[lookup]) * row_stride);
  }
  COLONNADE_INLINE_MEMBER void fetch(std::int64_t lookup) const {
    const auto* const at = reinterpret_cast<const std::byte*>(row(lookup));
    constexpr std::int64_t kBytes = kVectors * kLanes<T> * static_cast<std::int64_t>(sizeof(Row));
    const std::int64_t bytes = kVectors ? kBytes : row_bytes();
    for (std::int64_t b = 0; b < bytes; b += 64) COLONNADE_ISA::fetch(at + b);
    if (may_straddle) COLONNADE_ISA::fetch(at + bytes - 1);
  }

  // Divisor of the sum of n rows; 1: no division.
  COLONNADE_INLINE_MEMBER T divisor_of(std::int64_t n) const {
    if (divisor == Divisor::one || n < 2) return T{1};
    const T count = static_cast<T>(n);
    return divisor == Divisor::n ? count : square_root(count);
  }

  template <class Out, int kStored>
  COLONNADE_INLINE_MEMBER void write(Out* out, const Vector<T> (&values)[kStored]) const {
    if constexpr (kCanStream) {
      if (is_streamed) {
        for (int v = 0; v < kStored; ++v) stream_as(out + v * kLanes<T>, values[v]);
        return;
      }
    }
    for (int v = 0; v < kStored; ++v) store_as(out + v * kLanes<T>, values[v]);
  }
  template <int kStored>
  COLONNADE_INLINE_MEMBER void write(std::byte* out, std::int64_t column,
                                     const Vector<T> (&values)[kStored]) const {
    if constexpr (sizeof(T) == 4) {
      if (rounding == Rounding::bfloat16) return write(reinterpret_cast<Bfloat16*>(out) + column, values);
      if (rounding == Rounding::float16) return write(reinterpret_cast<Float16*>(out) + column, values);
    }
    write(reinterpret_cast<T*>(out) + column, values);
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

// Lookups of one output, and the distance and limit of prefetching.
struct Bag {
  std::int64_t lo, hi, ahead, last;
};

// kIsLast: for the last bags of a task, with fewer lookups left than the prefetch distance.
template <bool kIsLast, class Row, int kVectors>
COLONNADE_INLINE void fetch_ahead(const Bags<Row, kVectors>& bags, const Bag& bag, std::int64_t lookup) {
  if (!kIsLast || lookup + bag.ahead < bag.last) bags.fetch(lookup + bag.ahead);
}

// Sum kSummed vectors from `column` of one output row. The first row is copied and the others are added in lookup
// order; zeros without lookups.
template <int kSummed, bool kIsWeighted, bool kIsLast, class Row, int kVectors>
COLONNADE_INLINE void pool_vectors(const Bags<Row, kVectors>& bags, const Bag& bag, std::int64_t column,
                                   std::byte* out) {
  using T = Compute<Row>;
  Vector<T> sums[kSummed] = {};
  const auto term = [&](std::int64_t i, int v) {
    const Vector<T> value = load_as(bags.row(i) + column + v * kLanes<T>);
    return kIsWeighted ? value * bags.weights[i] : value;
  };
  if (bag.lo < bag.hi) {
    if (column == 0) fetch_ahead<kIsLast>(bags, bag, bag.lo);
    for (int v = 0; v < kSummed; ++v) sums[v] = term(bag.lo, v);
    for (std::int64_t i = bag.lo + 1; i < bag.hi; ++i) {
      if (column == 0) fetch_ahead<kIsLast>(bags, bag, i);
      for (int v = 0; v < kSummed; ++v) sums[v] = sums[v] + term(i, v);
    }
    const T divisor = bags.divisor_of(bag.hi - bag.lo);
    if (divisor != 1) {
      for (auto& sum : sums) sum = sum / divisor;
    }
  }
  bags.write(out, column, sums);
}

// Columns that do not fill a vector.
template <bool kIsWeighted, bool kIsLast, class Row, int kVectors>
COLONNADE_INLINE void pool_rest(const Bags<Row, kVectors>& bags, const Bag& bag, std::int64_t column,
                                std::byte* out) {
  using T = Compute<Row>;
  const std::int64_t width = bags.dim - column;
  T sums[kLanes<T>] = {};
  for (std::int64_t i = bag.lo; i < bag.hi; ++i) {
    if (column == 0) fetch_ahead<kIsLast>(bags, bag, i);
    const Row* row = bags.row(i) + column;
    for (std::int64_t j = 0; j < width; ++j) {
      T term = widen(row[j]);
      if constexpr (kIsWeighted) term = term * bags.weights[i];
      sums[j] = i == bag.lo ? term : sums[j] + term;
    }
  }
  const T divisor = bags.divisor_of(bag.hi - bag.lo);
  for (std::int64_t j = 0; j < width; ++j) bags.write(out, column + j, sums[j] / divisor);
}

template <bool kIsWeighted, bool kIsLast, class Row, int kVectors>
COLONNADE_INLINE void pool_row(const Bags<Row, kVectors>& bags, const Bag& bag, std::byte* out) {
  constexpr std::int64_t kWidth = kLanes<Compute<Row>>;
  if constexpr (kVectors) {
    pool_vectors<kVectors, kIsWeighted, kIsLast>(bags, bag, 0, out);
  } else {
    std::int64_t column = 0;
    for (; column + kBlock * kWidth <= bags.dim; column += kBlock * kWidth) {
      pool_vectors<kBlock, kIsWeighted, kIsLast>(bags, bag, column, out);
    }
    for (; column + kWidth <= bags.dim; column += kWidth) {
      pool_vectors<1, kIsWeighted, kIsLast>(bags, bag, column, out);
    }
    if (column < bags.dim) pool_rest<kIsWeighted, kIsLast>(bags, bag, column, out);
  }
}

// bag_at(b): first lookup of output b.
template <bool kIsWeighted, class Row, int kVectors, class BagAt>
COLONNADE_INLINE void pool_range(const Bags<Row, kVectors>& bags, const PoolTask& task, const BagAt& bag_at) {
  const std::int64_t out_stride = task.out_stride, end = task.end, last = bag_at(end);
  std::byte* const out = task.out;
  std::int64_t b = task.begin, lo = bag_at(b);
  const std::int64_t ahead = rows_ahead(bags.row_bytes());
  for (std::int64_t i = lo; i < lo + ahead && i < last; ++i) bags.fetch(i);
  for (std::int64_t hi; b < end && (hi = bag_at(b + 1)) + ahead <= last; ++b, lo = hi) {
    pool_row<kIsWeighted, false>(bags, {lo, hi, ahead, last}, out + b * out_stride);
  }
  for (std::int64_t hi; b < end; ++b, lo = hi) {
    hi = bag_at(b + 1);
    pool_row<kIsWeighted, true>(bags, {lo, hi, ahead, last}, out + b * out_stride);
  }
}

// One lookup per output, in the order of `order`.
template <bool kIsWeighted, class Row, int kVectors>
COLONNADE_INLINE void pool_in_order(const Bags<Row, kVectors>& bags, const PoolTask& task) {
  const std::int32_t* const order = task.order;
  std::byte* const out = task.out - task.first * task.out_stride;
  const std::int64_t out_stride = task.out_stride, end = task.end, ahead = rows_ahead(bags.row_bytes());
  for (std::int64_t i = task.begin; i < task.begin + ahead && i < end; ++i) bags.fetch(order[i]);
  for (std::int64_t i = task.begin; i < end; ++i) {
    if (i + ahead < end) bags.fetch(order[i + ahead]);
    const std::int64_t lookup = order[i];
    pool_row<kIsWeighted, true>(bags, {lookup, lookup + 1, 0, lookup}, out + lookup * out_stride);
  }
}

template <class Row, int kVectors, bool kIsWeighted>
void pool_rows(const PoolTask& task) {
  const Bags<Row, kVectors> bags(task);
  if (task.order) {
    pool_in_order<kIsWeighted>(bags, task);
  } else if (const std::int64_t* const bounds = task.bags) {
    pool_range<kIsWeighted>(bags, task, [bounds](std::int64_t b) { return bounds[b]; });
  } else {
    pool_range<kIsWeighted>(bags, task, [first = task.first](std::int64_t b) { return first + b; });
  }
  if (task.is_streamed) stream_end();
}

template <class Row, bool kIsWeighted>
void pool_by_dim(const PoolTask& task) {
  visit_num_vectors<Compute<Row>>(task.dim, [&](auto num_vectors) {
    pool_rows<Row, decltype(num_vectors)::value, kIsWeighted>(task);
  });
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
