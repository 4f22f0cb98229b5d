#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "registration.h"
#include "runtime/runtime.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("library() -> int");
  ops.def("exceptions() -> int");
  ops.def("threads(int count) -> int");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeImplicitAutograd, ops) {
  ops.impl("library", TORCH_BOX(&library));
  ops.impl("exceptions", TORCH_BOX(&exceptions));
  ops.impl("threads", TORCH_BOX(&threads));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
