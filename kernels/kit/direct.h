// Calls of operators from Python past Torch's dispatcher, which is most of what a small call costs the host: a module
// of functions that take the tensors for their results first, and then what the operator takes, by position.
//
// Reads:    Python's objects through its limited API of 3.9, and tensors through DLPack's exchange table, which Torch
//           has from 2.10 on. Declared here, since neither has headers on a machine that only builds kernels.
// Writes:   through what it calls.
// Must not: decide anything. A function returns False, and has done nothing, where a call is not of the plain kind,
//           or where the operator would report an error: the operator is then called, and does or reports it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <tuple>
#include <utility>

#include "kit/tensors.h"

namespace kit::direct {

// --- Python ---------------------------------------------------------------------------------------------------------

struct Object;

using Function = Object* (*)(Object * self, Object* const* arguments, std::ptrdiff_t count);

// PyMethodDef.
struct Method {
  const char* name;
  Function function;
  int flags;
  const char* doc;
};

constexpr int kFastCall = 0x80;  // METH_FASTCALL, the same since Python 3.7

// PyModuleDef, as the limited API fixes it for every Python that is built with the global interpreter lock.
struct Module {
  std::ptrdiff_t reference_count = 1;
  void* type = nullptr;
  void* (*init)() = nullptr;
  std::ptrdiff_t index = 0;
  void* copy = nullptr;
  const char* name;
  const char* doc = nullptr;
  std::ptrdiff_t size = 0;
  const Method* methods;
  void *slots = nullptr, *traverse = nullptr, *clear = nullptr, *free = nullptr;

  Module(const char* of_name, const Method* of_methods) : name(of_name), methods(of_methods) {}
};

// Under names of their own, because declarations of Python's would contradict those in <Python.h>.
extern "C" {
extern char kit_python_none __asm__("_Py_NoneStruct");
void* kit_python_module(Module*) __asm__("PyModuleDef_Init");
Object* kit_python_bool(long) __asm__("PyBool_FromLong");
Object* kit_python_type(Object*) __asm__("PyObject_Type");
void kit_python_release(Object*) __asm__("Py_DecRef");
double kit_python_double(Object*) __asm__("PyFloat_AsDouble");
long long kit_python_integer(Object*) __asm__("PyLong_AsLongLong");
int kit_python_truth(Object*) __asm__("PyObject_IsTrue");
Object* kit_python_error() __asm__("PyErr_Occurred");
void kit_python_clear_error() __asm__("PyErr_Clear");
void* kit_python_pointer(Object*, const char*) __asm__("PyCapsule_GetPointer");
void* kit_python_unlock() __asm__("PyEval_SaveThread");
void kit_python_lock(void*) __asm__("PyEval_RestoreThread");
}

// --- DLPack 1 -------------------------------------------------------------------------------------------------------

// DLTensor.
struct Exchanged {
  void* data;
  int32_t device_type, device_index;
  int32_t dims;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t *sizes, *strides;
  uint64_t byte_offset;
};

// DLPackExchangeAPI.
struct Exchange {
  uint32_t major, minor;
  void* previous;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*from_object)(void* object, Exchanged*);
  void* current_stream;
};

// What `bind` found.
inline const Exchange* exchange = nullptr;
inline Object *tensor_type = nullptr, *parameter_type = nullptr;

// --- Tensors --------------------------------------------------------------------------------------------------------

// Thrown where the operator has to be called instead.
struct Declined : std::exception {};

// What a binding asks of a tensor, for one that Python holds.
class Borrowed {
 public:
  Borrowed() = default;

  explicit Borrowed(Object* object) {
    Object* type = kit_python_type(object);
    const bool plain = type == tensor_type || type == parameter_type;  // no subclass, which may do as it likes
    kit_python_release(type);
    if (!plain) throw Declined();
    // An error is that there is no memory to point to, as for the tensors of a transformation of torch.func.
    if (exchange->from_object(object, &tensor_) != 0) {
      kit_python_clear_error();
      throw Declined();
    }
  }

