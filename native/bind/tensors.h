// Conversion of arrays: torch's tensors by its C functions, other arrays by nanobind.
//
// torch's Python functions take three microseconds for each array, its C functions (DLPack's exchange API) a twentieth
// of that. A torch version without them uses Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <utility>

namespace colonnade {

namespace nb = nanobind;

// DLManagedTensorVersioned of DLPack 1: its holder calls `release`.
struct ManagedTensor {
  uint32_t major, minor;
  void* context;
  void (*release)(ManagedTensor*);
  uint64_t flags;
  nb::dlpack::dltensor tensor;
};

// DLPackExchangeAPI of DLPack 1. Both functions used here return 0, or set a Python error.
struct TensorExchange {
  uint32_t major, minor;
  const TensorExchange* older;
  void *allocate, *take;
  int (*give)(ManagedTensor* tensor, void** out);  // takes a reference
  int (*look)(void* tensor, nb::dlpack::dltensor* out);  // valid as long as the tensor does not change
};

// Exchange API of torch.Tensor itself; null until torch is imported, and for versions without one. Subclasses have
// their own. Requires the GIL.
struct TorchTensors {
  PyTypeObject* type = nullptr;
  const TensorExchange* exchange = nullptr;
};
inline const TorchTensors& torch_tensors() noexcept {
  static TorchTensors tensors;
  if (tensors.type) return tensors;
  PyObject* const torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
  const nb::object type = nb::steal(torch ? PyObject_GetAttrString(torch, "Tensor") : nullptr);
  if (type.is_valid() && PyType_Check(type.ptr())) {
    const nb::object api = nb::steal(PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__"));
    if (api.is_valid() && PyCapsule_CheckExact(api.ptr())) {
      auto* exchange = static_cast<const TensorExchange*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
      while (exchange && exchange->major > 1) exchange = exchange->older;
      if (exchange && exchange->major == 1 && exchange->give && exchange->look) tensors.exchange = exchange;
    }
    tensors.type = reinterpret_cast<PyTypeObject*>(nb::object(type).release().ptr());  // never released
  }
  PyErr_Clear();
  return tensors;
}

// Array arguments that are read; those that are written.
struct In : nb::ndarray<nb::ro> {
  using Base = nb::ndarray<nb::ro>;
  using Base::Base;
};
struct Out : nb::ndarray<> {
  using Base = nb::ndarray<>;
  using Base::Base;
};

// Return whether `array` is a torch tensor, which is then in `out` and keeps it alive.
template <class Array>
bool look_at(nb::handle array, Array& out) noexcept {
  const auto& [type, exchange] = torch_tensors();
  if (!exchange || Py_TYPE(array.ptr()) != type) return false;
  nb::dlpack::dltensor tensor;
  if (exchange->look(array.ptr(), &tensor) != 0) {  // sparse, or without memory
    PyErr_Clear();
    return false;
  }
  out = Array(static_cast<std::byte*>(tensor.data) + tensor.byte_offset, static_cast<size_t>(tensor.ndim),
              reinterpret_cast<const size_t*>(tensor.shape), array, tensor.strides, tensor.dtype,
              static_cast<int>(tensor.device.device_type), tensor.device.device_id);
  return true;
}

// Return a tensor that refers to memory of `owner`.
template <class T>
struct Made : nb::ndarray<nb::pytorch, T> {
  using Base = nb::ndarray<nb::pytorch, T>;
  Made(void* data, std::initializer_list<size_t> shape, nb::handle owner) : Base(data, shape, owner) {}
};

// Likewise, of a dtype that is known when the program runs.
struct MadeOfDtype : nb::ndarray<nb::pytorch> {
  using Base = nb::ndarray<nb::pytorch>;
  MadeOfDtype(void* data, std::initializer_list<size_t> shape, nb::handle owner, nb::dlpack::dtype dtype)
      : Base(data, shape, owner, {}, dtype) {}
};

// Return the same as a Python object; null if torch is not available.
template <class Array>
nb::object to_python(const Array& made) noexcept {
  struct Held {
    ManagedTensor managed;
    typename Array::Base array;
  };
  const TensorExchange* const exchange = torch_tensors().exchange;
  if (!exchange) return {};
  auto* held = new (std::nothrow) Held{{1, 0, nullptr, nullptr, 0, {}}, made};
  if (!held) return {};
  held->managed.context = held;
  held->managed.release = [](ManagedTensor* self) { delete static_cast<Held*>(self->context); };
  auto& tensor = held->managed.tensor;
  tensor.data = held->array.data();
  tensor.device = {nb::device::cpu::value, 0};
  tensor.ndim = static_cast<int32_t>(held->array.ndim());
  tensor.dtype = held->array.dtype();
  tensor.shape = const_cast<int64_t*>(held->array.shape_ptr());
  tensor.strides = const_cast<int64_t*>(held->array.stride_ptr());
  void* object = nullptr;
  if (exchange->give(&held->managed, &object) != 0) {
    PyErr_Clear();
    return {};
  }
  return nb::steal(static_cast<PyObject*>(object));
}

}  // namespace colonnade

namespace nanobind::detail {

template <class Array>
struct array_caster {
  using Base = make_caster<typename Array::Base>;
  NB_TYPE_CASTER(Array, Base::Name)

  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
    if (colonnade::look_at(src, static_cast<typename Array::Base&>(value))) return true;
    Base base;
    if (!base.from_python(src, flags, cleanup)) return false;
    static_cast<typename Array::Base&>(value) = std::move(base.value);
    return true;
  }
};
template <>
struct type_caster<colonnade::In> : array_caster<colonnade::In> {};
template <>
struct type_caster<colonnade::Out> : array_caster<colonnade::Out> {};

template <class Array>
struct made_caster {
  using Base = make_caster<typename Array::Base>;
  using Value = Array;
  static constexpr auto Name = Base::Name;
  template <class>
  using Cast = Value;

  static handle from_cpp(const Array& made, rv_policy policy, cleanup_list* cleanup) noexcept {
    object tensor = colonnade::to_python(made);
    return tensor.is_valid() ? tensor.release() : Base::from_cpp(made, policy, cleanup);
  }
};
template <class T>
struct type_caster<colonnade::Made<T>> : made_caster<colonnade::Made<T>> {};
template <>
struct type_caster<colonnade::MadeOfDtype> : made_caster<colonnade::MadeOfDtype> {};

}  // namespace nanobind::detail
