// The second stage of sums over rows: from partial sums to the gradients of what several rows share.
#pragma once

#include <cuda_runtime.h>

#include "adaln/problem.h"

namespace adaln {

// One of the sums, for each column times a factor.
struct Term {
  int sum;
  Parameter factor;  // data null: 1
};

// A gradient: the sum of its terms.
struct Total {
  void* data;
  Type type;
  bool of_all_groups;  // each group's sums times 1 + its scale; else one gradient for each group
  int count;
  Term terms[2];
};

constexpr int kMostTotals = 5;

struct Reduction {
  int64_t hidden;
  Sums sums;
  Modulation scale;  // data null: there is none, or it is in the sums already
  int count = 0;
  Total totals[kMostTotals];

  void add(void* data, Type type, bool of_all_groups, Term first) {
    if (data != nullptr) totals[count++] = {data, type, of_all_groups, 1, {first, {}}};
  }
  void add(void* data, Type type, bool of_all_groups, Term first, Term second) {
    if (data != nullptr) totals[count++] = {data, type, of_all_groups, 2, {first, second}};
  }
};

// Right after the kernel that writes the partial sums, on the same stream.
cudaError_t reduce(const Reduction& reduction, cudaStream_t stream);

}  // namespace adaln
