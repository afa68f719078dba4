// Common code of all optimizers: rows and their clocks in memory, processing of the gradient before and of the row
// after the step that each optimizer's file defines. References and papers: src/colonnade/ops/optimizers.py.
#pragma once

#include "gradients.h"
#include "rounding.h"

namespace colonnade::COLONNADE_ISA {
namespace {

constexpr std::int64_t kRowsAhead = 32;

// Correctly rounded on every processor.
COLONNADE_INLINE Register<float>::Value root_of_lanes(Register<float>::Value lanes) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_ps(0xffff, lanes);
#elif defined(__AVX__)
  return _mm256_sqrt_ps(lanes);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(lanes);
#else
  for (int i = 0; i < Register<float>::kLanes; ++i) lanes[i] = root(lanes[i]);
  return lanes;
#endif
}
COLONNADE_INLINE Register<double>::Value root_of_lanes(Register<double>::Value lanes) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_pd(0xff, lanes);
#elif defined(__AVX__)
  return _mm256_sqrt_pd(lanes);
#elif defined(__x86_64__)
  return _mm_sqrt_pd(lanes);
#else
  for (int i = 0; i < Register<double>::kLanes; ++i) lanes[i] = root(lanes[i]);
  return lanes;
#endif
}

template <class T>
COLONNADE_INLINE Vector<T> roots(const Vector<T>& value) {
  return Vector<T>::of([&](int p) COLONNADE_INLINE_LAMBDA { return root_of_lanes(value.parts[p]); });
}

// Sum the squares of a row's columns: column j in lane j mod lanes, then the lanes as a tree.
template <class T, int kVectors>
COLONNADE_INLINE T sum_squares(const RowValues<T, kVectors>& row, std::int64_t dim) {
  Vector<T> squares = {};
  for (std::int64_t v = 0; v < row.num_vectors(); ++v) {
    Vector<T> value = row.get(v);
    if (const std::int64_t rest = dim - v * kLanes<T>; rest < kLanes<T>) {
      T lanes[kLanes<T>] = {};
      store_columns(lanes, 0, rest, value);
      value = load(lanes);
    }
    squares = squares + value * value;
  }
  return tree_sum(squares);
}

// Return base^t from the table of powers: entry 256 * k + i is base^(i * 256^k).
COLONNADE_INLINE double power(const double* table, std::uint64_t t) {
  if (t > 0xffffffffu) t = 0xffffffffu;
  double product = table[t & 0xff];
  while (t >>= 8) {
    table += 256;
    product *= table[t & 0xff];
  }
  return product;
}

// A copy of the task's fields: stores to rows may alias anything reached through a reference.
template <class T, int kVectors, bool kIsNarrow>
class Rows {
 public:
  Rows(const UpdateTask& task, std::int64_t state_bytes)
      : slots_(task.slots),
        rows_(task.rows),
        states_(task.states),
        lows_(task.is_split ? task.lows : nullptr),
        clocks_(task.clocks),
        ids_(task.ids),
        row_stride_(task.row_stride),
        state_stride_(task.state_stride),
        ids_stride_(task.ids_stride),
        dim_(columns<T, kVectors>(task.sum.dim)),
        state_bytes_(state_bytes),
        row_bytes_(dim_ * (kIsNarrow && is_16_bit(task.dtype) ? 2 : static_cast<std::int64_t>(sizeof(T)))),
        column_(task.column),
        dtype_(task.dtype),
        is_rounded_(kIsNarrow && is_16_bit(task.dtype) && !task.is_split),
        is_last_(task.is_last),
        seed_(task.seed),
        num_owners_(task.num_owners),
        place_(task.place) {}

  COLONNADE_INLINE_MEMBER T* state(std::int64_t u) const {
    return reinterpret_cast<T*>(states_ + slots_[u] * state_stride_);
  }
  COLONNADE_INLINE_MEMBER Clock& clock(std::int64_t u) const {
    return *reinterpret_cast<Clock*>(clocks_ + slots_[u] * state_stride_);
  }
  COLONNADE_INLINE_MEMBER void advance_clock(std::int64_t u) const {
    if (is_last_) clock(u) = next_clock(clock(u));
  }

