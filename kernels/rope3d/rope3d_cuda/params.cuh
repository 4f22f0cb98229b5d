// Parameters of the rotation kernel: the tensors, the tables of angles, and the mapping of tokens and heads to threads.
//
// Reads:    nothing.
// Must not: launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kit/division.cuh"
#include "kit/elements.cuh"
#include "rope3d/problem.h"
#include "rope3d_cuda/launch_plan.h"

namespace rope3d {

using kit::FastDivisor, kit::fast_divisor;

// A tensor that is read or written. Strides are in vectors: of a column's with a 32-bit Index, of one element with a
// 64-bit Index.
template <typename Index>
struct TensorLayout {
  const void* data;
  Index batch, token, head;

  __device__ __forceinline__ Index offset(uint32_t of_sequence, uint32_t of_token, uint32_t of_head) const {
    return of_sequence * batch + of_token * token + of_head * head;
  }
};

template <typename Index>
TensorLayout<Index> tensor_layout(const void* data, const Strides& strides, int64_t elements_of_vector) {
  const auto vectors = [=](int64_t stride) { return static_cast<Index>(stride / elements_of_vector); };
  return {data, vectors(strides.batch), vectors(strides.token), vectors(strides.head)};
}

// How tokens, or groups of heads, are numbered: a block has `in_block` of them, and the number grows by `in_y` with
// threadIdx.y and by `in_z` with threadIdx.z. One of the two factors is 1, the other 0.
struct ThreadMapping {
  uint32_t in_block, in_y, in_z;
};

// threadIdx.x counts the columns of a head. threadIdx.y counts groups of heads and threadIdx.z tokens; where the stride
// of a token is smaller than that of a head, it is the other way round.
template <typename Index>
struct Params {
  TensorLayout<Index> from[kMaxSides], to[kMaxSides];
  uint32_t sequences, tokens_per_sequence;
  uint32_t columns;
  uint32_t heads[kMaxSides], groups[kMaxSides];  // a thread has the heads group, group + groups, ...
  uint32_t first_k_block;                        // in blockIdx.z, where blocks have heads of one tensor only
  bool alternate_sides;                          // instead, blocks of q and of k alternate in blockIdx.x
  bool early_trigger;
  bool interleave_sequences;
  ThreadMapping token_mapping, group_mapping;
  FastDivisor block_divisor;  // by the sequences if they are interleaved, else by the blocks of a sequence
  uint32_t prefix;
  int pairs, passthrough, first_rotated;
  bool half, vectorized_table;
  float sign;  // of the sines: -1 for the transposed matrix
  union {
    struct {
      const float* table;
      FastDivisor by_width, by_height;
      int stride, second_row, third_row;                         // in elements; of the first rows of the axes
      int second_begin, third_begin, second_first, third_first;  // pairs
    } grid;
    struct {
      const void* cos;
      const void* sin;
      int64_t batch_stride, row_stride, pair_stride, second;
      Type type;
    } tokens;
  };
  // Bytes to prefetch per token, or per head of one where the stride of a token is the smaller one; or 0. Last, so that
  // short launches, which do not prefetch, read fewer cache lines of parameters.
  uint32_t prefetch_bytes[kMaxSides];
};

// Whether load_vectors may be used: the entries of a row are adjacent, every table row is 16-byte aligned, and only
// whole columns are rotated.
inline bool is_table_vectorizable(const Tokens& table, int64_t pairs, int64_t pairs_per_column) {
  const int64_t element = kit::bytes_of(table.type);
  const auto whole = [=](int64_t stride) { return stride * element % kit::kVectorBytes == 0; };
  return table.pair_stride == (table.second == 1 ? 2 : 1) && pairs % pairs_per_column == 0 && kit::aligned(table.cos) &&
         kit::aligned(table.sin) && whole(table.batch_stride) && whole(table.row_stride);
}

// Whether every vector of every head is aligned and a 32-bit index reaches the last one.
inline bool is_vectorizable(const Rotation& problem, const void* data, const Strides& strides, int64_t heads,
                            int64_t element_bytes, int64_t vector_bytes = kit::kVectorBytes) {
  const auto whole = [=](int64_t stride) { return stride * element_bytes % vector_bytes == 0; };
  const int64_t last = (problem.batch - 1) * strides.batch + (problem.tokens - 1) * strides.token +
                       (heads - 1) * strides.head + problem.width;
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(vector_bytes) == 0 && whole(strides.batch) &&
         whole(strides.token) && whole(strides.head) && last * element_bytes / vector_bytes <= UINT32_MAX;
}

}  // namespace rope3d
