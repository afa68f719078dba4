// Bindings of numbers, ids and rows in messages.
#include "packing.h"

#include "bind/arrays.h"
#include "codec.h"
#include "threshold.h"

namespace colonnade {
namespace {

struct Spaces {
  std::span<const int64_t> rows, num_owners, places;

  Spaces(const In& r, const In& n, const In& p)
      : rows(elements<const int64_t>(r, "rows", {-1})),
        num_owners(elements<const int64_t>(n, "num_owners", {length(rows)})),
        places(elements<const int64_t>(p, "places", {length(rows)})) {
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] < 0 || num_owners[i] < 1 || places[i] < 0 || places[i] >= num_owners[i]) {
        throw std::invalid_argument("spaces: got rows " + std::to_string(rows[i]) + ", place " +
                                    std::to_string(places[i]) + " of " + std::to_string(num_owners[i]) +
                                    " owners, wanted a place among them");
      }
    }
  }
  IdSpace operator[](size_t i) const { return {rows[i], num_owners[i], places[i]}; }
};

void check_range(int64_t first, int64_t last, int64_t size, const char* what) {
  if (first < 0 || last < first || last > size) {
    throw std::invalid_argument(std::string(what) + ": got " + std::to_string(first) + " .. " +
                                std::to_string(last) + " of " + std::to_string(size));
  }
}

RowCodec codec_named(const std::string& name) {
  if (name == "bf16") return RowCodec::bf16;
  if (name == "fp16") return RowCodec::fp16;
  if (name == "int8") return RowCodec::int8;
  throw std::invalid_argument("codec: got '" + name + "', choose from bf16, fp16, int8");
}

CodedRows shape_of(const std::string& codec, int64_t rows, const In& dims) {
  const CodedRows shape{codec_named(codec), rows, elements<const int32_t>(dims, "dims", {-1})};
  for (const auto dim : shape.dims) {
    if (dim < 0) throw std::invalid_argument("dims: got " + std::to_string(dim) + ", wanted 0 or more");
  }
  return shape;
}

ThresholdBlocks blocks_of(const In& starts, const In& slots) {
  const ThresholdBlocks blocks{elements<const int64_t>(starts, "starts", {length(slots) + 1}),
                               elements<const int64_t>(slots, "slots", {-1})};
  for (size_t b = 0; b < blocks.slots.size(); ++b) {
    const auto size = blocks.starts[b + 1] - blocks.starts[b];
    if (blocks.starts[0] != 0 || size < 1 || size > 65536 || blocks.slots[b] < 1) {
      throw std::invalid_argument("block " + std::to_string(b) + ": got " + std::to_string(size) + " elements and " +
                                  std::to_string(blocks.slots[b]) +
                                  " slots, wanted 1 to 65,536 elements, the first at 0, and 1 slot at least");
    }
  }
  return blocks;
}

}  // namespace

