// RMSNorm on CUDA: functions that launch on the current device. They return a cudaError_t, 0 when the launch succeeded.
#pragma once

#include "rmsnorm/problem.h"

namespace rmsnorm {

int forward(const Forward& problem, void* stream);

// How many partial sums to provide for the gradient of the weight on the current device.
int partial_sums(int64_t rows, int64_t hidden, Type type, int64_t* parts);

// The gradient of x, and that of the weight when it is asked for.
int backward(const Backward& problem, void* stream);

}  // namespace rmsnorm
