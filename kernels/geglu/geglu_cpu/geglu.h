// GEGLU and SwiGLU on the CPU: elements `begin` to `end`, counted over all rows. The caller splits the range over
// threads.
#pragma once

#include "geglu/problem.h"

namespace geglu {

void forward(const Forward& problem, int64_t begin, int64_t end);

void backward(const Backward& problem, int64_t begin, int64_t end);

}  // namespace geglu
