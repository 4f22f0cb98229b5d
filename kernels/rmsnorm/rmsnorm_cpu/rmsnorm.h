// RMSNorm on the CPU. Each function works on a range of rows, parts or columns; the caller distributes the ranges over
// threads.
#pragma once

#include "rmsnorm/problem.h"

namespace rmsnorm {

// Computes the rows [begin, end).
void forward(const Forward& problem, int64_t begin, int64_t end);

// Returns the number of rows of partial sums that the gradient of the weight needs.
int64_t partial_sums(int64_t rows);

// Computes the parts [begin, end): grad_x for their rows, and their partial sums.
void backward(const Backward& problem, int64_t begin, int64_t end);

// Computes the columns [begin, end) of the gradient of the weight from all partial sums.
void reduce_weight_gradient(const Backward& problem, int64_t begin, int64_t end);

}  // namespace rmsnorm
