// Operator `colonnade::lookup` for programs that score exported models without Python. It is the operator of
// colonnade/export/lookup.py, where its arguments are described, with the same bits.
// Link it, or load it as a library, before the first program is loaded. Compile with -ffp-contract=off.
//
// Legend: B samples, E ids of one feature, T tables.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using at::Tensor;

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;

std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct Part {
  std::int64_t column, dim;
  double scale;
};

struct Table {
  std::string name;
  std::int64_t rows, hashes, count, width;
  std::uint64_t seed;
  std::vector<Part> parts;
};

enum class Pooling { sum, mean, sequence, sqrtn };

struct Feature {
  std::string name;
  std::size_t table;
  Pooling pooling;
  bool has_lengths;
};

struct Layout {
  at::ScalarType dtype, output;
  bool has_master;
  std::vector<Table> tables;
  std::vector<Feature> features;
};

at::ScalarType parse_dtype(const std::string& name) {
  if (name == "float32") return at::kFloat;
  if (name == "float64") return at::kDouble;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  TORCH_CHECK(false, "colonnade::lookup: got dtype ", name, " in a layout; export the model again");
}

Layout parse_layout(const std::string& text) {
  std::istringstream lines(text);
  std::string line, word;
  Layout layout{};
  int version = 0;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    words >> word;
    if (word == "version") {
      std::string dtype, output;
      words >> version >> dtype >> layout.has_master >> output;
      layout.dtype = parse_dtype(dtype);
      layout.output = parse_dtype(output);
    } else if (word == "table") {
      Table table{};
      std::size_t num_parts = 0;
      words >> table.name >> table.rows >> table.hashes >> table.count >> table.seed >> num_parts;
      for (std::size_t p = 0; p < num_parts; ++p) {
        Part part{table.width, 0, 0.0};
        std::string name, scale;
        words >> name >> part.dim >> scale;
        part.scale = std::stod(scale);
        table.width += part.dim;
        table.parts.push_back(part);
      }
      layout.tables.push_back(std::move(table));
    } else if (word == "feature") {
      Feature feature{};
      int pooling = 0;
      words >> feature.name >> feature.table >> pooling >> feature.has_lengths;
      feature.pooling = static_cast<Pooling>(pooling);
      layout.features.push_back(std::move(feature));
    }
    const bool is_known = word == "version" || word == "table" || word == "feature";
    TORCH_CHECK(is_known && !words.fail(), "colonnade::lookup: got a damaged layout; export the model again");
  }
  TORCH_CHECK(version == 1, "colonnade::lookup: got a layout of version ", version, ", wanted 1; export the model again");
  return layout;
}

const Layout& get_layout(const std::string& text) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Layout>> layouts;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& layout = layouts[text];
  if (!layout) layout = std::make_unique<Layout>(parse_layout(text));
  return *layout;
}

// Value of column `column` of a row that was never trained.
template <class T>
T first_value(std::uint64_t seed, std::int64_t id, std::int64_t column, double scale) {
  const std::uint64_t start = mix64(mix64(static_cast<std::uint64_t>(id)) ^ seed);
  const std::uint64_t word = mix64(start + static_cast<std::uint64_t>(column + 1) * kGolden);
  if constexpr (sizeof(T) == 8) {
    return (static_cast<double>(static_cast<std::int64_t>(word >> 11)) * 0x1p-52 - 1.0) * scale;
  } else {
    return (static_cast<float>(static_cast<std::int32_t>(word >> 40)) * 0x1p-23f - 1.0f) * static_cast<float>(scale);
  }
}

// Round a first value to the dtype of rows, as training stores it, and widen it again.
template <class Row, class T>
T round_first_value(T value, bool has_master) {
  if constexpr (std::is_same_v<Row, at::BFloat16>) {
    if (has_master) {  // the upper half of a float32, rounded to nearest, halfway away from zero
      std::uint32_t bits;
      std::memcpy(&bits, &value, 4);
      bits = (bits + 0x8000u) & 0xffff0000u;
      std::memcpy(&value, &bits, 4);
      return value;
    }
  }
  return static_cast<T>(static_cast<Row>(value));
}

