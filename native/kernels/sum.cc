#include "rows.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {

namespace {

constexpr std::int64_t kGradientsAhead = 32;
constexpr std::int64_t kRowsAhead = 16;
constexpr std::int64_t kWaiting = 64;  // power of two above kGradientsAhead
constexpr std::int64_t kBlock = 4;

// The gradients of a task's entries, one after the other, each found and fetched some entries before its turn.
template <class T>
class Gradients {
 public:
  struct Term {
    const T* at;
    T coefficient;
  };

  explicit Gradients(const SumTask& task)
      : task_(task),
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
    const Term term = find(task_.entries[next_]);
    waiting_[next_ % kWaiting] = term;
    fetch_row(term.at, row_bytes_);
    ++next_;
  }

  COLONNADE_INLINE_MEMBER Term find(std::int32_t e) const {
    if (task_.index) return {reinterpret_cast<const T*>(task_.base) + task_.index[e], T{1}};
    const FeatureGradients* feature = task_.features;
    while (e >= feature->last) ++feature;
    const std::int64_t row = feature->output_rows ? feature->output_rows[e] : e - feature->first;
    T coefficient = task_.weights ? static_cast<const T*>(task_.weights)[e] : T{1};
    if (feature->mean_bags) {
      coefficient *= T{1} / static_cast<T>(feature->mean_bags[row + 1] - feature->mean_bags[row]);
    }
    return {reinterpret_cast<const T*>(feature->base + row * feature->stride), coefficient};
  }

  const SumTask& task_;
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
COLONNADE_INLINE void add_up(Gradients<T>& gradients, std::int64_t lo, std::int64_t hi, std::int64_t dim,
                             RowSum<T, kVectors>& sum) {
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

template <class T>
struct Sums {
  const SumTask& task;
  void fetch(std::int64_t) const {}
  template <class Sum>
  void finish(std::int64_t u, Sum& sum) const {
    T* out = static_cast<T*>(task.sums) + task.sum_index[u];
    for (std::int64_t v = 0; v < sum.num_vectors(); ++v) store_columns(out, v, task.dim, sum.get(v));
  }
};

template <class T>
struct Rows {
  const SumTask& task;

  T* row(std::int64_t u) const { return reinterpret_cast<T*>(task.rows + task.slots[u] * task.row_stride); }
  std::byte* state(std::int64_t u) const { return task.states + task.slots[u] * task.state_stride; }
  void fetch(std::int64_t u) const {
    fetch_row(row(u), task.dim * static_cast<std::int64_t>(sizeof(T)));
    COLONNADE_ISA::fetch(state(u));
  }
  void advance_clock(std::int64_t u) const {
    ++*reinterpret_cast<std::uint64_t*>(state(u) + task.state_stride - 8);
  }
  // g += weight_decay * w. Zero adds nothing, not even a NaN.
  template <class Sum>
  void decay(const T* row, Sum& sum) const {
    if (task.weight_decay == 0) return;
    const T decay = static_cast<T>(task.weight_decay);
    for (std::int64_t v = 0; v < sum.num_vectors(); ++v) {
      sum.set(v, sum.get(v) + load_columns(row, v, task.dim) * decay);
    }
  }
  // w -= step * g
  template <class Sum>
  void descend(T* row, T step, const Sum& sum) const {
    for (std::int64_t v = 0; v < sum.num_vectors(); ++v) {
      store_columns(row, v, task.dim, load_columns<T>(row, v, task.dim) - sum.get(v) * step);
    }
  }
};

template <class T>
struct Sgd : Rows<T> {
  template <class Sum>
  void finish(std::int64_t u, Sum& sum) const {
    T* const row = this->row(u);
    this->decay(row, sum);
    this->descend(row, static_cast<T>(this->task.learning_rate), sum);
    this->advance_clock(u);
  }
};

template <class T>
struct RowwiseAdagrad : Rows<T> {
  template <class Sum>
  void finish(std::int64_t u, Sum& sum) const {
    const SumTask& task = this->task;
    T* const row = this->row(u);
    this->decay(row, sum);
    Vector<T> squares = sum.get(0) * sum.get(0);
    for (std::int64_t v = 1; v < sum.num_vectors(); ++v) squares = squares + sum.get(v) * sum.get(v);
    T& accumulator = *reinterpret_cast<T*>(this->state(u));
    accumulator += tree_sum<T>(squares) / static_cast<T>(task.dim);
    const T root = sizeof(T) == 4 ? static_cast<T>(__builtin_sqrtf(static_cast<float>(accumulator)))
                                  : static_cast<T>(__builtin_sqrt(static_cast<double>(accumulator)));
    this->descend(row, static_cast<T>(task.learning_rate) / (root + static_cast<T>(task.eps)), sum);
    this->advance_clock(u);
  }
};

template <class T, int kVectors, class Finish>
void run(const SumTask& task) {
  const Finish rows{task};
  if (task.begin == task.end) return;
  Gradients<T> gradients(task);
  for (std::int64_t u = task.begin; u < task.begin + kRowsAhead && u < task.end; ++u) rows.fetch(u);
  for (std::int64_t u = task.begin; u < task.end; ++u) {
    if (u + kRowsAhead < task.end) rows.fetch(u + kRowsAhead);
    RowSum<T, kVectors> sum(task);
    add_up(gradients, task.segment_offsets[u], task.segment_offsets[u + 1], task.dim, sum);
    rows.finish(u, sum);
  }
}

template <class T, class Finish>
void run_by_dim(const SumTask& task) {
  switch (task.dim % kLanes<T> ? 0 : task.dim / kLanes<T>) {
    case 1: return run<T, 1, Finish>(task);
    case 2: return run<T, 2, Finish>(task);
    case 4: return run<T, 4, Finish>(task);
    case 8: return run<T, 8, Finish>(task);
    default: return run<T, 0, Finish>(task);
  }
}

}  // namespace

template <class T>
void sum(const SumTask& task) {
  run_by_dim<T, Sums<T>>(task);
}
template <class T>
void update_sgd(const SumTask& task) {
  run_by_dim<T, Sgd<T>>(task);
}
template <class T>
void update_rowwise_adagrad(const SumTask& task) {
  run_by_dim<T, RowwiseAdagrad<T>>(task);
}

template void sum<float>(const SumTask&);
template void sum<double>(const SumTask&);
template void update_sgd<float>(const SumTask&);
template void update_sgd<double>(const SumTask&);
template void update_rowwise_adagrad<float>(const SumTask&);
template void update_rowwise_adagrad<double>(const SumTask&);

}  // namespace colonnade::COLONNADE_ISA
