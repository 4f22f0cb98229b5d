// GEGLU on CUDA: functions that launch on the current device. They return a cudaError_t, 0 when the launch succeeded.
#pragma once

#include "geglu/problem.h"

namespace geglu {

int forward(const Forward& problem, void* stream);

int backward(const Backward& problem, void* stream);

}  // namespace geglu
