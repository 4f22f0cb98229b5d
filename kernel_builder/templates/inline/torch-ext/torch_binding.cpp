// Registers the operators with Torch.
#include <torch/csrc/stable/library.h>

#include "registration.h"

void define_operators(torch::stable::detail::StableLibrary& ops);
void implement_operators(torch::stable::detail::StableLibrary& ops);

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { define_operators(ops); }

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#endif
  implement_operators(ops);
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
