// The second stage of sums over rows, on CUDA.
//
// Reads:    the partial sums, which the first stage just left in the L2 cache; scale, weight and bias.
// Writes:   the gradients that are asked for.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// The order of each sum is fixed, so that equal inputs give equal bits. Where the device can, the blocks are there
// before the first stage ends, and wait for it: they are small, so that they find room beside its blocks.
#include "adaln_cuda/device.cuh"
#include "adaln_cuda/reduce.cuh"

namespace adaln {
namespace {

constexpr int kAcross = 8, kParts = 16;  // threads of a block: vectors side by side, and parts at a time
constexpr int kWarps = kAcross * kParts / kWarp;
constexpr int kBatch = 9;  // parts that a thread asks for together: with 132 processors, all of its own

__device__ __forceinline__ float value_at(const void* data, Type type, int64_t index) {
  if (type == Type::float16) return decode(static_cast<const __half*>(data)[index]);
  if (type == Type::bfloat16) return decode(static_cast<const __nv_bfloat16*>(data)[index]);
  return static_cast<const float*>(data)[index];
}

__device__ __forceinline__ void write(void* data, Type type, int64_t index, float value) {
  if (type == Type::float16) {
    static_cast<__half*>(data)[index] = encode<__half>(value);
  } else if (type == Type::bfloat16) {
    static_cast<__nv_bfloat16*>(data)[index] = encode<__nv_bfloat16>(value);
  } else {
    static_cast<float*>(data)[index] = value;
  }
}

// Sums over the parts of the groups from `begin` to `end`, times `factor` or 1 + the groups' scale. The threads in
// front get them.
template <int kWidth>
__device__ __forceinline__ void sum_parts(const Reduction& reduction, const Term& term, bool scaled, int64_t begin,
                                          int64_t end, int64_t column, float (&sums)[kWidth]) {
  __shared__ float of_warps[kWarps][kAcross][kWidth];
  const Sums& all = reduction.sums;
  // Of the threads below one another, each group has as many, if there are enough.
  const int of_group = end - begin < kParts ? kParts / static_cast<int>(end - begin) : 1;
  const int64_t stride = of_group * all.count * reduction.hidden;
  const int count = static_cast<int>(all.parts);
  const int first_group = threadIdx.y / of_group, first_part = threadIdx.y - first_group * of_group;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sums[j] = 0.0f;
  if (column < reduction.hidden) {
    for (int64_t group = begin + first_group; group < end; group += kParts / of_group) {
      const float* from =
          all.partial + ((group * all.parts + first_part) * all.count + term.sum) * reduction.hidden + column;
      const void* const factor = scaled ? reduction.scale.rows.data : term.factor.data;
      const Type type = scaled ? reduction.scale.type : term.factor.type;
      const int64_t index = column + (scaled ? reduction.scale.rows.offset(group) : 0);
      float parts[kWidth] = {}, factors[kWidth] = {};
      for (int first = first_part; first < count; first += kBatch * of_group) {
        float more[kBatch][kWidth];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) more[i][j] = 0.0f;
          if (first + i * of_group < count) load_floats(from, more[i]);
          from += stride;
        }
        if (first == first_part) {  // on its way together with the parts
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            factors[j] = factor == nullptr ? 1.0f : value_at(factor, type, index + j) + (scaled ? 1.0f : 0.0f);
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) parts[j] += more[i][j];
        }
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[j] += parts[j] * factors[j];
    }
  }
  // The lanes of a warp have several parts of the same columns.
#pragma unroll
  for (int distance = kAcross; distance < kWarp; distance *= 2) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sums[j] += __shfl_xor_sync(kAllLanes, sums[j], distance);
  }
  const int warp = threadIdx.y / (kWarp / kAcross);
  if (threadIdx.y % (kWarp / kAcross) == 0) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) of_warps[warp][threadIdx.x][j] = sums[j];
  }
  __syncthreads();
  if (threadIdx.y == 0) {
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[j] += of_warps[i][threadIdx.x][j];
    }
  }
  __syncthreads();
}

template <int kWidth>
__global__ void __launch_bounds__(kAcross* kParts)
    reduce_kernel(const __grid_constant__ Reduction reduction, unsigned blocks_in_a_row) {
  const Total& total = reduction.totals[blockIdx.y];
  const int64_t group = blockIdx.x / blocks_in_a_row;
  const int64_t column = (static_cast<int64_t>(blockIdx.x % blocks_in_a_row) * kAcross + threadIdx.x) * kWidth;
  let_next_begin();
  if (total.of_all_groups && group > 0) return;
  wait_for_previous();
  const bool scaled = total.of_all_groups && reduction.scale.rows.data != nullptr;
  const int64_t end = total.of_all_groups ? reduction.sums.groups : group + 1;
  float result[kWidth] = {};
  for (int i = 0; i < total.count; ++i) {
    float sums[kWidth];
    sum_parts(reduction, total.terms[i], scaled, group, end, column, sums);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] += sums[j];
  }
  if (threadIdx.y > 0 || column >= reduction.hidden) return;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) write(total.data, total.type, group * reduction.hidden + column + j, result[j]);
}

template <int kWidth>
cudaError_t launch(const Reduction& reduction, cudaStream_t stream) {
  constexpr int kColumns = kAcross * kWidth;
  const auto blocks = static_cast<unsigned>((reduction.hidden + kColumns - 1) / kColumns);
  const dim3 grid(blocks * static_cast<unsigned>(reduction.sums.groups), reduction.count);
  return launch_early(reduce_kernel<kWidth>, grid, dim3(kAcross, kParts), 0, stream, reduction, blocks);
}

}  // namespace

cudaError_t reduce(const Reduction& reduction, cudaStream_t stream) {
  if (reduction.count == 0) return cudaSuccess;
  return reduction.hidden % 4 == 0 ? launch<4>(reduction, stream) : launch<1>(reduction, stream);
}

}  // namespace adaln
