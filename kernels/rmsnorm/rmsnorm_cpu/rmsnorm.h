// RMSNorm on the CPU: functions over a range of rows or columns. Who calls them decides on the threads.
#pragma once

#include "rmsnorm/problem.h"

namespace rmsnorm {

// The rows from `begin` to `end`.
void forward(const Forward& problem, int64_t begin, int64_t end);

// How many partial sums to provide for the gradient of the weight of so many rows.
int64_t partial_sums(int64_t rows);

// The parts from `begin` to `end`: the gradient of x for their rows, and their partial sums.
void backward(const Backward& problem, int64_t begin, int64_t end);

// The columns from `begin` to `end` of the gradient of the weight, once all partial sums are there.
void reduce_weight_gradient(const Backward& problem, int64_t begin, int64_t end);

}  // namespace rmsnorm
