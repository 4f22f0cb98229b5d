// GEGLU on the CPU: functions over a range of elements, counted over all rows. Who calls them decides on the threads.
#pragma once

#include "geglu/problem.h"

namespace geglu {

void forward(const Forward& problem, int64_t begin, int64_t end);

void backward(const Backward& problem, int64_t begin, int64_t end);

}  // namespace geglu