  int64_t dim() const { return tensor_.dims; }
  int64_t size(int64_t dim) const { return tensor_.sizes[dim]; }
  int64_t stride(int64_t dim) const { return tensor_.strides[dim]; }
  IntHeaderOnlyArrayRef sizes() const { return {tensor_.sizes, static_cast<size_t>(tensor_.dims)}; }
  IntHeaderOnlyArrayRef strides() const { return {tensor_.strides, static_cast<size_t>(tensor_.dims)}; }
  const void* const_data_ptr() const { return mutable_data_ptr(); }
  void* mutable_data_ptr() const { return static_cast<char*>(tensor_.data) + tensor_.byte_offset; }
  // Torch's CPU has no number.
  int32_t get_device_index() const { return is_cpu() ? -1 : tensor_.device_index; }
  bool is_cpu() const { return tensor_.device_type == 1; }
  bool is_cuda() const { return tensor_.device_type == 2; }

  int64_t numel() const {
    int64_t elements = 1;
    for (int32_t dim = 0; dim < tensor_.dims; ++dim) elements *= tensor_.sizes[dim];
    return elements;
  }

  bool is_contiguous() const {
    int64_t stride = 1;
    for (int32_t dim = tensor_.dims; dim-- > 0; stride *= tensor_.sizes[dim]) {
      if (tensor_.sizes[dim] == 0) return true;
      if (tensor_.sizes[dim] != 1 && tensor_.strides[dim] != stride) return false;
    }
    return true;
  }

  const Exchanged& exchanged() const { return tensor_; }

 private:
  Exchanged tensor_;
};

inline int32_t dtype(const Borrowed& tensor) {
  const Exchanged& of = tensor.exchanged();
  if (of.type_lanes == 1 && of.type_code == 2 && of.type_bits == 32) return aoti_torch_dtype_float32();
  if (of.type_lanes == 1 && of.type_code == 2 && of.type_bits == 16) return aoti_torch_dtype_float16();
  if (of.type_lanes == 1 && of.type_code == 4 && of.type_bits == 16) return aoti_torch_dtype_bfloat16();
  throw Declined();
}

inline int32_t device_type(const Borrowed& tensor) {
  if (tensor.is_cpu()) return aoti_torch_device_type_cpu();
  if (tensor.is_cuda()) return aoti_torch_device_type_cuda();
  throw Declined();
}

inline Borrowed contiguous_copy(const Borrowed&) { throw Declined(); }

#if defined(CUDA_KERNEL)

// Nothing to do where the device of a tensor is the current one.
inline int enter(const Borrowed& x) {
  if (torch::stable::accelerator::getCurrentDeviceIndex() != x.get_device_index()) throw Declined();
  return 0;
}

#endif

// Gives the tensors that came for the results, in the order in which the operator would allocate them.
class Given {
 public:
  Given(Object* const* results, std::ptrdiff_t count) : count_(count) {
    if (count > kMost) throw Declined();
    for (std::ptrdiff_t i = 0; i < count; ++i) results_[i] = Borrowed(results[i]);
  }

  Borrowed operator()(IntHeaderOnlyArrayRef sizes, int32_t type, const Borrowed& beside) {
    if (next_ == count_) throw Declined();
    const Borrowed& result = results_[next_++];
    const bool fits = device_type(result) == device_type(beside) && dtype(result) == type &&
                      result.get_device_index() == beside.get_device_index() && result.sizes().equals(sizes) &&
                      result.is_contiguous();
    if (!fits) throw Declined();
    return result;
  }

 private:
  static constexpr std::ptrdiff_t kMost = 2;
  Borrowed results_[kMost];
  std::ptrdiff_t count_, next_ = 0;
};

// --- Calls ----------------------------------------------------------------------------------------------------------

template <class T>
struct From;

template <>
struct From<Borrowed> {
  static Borrowed object(Object* object) { return Borrowed(object); }
};

