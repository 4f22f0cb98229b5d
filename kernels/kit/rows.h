// Dtypes and the layout of a tensor's rows, in plain C++: device code needs no Torch and is compiled once for all
// versions of it.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// Strides and sizes are in elements; the elements of a row are contiguous.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define KIT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KIT_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace kit {

enum class Type : int { float32, float16, bfloat16 };

constexpr int64_t bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

// A weight or a bias, the same for all rows.
struct Parameter {
  const void* data = nullptr;  // null: there is none
  Type type = Type::float32;   // float32, or the rows' dtype
};

// The most leading dimensions that Rows can describe after folding; the binding makes tensors with more contiguous.
constexpr int kMaxDims = 4;

// Row offsets of a tensor. With more than one dimension there are fewer than 2^31 rows, so that `offset` divides in 32
// bits: a 64-bit division takes a GPU several times as long.
struct Rows {
  const void* data = nullptr;  // null: the tensor is absent
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
