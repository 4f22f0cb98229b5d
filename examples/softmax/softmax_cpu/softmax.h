// Softmax of rows on the CPU: rows `begin` to `end`. The caller splits the rows over threads.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace op {

// The tensors are contiguous and have one dtype.
struct Problem {
  kit::Type type;
  int64_t columns;
  const void* from;  // x, or y in the backward pass
  const void* grad;  // null: the forward pass
  void* out;         // y, or the gradient with respect to x
};

void run(const Problem& problem, int64_t begin, int64_t end);

}  // namespace op