// Reader of one table's rows.
template <class Row, class T>
struct Rows {
  const Table& table;
  const Row* weights;
  const std::int64_t* keys;
  std::int64_t num_keys;
  bool has_master;

  // Return the row of an id; null: it has none.
  const Row* find(std::int64_t id) const {
    if (num_keys == 0) return id >= 0 && id < table.count ? weights + id * table.width : nullptr;
    const std::int64_t* const end = keys + num_keys;
    const std::int64_t* const key = std::lower_bound(keys, end, id);
    return key != end && *key == id ? weights + (key - keys) * table.width : nullptr;
  }

  // Write columns of an id's row, multiplied by `factor`, to `out`, or add them to it.
  void read(std::int64_t id, const Part& part, T factor, bool is_first, T* out) const {
    const Row* const row = find(id);
    for (std::int64_t j = 0; j < part.dim; ++j) {
      const std::int64_t column = part.column + j;
      T value = row ? static_cast<T>(row[column])
                    : round_first_value<Row, T>(first_value<T>(table.seed, id, column, part.scale), has_master);
      if (factor != T{1}) value = value * factor;
      out[j] = is_first ? value : out[j] + value;
    }
  }
};

// Replace the ids of a hash-stacked table by the rows that they select.
std::vector<std::int64_t> hash_ids(const Table& table, const std::int64_t* ids, std::int64_t count) {
  std::vector<std::int64_t> rows;
  rows.reserve(static_cast<std::size_t>(count * table.hashes));
  for (std::int64_t e = 0; e < count; ++e) {
    for (std::int64_t h = 0; h < table.hashes; ++h) {
      const std::uint64_t key = mix64(kGolden + static_cast<std::uint64_t>(h));
      const std::uint64_t word = mix64(static_cast<std::uint64_t>(ids[e]) ^ key);
      rows.push_back(static_cast<std::int64_t>(word % static_cast<std::uint64_t>(table.rows)));
    }
  }
  return rows;
}

// Lookups of one feature: bag b has ids[bounds[b]] .. ids[bounds[b + 1] - 1].
struct Lookups {
  std::vector<std::int64_t> ids, bounds;
};

Lookups collect(const Feature& feature, const Table& table, const Tensor& ids, const Tensor& lengths,
                std::int64_t size) {
  const Tensor values = ids.contiguous(), counts = lengths.contiguous();
  const std::int64_t num_ids = values.numel(), stride = table.hashes ? table.hashes : 1;
  const std::int64_t* const data = values.const_data_ptr<std::int64_t>();
  Lookups lookups;
  if (table.hashes) {
    lookups.ids = hash_ids(table, data, num_ids);
  } else {
    lookups.ids.assign(data, data + num_ids);
    for (std::int64_t e = 0; table.rows && e < num_ids; ++e) {
      TORCH_CHECK(data[e] >= 0 && data[e] < table.rows, "feature '", feature.name, "', lookup ", e,
                  " of the batch: got id ", data[e], ", wanted 0 .. ", table.rows - 1, " of vocabulary table '",
                  table.name, "'");
    }
  }
  TORCH_CHECK(feature.has_lengths ? counts.numel() == size : num_ids == size, "feature '", feature.name, "': got ",
              feature.has_lengths ? counts.numel() : num_ids, feature.has_lengths ? " lengths" : " ids", " for ", size,
              " samples");
  std::int64_t end = 0;
  lookups.bounds.push_back(0);
  const bool is_sequence = feature.pooling == Pooling::sequence;
  for (std::int64_t b = 0; b < size; ++b) {
    const std::int64_t count = feature.has_lengths ? counts.const_data_ptr<std::int64_t>()[b] : 1;
    TORCH_CHECK(count >= 0, "feature '", feature.name, "': got a length of ", count, ", wanted 0 or more");
    end += count;
    if (!is_sequence) lookups.bounds.push_back(end * stride);
  }
  TORCH_CHECK(end == num_ids, "feature '", feature.name, "': got lengths of ", end, " ids in all, wanted ", num_ids);
  for (std::int64_t e = 1; is_sequence && e <= num_ids; ++e) lookups.bounds.push_back(e * stride);
  return lookups;
}

