// What owners see of coming batches.
#include "sight.h"

#include "bind/arrays.h"

namespace colonnade {

namespace {

// A read-only property that looks into the decision, as numpy.
template <class T, auto Member>
auto array() {
  return [](nb::handle handle) {
    auto& values = nb::cast<SightDecision&>(handle).*Member;
    return nb::ndarray<nb::numpy, T>(values.data(), {values.size()}, handle);
  };
}

}  // namespace

void bind_sight(nb::module_& m) {
  nb::class_<SightDecision>(m, "SightDecision")
      .def_prop_ro("has", array<bool, &SightDecision::has>(), kOwned)
      .def_prop_ro("keeps", array<bool, &SightDecision::keeps>(), kOwned)
      .def_prop_ro("copied", array<bool, &SightDecision::copied>(), kOwned)
      .def_prop_ro("reader", array<int16_t, &SightDecision::readers>(), kOwned)
      .def_prop_ro("recalled", array<int64_t, &SightDecision::recalled_ids>(), kOwned)
      .def_prop_ro("tables", array<int64_t, &SightDecision::recalled_tables>(), kOwned)
      .def_prop_ro("holders", array<int64_t, &SightDecision::holders>(), kOwned)
      .def_prop_ro("recopied", array<bool, &SightDecision::recopied>(), kOwned);

  nb::class_<Sight>(m, "Sight")
      .def(
          "__init__",
          [](Sight* self, int64_t num_ranks, In quotas, In least, In chances, In passes, bool holds, int64_t many) {
            const auto q = elements<const int64_t>(quotas, "quotas", {-1});
            const auto l = elements<const int64_t>(least, "least", {length(q)});
            const auto c = elements<const double>(chances, "chances", {length(q)});
            const auto p = elements<const bool>(passes, "passes", {length(q)});
            std::vector<LoanWorth> worths(q.size());
            for (size_t t = 0; t < q.size(); ++t) worths[t] = {q[t], l[t], c[t], p[t]};
            new (self) Sight(num_ranks, worths, holds, many);
          },
          "num_ranks"_a, "quotas"_a, "least"_a, "chances"_a, "passes"_a, "holds"_a, "many"_a)
      .def(
          "see",
          [](Sight& self, In counts, const Plan& plan) {
            const auto c = elements<const int64_t>(counts, "counts", {-1, -1});
            nb::gil_scoped_release release;
            self.see(c, plan);
          },
          "counts"_a, "plan"_a)
      .def("decide", &Sight::decide, "is_over"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace colonnade
