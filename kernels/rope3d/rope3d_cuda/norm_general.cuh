// RMSNorm with rotary embedding: the general kernels of both passes, for rows of any length, stride and alignment, and
// tables of any dtype. The dtype of every tensor is known at run time only: these kernels save bytes, not time.
//
// Reads:    what the fast kernels read, but each row twice.
// Writes:   what the fast kernels write.
// Must not: use atomics: equal inputs give equal bits.
//
// A block loops over rows of one side. Its threads take pairs of elements, each thread the same ones of every row.
#pragma once

#include "kit/launch.cuh"
#include "rope3d/norm_problem.h"
#include "rope3d_cuda/norm_launch_table.h"

namespace rope3d {

using namespace kit;

__device__ __forceinline__ float decode_entry(Type type, const void* table, int64_t index) {
  switch (type) {
    case Type::float16:
      return decode(static_cast<const __half*>(table)[index]);
    case Type::bfloat16:
      return decode(static_cast<const __nv_bfloat16*>(table)[index]);
    default:
      return static_cast<const float*>(table)[index];
  }
}

__device__ __forceinline__ void encode_entry(Type type, void* to, int64_t index, float value) {
  switch (type) {
    case Type::float16:
      static_cast<__half*>(to)[index] = encode<__half>(value);
      break;
    case Type::bfloat16:
      static_cast<__nv_bfloat16*>(to)[index] = encode<__nv_bfloat16>(value);
      break;
    default:
      static_cast<float*>(to)[index] = value;
  }
}

__device__ __forceinline__ float round_to(Type type, float value) {
  switch (type) {
    case Type::float16:
      return decode(encode<__half>(value));
    case Type::bfloat16:
      return decode(encode<__nv_bfloat16>(value));
    default:
      return value;
  }
}

// A row, and access to its pairs by their number in the row.
struct GeneralRow {
  const NormRotation& problem;
  int side;
  int64_t sequence, token, first_head;

  struct Pair {
    int64_t head;
    int64_t first, second;  // elements of the head
    float cos, sin;
  };

  __device__ GeneralRow(const NormRotation& of, int of_side, int64_t number) : problem(of), side(of_side) {
    const int64_t rows = problem.rows_per_token(side), all_tokens = number / rows;
    first_head = number - all_tokens * rows;
    sequence = all_tokens / problem.rotation.tokens;
    token = all_tokens - sequence * problem.rotation.tokens;
  }

  __device__ Pair pair(int64_t number) const {
    const Rotation& rotation = problem.rotation;
    const int64_t of_head = rotation.width / 2, head = number / of_head, p = number - head * of_head;
    Pair pair{head, 2 * p, 2 * p + 1, 1.0f, 0.0f};
    if (p >= rotation.pairs) return pair;
    if (rotation.half) {
      pair.first = p;
      pair.second = p + rotation.pairs;
    }
    if (token < rotation.prefix) return pair;
    const Tokens& table = rotation.table;
    const int64_t entry =
        sequence * table.batch_stride + (token - rotation.prefix) * table.row_stride + p * table.pair_stride;
    pair.cos = decode_entry(table.type, table.cos, entry);
    pair.sin = decode_entry(table.type, table.sin, entry);
    return pair;
  }

  // The index of the first element of a pair's head.
  __device__ int64_t head(const Strides& strides, const Pair& pair) const {
    return sequence * strides.batch + token * strides.token + (first_head + pair.head) * strides.head;
  }

  __device__ void load(const void* data, const Strides& strides, const Pair& pair, float& a, float& b) const {
    const int64_t from = head(strides, pair);
    a = decode_entry(problem.rotation.type, data, from + pair.first);
    b = decode_entry(problem.rotation.type, data, from + pair.second);
  }
  __device__ void store(const Pair& pair, float a, float b) const {
    const Side& target = problem.rotation.sides[side];
    const int64_t to = head(target.to_strides, pair);
    encode_entry(problem.rotation.type, target.to, to + pair.first, a);
    encode_entry(problem.rotation.type, target.to, to + pair.second, b);
  }

