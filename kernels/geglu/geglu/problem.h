// The arguments of a kernel call in plain C++, so that device code is compiled without Torch and once for all versions.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// Each call has `rows` evenly strided rows of `hidden` contiguous elements, both at least 1. Strides and sizes are in
// elements. The arithmetic is float32, and each result is rounded once.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace geglu {

using kit::Rows;
using kit::Type;

enum class Activation : int { gelu, gelu_tanh, silu };  // the ops take its number

// out = round(up * activation(gate)); `out` is contiguous.
struct Forward {
  int64_t rows, hidden;
  Type type;  // of all tensors
  Activation activation;
  Rows gate, up;
  void* out;
};

// grad_gate = round(grad * up * activation'(gate)), grad_up = round(grad * activation(gate)).
struct Backward {
  int64_t rows, hidden;
  Type type;  // of all tensors
  Activation activation;
  Rows grad, gate, up;
  void *grad_gate, *grad_up;
  int64_t stride;  // of the rows of grad_gate and of grad_up
};

// CUDA: launch on the current device, and return a cudaError_t, 0 on success.
int run(const Forward& problem, void* stream);
int run(const Backward& problem, void* stream);

// The CPU: compute the elements `begin` to `end`, counted over all rows. The caller divides them among threads.
void run(const Forward& problem, int64_t begin, int64_t end);
void run(const Backward& problem, int64_t begin, int64_t end);

}  // namespace geglu
