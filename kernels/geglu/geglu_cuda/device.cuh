// What the kernels in both directions share: fast arithmetic, and how elements are laid over threads.
//
// Where vectors fit, they are counted over all rows, and a block takes kThreads of them that follow one another,
// whatever rows they lie in: threads are idle at the end of a tensor only, not of a row. Elsewhere a block takes parts
// of a few rows, and a thread several single elements, kept apart so that the threads of a warp have neighbours.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "geglu/gelu.h"
#include "geglu/problem.h"
#include "kit/elements.cuh"
#include "kit/launch.cuh"

namespace geglu {

using namespace kit;

constexpr int kThreads = 128;
constexpr int kSingles = 8;  // elements of a thread, where vectors do not fit

// With what the device has instructions for, off by less than `Brief` is anyhow.
struct Fast : Brief {
  static __device__ __forceinline__ float exp2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
  }
  static __device__ __forceinline__ float share(float x) { return __fdividef(1.0f, 1.0f + x); }
};

template <typename T>
using MathFor = std::conditional_t<std::is_same_v<T, float>, Accurate, Fast>;

// Calls `launch` with a Tag of the arithmetic.
template <typename T, typename Launch>
void with_gelu(Approximate approximate, Launch&& launch) {
  if (approximate == Approximate::none) {
    launch(Tag<Gelu<MathFor<T>>>{});
  } else {
    launch(Tag<GeluTanh<MathFor<T>>>{});
  }
}

// Divides numbers below 2^31 by a product, of which the high half is kept.
class Divider {
 public:
  explicit Divider(uint32_t divisor) : divisor_(divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    factor_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t number) const {
    return __umulhi(number << 1, factor_) >> shift_;
  }

  __device__ __forceinline__ uint32_t remainder(uint32_t number, uint32_t quotient) const {
    return number - quotient * divisor_;
  }

 private:
  uint32_t divisor_, factor_ = 0;
  int shift_ = 0;
};

// Where a thread's elements start.
struct Place {
  int64_t row, column;
};

// Some of the vectors of some of the rows, few enough to count them with 31 bits.
struct Vectors {
  int64_t first_row, first_column;
  uint32_t count;
  Divider columns;

  template <int kWidth>
  __device__ __forceinline__ Place place(uint32_t vector) const {
    const uint32_t row = columns.quotient(vector);
    return {first_row + row, first_column + static_cast<int64_t>(columns.remainder(vector, row)) * kWidth};
  }
};

// Calls `launch(vectors, blocks)` until all vectors had their turn.
template <int kWidth, typename Launch>
void for_each_vectors(int64_t rows, int64_t hidden, const Launch& launch) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t in_row = hidden / kWidth;
  for (int64_t column = 0; column < in_row; column += kMost) {
    const int64_t columns = std::min(kMost, in_row - column);
    const int64_t step = kMost / columns;
    for (int64_t row = 0; row < rows; row += step) {
      const auto count = static_cast<uint32_t>(std::min(step, rows - row) * columns);
      launch(Vectors{row, column * kWidth, count, Divider(static_cast<uint32_t>(columns))},
             (count + kThreads - 1) / kThreads);
    }
  }
}

// Blocks of single elements: `group` threads, a power of two, share `width` columns of a row, which takes `in_row` such
// parts.
struct Singles {
  int64_t width, in_row;
  int group;

  explicit Singles(int64_t hidden) : group(1) {
    while (group < kThreads && group * kSingles < hidden) group *= 2;
    in_row = (hidden + group * kSingles - 1) / (group * kSingles);
    width = (hidden + in_row - 1) / in_row;  // as equal as may be
  }

  int64_t blocks(int64_t rows) const {
    const int64_t rows_in_block = kThreads / group;
    return (rows + rows_in_block - 1) / rows_in_block * in_row;
  }

  // The first element of this thread.
  __device__ __forceinline__ Place place() const {
    const auto parts = static_cast<uint32_t>(in_row);
    const uint32_t rows = blockIdx.x / parts, part = blockIdx.x % parts;
    return {static_cast<int64_t>(rows) * (kThreads / group) + threadIdx.x / group, part * width + threadIdx.x % group};
  }

  // How many columns there are from `place` to the end of its part.
  __device__ __forceinline__ int columns_from(const Place& place, int64_t rows, int64_t hidden) const {
    if (place.row >= rows) return 0;
    const int64_t begin = place.column - threadIdx.x % group;
    const int64_t end = begin + width < hidden ? begin + width : hidden;
    return static_cast<int>(end - place.column);
  }
};

}  // namespace geglu
