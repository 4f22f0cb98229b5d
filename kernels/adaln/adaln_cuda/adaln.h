// Modulated norms and gates on CUDA: functions that launch on the current device. They return a cudaError_t, 0 when the
// launch succeeded.
#pragma once

#include "adaln/problem.h"

namespace adaln {

int gate(const Gate& problem, void* stream);

int forward(const Forward& problem, void* stream);

// Into how many parts to divide each group of a problem's rows on the current device.
int partial_sums(const Backward& problem, int64_t* parts);
int partial_sums(const GateBackward& problem, int64_t* parts);

// All gradients that are asked for.
int backward(const Backward& problem, void* stream);
int gate_backward(const GateBackward& problem, void* stream);

}  // namespace adaln
