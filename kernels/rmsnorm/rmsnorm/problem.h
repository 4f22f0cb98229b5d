// What one call of a kernel works on, in plain C++, so that device code compiles without Torch and once for every
// Torch.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// In all of them: `rows` rows of `hidden` elements each, both at least 1; the elements of a row are adjacent; strides
// and sizes are counted in elements; rows that are written follow one another without gaps. The arithmetic is float32,
// and each result is rounded once.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define RMSNORM_INLINE __host__ __device__ __forceinline__
#else
#define RMSNORM_INLINE inline __attribute__((always_inline))
#endif

namespace rmsnorm {

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

  RMSNORM_INLINE int64_t offset(int64_t row) const {
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

struct Weight {
  const void* data = nullptr;  // null: all ones
  Type type = Type::float32;   // float32, or the type of the rows
};

// normed = round(sum * rstd * weight), where sum = round(x + residual), or x itself when there is no residual, and
// rstd = 1 / sqrt(mean(sum^2) + eps).
struct Forward {
  int64_t rows, hidden;
  Type type;  // of x, residual, normed and sum
  float eps;
  Rows x, residual;
  Weight weight;
  void* normed;
  void* sum;  // written exactly when there is a residual
};

// The gradients of `normed` with respect to its input x (plus grad_sum, when there is one) and to its weight. rstd is
// computed again from x, which is read anyway.
struct Backward {
  int64_t rows, hidden;
  Type type;  // of grad, x, grad_sum and grad_x
  float eps;
  Rows grad, x, grad_sum;
  Weight weight;
  void* grad_x;
  // The gradient of the weight is the sum over rows of float32 partial sums, of which there are `parts`, so that it
  // does not depend on the order in which threads finish. Null: not asked for.
  float* partial;  // [parts, hidden]
  int64_t parts;
  void* grad_weight;  // of the weight's type
};

}  // namespace rmsnorm
