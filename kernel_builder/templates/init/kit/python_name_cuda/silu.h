// SiLU on CUDA.
#pragma once

#include "silu/silu.h"

namespace silu {

// Launches the kernel on `stream`, a cudaStream_t, and returns the cudaError_t of the launch.
int run(const Problem& problem, void* stream);

}  // namespace silu
