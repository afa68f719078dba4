// Random vectors through the interactions against plain loops; also take, owner_of, squared_norm and
// all_finite.
#include <optional>

#include "../interaction.h"
#include "../plan.h"
#include "../pool.h"
#include "../update.h"
#include "fuzz.h"

using namespace colonnade;

namespace {

void check_close(double got, double wanted, double scale, Dtype dtype) {
  CHECK(std::abs(got - wanted) <= (dtype == Dtype::float64 ? 1e-12 : 1e-4) * (scale + 1e-3));
}

void fuzz_interaction(std::uint64_t seed) {
  Fuzz fuzz(seed);
  run_anywhere(fuzz);
  const bool is_large = fuzz.one_in(100);  // written around the cache
  const Dtype dtype = fuzz.pick({Dtype::float32, Dtype::float64});
  const std::int64_t item = item_bytes(dtype),
                     dim = is_large ? 64 : fuzz.pick<std::int64_t>({0, 1, 3, 8, 16, 17, 64, 127});
  const std::int64_t n = is_large ? 9 : fuzz.pick<std::int64_t>({1, 2, 3, 9, 27});
  const std::int64_t batch = is_large ? 4000 : fuzz.pick<std::int64_t>({0, 1, 2, 7, 13});

  Vectors vectors{{}, batch, dim, dtype};
  std::vector<Block> blocks, gradients;
  std::vector<TargetPlace> targets;
  for (std::int64_t v = 0; v < n; ++v) {
    const std::int64_t stride = dim * item + (is_large ? 0 : item * static_cast<std::int64_t>(fuzz.below(3)));
    const auto bytes = static_cast<std::size_t>(batch ? (batch - 1) * stride + dim * item : 0);
    blocks.emplace_back(bytes);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(bytes) / item; ++i)
      set_element(blocks.back().data(), i, dtype, fuzz);
    vectors.places.push_back({blocks.back().data(), stride});
    gradients.emplace_back(bytes);
    targets.push_back(fuzz.one_in(4) ? TargetPlace{nullptr, 0}
                                     : TargetPlace{gradients.back().data(), stride});
  }
  std::vector<std::int32_t> copied;
  for (std::int32_t v = 0; v < n; ++v)
    if (fuzz.one_in(4)) copied.push_back(static_cast<std::int32_t>(n - 1 - v));
  const bool is_wrong = fuzz.one_in(4);
  if (is_wrong) fuzz.damage(copied);
  const std::int64_t num_copied = static_cast<std::int64_t>(copied.size()), width = dots_width(vectors, num_copied);
  const auto at = [&](std::int64_t v, std::int64_t b, std::int64_t j) {
    return element(vectors.places[v].base + b * vectors.places[v].stride, j, dtype);
  };
  const auto target = [&](std::int64_t v, std::int64_t b, std::int64_t j) {
    return element(targets[v].base + b * targets[v].stride, j, dtype);
  };

  const Block out(static_cast<std::size_t>(batch * width * item));
  const bool is_fine = is_accepted([&] { dots(vectors, copied, out.data()); });
  CHECK(is_fine || is_wrong);
  if (!is_fine) {
    CHECK(out.is_untouched());
    CHECK(!is_accepted([&] { dots_gradient(vectors, copied, out.data(), targets); }));
    for (const auto& gradient : gradients) CHECK(gradient.is_untouched());
    return;
  }
  const std::int64_t step = is_large ? 997 : 1;
  for (std::int64_t b = 0; b < batch; b += step) {
    std::int64_t place = b * width;
    for (const auto v : copied)
      for (std::int64_t j = 0; j < dim; ++j) CHECK(element(out.data(), place++, dtype) == at(v, b, j));
    for (std::int64_t v = 0; v < n; ++v) {
      for (std::int64_t w = 0; w < v; ++w) {
        double dot = 0, scale = 0;
        for (std::int64_t j = 0; j < dim; ++j) {
          dot += at(v, b, j) * at(w, b, j);
          scale += std::abs(at(v, b, j) * at(w, b, j));
        }
        check_close(element(out.data(), place++, dtype), dot, scale, dtype);
      }
    }
  }
  for (std::int64_t i = 0; i < batch * width; ++i) set_element(out.data(), i, dtype, fuzz);
  dots_gradient(vectors, copied, out.data(), targets);
  for (std::int64_t b = 0; b < batch; b += step) {
    for (std::int64_t v = 0; v < n; ++v) {
      for (std::int64_t j = 0; targets[v].base && j < dim; ++j) {
        double wanted = 0, scale = 0;
        const auto add = [&](double term) {
          wanted += term;
          scale += std::abs(term);
        };
        const auto k = std::ranges::find(copied, static_cast<std::int32_t>(v)) - copied.begin();
        if (k < num_copied) add(element(out.data(), b * width + k * dim + j, dtype));
        for (std::int64_t w = 0; w < n; ++w) {
          if (w == v) continue;
          const std::int64_t pair = std::max(v, w) * (std::max(v, w) - 1) / 2 + std::min(v, w);
          add(element(out.data(), b * width + num_copied * dim + pair, dtype) * at(w, b, j));
        }
        check_close(target(v, b, j), wanted, scale, dtype);
      }
    }
  }

