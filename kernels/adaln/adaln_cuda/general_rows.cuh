// Rows of any length, stride and alignment, and operands of any dtypes: shared code of the general kernels, which
// process rows element by element.
//
// Reads:    elements of rows.
// Must not: depend on the operation of a kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "adaln/problem.h"
#include "kit/division.cuh"
#include "kit/elements.cuh"
#include "kit/group_sums.cuh"

namespace adaln {
namespace {

using namespace kit;

constexpr int kGeneralThreads = 1024;  // of a row and block, at most

inline unsigned general_threads(int64_t hidden) {
  return static_cast<unsigned>(std::min<int64_t>((hidden + kWarp - 1) / kWarp * kWarp, kGeneralThreads));
}

// A row of a tensor that may be absent.
struct ElementRow {
  const void* data;
  Type type;
  int64_t start = 0;

  __device__ __forceinline__ ElementRow(const void* data, Type type, int64_t start)
      : data(data), type(type), start(start) {}
  __device__ __forceinline__ ElementRow(const Rows& rows, Type type, int64_t row)
      : ElementRow(rows.data, type, rows.data == nullptr ? 0 : rows.offset(row)) {}
  __device__ __forceinline__ ElementRow(const Modulation& modulation, int64_t row)
      : ElementRow(modulation.rows, modulation.type, row) {}
  __device__ __forceinline__ explicit ElementRow(const Parameter& parameter)
      : ElementRow(parameter.data, parameter.type, 0) {}

  __device__ __forceinline__ bool exists() const { return data != nullptr; }
  __device__ __forceinline__ float at(int64_t column, float otherwise = 0.0f) const {
    return exists() ? load_as(type, data, start + column) : otherwise;
  }
};

// Calls `use` with the thread's columns of a row, which are the same ones in each row.
template <typename Use>
__device__ __forceinline__ void for_each_column(int64_t hidden, Use&& use) {
  for (int64_t column = threadIdx.x; column < hidden; column += blockDim.x) use(column);
}

// Averages over a row of up to four values of each column.
class RowAverages {
 public:
  using Scratch = float4[2][kGeneralThreads / kWarp];

  __device__ __forceinline__ RowAverages(Scratch& scratch, const Average& average)
      : scratch_(scratch), average_(average) {}

  // `add` adds the values of a column to the thread's sums. All threads of the block get the averages.
  template <typename Add>
  __device__ __forceinline__ void operator()(int64_t hidden, float (&averages)[4], Add&& add) {
    for (float& sum : averages) sum = 0.0f;
    for_each_column(hidden, [&](int64_t column) { add(column, averages); });
    sum_over_group(averages, scratch_[half_]);
    half_ ^= 1;  // a slow warp may still read this half while the next sums are written
    for (float& sum : averages) sum = average_(sum);
  }

 private:
  Scratch& scratch_;
  const Average& average_;
  int half_ = 0;
};

// Returns the mean of a row, from differences from its first element, which keep the digits of a row far from zero.
__device__ __forceinline__ float mean_of(const ElementRow& row, int64_t hidden, RowAverages& averages) {
  const float pivot = row.at(0);
  float differences[4];
  averages(hidden, differences, [&](int64_t column, float (&sums)[4]) { sums[0] += row.at(column) - pivot; });
  return pivot + differences[0];
}

}  // namespace
}  // namespace adaln
