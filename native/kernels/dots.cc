// Dot products of all pairs of vectors of a sample: forward and backward.
#include "registers.h"
#include "rows.h"
#include "vector.h"

namespace colonnade::COLONNADE_ISA {

namespace {

// Rows of the triangle, or vectors of the gradient, that are summed side by side: as many chains of additions
// as hide their latency, and few enough that their sums stay in registers.
constexpr int kRows = 8;

// What the last columns of a triangle's row fill at least: half a 64-byte register saves a quarter of the work.
constexpr int kHalfBytes = kRegisterBytes < 32 ? kRegisterBytes : 32;

// Where row i of the triangle starts: rows 1 .. i - 1 have as many elements as their number.
COLONNADE_INLINE std::int64_t triangle(std::int64_t i) {
  return i * (i - 1) / 2;
}

template <class T>
COLONNADE_INLINE void copy(const T* from, std::int64_t n, T* to) {
  std::int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = from[i];
}

// A square of 16-byte registers: element (r, c) of `rows` to columns[c * stride + r].
template <class T>
inline constexpr std::int64_t kSquare = 16 / static_cast<std::int64_t>(sizeof(T));

#if defined(__x86_64__)
COLONNADE_INLINE void transpose_square(const std::byte* const* rows, std::int64_t d, float* columns,
                                       std::int64_t stride) {
  const auto row = [&](int r) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[r]) + d); };
  __m128 r0 = row(0), r1 = row(1), r2 = row(2), r3 = row(3);
  _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
  _mm_storeu_ps(columns, r0);
  _mm_storeu_ps(columns + stride, r1);
  _mm_storeu_ps(columns + 2 * stride, r2);
  _mm_storeu_ps(columns + 3 * stride, r3);
}
COLONNADE_INLINE void transpose_square(const std::byte* const* rows, std::int64_t d, double* columns,
                                       std::int64_t stride) {
  const auto row = [&](int r) { return _mm_loadu_pd(reinterpret_cast<const double*>(rows[r]) + d); };
  const __m128d r0 = row(0), r1 = row(1);
  _mm_storeu_pd(columns, _mm_unpacklo_pd(r0, r1));
  _mm_storeu_pd(columns + stride, _mm_unpackhi_pd(r0, r1));
}
#else
template <class T>
COLONNADE_INLINE void transpose_square(const std::byte* const* rows, std::int64_t d, T* columns,
                                       std::int64_t stride) {
  for (std::int64_t c = 0; c < kSquare<T>; ++c) {
    for (std::int64_t r = 0; r < kSquare<T>; ++r) {
      columns[c * stride + r] = reinterpret_cast<const T*>(rows[r])[d + c];
    }
  }
}
#endif

// columns[d * stride + v] = element d of vector v. `rows` goes on to whole squares.
template <class T>
COLONNADE_INLINE void transpose(const std::byte* const* rows, std::int64_t num_rows, std::int64_t dim,
                                T* columns, std::int64_t stride) {
  for (std::int64_t v = 0; v < num_rows; v += kSquare<T>) {
    std::int64_t d = 0;
    for (; d + kSquare<T> <= dim; d += kSquare<T>) {
      transpose_square(rows + v, d, columns + d * stride + v, stride);
    }
    for (; d < dim; ++d) {
      for (std::int64_t r = 0; r < kSquare<T>; ++r) {
        columns[d * stride + v + r] = reinterpret_cast<const T*>(rows[v + r])[d];
      }
    }
  }
}

