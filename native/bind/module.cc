// The module. The files of this folder are the only ones that know Python: they check what they are given, let go
// of the GIL and call the core.
#include "bind/arrays.h"
#include "buffer.h"
#include "isa.h"
#include "threads.h"

using namespace colonnade;

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // objects that live until the interpreter ends are no mistake of the user's
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("available_isas", &available_isas);
  m.def("set_isa", &set_isa, "name"_a);
  m.def("set_num_threads", &set_num_threads, "n"_a);
  m.def("limit_threads_here", &limit_threads_here, "n"_a);
  m.def("num_threads", &num_threads);
  m.def(
      "empty_bytes",
      [](size_t n) {
        auto* kept = new Buffer<uint8_t>(n);
        nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Buffer<uint8_t>*>(p); });
        return Made<uint8_t>(kept->data(), {n}, owner);
      },
      "n"_a);
  bind_plan(m);
  bind_directory(m);
  bind_dram(m);
  bind_pool(m);
  bind_retention(m);
  bind_sight(m);
  bind_update(m);
  bind_files(m);
  bind_interaction(m);
  bind_log(m);
  bind_packing(m);
  bind_pending(m);
  bind_bags(m);
  bind_tiered(m);
}