  COLONNADE_INLINE_MEMBER void fetch(std::int64_t u) const {
    const std::byte* const row = rows_ + slots_[u] * row_stride_;
    if constexpr (kVectors && !kIsNarrow) {
      for (int v = 0; v < kVectors; ++v) COLONNADE_ISA::fetch(row + 64 * v);
    } else {
      for (std::int64_t b = 0; b < row_bytes_; b += 64) COLONNADE_ISA::fetch(row + b);
    }
    COLONNADE_ISA::fetch(row + row_bytes_ - 1);
    const std::byte* const state = reinterpret_cast<const std::byte*>(this->state(u));
    for (std::int64_t b = 0; b < state_bytes_; b += 64) COLONNADE_ISA::fetch(state + b);
    COLONNADE_ISA::fetch(&clock(u));
    if constexpr (kIsNarrow) {
      if (lows_) fetch_row(lows_ + slots_[u] * state_stride_, row_bytes_);
      if (is_rounded_ && ids_) COLONNADE_ISA::fetch(ids_ + slots_[u] * ids_stride_);
    }
  }

  COLONNADE_INLINE_MEMBER void load(std::int64_t u, RowValues<T, kVectors>& values) const {
    const std::byte* const row = rows_ + slots_[u] * row_stride_;
    if constexpr (kIsNarrow) {
      if (lows_) {
        const std::byte* const low = lows_ + slots_[u] * state_stride_;
        for (std::int64_t v = 0; v < values.num_vectors(); ++v) {
          values.set(v, join(load_halves(row, v, dim_), load_halves(low, v, dim_)));
        }
        return;
      }
    }
    visit_elements<T, kIsNarrow>(row, dtype_, [&](const auto* at) COLONNADE_INLINE_LAMBDA {
      for (std::int64_t v = 0; v < values.num_vectors(); ++v) values.set(v, load_columns(at, v, dim_));
    });
  }

  COLONNADE_INLINE_MEMBER void store(std::int64_t u, const RowValues<T, kVectors>& values) const {
    std::byte* const row = rows_ + slots_[u] * row_stride_;
    if constexpr (kIsNarrow) {
      if (lows_) {
        std::byte* const low = lows_ + slots_[u] * state_stride_;
        for (std::int64_t v = 0; v < values.num_vectors(); ++v) {
          Halves highs, lows;
          split(values.get(v), highs, lows);
          store_halves(row, v, dim_, highs);
          store_halves(low, v, dim_, lows);
        }
        return;
      }
      if (is_rounded_) {
        const std::uint64_t start = stream_start(seed_, id(slots_[u]), count_updates(clock(u)));
        for (std::int64_t v = 0; v < values.num_vectors(); ++v) {
          const Halves random = random_halves(start, column_ + 16 * v);
          store_halves(row, v, dim_,
                       dtype_ == Dtype::bfloat16 ? round_at_random<Bfloat16>(values.get(v), random)
                                                 : round_at_random<Float16>(values.get(v), random));
        }
        return;
      }
    }
    for (std::int64_t v = 0; v < values.num_vectors(); ++v) {
      store_columns(reinterpret_cast<T*>(row), v, dim_, values.get(v));
    }
  }

 private:
  COLONNADE_INLINE_MEMBER std::int64_t id(std::uint32_t slot) const {
    std::int64_t id;
    if (ids_) {
      __builtin_memcpy(&id, ids_ + slot * ids_stride_, 8);
      return id;
    }
    if (num_owners_ == 1) return slot;
    const std::uint64_t within = (place_ + num_owners_ - mix64(slot) % num_owners_) % num_owners_;
    return static_cast<std::int64_t>(slot * num_owners_ + within);
  }

  const std::uint32_t* slots_;
  std::byte *rows_, *states_, *lows_, *clocks_;
  const std::byte* ids_;
  std::int64_t row_stride_, state_stride_, ids_stride_, dim_, state_bytes_, row_bytes_, column_;
  Dtype dtype_;
  bool is_rounded_, is_last_;
  std::uint64_t seed_, num_owners_, place_;
};