// Rows [i, i + kCount) of the triangle, columns from c: kWhole registers, then kHalf half ones. A dot is summed
// from its first element to its last. A row's last store writes up to 7 elements too many, into the first columns
// of the next row: columns go from the last to the first and rows from the first to the last, so every element
// is written last by its own row.
template <int kWhole, int kHalf, int kCount, class T>
void dots_tile(const T* columns, std::int64_t stride, std::int64_t dim, std::int64_t i, std::int64_t c,
               T* out) {
  using W = Register<T, kRegisterBytes>;
  using H = Register<T, kHalfBytes>;
  typename W::Value wholes[kWhole + 1][kCount] = {};
  typename H::Value halves[kCount] = {};
  const T *left = columns + i, *right = columns + c;
  for (std::int64_t d = 0; d < dim; ++d, left += stride, right += stride) {
    typename W::Value whole[kWhole + 1];
#pragma GCC unroll 4
    for (int w = 0; w < kWhole; ++w) whole[w] = W::load(right + w * W::kLanes);
    typename H::Value half = {};
    if constexpr (kHalf) half = H::load(right + kWhole * W::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
      for (int w = 0; w < kWhole; ++w) wholes[w][r] = wholes[w][r] + whole[w] * left[r];
      if constexpr (kHalf) halves[r] = halves[r] + half * left[r];
    }
  }
  out += triangle(i) + c;
  if constexpr (kHalf) {
    for (std::int64_t r = 0, at = kWhole * W::kLanes; r < kCount; at += i + r++) H::store(out + at, halves[r]);
  }
#pragma GCC unroll 4
  for (int w = kWhole - 1; w >= 0; --w) {
    for (std::int64_t r = 0, at = w * W::kLanes; r < kCount; at += i + r++) W::store(out + at, wholes[w][r]);
  }
}

// All columns of rows [i, i + kCount).
template <int kCount, class T>
COLONNADE_INLINE void triangle_rows(const T* columns, std::int64_t stride, std::int64_t dim, std::int64_t i,
                                    T* out) {
  constexpr std::int64_t kLanes = Register<T, kRegisterBytes>::kLanes;
  constexpr std::int64_t kHalfLanes = Register<T, kHalfBytes>::kLanes;
  const std::int64_t width = i + kCount - 1, rest = width % kLanes;
  std::int64_t c = width - rest;  // columns left of it fill registers
  const bool is_half = rest && rest <= kHalfLanes && kHalfLanes < kLanes;
  if (rest && !is_half) c += kLanes;
  if (is_half && c) {
    c -= kLanes;
    dots_tile<1, 1, kCount>(columns, stride, dim, i, c, out);
  } else if (is_half) {
    dots_tile<0, 1, kCount>(columns, stride, dim, i, c, out);
  }
  if constexpr (kRegisterBytes == 64) {  // with fewer registers two columns' sums do not fit
    for (; c >= 2 * kLanes; c -= 2 * kLanes) {
      dots_tile<2, 0, kCount>(columns, stride, dim, i, c - 2 * kLanes, out);
    }
  }
  for (; c > 0; c -= kLanes) dots_tile<1, 0, kCount>(columns, stride, dim, i, c - kLanes, out);
}

template <class T>
COLONNADE_INLINE void last_rows(std::int64_t count, const T* columns, std::int64_t stride, std::int64_t dim,
                                std::int64_t i, T* out) {
  static_assert(kRows == 8);
  switch (count) {
    case 1:
      return triangle_rows<1>(columns, stride, dim, i, out);
    case 2:
      return triangle_rows<2>(columns, stride, dim, i, out);
    case 3:
      return triangle_rows<3>(columns, stride, dim, i, out);
    case 4:
      return triangle_rows<4>(columns, stride, dim, i, out);
    case 5:
      return triangle_rows<5>(columns, stride, dim, i, out);
    case 6:
      return triangle_rows<6>(columns, stride, dim, i, out);
    case 7:
      return triangle_rows<7>(columns, stride, dim, i, out);
    default:
      return;
  }
}

// Where the vectors of one sample start.
COLONNADE_INLINE void find_rows(const VectorPlace* vectors, std::int64_t num_vectors, std::int64_t sample,
                                const std::byte** rows) {
  for (std::int64_t v = 0; v < num_vectors; ++v) rows[v] = vectors[v].base + sample * vectors[v].stride;
}

}  // namespace

