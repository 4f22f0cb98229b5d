// The arguments of a kernel call in plain C++, so that device code is compiled without Torch and once for all versions.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace loss {

using kit::Type;

// Cross entropy of `rows` contiguous rows of `vocabulary` logits, both at least 1, in float32:
//
//   s = softcap * tanh(logit / softcap), or the logit if softcap is 0
//   lse = log(sum(exp(s)))
//   loss = (1 - smoothing) * (lse - s[target]) + smoothing * (lse - mean(s)) + z_loss * lse^2
//
// The gradients of `scale * sum(losses)` with respect to the logits replace these, rounded once. A row whose target is
// `ignored` has the loss 0 and gradients of 0; one whose target is no class has NaN for both.
struct CrossEntropy {
  int64_t rows, vocabulary;
  Type type;  // of the logits
  void* logits;
  const int64_t* targets;
  const float* scale;  // one number
  float* losses;
  int64_t ignored;
  float smoothing, softcap, z_loss;
};

// CUDA: launches on the current device, and returns a cudaError_t, 0 on success.
int run(const CrossEntropy& problem, void* stream);

// The CPU: the rows [begin, end). The caller divides them among threads.
void run(const CrossEntropy& problem, int64_t begin, int64_t end);

}  // namespace loss
