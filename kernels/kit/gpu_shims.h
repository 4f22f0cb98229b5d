// Functions of Torch's C interface for GPUs. Torch for ROCm has them under the names that they have for CUDA; its
// headers declare them for CUDA only.
//
// Reads:    nothing.
// Must not: declare anything newer than Torch 2.10.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

#if defined(ROCM_KERNEL)
extern "C" {
AOTI_TORCH_EXPORT AOTITorchError torch_c10_cuda_check_msg(int32_t error, const char* file, const char* function,
                                                          uint32_t line, bool device_assertions, char** message);
AOTI_TORCH_EXPORT void torch_c10_cuda_free_error_msg(char* message);
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
}
#endif
