#include "rows.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {

namespace {

constexpr std::int64_t kGradientsAhead = 32;
constexpr std::int64_t kRowsAhead = 16;
constexpr std::int64_t kWaiting = 64;  // power of two above kGradientsAhead
constexpr std::int64_t kBlock = 4;

// The cache lines of a row of kVectors vectors (0: of `bytes` bytes).
template <class T, int kVectors>
COLONNADE_INLINE void fetch_vectors(const T* row, std::int64_t bytes) {
  if constexpr (kVectors) {
    for (int v = 0; v < kVectors; ++v) fetch(row + v * kLanes<T>);
  } else {
    fetch_row(row, bytes);
  }
}

// The gradients of a task's entries, one after the other, each found and fetched some entries before its
// turn. A task's fields as values: stores to rows may alias anything that is reached through a reference.
template <class T, int kVectors>
class Gradients {
 public:
  struct Term {
    const T* at;
    T coefficient;
  };

  explicit Gradients(const SumTask& task)
      : entries_(task.entries),
        features_(task.features),
        weights_(static_cast<const T*>(task.weights)),
        index_(task.index),
        base_(reinterpret_cast<const T*>(task.base)),
        row_bytes_(task.dim * static_cast<std::int64_t>(sizeof(T))),
        next_(task.segment_offsets[task.begin]),
        end_(task.segment_offsets[task.end]) {
    for (std::int64_t i = 0; i < kGradientsAhead; ++i) find_next();
  }

  // The term of entry i, for i ascending by one.
  COLONNADE_INLINE_MEMBER Term take(std::int64_t i) {
    find_next();
    return waiting_[i % kWaiting];
  }

 private:
  COLONNADE_INLINE_MEMBER void find_next() {
    if (next_ == end_) return;
    const Term term = find(entries_[next_]);
    waiting_[next_ % kWaiting] = term;
    fetch_vectors<T, kVectors>(term.at, row_bytes_);
    ++next_;
  }

  COLONNADE_INLINE_MEMBER Term find(std::int32_t e) const {
    if (index_) return {base_ + index_[e], T{1}};
    const FeatureGradients* feature = features_;
    while (e >= feature->last) ++feature;
    const std::int64_t row = feature->output_rows ? feature->output_rows[e] : e - feature->first;
    T coefficient = weights_ ? weights_[e] : T{1};
    if (feature->mean_bags) {
      coefficient *= T{1} / static_cast<T>(feature->mean_bags[row + 1] - feature->mean_bags[row]);
    }
    return {reinterpret_cast<const T*>(feature->base + row * feature->stride), coefficient};
  }

