// The second stage of sums over rows: from partial sums to the gradients of modulations and parameters.
//
// Reads:    nothing by itself.
// Must not: depend on how the first stage divides the rows.
#pragma once

#include <cuda_runtime.h>

#include "adaln/problem.h"

namespace adaln {

// One of the sums, multiplied column by column.
struct Term {
  int sum;
  Parameter factor;  // data null: 1
};

// A gradient: the sum of its terms.
struct Total {
  void* data;
  Type type;
  bool over_groups;  // of one term, summed over the groups, each times 1 + its scale; else a row for each group
  int count;
  Term terms[2];
};

constexpr int kMaxTotals = 5;

struct Reduction {
  int64_t hidden;
  Sums sums;
  Modulation scale;  // data null: there is none, or it is in the sums already
  int count = 0;
  Total totals[kMaxTotals];

  void add(void* data, Type type, bool over_groups, Term first) {
    if (data != nullptr) totals[count++] = {data, type, over_groups, 1, {first, {}}};
  }
  void add(void* data, Type type, bool over_groups, Term first, Term second) {
    if (data != nullptr) totals[count++] = {data, type, over_groups, 2, {first, second}};
  }
};

// Launches the second stage. The kernel that writes the partial sums is the preceding one on the stream.
cudaError_t reduce(const Reduction& reduction, cudaStream_t stream);

}  // namespace adaln
