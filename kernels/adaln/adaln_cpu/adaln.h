// Modulated norms and gates on the CPU: functions over a range of rows, parts or columns. The caller divides the ranges
// among threads.
#pragma once

#include "adaln/problem.h"

namespace adaln {

// Compute the rows from `begin` to `end`.
void gate(const Gate& problem, int64_t begin, int64_t end);
void forward(const Forward& problem, int64_t begin, int64_t end);

// Returns the number of parts for each of `groups` groups of `rows` rows in all.
int64_t partial_sums(int64_t groups, int64_t rows);

// Compute the gradients of the rows of some parts, and their partial sums. `begin` and `end` count the parts of all
// groups.
void backward(const Backward& problem, int64_t begin, int64_t end);
void gate_backward(const GateBackward& problem, int64_t begin, int64_t end);

// Compute the columns from `begin` to `end` of the gradients that are sums over rows, from all partial sums.
void reduce(const Backward& problem, int64_t begin, int64_t end);
void reduce(const GateBackward& problem, int64_t begin, int64_t end);

}  // namespace adaln
