// RMSNorm with rotary embedding: the general kernels of both passes, for rows of any length, stride and alignment, and
// tables of any dtype.
//
// Reads:    the inputs of the fast kernels, each row twice.
// Writes:   the results of the fast kernels.
// Must not: use atomics: equal inputs give equal bits.
//
// A block loops over rows of one side. Its threads take pairs of elements, each thread the same ones of every row.
#pragma once

#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "rope3d/norm_problem.h"
#include "rope3d_cuda/norm_launch_table.h"

namespace rope3d {

using namespace kit;

// A row, and access to its pairs by their number in the row.
template <typename T>
struct GeneralRow {
  const NormRotation& problem;
  int side;
  int64_t sequence, token, first_head;

  struct Pair {
    int64_t head;
    int64_t first, second;  // elements of the head
    float cos[2], sin[2];   // of both elements
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
    Pair pair{head, 2 * p, 2 * p + 1, {1.0f, 1.0f}, {0.0f, 0.0f}};
    if (p >= rotation.pairs) return pair;
    if (rotation.half) {
      pair.first = p;
      pair.second = p + rotation.pairs;
    }
    if (token < rotation.prefix) return pair;
    const Tokens& table = rotation.table;
    const int64_t entry =
        sequence * table.batch_stride + (token - rotation.prefix) * table.row_stride + p * table.pair_stride;
    for (int i = 0; i < 2; ++i) {
      pair.cos[i] = load_as(table.type, table.cos, entry + i * table.second);
      pair.sin[i] = load_as(table.type, table.sin, entry + i * table.second);
    }
    return pair;
  }

  // The first element of a pair's head. T: with or without const.
  template <typename Element>
  __device__ Element* head(Element* data, const Strides& strides, const Pair& pair) const {
    return data + sequence * strides.batch + token * strides.token + (first_head + pair.head) * strides.head;
  }

  __device__ void load(const void* data, const Strides& strides, const Pair& pair, float& a, float& b) const {
    const T* from = head(static_cast<const T*>(data), strides, pair);
    a = decode(from[pair.first]);
    b = decode(from[pair.second]);
  }
  __device__ void store(const Pair& pair, float a, float b) const {
    const Side& target = problem.rotation.sides[side];
    T* to = head(static_cast<T*>(target.to), target.to_strides, pair);
    to[pair.first] = encode<T>(a);
    to[pair.second] = encode<T>(b);
  }

  __device__ int64_t weight_index(const Pair& pair, int64_t element) const {
    return pair.head * problem.rotation.width + element;
  }
  __device__ float factor(const Pair& pair, int64_t element) const {
    const SideNorm& norm = problem.norms[side];
    if (norm.weight == nullptr) return 1.0f;
    return load_as(norm.weight_type, norm.weight, weight_index(pair, element)) + problem.offset;
  }
};

// Adds up the sums of the threads of a block, for all of them.
template <int kSums>
__device__ __forceinline__ void sum_over_general_block(float (&sums)[kSums]) {
  __shared__ float of_warps[kGeneralThreads / kWarp][kSums];
#pragma unroll
  for (float& sum : sums) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
  }
  __syncthreads();  // the sums of the row before have been read
  if (threadIdx.x % kWarp == 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) of_warps[threadIdx.x / kWarp][i] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    sums[i] = 0.0f;
    for (uint32_t warp = 0; warp < blockDim.x / kWarp; ++warp) sums[i] += of_warps[warp][i];
  }
}

template <typename T>
__device__ __forceinline__ void norm_general_row(const GeneralRow<T>& row, int64_t pairs) {
  const NormRotation& problem = row.problem;
  const Side& side = problem.rotation.sides[row.side];
  float sums[1] = {};
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    float a, b;
    row.load(side.from, side.from_strides, row.pair(i), a, b);
    sums[0] += a * a + b * b;
  }
  sum_over_general_block(sums);
  const float rstd = rsqrtf(sums[0] / static_cast<float>(2 * pairs) + problem.eps);
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    const auto pair = row.pair(i);
    float a, b;
    row.load(side.from, side.from_strides, pair, a, b);
    const auto norm = [&](float value, int64_t element) {
      value *= rstd;
      if (problem.rounded_before_weight) value = decode(encode<T>(value));
      return decode(encode<T>(value * row.factor(pair, element)));
    };
    a = norm(a, pair.first);
    b = norm(b, pair.second);
    row.store(pair, a * pair.cos[0] - b * pair.sin[0], a * pair.sin[1] + b * pair.cos[1]);
  }
}

// Adds the row's terms of the weight's gradient to `partial`, if that is not null.
template <typename T>
__device__ __forceinline__ void differentiate_general_row(const GeneralRow<T>& row, int64_t pairs, float* partial) {
  const NormRotation& problem = row.problem;
  const Side& side = problem.rotation.sides[row.side];
  const SideNorm& norm = problem.norms[row.side];
  // x and the gradient of the normalized x, of a pair.
  const auto load_both = [&](const auto& pair, float& a, float& b, float& grad_a, float& grad_b) {
    row.load(norm.x, norm.x_strides, pair, a, b);
    float x, y;
    row.load(side.from, side.from_strides, pair, x, y);
    grad_a = x * pair.cos[0] + y * pair.sin[1];
    grad_b = y * pair.cos[1] - x * pair.sin[0];
  };
  float a, b, grad_a, grad_b, sums[2] = {};
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    const auto pair = row.pair(i);
    load_both(pair, a, b, grad_a, grad_b);
    sums[0] += a * a + b * b;
    sums[1] += a * (grad_a * row.factor(pair, pair.first)) + b * (grad_b * row.factor(pair, pair.second));
  }
  sum_over_general_block(sums);
  const auto elements = static_cast<float>(2 * pairs);
  const float rstd = rsqrtf(sums[0] / elements + problem.eps), projection = rstd * rstd * (sums[1] / elements);
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    const auto pair = row.pair(i);
    load_both(pair, a, b, grad_a, grad_b);
    if (partial != nullptr) {
      partial[row.weight_index(pair, pair.first)] += grad_a * (a * rstd);
      partial[row.weight_index(pair, pair.second)] += grad_b * (b * rstd);
    }
    row.store(pair, rstd * (grad_a * row.factor(pair, pair.first) - a * projection),
              rstd * (grad_b * row.factor(pair, pair.second) - b * projection));
  }
}

// blockIdx.y: the side.
template <typename T, bool kBackward>
__global__ void __launch_bounds__(kGeneralThreads)
    norm_rotate_general_kernel(const __grid_constant__ NormRotation problem) {
  const int side = static_cast<int>(blockIdx.y);
  const Rotation& rotation = problem.rotation;
  const int64_t elements = problem.row_elements(side);
  const int64_t rows = elements == 0 ? 0 : rotation.batch * rotation.tokens * problem.rows_per_token(side);
  grid_wait();
  float* partial = problem.norms[side].partial;
  if (kBackward && partial != nullptr) {
    partial += blockIdx.x * elements;
    for (int64_t i = threadIdx.x; i < elements; i += blockDim.x) partial[i] = 0.0f;
    __syncthreads();
  }
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const GeneralRow<T> row(problem, side, number);
    if constexpr (kBackward) {
      differentiate_general_row(row, elements / 2, partial);
    } else {
      norm_general_row(row, elements / 2);
    }
  }
  trigger_next_grid();
}

}  // namespace rope3d
