// Bare loops over the bench's own tables, for the figures "of roofline": what memory allows a lookup and an
// update, with no bookkeeping, no checks and no optimizer. workers/roofline.py builds this file when the bench
// runs and sweeps `hint` and `distance`.
//
// Rows are `lines` whole cache lines (64 bytes, 16 floats) at base + slot * stride_bytes.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace {

typedef float Line __attribute__((vector_size(64)));
constexpr int64_t kLineFloats = 16;
constexpr int64_t kLineBytes = 64;

inline Line load(const char* at) {
  Line line;
  std::memcpy(&line, at, sizeof line);
  return line;
}

// Around the cache where the processor can; `to` is a multiple of 64 bytes.
inline void stream(float* to, Line line) {
#if defined(__AVX512F__)
  __m512 whole;
  std::memcpy(&whole, &line, sizeof whole);
  _mm512_stream_ps(to, whole);
#elif defined(__AVX__)
  __m256 halves[2];
  std::memcpy(halves, &line, sizeof halves);
  for (int i = 0; i < 2; ++i) _mm256_stream_ps(to + 8 * i, halves[i]);
#elif defined(__SSE__)
  __m128 quarters[4];
  std::memcpy(quarters, &line, sizeof quarters);
  for (int i = 0; i < 4; ++i) _mm_stream_ps(to + 4 * i, quarters[i]);
#else
  std::memcpy(to, &line, sizeof line);
#endif
}

// 0 none, 1 into L1, 2 into L2, 3 into L3, 4 around the cache, 5 into L1 to be written
template <int hint>
inline void prefetch(const char* at) {
  if constexpr (hint == 1) __builtin_prefetch(at, 0, 3);
  if constexpr (hint == 2) __builtin_prefetch(at, 0, 2);
  if constexpr (hint == 3) __builtin_prefetch(at, 0, 1);
  if constexpr (hint == 4) __builtin_prefetch(at, 0, 0);
  if constexpr (hint == 5) __builtin_prefetch(at, 1, 3);
}

template <int lines, int hint>
inline void prefetch_row(const char* row) {
  for (int i = 0; i < lines; ++i) prefetch<hint>(row + i * kLineBytes);
}

struct Gather {
  const int64_t* bases;  // by feature
  int64_t stride_bytes;
  const uint32_t* index;  // (features, bags, bag)
  int64_t num_features, num_bags, bag;
  float* out;
  int64_t feature_floats, bag_floats;  // between outputs of neighbouring features, of neighbouring bags
  int64_t distance;
};

template <int lines, int hint>
void gather_share(const Gather& g, int64_t first, int64_t last) {
  while (first < last) {
    const int64_t feature = first / g.num_bags;
    const int64_t end = std::min(last, (feature + 1) * g.num_bags);
    const char* base = reinterpret_cast<const char*>(g.bases[feature]);
    const uint32_t* index = g.index + first * g.bag;
    const int64_t num = (end - first) * g.bag;
    float* out = g.out + feature * g.feature_floats + (first - feature * g.num_bags) * g.bag_floats;
    for (int64_t i = 0; i < std::min(g.distance, num); ++i)
      prefetch_row<lines, hint>(base + index[i] * g.stride_bytes);
    for (int64_t i = 0; i < num; out += g.bag_floats) {
      Line sum[lines] = {};
      for (int64_t k = 0; k < g.bag; ++k, ++i) {
        if (i + g.distance < num)
          prefetch_row<lines, hint>(base + index[i + g.distance] * g.stride_bytes);
        const char* row = base + index[i] * g.stride_bytes;
        for (int l = 0; l < lines; ++l) sum[l] += load(row + l * kLineBytes);
      }
      for (int l = 0; l < lines; ++l) stream(out + l * kLineFloats, sum[l]);
    }
    first = end;
  }
}

struct Update {
  const int64_t* bases;  // by table
  int64_t stride_bytes;
  const int64_t* state_bases;  // by table
  int64_t state_stride_bytes;
  const uint32_t* slots;   // unique rows, table by table
  const int64_t* offsets;  // (tables + 1)
  int64_t num_tables;
  const float* gradients;
  int64_t gradient_lines;
  float one;  // a factor the compiler does not know, so that the row is written
  float* sums;  // (threads, 16): so that the gradients are read
  int64_t distance;
};

