// What the kernels in both directions share: fast arithmetic, and how elements are laid over threads.
//
// Vectors are counted over all rows, and a block takes kThreads * loads of them that follow one another, whatever rows
// they lie in: threads are idle at the end of a tensor only, not of a row.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "geglu/gelu.h"
#include "geglu/problem.h"
#include "kit/elements.cuh"

namespace geglu {

using namespace kit;

constexpr int kThreads = 256;

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

// Some of the vectors of some of the rows, few enough to count them with 31 bits.
struct Piece {
  int64_t first_row, first_column;
  uint32_t count;  // of vectors
  Divider columns;

  // Where a vector starts.
  struct Place {
    int64_t row, column;
  };

  template <int kWidth>
  __device__ __forceinline__ Place place(uint32_t vector) const {
    const uint32_t row = columns.quotient(vector);
    return {first_row + row, first_column + static_cast<int64_t>(columns.remainder(vector, row)) * kWidth};
  }
};

// Calls `launch(piece, blocks)` until all elements had their turn.
template <int kWidth, int kLoads, class Launch>
void for_each_piece(int64_t rows, int64_t hidden, const Launch& launch) {
  constexpr int64_t kMost = int64_t{1} << 30;
  constexpr int64_t kTile = kThreads * kLoads;
  const int64_t vectors = hidden / kWidth;
  for (int64_t column = 0; column < vectors; column += kMost) {
    const int64_t columns = std::min(kMost, vectors - column);
    const int64_t step = kMost / columns;
    for (int64_t row = 0; row < rows; row += step) {
      const auto count = static_cast<uint32_t>(std::min(step, rows - row) * columns);
      const Piece piece{row, column * kWidth, count, Divider(static_cast<uint32_t>(columns))};
      launch(piece, static_cast<unsigned>((count + kTile - 1) / kTile));
    }
  }
}

}  // namespace geglu
