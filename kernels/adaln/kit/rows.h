// The element types, and where the rows of a tensor lie, in plain C++, so that device code compiles without Torch and
// once for every Torch.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// Strides and sizes are counted in elements; the elements of a row are adjacent.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KIT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KIT_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace kit {

enum class Type : int { float32, float16, bfloat16 };

// Leading dimensions that do not fold into one, at most; a tensor with more of them is copied before it comes here.
constexpr int kMaxDims = 4;

// Where the rows of a tensor start. With more than one dimension there are fewer than 2^31 rows, so that a division by
// a size, which takes a GPU several times as long with 64 bits, needs 32.
struct Rows {
  const void* data = nullptr;  // null: there is no such tensor
  int dims = 0;                // outermost first
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};

  KIT_HOST_DEVICE int64_t offset(int64_t row) const {
    if (dims <= 1) return row * strides[0];
    auto rest = static_cast<uint32_t>(row);
    int64_t sum = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int dim = dims - 1; dim > 0; --dim) {
      const auto size = static_cast<uint32_t>(sizes[dim]);
      sum += static_cast<int64_t>(rest % size) * strides[dim];
      rest /= size;
    }
    return sum + static_cast<int64_t>(rest) * strides[0];
  }
};

}  // namespace kit
