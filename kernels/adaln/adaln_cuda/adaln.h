// Modulated norms and gates on CUDA: functions that launch kernels on the current device. They return a cudaError_t, 0
// when the launch succeeded.
#pragma once

#include "adaln/problem.h"

namespace adaln {

int gate(const Gate& problem, void* stream);

int forward(const Forward& problem, void* stream);

// Finds the number of parts for each group of a problem's rows on the current device.
int partial_sums(const Backward& problem, int64_t* parts);
int partial_sums(const GateBackward& problem, int64_t* parts);

// Computes all requested gradients.
int backward(const Backward& problem, void* stream);
int gate_backward(const GateBackward& problem, void* stream);

}  // namespace adaln
