// The second stage of sums over rows: from partial sums to the gradients of what several rows share.
#pragma once

#include <cuda_runtime.h>

#include "adaln/problem.h"

namespace adaln {

// A gradient that is a sum.
struct Total {
  void* data = nullptr;  // null: not asked for
  Type type = Type::float32;
};

struct Reduction {
  int64_t hidden;
  Sums sums;
  Total scale, shift, gate;  // for each group
  int gate_sum;              // which of the sums is the gate's
  Total weight, bias;        // for all groups together
  Parameter weight_itself, bias_itself;
  Modulation scale_itself;  // data null: there is none, or it is in the sums already
};

cudaError_t reduce(const Reduction& reduction, cudaStream_t stream);

}  // namespace adaln
