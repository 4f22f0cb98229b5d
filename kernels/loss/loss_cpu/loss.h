// Cross entropy and its gradient on the CPU: rows `begin` to `end`. The caller splits the range over threads.
#pragma once

#include "loss/problem.h"

namespace loss {

void cross_entropy(const CrossEntropy& problem, int64_t begin, int64_t end);

}  // namespace loss
