// Macros with which a kernel's binding registers operators and becomes a Python module.
//
//   STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("..."); }
//   REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
//
// The *_EXPAND macros are those of Torch, for both ABIs, with macros in the namespace argument expanded.
// REGISTER_EXTENSION, once in each shared object, makes the object a Python module. This header includes neither
// Torch's nor Python's headers and can come before or after them. It uses only the limited API of Python 3.9.
#pragma once

#include <cstddef>

#define TORCH_LIBRARY_EXPAND(NAMESPACE, LIBRARY) TORCH_LIBRARY(NAMESPACE, LIBRARY)
#define TORCH_LIBRARY_IMPL_EXPAND(NAMESPACE, KEY, LIBRARY) TORCH_LIBRARY_IMPL(NAMESPACE, KEY, LIBRARY)
#define STABLE_TORCH_LIBRARY_EXPAND(NAMESPACE, LIBRARY) STABLE_TORCH_LIBRARY(NAMESPACE, LIBRARY)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAMESPACE, KEY, LIBRARY) STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, KEY, LIBRARY)

namespace kernel_registration {

// The layout of PyModuleDef in the limited API of Python 3.9 and later, in builds with the global interpreter lock.
struct ModuleDef {
  std::ptrdiff_t reference_count = 1;
  void* type = nullptr;
  void* (*init)() = nullptr;
  std::ptrdiff_t index = 0;
  void* copy = nullptr;
  const char* name;
  const char* doc = nullptr;
  std::ptrdiff_t size = 0;
  void* methods = nullptr;
  void* slots = nullptr;
  void* traverse = nullptr;
  void* clear = nullptr;
  void* free = nullptr;

  explicit constexpr ModuleDef(const char* module_name) : name(module_name) {}
};

// Declared under another name because <Python.h> declares PyModuleDef_Init with other types.
#ifdef __APPLE__  // where symbols of C begin with an underscore
extern "C" void* kernel_registration_module_def_init(ModuleDef*) __asm__("_PyModuleDef_Init");
#else
extern "C" void* kernel_registration_module_def_init(ModuleDef*) __asm__("PyModuleDef_Init");
#endif

}  // namespace kernel_registration

// The module is empty. Importing it runs the static initializers, which register the operators.
#define REGISTER_EXTENSION(NAME) KERNEL_REGISTRATION_MODULE(NAME)
#define KERNEL_REGISTRATION_MODULE(NAME)                                          \
  extern "C" __attribute__((visibility("default"))) void* PyInit_##NAME() {       \
    static kernel_registration::ModuleDef definition(#NAME);                      \
    return kernel_registration::kernel_registration_module_def_init(&definition); \
  }
