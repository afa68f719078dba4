// Sums of gradients per row: first step of `sum` and of every optimizer.
#pragma once

#include "convert.h"
#include "kernels.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {
namespace {

constexpr std::int64_t kGradientsAhead = 32;
constexpr std::uint64_t kWaiting = 64;  // power of two above kGradientsAhead

// kVectors: number of vectors of a row if it is a few whole ones; 0: any dim.
template <class T, int kVectors>
COLONNADE_INLINE constexpr std::int64_t columns(std::int64_t dim) {
  return kVectors ? kVectors * kLanes<T> : dim;
}

// Return vector v of a row of dim elements; zeros past the end.
template <class Row>
COLONNADE_INLINE Vector<Compute<Row>> load_columns(const Row* row, std::int64_t v, std::int64_t dim) {
  constexpr std::int64_t kWidth = kLanes<Compute<Row>>;
  const std::int64_t column = v * kWidth;
  if (column + kWidth <= dim) return load_as(row + column);
  Row lanes[kWidth] = {};
  for (std::int64_t j = column; j < dim; ++j) lanes[j - column] = row[j];
  return load_as(lanes);
}

// Return its first elements from the lanes of a row's vector v.
template <class T>
COLONNADE_INLINE void store_columns(T* row, std::int64_t v, std::int64_t dim, Vector<T> value) {
  const std::int64_t column = v * kLanes<T>;
  if (column + kLanes<T> <= dim) return store(row + column, value);
  T lanes[kLanes<T>];
  store(lanes, value);
  for (std::int64_t j = column; j < dim; ++j) row[j] = lanes[j - column];
}

// Elements of one row in the type of computation: in registers if it is a few whole vectors, else in `scratch`, with
// the last vector filled up.
template <class T, int kVectors>
struct RowValues {
  Vector<T> vectors[kVectors];
  RowValues(void*, std::int64_t) {}
  static constexpr std::int64_t num_vectors() { return kVectors; }
  COLONNADE_INLINE_MEMBER Vector<T> get(std::int64_t v) const { return vectors[v]; }
  COLONNADE_INLINE_MEMBER void set(std::int64_t v, Vector<T> value) { vectors[v] = value; }
};
template <class T>
struct RowValues<T, 0> {
  T* scratch;
  std::int64_t dim;
  RowValues(void* scratch, std::int64_t dim) : scratch(static_cast<T*>(scratch)), dim(dim) {}
  COLONNADE_INLINE_MEMBER std::int64_t num_vectors() const { return (dim + kLanes<T> - 1) / kLanes<T>; }
  COLONNADE_INLINE_MEMBER Vector<T> get(std::int64_t v) const { return load(scratch + v * kLanes<T>); }
  COLONNADE_INLINE_MEMBER void set(std::int64_t v, Vector<T> value) { store(scratch + v * kLanes<T>, value); }
};

COLONNADE_INLINE float root(float value) {
  return __builtin_sqrtf(value);
}
COLONNADE_INLINE double root(double value) {
  return __builtin_sqrt(value);
}

// Call visit(typed pointer) for a row of elements of `dtype`, computed in T.
template <class T, bool kIsNarrow, class Visit>
COLONNADE_INLINE void visit_elements(const void* at, Dtype dtype, const Visit& visit) {
  if constexpr (kIsNarrow) {
    if (dtype == Dtype::bfloat16) return visit(static_cast<const Bfloat16*>(at));
    if (dtype == Dtype::float16) return visit(static_cast<const Float16*>(at));
  }
  visit(static_cast<const T*>(at));
}

// Gradients of a task's entries, one after another, each located and prefetched some entries ahead. The task's fields
// are copied to values, because stores to rows may alias anything reached through a reference.
template <class T, int kVectors, bool kIsNarrow>
class Gradients {
 public:
  struct Term {
    const std::byte* at;  // null: none
    T coefficient;
  };

  explicit Gradients(const SumTask& task)
      : entries_(task.entries),
        features_(task.features),
        feature_(task.features),
        output_rows_(task.output_rows),
        weights_(static_cast<const T*>(task.weights)),
        index_(task.index),
        base_(task.base),
        dtype_(task.gradient_dtype),
        row_bytes_(columns<T, kVectors>(task.dim) * item_bytes()),
        is_straddling_(task.is_straddling),
        is_plain_(kVectors && task.is_plain),
        first_(is_plain_ ? task.features->first : 0),
        stride_(is_plain_ ? task.features->stride : 0),
        outputs_(is_plain_ ? task.features->base : nullptr),
        next_(task.segment_offsets[task.begin]),
        end_(task.segment_offsets[task.end]) {
    for (std::int64_t i = 0; i < kGradientsAhead; ++i) {
      if (is_plain_) {
        if (next_ + i < end_) fetch_term(plain(next_ + i));
      } else {
        find_next();
      }
    }
  }

