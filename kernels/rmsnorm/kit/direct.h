// Calls of operators from Python past Torch's dispatcher, which is most of what a small call costs the host: a module
// of functions that each take what is to be called otherwise, and return a function of what the operator takes, by
// position.
//
// Reads:    Python's objects through its limited API of 3.9, and tensors through DLPack's exchange table, which Torch
//           has from 2.10 on. Declared here, since neither has headers on a machine that only builds kernels.
// Writes:   through what it calls.
// Must not: decide anything. Where a call is not of the plain kind, where it needs a gradient, where somebody must see
//           each operator, or where the operator would report an error, nothing is done but the other call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <tuple>
#include <utility>

#include "kit/tensors.h"

namespace kit::direct {

// --- Python ---------------------------------------------------------------------------------------------------------

struct Object;

using Function = Object* (*)(Object * self, Object* const* arguments, std::ptrdiff_t count);
using FunctionOfOne = Object* (*)(Object * self, Object* argument);

// PyMethodDef.
struct Method {
  const char* name;
  Function function;
  int flags;
  const char* doc;
};

constexpr int kNoArguments = 0x04;  // METH_NOARGS
constexpr int kFastCall = 0x80;     // METH_FASTCALL, the same since Python 3.7

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
Object* kit_python_function(const Method*, Object* self, Object* module) __asm__("PyCFunction_NewEx");
FunctionOfOne kit_python_pointer_of(Object* function) __asm__("PyCFunction_GetFunction");
int kit_python_flags_of(Object* function) __asm__("PyCFunction_GetFlags");
Object* kit_python_bool(long) __asm__("PyBool_FromLong");
Object* kit_python_type(Object*) __asm__("PyObject_Type");
void kit_python_keep(Object*) __asm__("Py_IncRef");
void kit_python_release(Object*) __asm__("Py_DecRef");
double kit_python_to_double(Object*) __asm__("PyFloat_AsDouble");
long long kit_python_to_integer(Object*) __asm__("PyLong_AsLongLong");
int kit_python_truth(Object*) __asm__("PyObject_IsTrue");
Object* kit_python_integer(long long) __asm__("PyLong_FromLongLong");
Object* kit_python_tuple(std::ptrdiff_t) __asm__("PyTuple_New");
int kit_python_set(Object*, std::ptrdiff_t, Object*) __asm__("PyTuple_SetItem");  // takes the object over
Object* kit_python_attribute(Object*, Object*) __asm__("PyObject_GetAttr");
Object* kit_python_call(Object*, Object*) __asm__("PyObject_CallObject");
Object* kit_python_error() __asm__("PyErr_Occurred");
void kit_python_clear_error() __asm__("PyErr_Clear");
void* kit_python_pointer(Object*, const char*) __asm__("PyCapsule_GetPointer");
void* kit_python_unlock() __asm__("PyEval_SaveThread");
void kit_python_lock(void*) __asm__("PyEval_RestoreThread");
}

// Thrown where nothing may be done but the other call.
struct Declined : std::exception {};

// A reference of one's own to an object; of what a call returned, which may be an error.
class Reference {
 public:
  Reference() = default;
  explicit Reference(Object* object) : object_(object) {
    if (object_ != nullptr) return;
    kit_python_clear_error();
    throw Declined();
  }
  Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Reference& operator=(Reference&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Reference() {
    if (object_ != nullptr) kit_python_release(object_);
  }

  explicit operator bool() const { return object_ != nullptr; }
  Object* get() const { return object_; }
  Object* give() { return std::exchange(object_, nullptr); }
  // Of a tuple, an element, which it takes over.
  void set(size_t index, Object* element) {
    kit_python_set(object_, static_cast<std::ptrdiff_t>(index), Reference(element).give());
  }
  // An error, too, is reason for caution.
  bool truth() const {
    const int value = kit_python_truth(object_);
    if (value < 0) kit_python_clear_error();
    return value != 0;
  }

 private:
  Object* object_ = nullptr;
};

inline Object* kept(Object* object) {
  kit_python_keep(object);
  return object;
}

inline Object* none() { return kept(reinterpret_cast<Object*>(&kit_python_none)); }
inline Reference tuple(size_t size) { return Reference(kit_python_tuple(static_cast<std::ptrdiff_t>(size))); }

// Other threads of Python run while this lives, as they do while an operator runs.
class Unlocked {
 public:
  Unlocked() : state_(kit_python_unlock()) {}
  ~Unlocked() { kit_python_lock(state_); }
  Unlocked(const Unlocked&) = delete;