  const std::int32_t* entries_;
  const FeatureGradients* features_;
  const T* weights_;
  const std::uint32_t* index_;
  const T* base_;
  std::int64_t row_bytes_, next_, end_;
  Term waiting_[kWaiting];
};

// Where a row's sum lies while it is made: registers where the row is a few whole vectors, else scratch,
// whose last vector is filled up with zeros.
template <class T, int kVectors>
struct RowSum {
  Vector<T> vectors[kVectors];
  explicit RowSum(const SumTask&) {}
  static constexpr std::int64_t num_vectors() { return kVectors; }
  Vector<T> get(std::int64_t v) const { return vectors[v]; }
  void set(std::int64_t v, Vector<T> value) { vectors[v] = value; }
};
template <class T>
struct RowSum<T, 0> {
  T* scratch;
  std::int64_t dim;
  explicit RowSum(const SumTask& task) : scratch(static_cast<T*>(task.scratch)), dim(task.dim) {}
  std::int64_t num_vectors() const { return (dim + kLanes<T> - 1) / kLanes<T>; }
  Vector<T> get(std::int64_t v) const { return load(scratch + v * kLanes<T>); }
  void set(std::int64_t v, Vector<T> value) { store(scratch + v * kLanes<T>, value); }
};

// Vector v of a row of dim elements; past the end: zeros.
template <class T>
COLONNADE_INLINE Vector<T> load_columns(const T* row, std::int64_t v, std::int64_t dim) {
  const std::int64_t column = v * kLanes<T>;
  if (column + kLanes<T> <= dim) return load(row + column);
  T lanes[kLanes<T>] = {};
  for (std::int64_t j = column; j < dim; ++j) lanes[j - column] = row[j];
  return load(lanes);
}

template <class T>
COLONNADE_INLINE void store_columns(T* row, std::int64_t v, std::int64_t dim, Vector<T> value) {
  const std::int64_t column = v * kLanes<T>;
  if (column + kLanes<T> <= dim) return store(row + column, value);
  T lanes[kLanes<T>];
  store(lanes, value);
  for (std::int64_t j = column; j < dim; ++j) row[j] = lanes[j - column];
}

// First term copied, the others added in entry order; no entries: zeros.
template <class T, int kVectors>
COLONNADE_INLINE void add_up(Gradients<T, kVectors>& gradients, std::int64_t lo, std::int64_t hi,
                             std::int64_t dim, RowSum<T, kVectors>& sum) {
  if constexpr (kVectors) {
    Vector<T> sums[kVectors] = {};
    for (std::int64_t i = lo; i < hi; ++i) {
      const auto term = gradients.take(i);
      for (int v = 0; v < kVectors; ++v) {
        const Vector<T> value = load(term.at + v * kLanes<T>) * term.coefficient;
        sums[v] = i == lo ? value : sums[v] + value;
      }
    }
    for (int v = 0; v < kVectors; ++v) sum.vectors[v] = sums[v];
  } else {
    for (std::int64_t v = 0; lo == hi && v < sum.num_vectors(); ++v) sum.set(v, Vector<T>{});
    for (std::int64_t i = lo; i < hi; ++i) {
      const auto term = gradients.take(i);
      for (std::int64_t v = 0; v < sum.num_vectors(); ++v) {
        const Vector<T> value = load_columns(term.at, v, dim) * term.coefficient;
        sum.set(v, i == lo ? value : sum.get(v) + value);
      }
    }
  }
}

// What becomes of a row's sum. Each has fetch(u), some rows before finish(u, sum).
template <class T, int kVectors>
struct Sums {
  T* sums;
  const std::uint32_t* index;
  std::int64_t dim;

  explicit Sums(const SumTask& task)
      : sums(static_cast<T*>(task.sums)), index(task.sum_index), dim(task.dim) {}

  void fetch(std::int64_t) const {}
  COLONNADE_INLINE_MEMBER void finish(std::int64_t u, RowSum<T, kVectors>& sum) const {
    T* const out = sums + index[u];
    for (std::int64_t v = 0; v < sum.num_vectors(); ++v) store_columns(out, v, dim, sum.get(v));
  }
};

template <class T, int kVectors>
struct Rows {
  const std::uint32_t* slots;
  std::byte *rows, *states;
  std::int64_t row_stride, state_stride, dim;
  T learning_rate, weight_decay, eps;

  explicit Rows(const SumTask& task)
      : slots(task.slots),
        rows(task.rows),
        states(task.states),
        row_stride(task.row_stride),
        state_stride(task.state_stride),
        dim(task.dim),
        learning_rate(static_cast<T>(task.learning_rate)),
        weight_decay(static_cast<T>(task.weight_decay)),
        eps(static_cast<T>(task.eps)) {}

