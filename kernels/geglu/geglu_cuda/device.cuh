// Device code of both passes: arithmetic, and the mapping of elements to threads.
//
// Reads:    nothing of its own; the kernels pass the addresses.
// Must not: depend on the pass.
//
// Vectors (or single elements, where rows are not 16-byte aligned) are numbered over all rows, and each block takes a
// contiguous range of numbers. Threads are idle at the end of a tensor only, not at the end of each row.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "geglu/activation.h"
#include "geglu/problem.h"
#include "kit/division.cuh"
#include "kit/elements.cuh"
#include "kit/launch.cuh"

namespace geglu {

using namespace kit;

// Approximate instructions of the GPU. Their error is below that of `Fast`'s polynomial.
struct CudaIntrinsics {
  static __device__ __forceinline__ float exp2(float x) { return exp2_approximate(x); }
  static __device__ __forceinline__ float reciprocal(float x) { return __fdividef(1.0f, x); }
};

template <typename T>
using MathFor = std::conditional_t<std::is_same_v<T, float>, Accurate, Fast<CudaIntrinsics>>;

// The vectors of one launch: at most 2^30, so that 32-bit arithmetic numbers them. A vector may be a single element.
struct Chunk {
  int64_t first_row, first_column;
  uint32_t count, columns;  // vectors in the chunk and per row
  FastDivisor by_columns;

  // Threads past the end load the last vector again, which costs less than a branch around each load.
  __device__ __forceinline__ uint32_t clamped(uint32_t vector) const { return min(vector, count - 1); }

  __device__ __forceinline__ uint32_t row(uint32_t vector) const { return by_columns(vector); }
};

// Addresses of a chunk's vectors in a tensor with evenly strided rows.
template <typename T, int kWidth>
class StridedRows {
 public:
  StridedRows(void* data, int64_t stride, const Chunk& chunk)
      : start_(static_cast<T*>(data) + chunk.first_row * stride + chunk.first_column),
        gap_(stride - static_cast<int64_t>(chunk.columns) * kWidth) {}
  StridedRows(const Rows& rows, const Chunk& chunk)
      : StridedRows(const_cast<void*>(rows.data), rows.dims == 0 ? 0 : rows.strides[0], chunk) {}

  // `row` is the vector's row in the chunk.
  __device__ __forceinline__ T* at(uint32_t vector, uint32_t row) const {
    return start_ + static_cast<int64_t>(vector) * kWidth + row * gap_;
  }

 private:
  T* start_;
  int64_t gap_;  // elements from the end of a row to the start of the next
};

// The launch configuration of aligned rows (`kVectors`) and of others, tuned on an H100 80GB HBM3 in bfloat16.
// Aligned rows have one vector per thread and input: blocks are short, and PDL hides their start (1.00 to 1.04 of copy
// speed, 24 MB to 1.3 GB). Others have several elements, as each load is small (backward 0.93 of it at 4096x4097).
template <typename T, bool kVectors>
struct KernelConfig {
  static constexpr int kThreads = 256, kLoads = kVectors ? 1 : 4;
  static constexpr int kWidth = kVectors ? kVectorBytes / sizeof(T) : 1;  // elements per load

  using Rows = StridedRows<T, kWidth>;
};

// Calls `launch(config, chunk, blocks)` with the KernelConfig for a call and each chunk of at most 2^30 vectors.
template <typename T, typename Launch>
void for_each_chunk(bool vectors, int64_t rows, int64_t hidden, const Launch& launch) {
  constexpr int64_t kMaxVectors = int64_t{1} << 30;
  const auto launch_all = [&](auto config) {
    using Config = decltype(config);
    constexpr int64_t kTile = Config::kThreads * Config::kLoads;
    const int64_t vectors_per_row = hidden / Config::kWidth;
    for (int64_t column = 0; column < vectors_per_row; column += kMaxVectors) {
      const auto columns = static_cast<uint32_t>(std::min(kMaxVectors, vectors_per_row - column));
      const int64_t step = kMaxVectors / columns;
      for (int64_t row = 0; row < rows; row += step) {
        const auto count = static_cast<uint32_t>(std::min(step, rows - row) * columns);
        launch(config, Chunk{row, column * Config::kWidth, count, columns, fast_divisor(columns)},
               static_cast<unsigned>((count + kTile - 1) / kTile));
      }
    }
  };
  vectors ? launch_all(KernelConfig<T, true>{}) : launch_all(KernelConfig<T, false>{});
}

}  // namespace geglu