  // Sum terms: the first is copied, the others are added in entry order; zeros without terms. Entries [lo, hi) follow
  // those of the previous call.
  COLONNADE_INLINE_MEMBER void add_up(std::int64_t lo, std::int64_t hi, std::int64_t dim,
                                      RowValues<T, kVectors>& sum) {
    // -0 + x is x for every x.
    bool is_empty = true;
    if constexpr (kVectors) {
      Vector<T> sums[kVectors];
      for (auto& value : sums) value = -Vector<T>{};
      const auto add = [&](const Term& term) COLONNADE_INLINE_LAMBDA {
        visit_elements<T, kIsNarrow>(term.at, dtype_, [&](const auto* at) COLONNADE_INLINE_LAMBDA {
          for (int v = 0; v < kVectors; ++v) sums[v] = sums[v] + load_as(at + v * kLanes<T>) * term.coefficient;
        });
      };
      for (std::int64_t i = lo; is_plain_ && i < hi; ++i) {
        if (i + kGradientsAhead < end_) fetch_term(plain(i + kGradientsAhead));
        is_empty = false;
        add({plain(i), T{1}});
      }
      for (std::int64_t i = lo; !is_plain_ && i < hi; ++i) {
        const Term term = take(i);
        if (!term.at) continue;
        is_empty = false;
        add(term);
      }
      for (int v = 0; v < kVectors; ++v) sum.vectors[v] = is_empty ? Vector<T>{} : sums[v];
    } else {
      for (std::int64_t v = 0; v < sum.num_vectors(); ++v) sum.set(v, -Vector<T>{});
      for (std::int64_t i = lo; i < hi; ++i) {
        const Term term = take(i);
        if (!term.at) continue;
        is_empty = false;
        visit_elements<T, kIsNarrow>(term.at, dtype_, [&](const auto* at) COLONNADE_INLINE_LAMBDA {
          for (std::int64_t v = 0; v < sum.num_vectors(); ++v) {
            sum.set(v, sum.get(v) + load_columns(at, v, dim) * term.coefficient);
          }
        });
      }
      for (std::int64_t v = 0; is_empty && v < sum.num_vectors(); ++v) sum.set(v, Vector<T>{});
    }
  }

 private:
  COLONNADE_INLINE_MEMBER std::int64_t item_bytes() const {
    return kIsNarrow && (dtype_ == Dtype::bfloat16 || dtype_ == Dtype::float16)
               ? 2
               : static_cast<std::int64_t>(sizeof(T));
  }

  // Return the term of entry i, for i ascending by one.
  COLONNADE_INLINE_MEMBER Term take(std::int64_t i) {
    find_next();
    return waiting_[static_cast<std::uint64_t>(i) % kWaiting];
  }

  COLONNADE_INLINE_MEMBER void find_next() {
    if (next_ == end_) return;
    // Entries of a row are at any position in data that is stored by lookup.
    if (next_ + kGradientsAhead < end_) {
      const std::int32_t later = entries_[next_ + kGradientsAhead];
      if (output_rows_) fetch(output_rows_ + later);
      if (weights_) fetch(weights_ + later);
    }
    const Term term = find(entries_[next_]);
    waiting_[static_cast<std::uint64_t>(next_) % kWaiting] = term;
    ++next_;
    if (term.at) fetch_term(term.at);
  }

  COLONNADE_INLINE_MEMBER void fetch_term(const std::byte* at) const {
    if constexpr (kVectors && !kIsNarrow) {
      for (int v = 0; v < kVectors; ++v) fetch(at + 64 * v);
    } else {
      for (std::int64_t b = 0; b < row_bytes_; b += 64) fetch(at + b);
    }
    if (is_straddling_) fetch(at + row_bytes_ - 1);
  }

  // Address of the term of entry i, if `is_plain_`.
  COLONNADE_INLINE_MEMBER const std::byte* plain(std::int64_t i) const {
    return outputs_ + (entries_[i] - first_) * stride_;
  }

  COLONNADE_INLINE_MEMBER Term find(std::int32_t e) {
    if (index_) return {base_ + static_cast<std::int64_t>(index_[e]) * item_bytes(), T{1}};
    if (e < feature_->first) feature_ = features_;  // entries ascend within a row
    while (e >= feature_->last) ++feature_;
    const FeatureGradients& feature = *feature_;
    if (!feature.base) return {nullptr, T{1}};
    const std::int64_t row = feature.output_rows ? feature.output_rows[e] : e - feature.first;
    T coefficient = weights_ ? weights_[e] : T{1};
    if (feature.bags) {
      const T length = static_cast<T>(feature.bags[row + 1] - feature.bags[row]);
      coefficient *= T{1} / (feature.is_sqrtn ? root(length) : length);
    }
    return {feature.base + row * feature.stride, coefficient};
  }

  const std::int32_t* entries_;
  const FeatureGradients *features_, *feature_;
  const std::int32_t* output_rows_;
  const T* weights_;
  const std::uint32_t* index_;
  const std::byte* base_;
  Dtype dtype_;
  std::int64_t row_bytes_;
  bool is_straddling_, is_plain_;
  std::int64_t first_, stride_;  // of the only feature, if `is_plain_`
  const std::byte* outputs_;
  std::int64_t next_, end_;
  Term waiting_[kWaiting];
};

// Call Loop::run<T, kVectors, kIsNarrow>(task) with the loop that fits the task.
template <class T, class Loop, class Task>
void run_by_dim(const Task& task, std::int64_t dim, bool is_narrow) {
  visit_num_vectors<T>(dim, [&](auto num_vectors) {
    constexpr int kVectors = decltype(num_vectors)::value;
    if constexpr (sizeof(T) == 4) {
      if (is_narrow) return Loop::template run<T, kVectors, true>(task);
    }
    Loop::template run<T, kVectors, false>(task);
  });
}

COLONNADE_INLINE bool is_16_bit(Dtype dtype) {
  return dtype == Dtype::bfloat16 || dtype == Dtype::float16;
}

}  // namespace
}  // namespace colonnade::COLONNADE_ISA