template <class T>
void dots(const DotsTask& task) {
  const std::int64_t num_vectors = task.num_vectors, dim = task.dim, num_copied = task.num_copied;
  const std::int64_t stride = (num_vectors + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  const std::int64_t num_dots = triangle(num_vectors), width = num_copied * dim + num_dots;
  T* const columns = static_cast<T*>(task.scratch);
  T* const zeros = columns + stride * dim;
  T* const spare = zeros + dim;  // num_dots + kDotsOverrun
  for (std::int64_t d = 0; d < dim; ++d) zeros[d] = 0;
  // The squares' last columns are zeros from here; those beyond stay as the caller cleared them.
  for (std::int64_t v = num_vectors; v % kSquare<T>; ++v) {
    task.rows[v] = reinterpret_cast<const std::byte*>(zeros);
  }
  for (std::int64_t b = task.begin; b < task.end; ++b) {
    find_rows(task.vectors, num_vectors, b, task.rows);
    if (b + 2 < task.end) fetch_vectors<T>(task.vectors, num_vectors, dim, b + 2);
    T* out = static_cast<T*>(task.out) + b * width;
    for (std::int64_t k = 0; k < num_copied; ++k, out += dim) {
      copy(reinterpret_cast<const T*>(task.rows[task.copied[k]]), dim, out);
    }
    transpose(task.rows, num_vectors, dim, columns, stride);
    // What is written too far lands in this task's next samples, which are written later, or else is cut off.
    const bool is_room_behind = (task.end - b - 1) * width >= kDotsOverrun;
    T* const at = is_room_behind ? out : spare;
    std::int64_t i = 1;
    for (; i + kRows <= num_vectors; i += kRows) triangle_rows<kRows>(columns, stride, dim, i, at);
    last_rows(num_vectors - i, columns, stride, dim, i, at);
    if (!is_room_behind) copy(spare, num_dots, out);
  }
}
template void dots<float>(const DotsTask&);
template void dots<double>(const DotsTask&);

namespace {

using std::int64_t;

#define COLONNADE_INLINE_LAMBDA __attribute__((always_inline))
// Registers of a vector's elements that share the factors: more do not leave room for the sums.
constexpr int kWidest = kRegisterBytes == 64 ? 2 : 1;

// What kWide registers of elements from `d` of vectors [i, i + kCount) receive: the sum over the others j,
// ascending, of the gradient of <v_i, v_j> times v_j, on top of what is in `sums`. others[j] + d: element d of v_j.
template <int kCount, int kWide, class T, class R = Register<T, kRegisterBytes>>
COLONNADE_INLINE void add_others(const std::byte* const* others, int64_t num_vectors, int64_t d,
                                 const T* gradient, int64_t i, typename R::Value (&sums)[kCount][kWide]) {
  const T* own[kCount];  // rows of the triangle
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) own[r] = gradient + triangle(i + r);
  typename R::Value vector[kWide];
  const auto take = [&](int64_t j) COLONNADE_INLINE_LAMBDA {
    const T* at = reinterpret_cast<const T*>(others[j]) + d;
#pragma GCC unroll 4
    for (int w = 0; w < kWide; ++w) vector[w] = R::load(at + w * R::kLanes);
  };
  const auto add = [&](int r, T factor) COLONNADE_INLINE_LAMBDA {
#pragma GCC unroll 4
    for (int w = 0; w < kWide; ++w) sums[r][w] = sums[r][w] + vector[w] * factor;
  };
  for (int64_t j = 0; j < i; ++j) {
    take(j);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) add(r, own[r][j]);
  }
#pragma GCC unroll 8
  for (int j = 0; j < kCount; ++j) {
    take(i + j);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
      if (r != j) add(r, r > j ? own[r][i + j] : own[j][i + r]);
    }
  }
  const T* column = gradient + triangle(i + kCount) + i;  // of the rows below, these columns
  for (int64_t j = i + kCount; j < num_vectors; column += j++) {
    take(j);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) add(r, column[r]);
  }
}

// One sample's gradient: the copied vectors' at `copied`, the dots' at `dots`.
template <class T>
struct SampleGradient {
  const DotsGradientTask& task;
  int64_t sample;
  const T *copied, *dots;

