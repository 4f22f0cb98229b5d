// Modulated norms and gates on the CPU: functions over a range of rows, parts or columns. Who calls them decides on the
// threads.
#pragma once

#include "adaln/problem.h"

namespace adaln {

// The rows from `begin` to `end`.
void gate(const Gate& problem, int64_t begin, int64_t end);
void forward(const Forward& problem, int64_t begin, int64_t end);

// Into how many parts to divide each of so many groups of rows.
int64_t partial_sums(int64_t groups, int64_t rows);

// Of all parts of all groups those from `begin` to `end`: the gradients of their rows, and their partial sums.
void backward(const Backward& problem, int64_t begin, int64_t end);
void gate_backward(const GateBackward& problem, int64_t begin, int64_t end);

// The columns from `begin` to `end` of the gradients that are sums, once all partial sums are there.
void reduce(const Backward& problem, int64_t begin, int64_t end);
void reduce(const GateBackward& problem, int64_t begin, int64_t end);

}  // namespace adaln