  __device__ int64_t weight_index(const Pair& pair, int64_t element) const {
    return pair.head * problem.rotation.width + element;
  }
  __device__ float factor(const Pair& pair, int64_t element) const {
    const SideNorm& norm = problem.norms[side];
    if (norm.weight == nullptr) return 1.0f;
    return decode_entry(norm.weight_type, norm.weight, weight_index(pair, element)) + problem.offset;
  }
  // The result of the norm, before the rotation.
  __device__ float normed(float value, float factor) const {
    const Type type = problem.rotation.type;
    return round_to(type, (problem.rounded_before_weight ? round_to(type, value) : value) * factor);
  }
};

// Adds up the sums of the threads of a block, for all of them.
template <int kSums>
__device__ __forceinline__ void sum_over_general_block(float (&sums)[kSums]) {
  __shared__ float of_warps[kGeneralThreads / 32][kSums];
#pragma unroll
  for (float& sum : sums) {
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  __syncthreads();  // the sums of the row before have been read
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) of_warps[threadIdx.x / 32][i] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    sums[i] = 0.0f;
#pragma unroll 1
    for (uint32_t warp = 0; warp < blockDim.x / 32; ++warp) sums[i] += of_warps[warp][i];
  }
}

// blockIdx.y: the side. Backward, a block writes its part of the weight's gradient, if that is requested.
static __global__ void __launch_bounds__(kGeneralThreads)
    norm_rotate_general_kernel(const __grid_constant__ NormRotation problem, bool backward) {
  const int number_of_side = static_cast<int>(blockIdx.y);
  const Rotation& rotation = problem.rotation;
  const Side& side = rotation.sides[number_of_side];
  const SideNorm& norm = problem.norms[number_of_side];
  const void* x = backward ? norm.x : side.from;
  const Strides x_strides = backward ? norm.x_strides : side.from_strides;
  const int64_t elements = problem.row_elements(number_of_side), pairs = elements / 2;
  const int64_t rows = elements == 0 ? 0 : rotation.batch * rotation.tokens * problem.rows_per_token(number_of_side);
  grid_wait();
  float* partial = norm.partial;
  if (partial != nullptr) {
    partial += blockIdx.x * elements;
#pragma unroll 1
    for (int64_t i = threadIdx.x; i < elements; i += blockDim.x) partial[i] = 0.0f;
    __syncthreads();
  }
#pragma unroll 1
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const GeneralRow row(problem, number_of_side, number);
    // Of squares, and of products with the gradient.
    float sums[2] = {}, rstd = 0.0f, projection = 0.0f;
    // The first pass sums up, the second stores.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
      for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
        const auto pair = row.pair(i);
        const float factor_a = row.factor(pair, pair.first), factor_b = row.factor(pair, pair.second);
        float a, b;
        row.load(x, x_strides, pair, a, b);
        if (backward) {
          float to_a, to_b;
          row.load(side.from, side.from_strides, pair, to_a, to_b);
          const float grad_a = to_a * pair.cos + to_b * pair.sin, grad_b = to_b * pair.cos - to_a * pair.sin;
          sums[1] += a * (grad_a * factor_a) + b * (grad_b * factor_b);
          if (pass == 1 && partial != nullptr) {
            partial[row.weight_index(pair, pair.first)] += grad_a * (a * rstd);
            partial[row.weight_index(pair, pair.second)] += grad_b * (b * rstd);
          }
          if (pass == 1)
            row.store(pair, rstd * (grad_a * factor_a - a * projection), rstd * (grad_b * factor_b - b * projection));
        } else if (pass == 1) {
          a = row.normed(a * rstd, factor_a);
          b = row.normed(b * rstd, factor_b);
          row.store(pair, a * pair.cos - b * pair.sin, a * pair.sin + b * pair.cos);
        }
        sums[0] += a * a + b * b;
      }
      if (pass == 1) break;
      sum_over_general_block(sums);
      const auto count = static_cast<float>(elements);
      rstd = rsqrtf(sums[0] / count + problem.eps);
      projection = rstd * rstd * (sums[1] / count);
    }
  }
  trigger_next_grid();
}

}  // namespace rope3d