  COLONNADE_INLINE_MEMBER T* row(std::int64_t u) const {
    return reinterpret_cast<T*>(rows + slots[u] * row_stride);
  }
  COLONNADE_INLINE_MEMBER std::byte* state(std::int64_t u) const { return states + slots[u] * state_stride; }
  COLONNADE_INLINE_MEMBER void fetch(std::int64_t u) const {
    fetch_vectors<T, kVectors>(row(u), dim * static_cast<std::int64_t>(sizeof(T)));
    COLONNADE_ISA::fetch(state(u));
  }
  COLONNADE_INLINE_MEMBER void advance_clock(std::int64_t u) const {
    auto& clock = *reinterpret_cast<std::uint32_t*>(state(u) + state_stride - 4);
    clock += clock != ~0u;
  }
  // g += weight_decay * w. Zero adds nothing, not even a NaN.
  COLONNADE_INLINE_MEMBER void decay(const T* row, RowSum<T, kVectors>& sum) const {
    if (weight_decay == 0) return;
    for (std::int64_t v = 0; v < sum.num_vectors(); ++v) {
      sum.set(v, sum.get(v) + load_columns(row, v, dim) * weight_decay);
    }
  }
  // w -= step * g
  COLONNADE_INLINE_MEMBER void descend(T* row, T step, const RowSum<T, kVectors>& sum) const {
    for (std::int64_t v = 0; v < sum.num_vectors(); ++v) {
      store_columns(row, v, dim, load_columns<T>(row, v, dim) - sum.get(v) * step);
    }
  }
};

template <class T, int kVectors>
struct Sgd : Rows<T, kVectors> {
  using Rows<T, kVectors>::Rows;
  COLONNADE_INLINE_MEMBER void finish(std::int64_t u, RowSum<T, kVectors>& sum) const {
    T* const row = this->row(u);
    this->decay(row, sum);
    this->descend(row, this->learning_rate, sum);
    this->advance_clock(u);
  }
};

template <class T, int kVectors>
struct RowwiseAdagrad : Rows<T, kVectors> {
  using Rows<T, kVectors>::Rows;
  COLONNADE_INLINE_MEMBER void finish(std::int64_t u, RowSum<T, kVectors>& sum) const {
    T* const row = this->row(u);
    this->decay(row, sum);
    Vector<T> squares = sum.get(0) * sum.get(0);
    for (std::int64_t v = 1; v < sum.num_vectors(); ++v) squares = squares + sum.get(v) * sum.get(v);
    T& accumulator = *reinterpret_cast<T*>(this->state(u));
    const T total = accumulator + tree_sum<T>(squares) / static_cast<T>(this->dim);
    accumulator = total;
    const T root = sizeof(T) == 4 ? static_cast<T>(__builtin_sqrtf(static_cast<float>(total)))
                                  : static_cast<T>(__builtin_sqrt(static_cast<double>(total)));
    this->descend(row, this->learning_rate / (root + this->eps), sum);
    this->advance_clock(u);
  }
};

template <class T, int kVectors, class Finish>
void run(const SumTask& task) {
  const std::int64_t begin = task.begin, end = task.end, dim = task.dim;
  const std::int32_t* const offsets = task.segment_offsets;
  if (begin == end) return;
  const Finish rows(task);
  Gradients<T, kVectors> gradients(task);
  RowSum<T, kVectors> sum(task);
  for (std::int64_t u = begin; u < begin + kRowsAhead && u < end; ++u) rows.fetch(u);
  for (std::int64_t u = begin; u < end; ++u) {
    if (u + kRowsAhead < end) rows.fetch(u + kRowsAhead);
    add_up(gradients, offsets[u], offsets[u + 1], dim, sum);
    rows.finish(u, sum);
  }
}

template <class T, template <class, int> class Finish>
void run_by_dim(const SumTask& task) {
  switch (task.dim % kLanes<T> ? 0 : task.dim / kLanes<T>) {
    case 1:
      return run<T, 1, Finish<T, 1>>(task);
    case 2:
      return run<T, 2, Finish<T, 2>>(task);
    case 4:
      return run<T, 4, Finish<T, 4>>(task);
    case 8:
      return run<T, 8, Finish<T, 8>>(task);
    default:
      return run<T, 0, Finish<T, 0>>(task);
  }
}

}  // namespace

template <class T>
void sum(const SumTask& task) {
  run_by_dim<T, Sums>(task);
}
template <class T>
void update_sgd(const SumTask& task) {
  run_by_dim<T, Sgd>(task);
}
template <class T>
void update_rowwise_adagrad(const SumTask& task) {
  run_by_dim<T, RowwiseAdagrad>(task);
}

template void sum<float>(const SumTask&);
template void sum<double>(const SumTask&);
template void update_sgd<float>(const SumTask&);
template void update_sgd<double>(const SumTask&);
template void update_rowwise_adagrad<float>(const SumTask&);
template void update_rowwise_adagrad<double>(const SumTask&);

}  // namespace colonnade::COLONNADE_ISA
