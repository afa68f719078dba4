// Bindings of pending gradient sums of cached rows.
#include "pending.h"

#include "bind/arrays.h"

namespace colonnade {

namespace {

template <class T>
std::vector<Pending<T>> tables_in(const std::vector<Out>& sums, const std::vector<Out>& ticks) {
  if (sums.size() != ticks.size()) throw std::invalid_argument("sums, ticks: got different numbers of tables");
  std::vector<Pending<T>> tables;
  for (size_t t = 0; t < sums.size(); ++t) {
    const auto s = elements<T>(sums[t], "sums", {-1, -1});
    const auto n = elements<int32_t>(ticks[t], "ticks", {static_cast<int64_t>(sums[t].shape(0))});
    tables.push_back({s.data(), n.data(), static_cast<int64_t>(sums[t].shape(1)), length(n)});
  }
  return tables;
}

template <class T>
BatchSums<T> batch_in(const In& slots, const In& index, const In& batch) {
  const auto s = elements<const int64_t>(slots, "slots", {-1});
  const auto i = unsigned_bits(elements<const int32_t>(index, "index", {length(s)}));
  return {s, i, elements<const T>(batch, "batch", {-1})};
}

template <class T>
void add(const std::vector<Out>& sums, const std::vector<Out>& ticks, const In& counts, const In& slots,
         const In& index, const In& batch, const In& leaves) {
  const auto tables = tables_in<T>(sums, ticks);
  const auto c = elements<const int64_t>(counts, "counts", {-1});
  const auto rows = batch_in<T>(slots, index, batch);
  const auto l = elements<const uint8_t>(leaves, "leaves", {length(rows.slots)});
  nb::gil_scoped_release release;
  add_pending<T>(tables, c, rows, l);
}

template <class T>
void take(const std::vector<Out>& sums, const std::vector<Out>& ticks, const In& counts, const In& slots,
          const In& origin, const In& index, const In& batch, const Out& out) {
  const auto tables = tables_in<T>(sums, ticks);
  const auto c = elements<const int64_t>(counts, "counts", {-1});
  const auto s = elements<const int64_t>(slots, "slots", {-1});
  const auto from = elements<const int64_t>(origin, "origin", {length(s)});
  const auto i = unsigned_bits(elements<const int32_t>(index, "index", {-1}));
  const BatchSums<T> rows{{}, i, elements<const T>(batch, "batch", {-1})};
  const auto o = elements<T>(out, "out", {-1});
  nb::gil_scoped_release release;
  take_pending<T>(tables, c, s, from, rows, o);
}

bool is_double(const In& batch) {
  return batch.dtype() == nb::dtype<double>();
}

}  // namespace

void bind_pending(nb::module_& m) {
  m.def(
      "name_slots",
      [](const std::vector<Out>& names, const std::vector<Out>& ticks, In counts, In slots, In ids) {
        std::vector<SlotNames> tables;
        for (size_t t = 0; t < names.size() && t < ticks.size(); ++t) {
          const auto n = elements<int64_t>(names[t], "names", {-1});
          const auto k = elements<int32_t>(ticks[t], "ticks", {length(n)});
          tables.push_back({n.data(), k.data(), length(n)});
        }
        const auto c = elements<const int64_t>(counts, "counts", {-1});
        const auto s = elements<const int64_t>(slots, "slots", {-1});
        const auto i = elements<const int64_t>(ids, "ids", {length(s)});
        std::vector<uint8_t> has(s.size());
        {
          nb::gil_scoped_release release;
          name_slots(tables, c, s, i, has);
        }
        return tensor(std::move(has));
      },
      "names"_a, "ticks"_a, "counts"_a, "slots"_a, "ids"_a);
  m.def(
      "add_pending",
      [](const std::vector<Out>& sums, const std::vector<Out>& ticks, In counts, In slots, In index, In batch,
         In leaves) {
        (is_double(batch) ? add<double> : add<float>)(sums, ticks, counts, slots, index, batch, leaves);
      },
      "sums"_a, "ticks"_a, "counts"_a, "slots"_a, "index"_a, "batch"_a, "leaves"_a);
  m.def(
      "take_pending",
      [](const std::vector<Out>& sums, const std::vector<Out>& ticks, In counts, In slots, In origin, In index,
         In batch, Out out) {
        (is_double(batch) ? take<double> : take<float>)(sums, ticks, counts, slots, origin, index, batch, out);
      },
      "sums"_a, "ticks"_a, "counts"_a, "slots"_a, "origin"_a, "index"_a, "batch"_a, "out"_a);
}

}  // namespace colonnade
