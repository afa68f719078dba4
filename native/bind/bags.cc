// Bindings of bag messages.
#include "bags.h"

#include "bind/arrays.h"

namespace colonnade {
namespace {

struct HeldDeal {
  Dealt dealt;

  HeldDeal(const In& rows, const In& owners)
      : dealt{elements<const int64_t>(rows, "table_rows", {-1}), {}} {
    dealt.num_owners = elements<const int64_t>(owners, "num_owners", {length(dealt.table_rows)});
  }
  int64_t num_tables() const { return length(dealt.table_rows); }

  // places: of one rank.
  void check(std::span<const int64_t> places) const {
    for (size_t t = 0; t < places.size(); ++t) {
      if (places[t] < -1 || places[t] >= dealt.num_owners[t]) {
        throw std::invalid_argument("places: got " + std::to_string(places[t]) + " of " +
                                    std::to_string(dealt.num_owners[t]) + " owners of table " + std::to_string(t));
      }
    }
  }
};

}  // namespace

void bind_bags(nb::module_& m) {
  m.def(
      "pack_bags",
      [](const HeldLookups& lookups, In table_rows, In num_owners, In places, In is_weighted,
         std::optional<In> codes) {
        const HeldDeal deal(table_rows, num_owners);
        const auto p = elements<const int64_t>(places, "places", {-1, deal.num_tables()});
        for (int64_t at = 0; deal.num_tables() && at < length(p); at += deal.num_tables()) {
          deal.check(p.subspan(static_cast<size_t>(at), static_cast<size_t>(deal.num_tables())));
        }
        const auto w = elements<const uint8_t>(is_weighted, "is_weighted", {lookups.lookups->num_features()});
        std::optional<std::span<const uint8_t>> c;
        if (codes) c = elements<const uint8_t>(*codes, "codes", {lookups.lookups->num_lookups()});
        PackedBags result;
        {
          nb::gil_scoped_release release;
          result = pack_bags(*lookups.lookups, deal.dealt, p, w, c);
        }
        return std::pair(tensor(std::move(result.bytes)), tensor(std::move(result.ends)));
      },
      "lookups"_a, "table_rows"_a, "num_owners"_a, "places"_a, "is_weighted"_a, "codes"_a.none());
  m.def(
      "join_bags",
      [](const std::vector<In>& messages, In tables, In table_rows, In num_owners, In places, const std::string& dtype) {
        const HeldDeal deal(table_rows, num_owners);
        const auto p = elements<const int64_t>(places, "places", {deal.num_tables()});
        deal.check(p);
        const auto t = elements<const int32_t>(tables, "tables", {-1});
        for (const auto table : t) {
          if (table < 0 || table >= deal.num_tables() || p[static_cast<size_t>(table)] < 0) {
            throw std::invalid_argument("tables: got " + std::to_string(table) + ", which has no rows here");
          }
        }
        std::vector<std::span<const uint8_t>> data;
        for (const auto& message : messages) data.push_back(elements<const uint8_t>(message, "message", {-1}));
        const Dtype of_weights = dtype_named(dtype);
        JoinedBags result;
        {
          nb::gil_scoped_release release;
          result = join_bags(data, t, deal.dealt, p, of_weights);
        }
        return std::tuple(tensor(std::move(result.ids)), tensor(std::move(result.feature_offsets)),
                          tensor(std::move(result.bag_offsets)), tensor(std::move(result.weights)),
                          tensor(std::move(result.codes)), tensor(std::move(result.sizes)));
      },
      "messages"_a, "tables"_a, "table_rows"_a, "num_owners"_a, "places"_a, "dtype"_a);
}

}  // namespace colonnade