void bind_packing(nb::module_& m) {
  m.def(
      "pack_ids",
      [](In ids, In firsts, In lasts, In rows, In num_owners, In places, bool is_ascending) {
        const auto i = elements<const int64_t>(ids, "ids", {-1});
        const Spaces spaces(rows, num_owners, places);
        const auto lists = length(spaces.rows);
        const auto f = elements<const int64_t>(firsts, "firsts", {lists});
        const auto l = elements<const int64_t>(lasts, "lasts", {lists});
        std::vector<uint8_t> out;
        std::vector<int64_t> ends;
        {
          nb::gil_scoped_release release;
          out.reserve(i.size() * 2 + spaces.rows.size() * 4);
          Packer packer(out);
          for (size_t k = 0; k < f.size(); ++k) {
            check_range(f[k], l[k], length(i), "list of ids");
            packer.list(i.subspan(static_cast<size_t>(f[k]), static_cast<size_t>(l[k] - f[k])), spaces[k],
                        is_ascending);
            ends.push_back(length(out));
          }
        }
        return std::pair(tensor(std::move(out)), tensor(std::move(ends)));
      },
      "ids"_a, "firsts"_a, "lasts"_a, "rows"_a, "num_owners"_a, "places"_a, "is_ascending"_a);
  m.def(
      "unpack_ids",
      [](In data, In rows, In num_owners, In places, bool is_ascending) {
        const auto d = elements<const uint8_t>(data, "data", {-1});
        const Spaces spaces(rows, num_owners, places);
        std::vector<int64_t> ids, counts;
        Unpacker unpacker(d);
        {
          nb::gil_scoped_release release;
          for (size_t k = 0; k < spaces.rows.size(); ++k) {
            counts.push_back(unpacker.list(spaces[k], is_ascending, ids));
          }
        }
        return std::tuple(tensor(std::move(ids)), tensor(std::move(counts)), unpacker.position());
      },
      "data"_a, "rows"_a, "num_owners"_a, "places"_a, "is_ascending"_a);
  m.def(
      "encode_rows",
      [](const std::string& codec, In values, In dims, std::optional<In> ids, uint64_t seed, uint64_t step, Out out) {
        const auto rows = static_cast<int64_t>(values.ndim() ? values.shape(0) : 0);
        const CodedRows shape = shape_of(codec, rows, dims);
        const auto v = elements<const float>(values, "values", {rows, shape.width()});
        const auto o = elements<uint8_t>(out, "out", {rows, shape.row_bytes()});
        CodecDraw draw{{}, seed, step};
        if (ids) draw.ids = elements<const int64_t>(*ids, "ids", {rows});
        nb::gil_scoped_release release;
        encode_rows(shape, v.data(), ids ? &draw : nullptr, o.data());
      },
      "codec"_a, "values"_a, "dims"_a, "ids"_a.none(), "seed"_a, "step"_a, "out"_a);
  m.def(
      "decode_rows",
      [](const std::string& codec, In coded, In dims, Out values) {
        const auto rows = static_cast<int64_t>(coded.ndim() ? coded.shape(0) : 0);
        const CodedRows shape = shape_of(codec, rows, dims);
        const auto c = elements<const uint8_t>(coded, "coded", {rows, shape.row_bytes()});
        const auto v = elements<float>(values, "values", {rows, shape.width()});
        nb::gil_scoped_release release;
        decode_rows(shape, c.data(), v.data());
      },
      "codec"_a, "coded"_a, "dims"_a, "values"_a);
  m.def(
      "encode_thresholded",
      [](In values, In residual, float scale, In starts, In slots, In thresholds, int64_t step, Out new_residual,
         Out num_passed, Out message) {
        const ThresholdBlocks blocks = blocks_of(starts, slots);
        const auto size = blocks.starts.back(), count = length(blocks.slots);
        const auto v = elements<const float>(values, "values", {size});
        const auto r = elements<const float>(residual, "residual", {size});
        const auto t = elements<const float>(thresholds, "thresholds", {count});
        const auto n = elements<float>(new_residual, "new_residual", {size});
        const auto p = elements<int64_t>(num_passed, "num_passed", {count});
        const auto m = elements<int32_t>(message, "message", {blocks.num_slots()});
        nb::gil_scoped_release release;
        encode_thresholded(blocks, v.data(), r.data(), scale, t.data(), step, n.data(), p.data(),
                           reinterpret_cast<Slot*>(m.data()));
      },
      "values"_a, "residual"_a, "scale"_a, "starts"_a, "slots"_a, "thresholds"_a, "step"_a, "new_residual"_a,
      "num_passed"_a, "message"_a);
  m.def(
      "decode_thresholded",
      [](In message, In starts, In slots, Out values) {
        const ThresholdBlocks blocks = blocks_of(starts, slots);
        const auto m = elements<const int32_t>(message, "message", {blocks.num_slots()});
        const auto v = elements<float>(values, "values", {blocks.starts.back()});
        nb::gil_scoped_release release;
        decode_thresholded(blocks, reinterpret_cast<const Slot*>(m.data()), v.data());
      },
      "message"_a, "starts"_a, "slots"_a, "values"_a);
  m.def(
      "pack_numbers",
      [](In values) {
        const auto v = elements<const int64_t>(values, "values", {-1});
        std::vector<uint8_t> out;
        {
          nb::gil_scoped_release release;
          Packer(out).numbers({reinterpret_cast<const uint64_t*>(v.data()), v.size()});
        }
        return tensor(std::move(out));
      },
      "values"_a);
  m.def(
      "unpack_numbers",
      [](In data, int64_t count) {
        const auto d = elements<const uint8_t>(data, "data", {-1});
        check_range(0, count, 128 * length(d), "numbers in a message");
        std::vector<int64_t> values(static_cast<size_t>(count));
        Unpacker unpacker(d);
        {
          nb::gil_scoped_release release;
          unpacker.numbers({reinterpret_cast<uint64_t*>(values.data()), values.size()});
        }
        return std::pair(tensor(std::move(values)), unpacker.position());
      },
      "data"_a, "count"_a);
}

}  // namespace colonnade
