#include "interaction.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kStreamedBytes = std::int64_t{1} << 23;  // smaller outputs may still be cached when read

// Return whether gradients bypass the cache: there are many, and their rows are whole cache lines.
bool is_streamed(const Vectors& vectors, std::span<const TargetPlace> out) {
  const std::int64_t bytes = vectors.dim * item_bytes(vectors.dtype);
  const auto is_whole_lines = [](const TargetPlace& place) {
    return (reinterpret_cast<std::uintptr_t>(place.base) | static_cast<std::uintptr_t>(place.stride)) % 64 == 0;
  };
  return vectors.num_samples * vectors.num_vectors() * bytes >= kStreamedBytes && bytes % 64 == 0 &&
         std::ranges::all_of(out, is_whole_lines);
}

// By vector: its index among the copied ones, or -1.
std::vector<std::int32_t> places_of(std::span<const std::int32_t> copied, std::int64_t num_vectors) {
  std::vector<std::int32_t> places(static_cast<std::size_t>(num_vectors), -1);
  for (std::size_t k = 0; k < copied.size(); ++k) {
    if (copied[k] < 0 || copied[k] >= num_vectors || places[copied[k]] >= 0) {
      throw std::invalid_argument("copied: got vector " + std::to_string(copied[k]) + " at position " +
                                  std::to_string(k) + ", wanted each at most once and in 0 .. " +
                                  std::to_string(num_vectors - 1));
    }
    places[copied[k]] = static_cast<std::int32_t>(k);
  }
  return places;
}

// Call run(begin, end, scratch, rows) over all samples; scratch: `bytes` cleared bytes, rows: `num_rows` pointers. A
// few slices per thread balance other load of the machine.
template <class Run>
void for_each_slice(std::int64_t num_samples, std::int64_t bytes, std::int64_t num_rows, const Run& run) {
  const std::int64_t num_slices = std::min<std::int64_t>(num_samples, 4 * num_threads());
  const std::int64_t lines = (bytes + 63) / 64;
  std::vector<std::byte> scratch(static_cast<std::size_t>(num_slices * lines * 64));
  std::vector<const std::byte*> rows(static_cast<std::size_t>(num_slices * num_rows));
  for_each_unit(num_slices, [&](std::int64_t i) {
    run(num_samples * i / num_slices, num_samples * (i + 1) / num_slices, scratch.data() + i * lines * 64,
        rows.data() + i * num_rows);
  });
}

}  // namespace

std::int64_t dots_width(const Vectors& vectors, std::int64_t num_copied) {
  const std::int64_t n = vectors.num_vectors();
  return num_copied * vectors.dim + n * (n - 1) / 2;
}

void dots(const Vectors& vectors, std::span<const std::int32_t> copied, void* out) {
  const std::int64_t num_vectors = vectors.num_vectors();
  places_of(copied, num_vectors);
  const auto kernel = vectors.dtype == Dtype::float32 ? kernels().float32.dots : kernels().float64.dots;
  const std::int64_t bytes = dots_scratch(num_vectors, vectors.dim) * item_bytes(vectors.dtype);
  for_each_slice(vectors.num_samples, bytes, num_vectors + 3,
                 [&](std::int64_t begin, std::int64_t end, void* scratch, const std::byte** rows) {
                   kernel({.vectors = vectors.places.data(),
                           .num_vectors = num_vectors,
                           .dim = vectors.dim,
                           .copied = copied.data(),
                           .num_copied = static_cast<std::int64_t>(copied.size()),
                           .out = out,
                           .begin = begin,
                           .end = end,
                           .scratch = scratch,
                           .rows = rows});
                 });
}

void dots_gradient(const Vectors& vectors, std::span<const std::int32_t> copied, const void* gradient,
                   std::span<const TargetPlace> out) {
  const std::int64_t num_vectors = vectors.num_vectors();
  const auto copied_at = places_of(copied, num_vectors);
  const auto kernel =
      vectors.dtype == Dtype::float32 ? kernels().float32.dots_gradient : kernels().float64.dots_gradient;
  for_each_slice(vectors.num_samples, num_vectors * 64, 2 * num_vectors,
                 [&](std::int64_t begin, std::int64_t end, void* scratch, const std::byte** rows) {
                   kernel({.vectors = vectors.places.data(),
                           .num_vectors = num_vectors,
                           .dim = vectors.dim,
                           .copied_at = copied_at.data(),
                           .num_copied = static_cast<std::int64_t>(copied.size()),
                           .gradient = gradient,
                           .out = out.data(),
                           .is_streamed = is_streamed(vectors, out),
                           .begin = begin,
                           .end = end,
                           .scratch = scratch,
                           .rows = rows});
                 });
}

void fm(const Vectors& vectors, std::span<const Term> terms, void* out) {
  const auto kernel = vectors.dtype == Dtype::float32 ? kernels().float32.fm : kernels().float64.fm;
  for_each_slice(vectors.num_samples, 0, 0, [&](std::int64_t begin, std::int64_t end, void*, auto) {
    kernel({.vectors = vectors.places.data(),
            .terms = terms.empty() ? nullptr : terms.data(),
            .num_vectors = vectors.num_vectors(),
            .dim = vectors.dim,
            .out = out,
            .begin = begin,
            .end = end});
  });
}

void fm_gradient(const Vectors& vectors, std::span<const Term> terms, const void* gradient,
                 std::span<const TargetPlace> out) {
  const auto kernel =
      vectors.dtype == Dtype::float32 ? kernels().float32.fm_gradient : kernels().float64.fm_gradient;
  for_each_slice(vectors.num_samples, 0, 0, [&](std::int64_t begin, std::int64_t end, void*, auto) {
    kernel({.vectors = vectors.places.data(),
            .terms = terms.empty() ? nullptr : terms.data(),
            .num_vectors = vectors.num_vectors(),
            .dim = vectors.dim,
            .gradient = gradient,
            .out = out.data(),
            .is_streamed = is_streamed(vectors, out),
            .begin = begin,
            .end = end});
  });
}

namespace {

constexpr std::int64_t kRunElements = 1 << 14;  // whole cache lines

bool is_streamed(std::int64_t bytes, std::initializer_list<const void*> out) {
  return bytes >= kStreamedBytes && std::ranges::all_of(out, [](const void* at) {
           return reinterpret_cast<std::uintptr_t>(at) % 64 == 0;
         });
}

}  // namespace

void cross(const void* first, const void* factor, const void* input, void* out, std::int64_t n, Dtype dtype) {
  const auto kernel = dtype == Dtype::float32 ? kernels().float32.cross : kernels().float64.cross;
  const bool is_around = is_streamed(n * item_bytes(dtype), {out});
  for_each_run(n, kRunElements, [&](std::int64_t begin, std::int64_t end) {
    kernel({first, factor, input, out, is_around, begin, end});
  });
}

void cross_gradient(const void* first, const void* factor, const void* gradient, void* of_first,
                    void* of_factor, std::int64_t n, Dtype dtype) {
  const auto kernel =
      dtype == Dtype::float32 ? kernels().float32.cross_gradient : kernels().float64.cross_gradient;
  const bool is_around = is_streamed(n * item_bytes(dtype), {of_first, of_factor});
  for_each_run(n, kRunElements, [&](std::int64_t begin, std::int64_t end) {
    kernel({first, factor, gradient, of_first, of_factor, is_around, begin, end});
  });
}

}  // namespace colonnade