 private:
  void* state_;
};

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

// What `bind` was given, in this order.
struct Torch {
  // The exchange table; types; a method of some tensor; an attribute of all.
  Object *exchange, *tensor, *parameter, *is_neg, *requires_grad;
  // Functions that take sizes, strides and one of the dtypes, for a tensor on the CPU, or on CUDA's current device.
  Object *empty_on_cpu, *empty_on_cuda, *float32, *float16, *bfloat16;
  // Functions that return what is true where each operator must be seen; and a module with such an attribute.
  Object *modes, *function_modes, *trace, *profiler, *is_profiler_enabled;
};

inline Torch python{};
inline const Exchange* exchange = nullptr;  // null before, too
inline FunctionOfOne is_neg = nullptr;      // which takes the tensor as its `self`

inline Object* empty_here() {
#if defined(CUDA_KERNEL)
  return python.empty_on_cuda;
#else
  return python.empty_on_cpu;
#endif
}

// --- Tensors --------------------------------------------------------------------------------------------------------

// What a binding asks of a tensor, for one that Python holds.
class Borrowed {
 public:
  Borrowed() = default;

  // One that Torch has just made, or that is known to be like those.
  explicit Borrowed(Object* object) : object_(object) {
    // An error is that there is no memory to point to, as for the tensors of a transformation of torch.func.
    if (exchange->from_object(object, &tensor_) != 0) {
      kit_python_clear_error();
      throw Declined();
    }
    // As where all elements are known to be zero.
    if (tensor_.data == nullptr && numel() > 0) throw Declined();
  }

  // No subclass, which may do as it likes.
  static Borrowed plain(Object* object) {
    const Reference type(kit_python_type(object));
    if (type.get() != python.tensor && type.get() != python.parameter) throw Declined();
    return Borrowed(object);
  }

