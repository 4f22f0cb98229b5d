// `${operator}` on CUDA.
#pragma once

#include "${operator}/${operator}.h"

namespace op {

// Launches the kernel on `stream`, a cudaStream_t, and returns the cudaError_t of the launch.
int run(const Problem& problem, void* stream);

}  // namespace op
