// What the kernels in both directions share: fast arithmetic, and how elements are laid over threads.
//
// Vectors, or where they do not fit single elements, are counted over all rows. A block takes so many of them that
// follow one another, whatever rows they lie in: threads are idle at the end of a tensor only, not of a row.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "geglu/gelu.h"
#include "geglu/problem.h"
#include "kit/elements.cuh"
#include "kit/launch.cuh"

namespace geglu {

using namespace kit;

constexpr int kThreads = 256;
constexpr int kSingles = 4;  // elements of a thread, where vectors do not fit

// What the device has instructions for, off by less than `Brief` is anyhow.
struct Instructions {
  static __device__ __forceinline__ float exp2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
  }
  static __device__ __forceinline__ float reciprocal(float x) { return __fdividef(1.0f, x); }
};

template <typename T>
using MathFor = std::conditional_t<std::is_same_v<T, float>, Accurate, Rough<Instructions>>;

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

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
  explicit Divider(uint32_t divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    factor_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t number) const {
    return __umulhi(number << 1, factor_) >> shift_;
  }

 private:
  uint32_t factor_;
  int shift_ = 0;
};

// Some of the vectors of some of the rows, few enough to count them with 31 bits. A vector of one element is one, too.
struct Piece {
  int64_t first_row, first_column;
  uint32_t count, columns;  // vectors in all, and in a row
  Divider by_columns;

  // The last vector instead of one beyond it: reading that again costs less than a branch around each load.
  __device__ __forceinline__ uint32_t within(uint32_t vector) const { return min(vector, count - 1); }

  __device__ __forceinline__ uint32_t row(uint32_t vector) const { return by_columns.quotient(vector); }
};

// Where the vectors of a piece lie in a tensor whose rows are `stride` apart.
template <typename T, int kWidth>
class Even {
 public:
  Even(void* data, int64_t stride, const Piece& piece)
      : start_(static_cast<T*>(data) + piece.first_row * stride + piece.first_column),
        between_(stride - static_cast<int64_t>(piece.columns) * kWidth) {}
  Even(const Rows& rows, const Piece& piece)
      : Even(const_cast<void*>(rows.data), rows.dims == 0 ? 0 : rows.strides[0], piece) {}

  // `row` is that of the vector in the piece.
  __device__ __forceinline__ T* at(uint32_t vector, uint32_t row) const {
    return start_ + static_cast<int64_t>(vector) * kWidth + row * between_;
  }

 private:
  T* start_;
  int64_t between_;  // the end of a row's vectors and the start of the next one's
};

// The same where several leading dimensions do not fold into one.
template <typename T, int kWidth>
class Uneven {
 public:
  Uneven(const Rows& rows, const Piece& piece) : rows_(rows), piece_(piece) {}

  __device__ __forceinline__ const T* at(uint32_t vector, uint32_t row) const {
    const int64_t column = piece_.first_column + static_cast<int64_t>(vector - row * piece_.columns) * kWidth;
    return static_cast<const T*>(rows_.data) + rows_.offset(piece_.first_row + row) + column;
  }

 private:
  Rows rows_;
  Piece piece_;
};

template <typename T, int kWidth, bool kEven>
using Source = std::conditional_t<kEven, Even<T, kWidth>, Uneven<T, kWidth>>;

// Calls `launch` with how many elements make a vector, how many vectors a thread takes, and whether rows are even, as
// constants.
template <typename T, typename Launch>
void with_access(bool vectors, bool even, Launch&& launch) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  if (vectors && even) {
    launch(Constant<kWidth>{}, Constant<1>{}, std::true_type{});
  } else if (vectors) {
    launch(Constant<kWidth>{}, Constant<1>{}, std::false_type{});
  } else if (even) {
    launch(Constant<1>{}, Constant<kSingles>{}, std::true_type{});
  } else {
    launch(Constant<1>{}, Constant<1>{}, std::false_type{});
  }
}

// Rows that follow one another in all tensors are one: then vectors fit, however long a row was.
inline void fold(int64_t& rows, int64_t& hidden, std::initializer_list<Rows*> tensors) {
  for (const Rows* tensor : tensors) {
    if (tensor->dims != 1 || tensor->strides[0] != hidden) return;
  }
  hidden *= rows;
  rows = 1;
  for (Rows* tensor : tensors) tensor->dims = 0;
}

// Calls `launch(piece, blocks)` until all elements had their turn.
template <int kWidth, int kLoads, typename Launch>
void for_each_piece(int64_t rows, int64_t hidden, const Launch& launch) {
  constexpr int64_t kMost = int64_t{1} << 30;
  constexpr int64_t kTile = kThreads * kLoads;
  const int64_t in_row = hidden / kWidth;
  for (int64_t column = 0; column < in_row; column += kMost) {
    const auto columns = static_cast<uint32_t>(std::min(kMost, in_row - column));
    const int64_t step = kMost / columns;
    for (int64_t row = 0; row < rows; row += step) {
      const auto count = static_cast<uint32_t>(std::min(step, rows - row) * columns);
      launch(Piece{row, column * kWidth, count, columns, Divider(columns)},
             static_cast<unsigned>((count + kTile - 1) / kTile));
    }
  }
}

}  // namespace geglu