template <class T>
T divisor_of(Pooling pooling, std::int64_t count) {
  if (count < 2 || pooling == Pooling::sum || pooling == Pooling::sequence) return T{1};
  return pooling == Pooling::mean ? static_cast<T>(count) : std::sqrt(static_cast<T>(count));
}

template <class Row, class T>
Tensor pool(const Rows<Row, T>& rows, const Feature& feature, const Part& part, const Lookups& lookups,
            at::ScalarType output) {
  const auto num_bags = static_cast<std::int64_t>(lookups.bounds.size()) - 1;
  Tensor out = at::zeros({num_bags, part.dim}, at::CppTypeToScalarType<T>::value);
  // Pooling divides by the number of rows, and must divide by the number of ids.
  const auto hashes = static_cast<double>(rows.table.hashes ? rows.table.hashes : 1);
  const double factor = feature.pooling == Pooling::mean    ? hashes
                        : feature.pooling == Pooling::sqrtn ? std::sqrt(hashes)
                                                            : 1.0;
  T* sums = out.mutable_data_ptr<T>();
  for (std::int64_t b = 0; b < num_bags; ++b, sums += part.dim) {
    const std::int64_t first = lookups.bounds[b], last = lookups.bounds[b + 1];
    for (std::int64_t i = first; i < last; ++i) {
      rows.read(lookups.ids[i], part, static_cast<T>(factor), i == first, sums);
    }
    const T divisor = divisor_of<T>(feature.pooling, last - first);
    for (std::int64_t j = 0; divisor != T{1} && j < part.dim; ++j) sums[j] = sums[j] / divisor;
  }
  return out.to(output);
}

template <class Row, class T>
std::vector<Tensor> look_up(const Layout& layout, at::TensorList weights, at::TensorList keys, at::TensorList ids,
                            at::TensorList lengths, std::int64_t size) {
  std::vector<Tensor> fields;
  for (std::size_t f = 0; f < layout.features.size(); ++f) {
    const Feature& feature = layout.features[f];
    const Table& table = layout.tables[feature.table];
    const Tensor table_weights = weights[feature.table].contiguous(), table_keys = keys[feature.table].contiguous();
    TORCH_CHECK(table_weights.dim() == 2 && table_weights.size(0) == table.count && table_weights.size(1) == table.width,
                "table '", table.name, "': got rows of shape ", table_weights.sizes(), ", wanted [", table.count, ", ",
                table.width, "]");
    const Rows<Row, T> rows{table, table_weights.const_data_ptr<Row>(), table_keys.const_data_ptr<std::int64_t>(),
                            table_keys.numel(), layout.has_master};
    const Lookups lookups = collect(feature, table, ids[f], lengths[f], size);
    for (const Part& part : table.parts) fields.push_back(pool(rows, feature, part, lookups, layout.output));
  }
  return fields;
}

std::vector<Tensor> lookup(std::string layout_text, at::TensorList weights, at::TensorList keys,
                           at::TensorList ids, at::TensorList lengths, std::int64_t size) {
  const Layout& layout = get_layout(layout_text);
  TORCH_CHECK(weights.size() == layout.tables.size() && keys.size() == layout.tables.size() &&
                  ids.size() == layout.features.size() && lengths.size() == layout.features.size(),
              "colonnade::lookup: got lists of other lengths than the layout has tables and features");
  switch (layout.dtype) {
    case at::kDouble: return look_up<double, double>(layout, weights, keys, ids, lengths, size);
    case at::kBFloat16: return look_up<at::BFloat16, float>(layout, weights, keys, ids, lengths, size);
    case at::kHalf: return look_up<at::Half, float>(layout, weights, keys, ids, lengths, size);
    default: return look_up<float, float>(layout, weights, keys, ids, lengths, size);
  }
}

}  // namespace

TORCH_LIBRARY(colonnade, library) {
  library.def(
      "lookup(str layout, Tensor[] weights, Tensor[] keys, Tensor[] ids, Tensor[] lengths, SymInt size) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(colonnade, CPU, library) {
  library.impl("lookup", lookup);
}