template <class T>
struct From<std::optional<T>> {
  static std::optional<T> object(Object* object) {
    if (reinterpret_cast<char*>(object) == &kit_python_none) return std::nullopt;
    return From<T>::object(object);
  }
};

// Python's conversions report an error by a value that may also be one of a number.
template <class T>
T without_error(T value, bool suspicious) {
  if (suspicious && kit_python_error() != nullptr) {
    kit_python_clear_error();
    throw Declined();
  }
  return value;
}

template <>
struct From<double> {
  static double object(Object* object) {
    const double value = kit_python_double(object);
    return without_error(value, value == -1);
  }
};

template <>
struct From<int64_t> {
  static int64_t object(Object* object) {
    const int64_t value = kit_python_integer(object);
    return without_error(value, value == -1);
  }
};

template <>
struct From<bool> {
  static bool object(Object* object) {
    const int value = kit_python_truth(object);
    return without_error(value != 0, value < 0);
  }
};

// Other threads of Python run while this lives, as they do while an operator runs.
class Unlocked {
 public:
  Unlocked() : state_(kit_python_unlock()) {}
  ~Unlocked() { kit_python_lock(state_); }
  Unlocked(const Unlocked&) = delete;

 private:
  void* state_;
};

template <auto function>
struct Call;

template <class... Arguments, void (*function)(Given&, Arguments...)>
struct Call<function> {
  static Object* from_python(Object*, Object* const* objects, std::ptrdiff_t count) {
    return kit_python_bool(call(objects, count, std::index_sequence_for<Arguments...>()));
  }

 private:
  template <size_t... i>
  static bool call(Object* const* objects, std::ptrdiff_t count, std::index_sequence<i...>) {
    const std::ptrdiff_t results = count - static_cast<std::ptrdiff_t>(sizeof...(Arguments));
    if (exchange == nullptr || results < 0) return false;
    try {
      // Braces: from the first to the last.
      std::tuple<Arguments...> arguments{From<Arguments>::object(objects[results + static_cast<std::ptrdiff_t>(i)])...};
      Given given(objects, results);
      const Unlocked unlocked;
      function(given, std::get<i>(arguments)...);
      return true;
    } catch (...) {
      return false;
    }
  }
};

// bind(torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter), once; False: there is no way.
inline Object* bind(Object*, Object* const* arguments, std::ptrdiff_t count) {
  if (count != 3) return kit_python_bool(0);
  const auto* found = static_cast<const Exchange*>(kit_python_pointer(arguments[0], "dlpack_exchange_api"));
  if (found == nullptr) kit_python_clear_error();
  if (found == nullptr || found->major != 1 || found->from_object == nullptr) return kit_python_bool(0);
  tensor_type = arguments[1];
  parameter_type = arguments[2];
  exchange = found;
  return kit_python_bool(1);
}

}  // namespace kit::direct

// One function of a module: its name, and a function of C++ that takes `Given`, and then what the operator takes.
#define KIT_DIRECT(NAME, ...) {NAME, kit::direct::Call<__VA_ARGS__>::from_python, kit::direct::kFastCall, nullptr}

// Makes the shared object a Python module with such functions, in place of REGISTER_EXTENSION.
#define KIT_DIRECT_MODULE(NAME, ...) KIT_DIRECT_MODULE_EXPANDED(NAME, __VA_ARGS__)
#define KIT_DIRECT_MODULE_EXPANDED(NAME, ...)                                                                       \
  extern "C" __attribute__((visibility("default"))) void* PyInit_##NAME() {                                         \
    static const kit::direct::Method methods[] = {                                                                  \
        {"bind", kit::direct::bind, kit::direct::kFastCall, nullptr}, __VA_ARGS__, {nullptr, nullptr, 0, nullptr}}; \
    static kit::direct::Module module(#NAME, methods);                                                              \
    return kit::direct::kit_python_module(&module);                                                                 \
  }