  static Borrowed given(Object* object) {
    const Borrowed tensor = plain(object);
    // Their memory holds the negatives of their elements, which DLPack does not say.
    if (Reference(is_neg(object, nullptr)).truth()) throw Declined();
    return tensor;
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

  bool requires_grad() const { return Reference(kit_python_attribute(object_, python.requires_grad)).truth(); }

  Object* object() const { return object_; }
  const Exchanged& exchanged() const { return tensor_; }

 private:
  Object* object_ = nullptr;
  Exchanged tensor_{};
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
inline void fill_with_zeros(const Borrowed&) { throw Declined(); }

#if defined(CUDA_KERNEL)

// Nothing to do where the device of a tensor is the current one.
inline Nothing enter(const Borrowed& x) {
  if (torch::stable::accelerator::getCurrentDeviceIndex() != x.get_device_index()) throw Declined();
  return {};
}

#endif

// Lets other threads run while a kernel is launched, or runs.
inline Unlocked running(const Borrowed&) { return Unlocked(); }

// Makes tensors in Torch, so that they are its own in everything, on the current device. Keeps them while it lives.
class Results {
 public:
  // Nothing to do where the device of a tensor is the current one: that of the tensors that are made.
  Nothing enter(const Borrowed&) const { return {}; }

  Borrowed operator()(IntHeaderOnlyArrayRef sizes, int32_t type, const Borrowed& beside) {
    if (count_ == kMost) throw Declined();
    if (!arguments_ || type != type_ || !sizes.equals({sizes_, dims_})) describe(sizes, type);
    made_[count_] = Reference(kit_python_call(empty_here(), arguments_.get()));
    const Borrowed made(made_[count_++].get());
    if (made.get_device_index() != beside.get_device_index()) throw Declined();
    return made;
  }

  // None.
  Borrowed nothing(int32_t, const Borrowed&) { return {}; }

 private:
  static Object* dtype_of(int32_t type) {
    if (type == aoti_torch_dtype_float32()) return python.float32;
    if (type == aoti_torch_dtype_float16()) return python.float16;
    if (type == aoti_torch_dtype_bfloat16()) return python.bfloat16;
    throw Declined();
  }

  // Makes what Python is told of a tensor, which often comes twice.
  void describe(IntHeaderOnlyArrayRef sizes, int32_t type) {
    type_ = type;
    dims_ = sizes.size();
    if (dims_ > kMostDims) throw Declined();
    Reference shape = tuple(dims_), strides = tuple(dims_);
    int64_t stride = 1;
    for (size_t dim = dims_; dim-- > 0; stride *= sizes[dim] > 0 ? sizes[dim] : 1) {
      sizes_[dim] = sizes[dim];
      shape.set(dim, kit_python_integer(sizes[dim]));
      strides.set(dim, kit_python_integer(stride));
    }
    arguments_ = tuple(3);
    arguments_.set(0, shape.give());
    arguments_.set(1, strides.give());
    arguments_.set(2, kept(dtype_of(type)));
  }

  static constexpr std::ptrdiff_t kMost = 8;
  Reference made_[kMost], arguments_;
  int32_t type_ = 0;
  int64_t sizes_[kMostDims];
  size_t dims_ = 0;
  std::ptrdiff_t count_ = 0;
};

// A function's result as an object of its own.
inline Reference to_python(const Borrowed& tensor) {
  return Reference(tensor.object() == nullptr ? none() : kept(tensor.object()));
}

template <class... Tensors>
Reference to_python(const std::tuple<Tensors...>& tensors) {
  Reference all = tuple(sizeof...(Tensors));
  size_t count = 0;
  std::apply([&](const auto&... each) { (all.set(count++, to_python(each).give()), ...); }, tensors);
  return all;
}

// --- Calls ----------------------------------------------------------------------------------------------------------

template <class T>
struct From;

template <>
struct From<Borrowed> {
  static Borrowed object(Object* object) { return Borrowed::given(object); }
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
    const double value = kit_python_to_double(object);
    return without_error(value, value == -1);
  }
};

template <>
struct From<int64_t> {
  static int64_t object(Object* object) {
    const int64_t value = kit_python_to_integer(object);
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

inline bool requires_grad(const Borrowed& tensor) { return tensor.requires_grad(); }

template <class T>
bool requires_grad(const std::optional<T>& tensor) {
  return tensor.has_value() && tensor->requires_grad();
}

template <class T>
bool requires_grad(const T&) {
  return false;
}

// Whether there is a mode of Torch that looks at operators, such as one that counts them or fakes their tensors.
inline bool any_mode() { return Reference(kit_python_call(python.modes, nullptr)).truth(); }

// Whether somebody must see each operator: a mode, a trace of torch.jit, or a profile.
inline bool watched() {
  return any_mode() || Reference(kit_python_call(python.function_modes, nullptr)).truth() ||
         Reference(kit_python_call(python.trace, nullptr)).truth() ||
         Reference(kit_python_attribute(python.profiler, python.is_profiler_enabled)).truth();
}

// Calls a function of C++ that takes `Results`, if it has any, and then what the operator takes. Returns whether that
// was done; an exception says no, too, at a cost.
template <class... Arguments, size_t... i, class Function>
bool call(Object* const* objects, std::ptrdiff_t count, std::index_sequence<i...>, Function function) {
  if (exchange == nullptr || count != static_cast<std::ptrdiff_t>(sizeof...(Arguments))) return false;
  if (watched()) return false;  // before a tensor is asked for anything, which they would see
  // Braces: from the first to the last.
  std::tuple<Arguments...> arguments{From<Arguments>::object(objects[i])...};
  if (aoti_torch_grad_mode_is_enabled() && (requires_grad(std::get<i>(arguments)) || ...)) return false;
  function(std::get<i>(arguments)...);
  return true;
}

template <auto function>
struct Call;

// From Python: what the operator takes. Returns its results, but None for those that nobody has asked for.
template <class Result, class... Arguments, Result (*function)(Results&, Arguments...)>
struct Call<function> {
  static Object* from_python(Object* otherwise, Object* const* objects, std::ptrdiff_t count) {
    try {
      Results results;
      Reference result;
      const auto keep = [&](const auto&... arguments) { result = to_python(function(results, arguments...)); };
      if (call<Arguments...>(objects, count, std::index_sequence_for<Arguments...>(), keep)) return result.give();
    } catch (...) {
    }
    Object* arguments = kit_python_tuple(count);
    if (arguments == nullptr) return nullptr;
    for (std::ptrdiff_t i = 0; i < count; ++i) {
      kit_python_keep(objects[i]);
      kit_python_set(arguments, i, objects[i]);
    }
    Object* result = kit_python_call(otherwise, arguments);
    kit_python_release(arguments);
    return result;
  }
};

template <auto function>
struct Change;

// From Python: what the operator takes, which changes its arguments. Returns whether that was done.
template <class... Arguments, void (*function)(Arguments...)>
struct Change<function> {
  static Object* from_python(Object*, Object* const* objects, std::ptrdiff_t count) {
    try {
      return kit_python_bool(call<Arguments...>(objects, count, std::index_sequence_for<Arguments...>(), function));
    } catch (...) {
      return kit_python_bool(0);
    }
  }
};

// Takes the members of `Torch`, once, and keeps them; returns whether there is a way past the dispatcher.
inline Object* bind(Object*, Object* const* objects, std::ptrdiff_t count) {
  if (count * sizeof(Object*) != sizeof(Torch)) return kit_python_bool(0);
  const auto* found = static_cast<const Exchange*>(kit_python_pointer(objects[0], "dlpack_exchange_api"));
  if (found == nullptr) kit_python_clear_error();
  if (found == nullptr || found->major != 1 || found->from_object == nullptr) return kit_python_bool(0);
  std::memcpy(&python, objects, sizeof(Torch));
  is_neg = kit_python_pointer_of(python.is_neg);
  if (is_neg == nullptr) kit_python_clear_error();
  if (is_neg == nullptr || kit_python_flags_of(python.is_neg) != kNoArguments) return kit_python_bool(0);
  for (std::ptrdiff_t i = 0; i < count; ++i) kit_python_keep(objects[i]);
  exchange = found;
  return kit_python_bool(1);
}

}  // namespace kit::direct

// One function of a module: its name, and a function of C++ as `Call` takes it, or as `Change` does. The first takes
// what is to be called otherwise, and returns what calls the function.
#define KIT_DIRECT(NAME, FUNCTION)                                                                                   \
  {NAME,                                                                                                             \
   [](kit::direct::Object*, kit::direct::Object* const* otherwise, std::ptrdiff_t count) {                           \
     static const kit::direct::Method method{NAME, kit::direct::Call<FUNCTION>::from_python, kit::direct::kFastCall, \
                                             nullptr};                                                               \
     return count == 1 ? kit::direct::kit_python_function(&method, otherwise[0], nullptr)                            \
                       : kit::direct::kit_python_bool(0);                                                            \
   },                                                                                                                \
   kit::direct::kFastCall, nullptr}
#define KIT_CHANGING(NAME, FUNCTION) {NAME, kit::direct::Change<FUNCTION>::from_python, kit::direct::kFastCall, nullptr}

// Makes the shared object a Python module with such functions, in place of REGISTER_EXTENSION.
#define KIT_DIRECT_MODULE(NAME, ...) KIT_DIRECT_MODULE_EXPANDED(NAME, __VA_ARGS__)
#define KIT_DIRECT_MODULE_EXPANDED(NAME, ...)                                                                       \
  extern "C" __attribute__((visibility("default"))) void* PyInit_##NAME() {                                         \
    static const kit::direct::Method methods[] = {                                                                  \
        {"bind", kit::direct::bind, kit::direct::kFastCall, nullptr}, __VA_ARGS__, {nullptr, nullptr, 0, nullptr}}; \
    static kit::direct::Module module(#NAME, methods);                                                              \
    return kit::direct::kit_python_module(&module);                                                                 \
  }
