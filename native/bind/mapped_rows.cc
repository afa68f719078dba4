// Bindings of lookups in exported rows.
#include "mapped_rows.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "bind/arrays.h"
#include "pool.h"

namespace colonnade {

namespace {

// Table with the arrays and indexes that it refers to.
struct HeldTable {
  MappedTable table;
  In slots_by_id, checked;
  nb::object hashed, newer;

  HeldTable(int64_t num_ids, int64_t num_rows, std::optional<In> slots_by_id_, nb::object hashed_, int64_t stride,
            int64_t begin, int64_t block_bytes, In checked_)
      : checked(std::move(checked_)), hashed(std::move(hashed_)) {
    table.num_ids = num_ids;
    table.num_rows = num_rows;
    table.stride = stride;
    table.begin = begin;
    table.checked = elements<const uint8_t>(checked, "checked", {-1});
    if (block_bytes <= 0 || !std::has_single_bit(static_cast<uint64_t>(block_bytes))) {
      throw std::invalid_argument("block_bytes: got " + std::to_string(block_bytes) + ", wanted a power of two");
    }
    table.block_bits = std::countr_zero(static_cast<uint64_t>(block_bytes));
    if (num_rows < 0 || stride <= 0 || begin < 0 ||
        (num_rows && (begin + num_rows * stride - 1) / block_bytes >= length(table.checked))) {
      throw std::invalid_argument("checked: got fewer blocks than the rows take");
    }
    if (slots_by_id_) {
      slots_by_id = *std::move(slots_by_id_);
      table.slots_by_id = elements<const int32_t>(slots_by_id, "slots_by_id", {num_ids});
    } else if (!hashed.is_none()) {
      table.hashed = nb::cast<const RowIndex*>(hashed);
    } else if (num_ids != num_rows) {
      throw std::invalid_argument("hashed: got no index of a table that lacks rows of its vocabulary");
    }
  }

  void set_newer(nb::object index) {
    table.newer = index.is_none() ? nullptr : nb::cast<const RowIndex*>(index);
    newer = std::move(index);
  }
};

nb::dlpack::dtype dlpack_dtype(Dtype dtype) {
  const auto code = dtype == Dtype::bfloat16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * item_bytes(dtype)), 1};
}

// Return whether it is a tensor (N,) of this type in CPU memory, which is then in `array` and keeps it alive.
bool look_at_vector(nb::handle object, nb::dlpack::dtype dtype, In& array) noexcept {
  return Py_TYPE(object.ptr()) == torch_tensors().type && nb::try_cast(object, array, false) && array.device_type() == nb::device::cpu::value && array.dtype() == dtype &&
         array.ndim() == 1 && (array.shape(0) <= 1 || array.stride(0) == 1) && (array.data() || array.size() == 0);
}

bool are_offsets(const int64_t* offsets, int64_t num_samples, int64_t num_ids) noexcept {
  bool decreases = false;
  for (int64_t i = 0; i < num_samples; ++i) decreases |= offsets[i] > offsets[i + 1];
  return !decreases && offsets[0] == 0 && offsets[num_samples] == num_ids;
}

