// GEGLU and SwiGLU on CUDA. Each function launches on the current device and returns a cudaError_t, 0 on success.
#pragma once

#include "geglu/problem.h"

namespace geglu {

int forward(const Forward& problem, void* stream);

int backward(const Backward& problem, void* stream);

}  // namespace geglu
