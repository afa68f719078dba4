// Python module. Only the files of this folder use Python: they check arguments, release the GIL and call the core.
#include <unistd.h>

#include <cstdlib>
#include <exception>

#if defined(__APPLE__)
#include <pthread.h>
#else
#include <sys/syscall.h>
#endif

#include "bind/arrays.h"
#include "buffer.h"
#include "isa.h"
#include "threads.h"

using namespace colonnade;

#if PY_VERSION_HEX < 0x030e0000
namespace {
std::terminate_handler next_handler = nullptr;

bool is_exiting() noexcept {
#if PY_VERSION_HEX < 0x030d0000
  return _Py_IsFinalizing() || !Py_IsInitialized();
#else
  return Py_IsFinalizing() || !Py_IsInitialized();
#endif
}

bool is_main_thread() noexcept {
#if defined(__APPLE__)
  return pthread_main_np() != 0;
#else
  return syscall(SYS_gettid) == getpid();
#endif
}

// Python before 3.14 ends a daemon thread that returns from native code while the process exits by unwinding its stack;
// if a destructor then takes the GIL, ours or torch's, that is std::terminate. Such a thread sleeps instead, as from
// 3.14 on: the process exits without it.
[[noreturn]] void sleep_in_an_exit() {
  while (is_exiting() && !is_main_thread()) pause();
  if (next_handler) next_handler();
  std::abort();
}
}  // namespace
#endif

NB_MODULE(_native, m) {
#if PY_VERSION_HEX < 0x030e0000
  next_handler = std::set_terminate(sleep_in_an_exit);
#endif
  nb::set_leak_warnings(false);  // objects that live until the interpreter ends are not leaks of the user
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("available_isas", &available_isas);
  m.def("set_isa", &set_isa, "name"_a);
  m.def("set_num_threads", &set_num_threads, "n"_a);
  m.def("limit_threads_here", &limit_threads_here, "n"_a);
  m.def("num_threads", &num_threads);
  m.def(
      "empty_bytes",
      [](size_t n) {
        auto* owned = new Buffer<uint8_t>(n);
        nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Buffer<uint8_t>*>(p); });
        return Made<uint8_t>(owned->data(), {n}, owner);
      },
      "n"_a);
  bind_plan(m);
  bind_directory(m);
  bind_dram(m);
  bind_pool(m);
  bind_retention(m);
  bind_update(m);
  bind_files(m);
  bind_interaction(m);
  bind_log(m);
  bind_mapped_rows(m);
  bind_packing(m);
  bind_pending(m);
  bind_bags(m);
  bind_tiered(m);
}