// Reader of a declaration's features. Its outputs are those of `pool`.
class MappedReader {
 public:
  MappedReader(nb::object kind, std::vector<nb::str> names, In tables, In poolings, In reads, In widths,
               const std::string& dtype, const std::string& output)
      : kind_(std::move(kind)), dtype_(dtype_named(dtype)), output_(dtype_named(output)), names_(std::move(names)) {
    const auto t = elements<const int32_t>(tables, "tables", {length(std::span(names_))});
    const auto p = elements<const uint8_t>(poolings, "poolings", {length(std::span(names_))});
    for (size_t c = 0; c < t.size(); ++c) {
      const auto pooling = static_cast<Pooling>(p[c]);
      auto& column = columns_.emplace_back();
      column.table = t[c];
      column.divisor = divisor_of(pooling);
      column.is_sequence = pooling == Pooling::sequence;
      num_tables_ = std::max<size_t>(num_tables_, static_cast<size_t>(t[c]) + 1);
      if (t[c] < 0 || p[c] > 3) throw std::invalid_argument("poolings: got a column that no table or pooling has");
    }
    const auto w = elements<const int64_t>(widths, "widths", {-1});
    outputs_.resize(w.size());
    const auto r = elements<const int64_t>(reads, "reads", {-1, 5});
    for (size_t i = 0; i < r.size(); i += 5) {
      const auto [column, first, dim, output_index, output_column] = std::tie(r[i], r[i + 1], r[i + 2], r[i + 3], r[i + 4]);
      if (column < 0 || column >= length(t) || first < 0 || dim <= 0 || output_index < 0 || output_index >= length(w) ||
          output_column < 0 || output_column + dim > w[output_index]) {
        throw std::invalid_argument("reads: got one of a column, row or output that does not exist");
      }
      reads_.push_back({static_cast<int32_t>(column), first * item_bytes(dtype_), dim});
      read_outputs_.push_back({static_cast<size_t>(output_index), output_column});
      outputs_[output_index] = {w[output_index], static_cast<size_t>(column)};
    }
  }

  // None: something is unusual, invalid or unchecked.
  std::optional<std::vector<MadeOfDtype>> read(const std::vector<const HeldTable*>& tables, const Dram& initial_rows,
                                               nb::handle ids, int64_t size, bool is_sharing,
                                               RowCache* cache) const {
    if (tables.size() < num_tables_ || initial_rows.num_tables() < length(std::span(tables)) || size < 0) return std::nullopt;
    if (cache && cache->num_files() != tables.size()) return std::nullopt;
    std::vector<const MappedTable*> mapped;
    for (const auto* held : tables) mapped.push_back(&held->table);
    std::vector<MappedColumn> columns = columns_;
    std::vector<In> arrays;
    if (!collect(ids, size, is_sharing, columns, arrays)) return std::nullopt;
    std::vector<MadeOfDtype> outputs;
    for (const auto& output : outputs_) {
      const auto& column = columns[output.column];
      int64_t rows = column.is_sequence ? length(column.ids) : size;
      if (column.is_sequence && column.is_shared) rows *= size;
      outputs.push_back(make_output(rows, output.width));
    }
    std::vector<MappedRead> reads = reads_;
    for (size_t r = 0; r < reads.size(); ++r) {
      const auto [output, column] = read_outputs_[r];
      reads[r].out = static_cast<std::byte*>(outputs[output].data()) + column * item_bytes(output_);
      reads[r].out_stride = outputs_[output].width * item_bytes(output_);
    }
    bool is_read = false;
    {
      nb::gil_scoped_release release;
      is_read = read_mapped(mapped, initial_rows, columns, reads, size, dtype_, output_, cache);
    }
    if (!is_read) return std::nullopt;
    return outputs;
  }

 private:
  struct Output {
    int64_t width;
    size_t column;  // of a lookup that it reads
  };

  MadeOfDtype make_output(int64_t rows, int64_t width) const {
    auto buffer = std::make_unique<Buffer<std::byte>>(static_cast<size_t>(rows * width * item_bytes(output_)));
    nb::capsule owner(buffer.get(), [](void* p) noexcept { delete static_cast<Buffer<std::byte>*>(p); });
    return MadeOfDtype(buffer.release()->data(), {static_cast<size_t>(rows), static_cast<size_t>(width)}, owner,
                       dlpack_dtype(output_));
  }

  bool collect(nb::handle ids, int64_t size, bool is_sharing, std::vector<MappedColumn>& columns,
               std::vector<In>& arrays) const {
    int64_t num_lookups = 0;
    for (size_t c = 0; c < columns.size(); ++c) {
      const nb::object feature = nb::steal(PyObject_GetItem(ids.ptr(), names_[c].ptr()));
      if (!feature.is_valid()) {
        PyErr_Clear();
        return false;
      }
      if (feature.type().ptr() != kind_.ptr()) return false;
      if (!collect_feature(feature, size, is_sharing, columns[c], arrays)) return false;
      num_lookups += length(columns[c].ids);
    }
    return num_lookups <= std::numeric_limits<int32_t>::max();
  }