template <int lines, int hint>
void update_share(const Update& u, int64_t first, int64_t last) {
  for (int64_t t = 0; t < u.num_tables; ++t) {
    const int64_t begin = std::max(first, u.offsets[t]), end = std::min(last, u.offsets[t + 1]);
    char* base = reinterpret_cast<char*>(u.bases[t]);
    char* states = reinterpret_cast<char*>(u.state_bases[t]);
    const auto prefetch_all = [&](int64_t i) {
      prefetch_row<lines, hint>(base + u.slots[i] * u.stride_bytes);
      prefetch<hint>(states + u.slots[i] * u.state_stride_bytes);
    };
    for (int64_t i = begin; i < std::min(begin + u.distance, end); ++i) prefetch_all(i);
    for (int64_t i = begin; i < end; ++i) {
      if (i + u.distance < end) prefetch_all(i + u.distance);
      char* row = base + u.slots[i] * u.stride_bytes;
      for (int l = 0; l < lines; ++l) {
        const Line line = load(row + l * kLineBytes) * u.one;
        std::memcpy(row + l * kLineBytes, &line, sizeof line);
      }
      float* state = reinterpret_cast<float*>(states + u.slots[i] * u.state_stride_bytes);
      state[0] *= u.one;
      state[1] *= u.one;
    }
  }
}

template <typename Work, typename Share>
void in_shares(int64_t num, int threads, const Work& work, Share share) {
#pragma omp parallel num_threads(threads)
  {
    const int64_t n = omp_get_num_threads(), i = omp_get_thread_num();
    share(work, num * i / n, num * (i + 1) / n);
#if defined(__SSE__)
    _mm_sfence();
#endif
  }
}

template <int lines>
void gather_with(int hint, int threads, const Gather& g) {
  const int64_t num = g.num_features * g.num_bags;
  switch (hint) {
    case 1: return in_shares(num, threads, g, gather_share<lines, 1>);
    case 2: return in_shares(num, threads, g, gather_share<lines, 2>);
    case 3: return in_shares(num, threads, g, gather_share<lines, 3>);
    case 4: return in_shares(num, threads, g, gather_share<lines, 4>);
    default: return in_shares(num, threads, g, gather_share<lines, 0>);
  }
}

void read_gradients(const Update& u, int64_t first, int64_t last) {
  Line sums[4] = {};
  for (int64_t i = first; i < last; ++i)
    sums[i & 3] += load(reinterpret_cast<const char*>(u.gradients + i * kLineFloats));
  const Line sum = sums[0] + sums[1] + sums[2] + sums[3];
  std::memcpy(u.sums + omp_get_thread_num() * kLineFloats, &sum, sizeof sum);
}

template <int lines>
void update_with(int hint, int threads, const Update& u) {
  const int64_t num = u.offsets[u.num_tables];
  in_shares(u.gradient_lines, threads, u, read_gradients);
  switch (hint) {
    case 1: return in_shares(num, threads, u, update_share<lines, 1>);
    case 2: return in_shares(num, threads, u, update_share<lines, 2>);
    case 4: return in_shares(num, threads, u, update_share<lines, 4>);
    case 5: return in_shares(num, threads, u, update_share<lines, 5>);
    default: return in_shares(num, threads, u, update_share<lines, 0>);
  }
}

}  // namespace

// Both return 0, or 1 for a `lines` that was not compiled.
extern "C" int gather(int lines, int hint, int threads, const Gather* g) {
  switch (lines) {
    case 1: return gather_with<1>(hint, threads, *g), 0;
    case 2: return gather_with<2>(hint, threads, *g), 0;
    case 4: return gather_with<4>(hint, threads, *g), 0;
    case 8: return gather_with<8>(hint, threads, *g), 0;
    default: return 1;
  }
}

extern "C" int update(int lines, int hint, int threads, const Update* u) {
  switch (lines) {
    case 1: return update_with<1>(hint, threads, *u), 0;
    case 2: return update_with<2>(hint, threads, *u), 0;
    case 4: return update_with<4>(hint, threads, *u), 0;
    case 8: return update_with<8>(hint, threads, *u), 0;
    default: return 1;
  }
}
