// RMSNorm forward, without the rotation, and its backward pass with the rotation: the general kernels, for rows of any
// length, stride and alignment. After the forward pass, the rotation's own kernel runs in place.
//
// Reads:    q and k, or them and the gradients, each row twice; the weights, and backward the tables.
// Writes:   the normalized rows; or the gradients of q and k, and partial sums of the weights'.
// Must not: use atomics: equal inputs give equal bits.
//
// A block loops over rows of one side. Each thread has the same elements of every row.
#pragma once

#include "kit/elements.cuh"
#include "kit/group_sums.cuh"
#include "kit/launch.cuh"
#include "rope3d/problem.h"
#include "rope3d_cuda/launch_table.h"

namespace rope3d {

using namespace kit;

// A row, and access to its elements by their number in the row.
template <typename T>
struct GeneralRow {
  const NormRotation& problem;
  int side;
  int64_t sequence, token, first_head;

  __device__ GeneralRow(const NormRotation& of, int of_side, int64_t number) : problem(of), side(of_side) {
    const int64_t rows = problem.rows_per_token(side), all_tokens = number / rows;
    first_head = number - all_tokens * rows;
    sequence = all_tokens / problem.rotation.tokens;
    token = all_tokens - sequence * problem.rotation.tokens;
  }

  __device__ int64_t offset(const Strides& strides, int64_t element) const {
    const int64_t width = problem.rotation.width, head = element / width;
    return sequence * strides.batch + token * strides.token + (first_head + head) * strides.head + element -
           head * width;
  }
  __device__ float load(const void* data, const Strides& strides, int64_t element) const {
    return decode(static_cast<const T*>(data)[offset(strides, element)]);
  }
  // An element of the gradient, rotated by the transposed matrix.
  __device__ float load_gradient(int64_t element) const {
    const Rotation& rotation = problem.rotation;
    const Side& from = rotation.sides[side];
    const float grad = load(from.from, from.from_strides, element);
    const int64_t of_head = element % rotation.width;
    if (token < rotation.prefix || of_head >= 2 * rotation.pairs) return grad;
    const int64_t pair = rotation.half ? of_head % rotation.pairs : of_head / 2;
    const bool second = rotation.half ? of_head >= rotation.pairs : of_head % 2 != 0;
    const int64_t distance = rotation.half ? rotation.pairs : 1;
    const float other = load(from.from, from.from_strides, second ? element - distance : element + distance);
    const Tokens& table = rotation.table;
    const int64_t entry =
        sequence * table.batch_stride + (token - rotation.prefix) * table.row_stride + pair * table.pair_stride;
    const float cos = load_as(table.type, table.cos, entry + (second ? table.second : 0));
    const float sin = load_as(table.type, table.sin, entry + (second ? 0 : table.second));
    return grad * cos + (second ? -other : other) * sin;
  }
  __device__ float factor(int64_t element) const {
    const SideNorm& norm = problem.norms[side];
    return norm.weight.data == nullptr ? 1.0f : load_as(norm.weight.type, norm.weight.data, element) + problem.offset;
  }
};

// blockIdx.y: the side.
template <typename T, bool kBackward>
__global__ void __launch_bounds__(kGeneralThreads) norm_general_kernel(const __grid_constant__ NormRotation problem) {
  __shared__ float4 scratch[2][kGeneralThreads / kWarp];
  const int side_number = static_cast<int>(blockIdx.y);
  const Rotation& rotation = problem.rotation;
  const Side& side = rotation.sides[side_number];
  const SideNorm& norm = problem.norms[side_number];
  const void* const x_data = kBackward ? norm.x : side.from;
  const Strides& x_strides = kBackward ? norm.x_strides : side.from_strides;
  const int64_t elements = problem.row_elements(side_number);
  const int64_t rows = elements == 0 ? 0 : rotation.batch * rotation.tokens * problem.rows_per_token(side_number);
  const float inverse_of_elements = 1.0f / static_cast<float>(elements);
  grid_wait();
  float* partial = kBackward ? norm.partial : nullptr;
  if (partial != nullptr) {
    partial += blockIdx.x * elements;
    for (int64_t i = threadIdx.x; i < elements; i += blockDim.x) partial[i] = 0.0f;
  }
  int half = 0;
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const GeneralRow<T> row(problem, side_number, number);
    float sums[4] = {};  // of squares, and of products with the gradient
    for (int64_t i = threadIdx.x; i < elements; i += blockDim.x) {
      const float x = row.load(x_data, x_strides, i);
      sums[0] += x * x;
      if (kBackward) sums[1] += x * (row.load_gradient(i) * row.factor(i));
    }
    sum_over_group(sums, scratch[half]);
    half ^= 1;  // a slow warp may still read this half while the next sums are written
    const float rstd = rsqrtf(sums[0] * inverse_of_elements + problem.eps);
    const float projection = rstd * rstd * (sums[1] * inverse_of_elements);
    for (int64_t i = threadIdx.x; i < elements; i += blockDim.x) {
      const float x = row.load(x_data, x_strides, i), factor = row.factor(i);
      T& to = static_cast<T*>(side.to)[row.offset(side.to_strides, i)];
      float result = x * rstd;
      if constexpr (kBackward) {
        const float grad = row.load_gradient(i);
        if (partial != nullptr) partial[i] += grad * result;
        result = rstd * (grad * factor - x * projection);
      } else {
        if (problem.rounded_before_weight) result = decode(encode<T>(result));
        result *= factor;
      }
      to = encode<T>(result);
    }
  }
  trigger_next_grid();
}

}  // namespace rope3d