  const Block sums(static_cast<std::size_t>(batch * item));
  std::vector<Term> terms;
  if (!fuzz.one_in(3)) {
    for (std::int64_t v = 0; v < n; ++v) terms.push_back(fuzz.pick({Term::both, Term::vector, Term::squares}));
  }
  const auto is_of = [&](std::int64_t v, Term other) { return !terms.empty() && terms[v] == other; };
  fm(vectors, terms, sums.data());
  for (std::int64_t b = 0; b < batch; b += step) {
    double wanted = 0, scale = 0;
    for (std::int64_t j = 0; j < dim; ++j) {
      double sum = 0, squares = 0, size = 0, size_of_squares = 0;
      for (std::int64_t v = 0; v < n; ++v) {
        const double x = at(v, b, j);
        if (!is_of(v, Term::squares)) sum += x, size += std::abs(x);
        if (!is_of(v, Term::vector)) {
          const double square = is_of(v, Term::squares) ? x : x * x;
          squares += square, size_of_squares += std::abs(square);
        }
      }
      wanted += (sum * sum - squares) / 2;
      scale += size * size + size_of_squares;
    }
    check_close(element(sums.data(), b, dtype), wanted, scale, dtype);
  }
  fm_gradient(vectors, terms, sums.data(), targets);
  for (std::int64_t b = 0; b < batch; b += step) {
    for (std::int64_t j = 0; j < dim; ++j) {
      double sum = 0, size = 0;
      for (std::int64_t v = 0; v < n; ++v) {
        if (!is_of(v, Term::squares)) sum += at(v, b, j), size += std::abs(at(v, b, j));
      }
      const double g = element(sums.data(), b, dtype);
      for (std::int64_t v = 0; v < n; ++v) {
        if (!targets[v].base) continue;
        const double own = is_of(v, Term::vector) ? 0 : at(v, b, j);
        const double wanted = is_of(v, Term::squares) ? -g / 2 : g * (sum - own);
        check_close(target(v, b, j), wanted, std::abs(g) * (size + 1), dtype);
      }
    }
  }
}

void fuzz_numbers(std::uint64_t seed) {
  Fuzz fuzz(seed);
  run_anywhere(fuzz);
  const Dtype dtype = fuzz.pick({Dtype::float32, Dtype::float64});
  const std::int64_t item = item_bytes(dtype),
                     n = fuzz.one_in(50) ? (1 << 20) + 5 : static_cast<std::int64_t>(fuzz.below(200));
  const auto numbers = [&] {
    Block block(static_cast<std::size_t>(n * item));
    for (std::int64_t i = 0; i < n; ++i) set_element(block.data(), i, dtype, fuzz);
    return block;
  };
  const Block x = numbers(), u = numbers(), y = numbers(), z(x.size()), of_x(x.size()), of_u(x.size());
  cross(x.data(), u.data(), y.data(), z.data(), n, dtype);
  cross_gradient(x.data(), u.data(), y.data(), of_x.data(), of_u.data(), n, dtype);
  double squares = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double a = element(x.data(), i, dtype), b = element(u.data(), i, dtype),
                 c = element(y.data(), i, dtype);
    check_close(element(z.data(), i, dtype), a * b + c, 1, dtype);
    check_close(element(of_x.data(), i, dtype), c * b, 1, dtype);
    check_close(element(of_u.data(), i, dtype), c * a, 1, dtype);
    squares += a * a;
  }
  check_close(squared_norm(x.data(), n, dtype), squares, squares, dtype);
  CHECK(!is_accepted([&] { squared_norm(x.data(), -1, dtype); }) &&
        !is_accepted([&] { squared_norm(x.data(), n, Dtype::float16); }));
  const Dtype any = fuzz.pick({Dtype::float32, Dtype::float64, Dtype::bfloat16, Dtype::float16});
  const Block finite(static_cast<std::size_t>(n * item_bytes(any)));
  for (std::int64_t i = 0; i < n; ++i) set_element(finite.data(), i, any, fuzz);
  CHECK(all_finite(finite.data(), n, any));
  if (n) {
    const auto bytes = static_cast<std::size_t>(item_bytes(any));
    std::fill_n(finite.data() + fuzz.below(static_cast<std::uint64_t>(n)) * bytes, bytes,
                std::byte{0xff});  // no number
    CHECK(!all_finite(finite.data(), n, any));
  }

  std::vector<std::int32_t> values(fuzz.below(20)), index(values.empty() ? 0 : fuzz.below(300)),
      taken(index.size());
  for (auto& value : values) value = static_cast<std::int32_t>(fuzz.next());
  for (auto& i : index) i = static_cast<std::int32_t>(fuzz.below(values.size()));
  const bool is_damaged = fuzz.one_in(3) && !index.empty();
  if (is_damaged) fuzz.change(index[fuzz.below(index.size())], 2 + fuzz.below(5));
  if (is_accepted([&] { take(values, index, taken); })) {
    for (std::size_t i = 0; i < index.size(); ++i) CHECK(taken[i] == values[index[i]]);
  } else {
    CHECK(is_damaged && std::ranges::count(taken, 0) == static_cast<std::int64_t>(taken.size()));
  }

  std::vector<std::int64_t> ids(fuzz.below(50));
  for (auto& id : ids) id = fuzz.id();
  const std::int64_t rows = fuzz.pick<std::int64_t>({0, 0, 3, std::numeric_limits<std::int64_t>::max()});
  const std::int64_t num_owners =
      fuzz.pick<std::int64_t>({-1, 0, 1, 3, (std::int64_t{1} << 31) - 1, std::int64_t{1} << 31});
  std::vector<std::int32_t> owners(ids.size());
  if (is_accepted([&] { owner_of(ids, rows, num_owners, owners); })) {
    for (const auto owner : owners) CHECK(owner >= 0 && owner < num_owners);
  } else {
    CHECK(num_owners < 1 || num_owners >> 31 ||
          std::ranges::any_of(ids, [&](auto id) { return rows && (id < 0 || id >= rows); }));
  }
}

}  // namespace

int main(int argc, char** argv) {
  for_each_seed(argc, argv, 500, [](std::uint64_t seed) {
    fuzz_interaction(seed);
    fuzz_numbers(seed);
  });
}