// Clamp every element to +-most; a NaN stays.
template <class T, int kVectors>
COLONNADE_INLINE void clamp(RowValues<T, kVectors>& values, T most) {
  const auto is_above = [most](auto lanes) COLONNADE_INLINE_LAMBDA { return lanes > most; };
  const auto is_below = [most](auto lanes) COLONNADE_INLINE_LAMBDA { return lanes < -most; };
  for (std::int64_t v = 0; v < values.num_vectors(); ++v) {
    const Vector<T> value = where(values.get(v), is_above, splat(most), values.get(v));
    values.set(v, where(value, is_below, splat(-most), value));
  }
}

// An optimizer is constructed from a task's settings, and has
//   kIsDecayAdded           weight decay is added to the gradient
//   kSettings               the settings that it reads
//   state_elements(dim)     number of elements of a row's state that it uses
//   step(w, g, state, dim, steps)    steps: number of earlier ones of the row; may overwrite g
template <template <class> class Optimizer>
struct Updates {
  template <class T, int kVectors, bool kIsNarrow>
  static void run(const UpdateTask& task) {
    const std::int64_t begin = task.sum.begin, end = task.sum.end;
    const std::int64_t dim = columns<T, kVectors>(task.sum.dim);
    const std::int32_t* const offsets = task.sum.segment_offsets;
    constexpr T kAny = static_cast<T>(__builtin_inf());
    const T scale = static_cast<T>(task.settings.gradient_scale);
    const T clip = static_cast<T>(task.settings.clip_value);
    const T decay = Optimizer<T>::kIsDecayAdded ? static_cast<T>(task.settings.weight_decay) : T{0};
    const T max_norm = static_cast<T>(task.settings.max_norm);
    const T bound = static_cast<T>(task.settings.weight_bound);
    const Rows<T, kVectors, kIsNarrow> rows(
        task, Optimizer<T>::state_elements(dim) * static_cast<std::int64_t>(sizeof(T)));
    const Optimizer<T> optimizer(task.settings);
    Gradients<T, kVectors, kIsNarrow> gradients(task.sum);
    auto* const scratch = static_cast<std::byte*>(task.sum.scratch);
    RowValues<T, kVectors> g(scratch, dim);
    RowValues<T, kVectors> w(
        scratch + (dim * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64, dim);

    for (std::int64_t u = begin; u < begin + kRowsAhead && u < end; ++u) rows.fetch(u);
    for (std::int64_t u = begin; u < end; ++u) {
      if (u + kRowsAhead < end) rows.fetch(u + kRowsAhead);
      gradients.add_up(offsets[u], offsets[u + 1], dim, g);
      rows.load(u, w);
      if (scale != 1) {
        for (std::int64_t v = 0; v < g.num_vectors(); ++v) g.set(v, g.get(v) * scale);
      }
      if (clip < kAny) clamp(g, clip);
      if (decay != 0) {  // zero decay adds nothing, not even a NaN
        for (std::int64_t v = 0; v < g.num_vectors(); ++v) g.set(v, g.get(v) + w.get(v) * decay);
      }
      optimizer.step(w, g, rows.state(u), dim, std::uint64_t{count_steps(rows.clock(u))});
      if (max_norm < kAny) {
        const T norm = root(sum_squares(w, dim));
        if (norm > max_norm) {
          const T factor = max_norm / (norm + static_cast<T>(1e-7));
          for (std::int64_t v = 0; v < w.num_vectors(); ++v) w.set(v, w.get(v) * factor);
        }
      }
      if (bound < kAny) clamp(w, bound);
      rows.store(u, w);
      rows.advance_clock(u);
    }
  }
};

template <class T, template <class> class Optimizer>
void run_updates(const UpdateTask& task) {
  if (task.sum.begin == task.sum.end) return;
  run_by_dim<T, Updates<Optimizer>>(task, task.sum.dim,
                                    is_16_bit(task.dtype) || is_16_bit(task.sum.gradient_dtype));
}

template <template <class> class Optimizer>
constexpr OptimizerKernel optimizer_kernel(const char* name) {
  return {name, Optimizer<float>::state_elements, Optimizer<float>::kSettings, run_updates<float, Optimizer>,
          run_updates<double, Optimizer>};
}

}  // namespace
}  // namespace colonnade::COLONNADE_ISA