  bool collect_feature(nb::handle feature, int64_t size, bool is_sharing, MappedColumn& column,
                       std::vector<In>& arrays) const {
    const nb::object values = attribute(feature, values_), offsets = attribute(feature, offsets_),
                     weights = attribute(feature, weights_);
    if (!look_at_vector(values, nb::dtype<int64_t>(), arrays.emplace_back())) return false;
    column.ids = {static_cast<const int64_t*>(arrays.back().data()), arrays.back().size()};
    int64_t num_samples = length(column.ids);
    if (!offsets.is_none()) {
      if (!look_at_vector(offsets, nb::dtype<int64_t>(), arrays.emplace_back())) return false;
      column.offsets = static_cast<const int64_t*>(arrays.back().data());
      num_samples = static_cast<int64_t>(arrays.back().size()) - 1;
      if (num_samples < 0 || !are_offsets(column.offsets, num_samples, length(column.ids))) return false;
    }
    column.is_shared = is_sharing && num_samples == 1 && size != 1;
    if (num_samples != size && !column.is_shared) return false;
    if (weights.is_none()) return true;
    const Dtype compute = compute_dtype(dtype_);
    if (!look_at_vector(weights, dlpack_dtype(compute), arrays.emplace_back())) return false;
    column.weights = arrays.back().data();
    return arrays.back().size() == column.ids.size() && !nb::cast<bool>(weights.attr("requires_grad")) &&
           all_finite(column.weights, length(column.ids), compute);
  }

  static nb::object attribute(nb::handle object, const nb::str& name) {
    PyObject* const value = PyObject_GetAttr(object.ptr(), name.ptr());
    if (!value) nb::raise_python_error();
    return nb::steal(value);
  }

  nb::object kind_;  // class of a feature's ids
  nb::str values_{"values"}, offsets_{"offsets"}, weights_{"weights"};
  Dtype dtype_, output_;
  std::vector<nb::str> names_;
  std::vector<MappedColumn> columns_;
  std::vector<MappedRead> reads_;
  std::vector<std::pair<size_t, int64_t>> read_outputs_;  // output of each read, and its first column there
  std::vector<Output> outputs_;
  size_t num_tables_ = 0;
};

}  // namespace

void bind_mapped_rows(nb::module_& m) {
  nb::class_<HeldTable>(m, "MappedTable")
      .def(nb::init<int64_t, int64_t, std::optional<In>, nb::object, int64_t, int64_t, int64_t, In>(), "num_ids"_a,
           "num_rows"_a, "slots_by_id"_a.none(), "hashed"_a.none(), "stride"_a, "begin"_a, "block_bytes"_a, "checked"_a)
      .def("set_base",
           [](HeldTable& self, int64_t address) { self.table.base = reinterpret_cast<const std::byte*>(address); },
           "address"_a)
      .def("set_newer", &HeldTable::set_newer, "index"_a.none());
  nb::class_<RowCache>(m, "RowCache")
      .def("__init__",
           [](RowCache* self, const std::vector<std::tuple<int, int64_t, int64_t, int64_t>>& files, int64_t bytes, bool has_ring) {
             std::vector<RowCache::File> opened;
             for (const auto& [fd, begin, stride, num_rows] : files) opened.push_back({fd, begin, stride, num_rows});
             new (self) RowCache(opened, bytes, has_ring);
           },
           "files"_a, "bytes"_a, "has_ring"_a = true)
      .def_prop_ro("counts", [](const RowCache& self) {
        const auto counts = self.counts();
        return std::tuple(counts.hits, counts.misses, counts.reads);
      });
  nb::class_<MappedReader>(m, "MappedReader")
      .def(nb::init<nb::object, std::vector<nb::str>, In, In, In, In, const std::string&, const std::string&>(), "kind"_a,
           "names"_a, "tables"_a, "poolings"_a, "reads"_a, "widths"_a, "dtype"_a, "output"_a)
      .def("read", &MappedReader::read, "tables"_a, "initial_rows"_a, "ids"_a, "size"_a, "is_sharing"_a, "cache"_a.none() = nb::none());
}

}  // namespace colonnade
