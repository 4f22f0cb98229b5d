// What every kernel project includes to register its operators and to be importable from Python.
//
// Reads:    nothing; it needs neither Torch's nor Python's headers, and may stand before or after either.
// Gives:    the registration macros of Torch, of both ABIs, with the namespace macro-expanded, so that
//           `STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("..."); }` works; and
//           `REGISTER_EXTENSION(TORCH_EXTENSION_NAME)`, once per shared object, which makes the object a Python module.
// Must not: name anything outside Python's limited API of 3.9.
#pragma once

#include <cstddef>

#define TORCH_LIBRARY_EXPAND(NAMESPACE, LIBRARY) TORCH_LIBRARY(NAMESPACE, LIBRARY)
#define TORCH_LIBRARY_IMPL_EXPAND(NAMESPACE, KEY, LIBRARY) TORCH_LIBRARY_IMPL(NAMESPACE, KEY, LIBRARY)
#define STABLE_TORCH_LIBRARY_EXPAND(NAMESPACE, LIBRARY) STABLE_TORCH_LIBRARY(NAMESPACE, LIBRARY)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAMESPACE, KEY, LIBRARY) STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, KEY, LIBRARY)

namespace kernel_registration {

// PyModuleDef as the limited API fixes it for every Python from 3.9 that is built with the global interpreter lock.
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

// Under a name of its own, because a declaration of PyModuleDef_Init would contradict the one in <Python.h>.
extern "C" void* kernel_registration_module_def_init(ModuleDef*) __asm__("PyModuleDef_Init");

}  // namespace kernel_registration

// The module is empty: importing it runs the static initializers, and those register the operators.
#define REGISTER_EXTENSION(NAME) KERNEL_REGISTRATION_MODULE(NAME)
#define KERNEL_REGISTRATION_MODULE(NAME)                                          \
  extern "C" __attribute__((visibility("default"))) void* PyInit_##NAME() {       \
    static kernel_registration::ModuleDef definition(#NAME);                      \
    return kernel_registration::kernel_registration_module_def_init(&definition); \
  }
