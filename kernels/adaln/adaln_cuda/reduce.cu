// The second stage of sums over rows, on CUDA.
//
// Reads:    the partial sums, which the first stage just left in the L2 cache; scale, weight and bias.
// Writes:   the gradients that are asked for.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// The order of each sum is fixed, so that equal inputs give equal bits.
#include "adaln_cuda/device.cuh"
#include "adaln_cuda/reduce.cuh"

namespace adaln {
namespace {

constexpr int kColumns = 32, kParts = 32;  // of a block
constexpr int kMostSums = 3;

__device__ __forceinline__ float value_at(const void* data, Type type, int64_t index) {
  if (type == Type::float16) return decode(static_cast<const __half*>(data)[index]);
  if (type == Type::bfloat16) return decode(static_cast<const __nv_bfloat16*>(data)[index]);
  return static_cast<const float*>(data)[index];
}

__device__ __forceinline__ void write(const Total& total, int64_t index, float value) {
  if (total.data == nullptr) return;
  if (total.type == Type::float16) {
    static_cast<__half*>(total.data)[index] = encode<__half>(value);
  } else if (total.type == Type::bfloat16) {
    static_cast<__nv_bfloat16*>(total.data)[index] = encode<__nv_bfloat16>(value);
  } else {
    static_cast<float*>(total.data)[index] = value;
  }
}

// Sums over the threads of a column. True for the one that gets them.
__device__ __forceinline__ bool sum_over_column(float (&sums)[kMostSums], int count) {
  __shared__ float of_threads[kMostSums][kParts][kColumns];
  for (int k = 0; k < count; ++k) of_threads[k][threadIdx.y][threadIdx.x] = sums[k];
  __syncthreads();
  if (threadIdx.y > 0) return false;
  for (int k = 0; k < count; ++k) {
    for (int i = 1; i < kParts; ++i) sums[k] += of_threads[k][i][threadIdx.x];
  }
  return true;
}

__global__ void __launch_bounds__(kColumns* kParts)
    modulation_kernel(const __grid_constant__ Reduction reduction, unsigned blocks_in_a_row) {
  const int64_t hidden = reduction.hidden, group = blockIdx.x / blocks_in_a_row;
  const int64_t column = static_cast<int64_t>(blockIdx.x % blocks_in_a_row) * kColumns + threadIdx.x;
  const Sums& all = reduction.sums;
  float sums[kMostSums] = {};
  if (column < hidden) {
    for (int64_t part = threadIdx.y; part < all.parts; part += kParts) {
      const float* from = all.partial + (group * all.parts + part) * all.count * hidden + column;
#pragma unroll
      for (int k = 0; k < kMostSums; ++k) {
        if (k < all.count) sums[k] += from[k * hidden];
      }
    }
  }
  if (!sum_over_column(sums, all.count) || column >= hidden) return;
  const int64_t index = group * hidden + column;
  write(reduction.gate, index, reduction.gate_sum == 0 ? sums[0] : sums[kGate]);
  write(reduction.shift, index, sums[kSlope]);
  if (reduction.scale.data != nullptr) {
    const Parameter &weight = reduction.weight_itself, &bias = reduction.bias_itself;
    float sum = sums[kSlopeTimesNormed];
    if (weight.data != nullptr) sum *= value_at(weight.data, weight.type, column);
    if (bias.data != nullptr) sum += value_at(bias.data, bias.type, column) * sums[kSlope];
    write(reduction.scale, index, sum);
  }
}

__global__ void __launch_bounds__(kColumns* kParts) parameter_kernel(const __grid_constant__ Reduction reduction) {
  const int64_t hidden = reduction.hidden, column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const Sums& all = reduction.sums;
  const Modulation& scale = reduction.scale_itself;
  float sums[kMostSums] = {};
  if (column < hidden) {
    for (int64_t part = threadIdx.y; part < all.groups * all.parts; part += kParts) {
      const float* from = all.partial + part * all.count * hidden + column;
      float factor = 1.0f;
      if (scale.rows.data != nullptr) {
        factor += value_at(scale.rows.data, scale.type, scale.rows.offset(part / all.parts) + column);
      }
      sums[kSlopeTimesNormed] += factor * from[kSlopeTimesNormed * hidden];
      sums[kSlope] += factor * from[kSlope * hidden];
    }
  }
  if (!sum_over_column(sums, 2) || column >= hidden) return;
  write(reduction.weight, column, sums[kSlopeTimesNormed]);
  write(reduction.bias, column, sums[kSlope]);
}

}  // namespace

cudaError_t reduce(const Reduction& reduction, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((reduction.hidden + kColumns - 1) / kColumns);
  const dim3 threads(kColumns, kParts);
  if (reduction.scale.data != nullptr || reduction.shift.data != nullptr || reduction.gate.data != nullptr) {
    const auto groups = static_cast<unsigned>(reduction.sums.groups);
    modulation_kernel<<<blocks * groups, threads, 0, stream>>>(reduction, blocks);
  }
  if (reduction.weight.data != nullptr || reduction.bias.data != nullptr) {
    parameter_kernel<<<blocks, threads, 0, stream>>>(reduction);
  }
  return cudaGetLastError();
}

}  // namespace adaln