  // Vectors [i, i + kCount).
  template <int kCount>
  void rows(int64_t i) const {
    using R = Register<T, kRegisterBytes>;
    bool is_wanted = false;
    for (int r = 0; r < kCount; ++r) is_wanted |= task.out[i + r].base != nullptr;
    if (!is_wanted) return;
    const int64_t dim = task.dim;
    int64_t d = 0;
    for (; d + kWidest * R::kLanes <= dim; d += kWidest * R::kLanes) columns<kCount, kWidest>(i, d);
    for (; d + R::kLanes <= dim; d += R::kLanes) columns<kCount, 1>(i, d);
    if (d == dim) return;
    // Elements that do not fill a register: `rows_rest` points to copies that go on with zeros.
    typename R::Value sums[kCount][1] = {};
    const auto bytes = static_cast<std::size_t>(dim - d) * sizeof(T);
    for (int r = 0; r < kCount; ++r) {
      const int64_t k = task.copied_at[i + r];
      if (k >= 0) __builtin_memcpy(sums[r], copied + k * dim + d, bytes);
    }
    add_others<kCount, 1, T>(task.rows + task.num_vectors, task.num_vectors, 0, dots, i, sums);
    for (int r = 0; r < kCount; ++r) {
      if (T* out = target(i + r)) __builtin_memcpy(out + d, sums[r], bytes);
    }
  }

  // kWide registers of them from element d.
  template <int kCount, int kWide>
  COLONNADE_INLINE_MEMBER void columns(int64_t i, int64_t d) const {
    using R = Register<T, kRegisterBytes>;
    typename R::Value sums[kCount][kWide] = {};
    for (int r = 0; r < kCount; ++r) {
      const int64_t k = task.copied_at[i + r];
      if (k < 0) continue;
      for (int w = 0; w < kWide; ++w) sums[r][w] = R::load(copied + k * task.dim + d + w * R::kLanes);
    }
    add_others<kCount, kWide, T>(task.rows, task.num_vectors, d, dots, i, sums);
    for (int r = 0; r < kCount; ++r) {
      if (T* out = target(i + r)) {
        for (int w = 0; w < kWide; ++w) {
          if (task.is_streamed) {
            R::stream(out + d + w * R::kLanes, sums[r][w]);
          } else {
            R::store(out + d + w * R::kLanes, sums[r][w]);
          }
        }
      }
    }
  }

  COLONNADE_INLINE_MEMBER T* target(int64_t v) const {
    const TargetPlace& place = task.out[v];
    return place.base ? reinterpret_cast<T*>(place.base + sample * place.stride) : nullptr;
  }
};

}  // namespace

template <class T>
void dots_gradient(const DotsGradientTask& task) {
  constexpr int64_t kWidth = Register<T, kRegisterBytes>::kLanes;
  const int64_t num_vectors = task.num_vectors, dim = task.dim;
  const int64_t rest = dim % kWidth;
  const int64_t width = task.num_copied * dim + triangle(num_vectors);
  T* const copies = static_cast<T*>(task.scratch);  // num_vectors registers, cleared by the caller
  for (int64_t v = 0; v < num_vectors; ++v) {
    task.rows[num_vectors + v] = reinterpret_cast<const std::byte*>(copies + v * kWidth);
  }
  for (int64_t b = task.begin; b < task.end; ++b) {
    find_rows(task.vectors, num_vectors, b, task.rows);
    if (b + 2 < task.end) fetch_vectors<T>(task.vectors, num_vectors, dim, b + 2);
    for (int64_t v = 0; rest && v < num_vectors; ++v) {
      const T* row = reinterpret_cast<const T*>(task.rows[v]) + dim - rest;
      for (int64_t d = 0; d < rest; ++d) copies[v * kWidth + d] = row[d];
    }
    const T* copied = static_cast<const T*>(task.gradient) + b * width;
    const SampleGradient<T> gradient{task, b, copied, copied + task.num_copied * dim};
    int64_t i = 0;
    for (; i + kRows <= num_vectors; i += kRows) gradient.template rows<kRows>(i);
    if (i + 4 <= num_vectors) gradient.template rows<4>(i), i += 4;
    if (i + 2 <= num_vectors) gradient.template rows<2>(i), i += 2;
    if (i < num_vectors) gradient.template rows<1>(i);
  }
  if (task.is_streamed) stream_end();
}
template void dots_gradient<float>(const DotsGradientTask&);
template void dots_gradient<double>(const DotsGradientTask&);

}  // namespace colonnade::COLONNADE_ISA
