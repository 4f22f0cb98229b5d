// The rotation kernel: q and k in one launch.
//
// Reads:    the tokens, each element once from memory, and the tables of cosines and sines.
// Writes:   the rotated tokens.
// Must not: access global memory before the grid wait, apart from the L2 prefetch.
//
// A thread has one column of a token, in two heads. It issues all loads before it uses any. More heads per thread would
// share more of the index arithmetic, but memory is fastest with short blocks that read one tensor and write one, so
// blocks have heads of q or of k where a token has enough of them.
//
// Work before the first load of a block delays the whole block, which counts most in short launches: offsets are 32-bit
// and in vectors, and the table entries of a token are loaded together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kit/async_copy.cuh"
#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "rope3d_cuda/angles.cuh"
#include "rope3d_cuda/params.cuh"

namespace rope3d {

using namespace kit;

// The work of a thread: one column of a token, in the heads of one group.
struct Work {
  uint32_t column;
  uint32_t sequence, token;
  uint32_t group;  // of heads
  uint32_t side;   // q or k; 0 if the thread has a head of both
};

template <int kRow, Source kSource, typename Index>
__device__ __forceinline__ Work assign_work(const Params<Index>& params) {
  constexpr int64_t kSideBlocks = kLaunchTable[kRow].side_blocks;
  Work work;
  work.column = blockIdx.y * blockDim.x + threadIdx.x;
  uint32_t x = blockIdx.x, z = blockIdx.z;
  work.side = 0;
  if (kSource == Source::tokens && params.alternate_sides) {
    work.side = x / kSideBlocks % kMaxSides;
    x = x / (kMaxSides * kSideBlocks) * kSideBlocks + x % kSideBlocks;
  } else if (!has_both_sides(kSource) && z >= params.first_k_block) {
    work.side = 1;
    z -= params.first_k_block;
  }
  const ThreadMapping &tokens = params.token_mapping, &groups = params.group_mapping;
  // The division is uniform over the block.
  uint32_t block;  // of the sequence
  if (params.interleave_sequences) {
    block = params.block_divisor(x, work.sequence);
  } else {
    work.sequence = params.block_divisor(x, block);
  }
  work.token = block * tokens.in_block + threadIdx.y * tokens.in_y + threadIdx.z * tokens.in_z;
  work.group = z * groups.in_block + threadIdx.y * groups.in_y + threadIdx.z * groups.in_z;
  return work;
}

// The tensor of a thread's i-th head.
template <Source kSource>
__device__ __forceinline__ uint32_t side_of(const Work& work, int i) {
  return has_both_sides(kSource) ? i % kMaxSides : work.side;
}

// The number of a thread's i-th head in its tensor.
template <Source kSource, typename Index>
__device__ __forceinline__ uint32_t head_of(const Params<Index>& params, const Work& work, int i) {
  return work.group +
         (has_both_sides(kSource) ? i / kMaxSides : i) * params.groups[has_both_sides(kSource) ? 0 : work.side];
}

// A column of a head: its first pair, and the offsets of its vectors in the head, in vectors.
struct Column {
  int pair;
  uint32_t first, second;
};

template <int kWidth, bool kSplit, typename Index>
__device__ __forceinline__ Column column_of(const Params<Index>& params, uint32_t number) {
  if constexpr (!kSplit) return {(static_cast<int>(number) * kWidth - params.first_rotated) / 2, number, 0};
  // The rotated columns come first, then those that are only copied.
  const int pair = static_cast<int>(number) * kWidth;
  const auto vectors = [](int elements) { return static_cast<uint32_t>(elements) / kWidth; };
  uint32_t first, second;
  if (pair >= params.pairs) {
    first = vectors(pair - params.pairs + (params.first_rotated > 0 ? 0 : 2 * params.pairs));
    second = first + vectors(params.passthrough) / 2;
  } else {
    first = vectors(params.first_rotated + (params.half ? pair : 2 * pair));
    second = first + (params.half ? vectors(params.pairs) : 1);
  }
  return {pair, first, second};
}

// Prefetches the block's tokens into L2 before the grid wait. L2 is coherent, so no stale data is loaded later. One
// thread prefetches all heads of a token, or all tokens of a head where the stride of a token is the smaller one.
template <typename Unit, int kHeads, Source kSource, typename Index>
__device__ __forceinline__ void prefetch_tokens([[maybe_unused]] const Params<Index>& params,
                                                [[maybe_unused]] const Work& work) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const ThreadMapping& tokens = params.token_mapping;
  if (work.column == 0 && !params.early_trigger && (params.prefetch_bytes[0] | params.prefetch_bytes[1]) != 0) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const uint32_t side = side_of<kSource>(work, i), head = head_of<kSource>(params, work, i);
      const uint32_t bytes = params.prefetch_bytes[side];
      if (bytes > 0 && head < params.heads[side] && (tokens.in_y ? threadIdx.y : head) == 0) {
        const TensorLayout<Index>& from = params.from[side];
        const Index offset = from.offset(work.sequence, work.token, head);
        const uint32_t count = tokens.in_y ? min(tokens.in_block, params.tokens_per_sequence - work.token) : 1;
        prefetch_to_l2(static_cast<const Unit*>(from.data) + offset, count * bytes);
      }
    }
  }
#endif
}

// Bit i is set if pair `pair + i` of the token is not rotated.
template <int kPairs, typename Index>
__device__ __forceinline__ uint32_t passthrough_mask(const Params<Index>& params, uint32_t token, int pair) {
  uint32_t mask = 0;
  if (token < params.prefix) {
    mask = (1u << kPairs) - 1;
  } else if (params.passthrough > 0) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) mask |= (pair + i < 0 || pair + i >= params.pairs) << i;
  }
  return mask;
}

// Rotates a column of two vectors or, where `kSplit` is false, of `a` alone.
template <bool kSplit, int kPairs, int kValues, typename T, int kWidth>
__device__ __forceinline__ void rotate_column(const Angles<kPairs, kValues>& angles, Vector<T, kWidth>& a,
                                              Vector<T, kWidth>& b) {
#if defined(__clang__)
  // Selections and whole vectors: clang makes a branch of each condition, and ptxas converts clang's elements one by
  // one.
  float values[2][kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    values[0][j] = decode(a, j);
    if (kSplit) values[1][j] = decode(b, j);
  }
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    float &x = kSplit ? values[0][j] : values[0][2 * j], &y = kSplit ? values[1][j] : values[0][2 * j + 1];
    float rotated_x = x, rotated_y = y;
    angles.template rotate<false>(j, rotated_x, rotated_y);
    const bool rotated = (angles.passthrough >> j & 1) == 0;
    x = rotated ? rotated_x : x;
    y = rotated ? rotated_y : y;
  }
  a = encode_all<T>(values[0]);
  if (kSplit) b = encode_all<T>(values[1]);
#else
  // By elements: with whole vectors nvcc's code takes up to 17 more registers, and up to 24 % more time (H100).
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    T& x = kSplit ? a.elements[j] : a.elements[2 * j];
    T& y = kSplit ? b.elements[j] : a.elements[2 * j + 1];
    if (angles.passthrough >> j & 1) continue;
    float first = decode(x), second = decode(y);
    angles.template rotate<false>(j, first, second);
    x = encode<T>(first);
    y = encode<T>(second);
  }
#endif
}

// kRow: of the launch table.
template <typename T, int kWidth, int kRow, Source kSource, typename Index>
__global__ void __launch_bounds__(kLaunchTable[kRow].max_threads)
    rotate_kernel(const __grid_constant__ Params<Index> params) {
  // Split: a column is two vectors, with the first and the second elements of its pairs. Else it is one vector of whole
  // pairs.
  constexpr bool kSplit = kLaunchTable[kRow].is(ColumnVectors::two);
  constexpr int kHeads = kLaunchTable[kRow].heads_per_thread;
  static_assert(kHeads % kMaxSides == 0);
  constexpr int kPairs = kSplit ? kWidth : kWidth / 2;
  using Unit = Vector<T, std::is_same_v<Index, uint32_t> ? kWidth : 1>;  // of strides and offsets
  if (params.early_trigger) trigger_next_grid();
  const Work work = assign_work<kRow, kSource>(params);
  if (work.sequence >= params.sequences || work.token >= params.tokens_per_sequence || work.column >= params.columns ||
      work.group >= params.groups[work.side]) {
    return;
  }
  const Column column = column_of<kWidth, kSplit>(params, work.column);
  prefetch_tokens<Unit, kHeads, kSource>(params, work);
  grid_wait();
  Vector<T, kWidth> a[kHeads], b[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const uint32_t side = side_of<kSource>(work, i), head = head_of<kSource>(params, work, i);
    if (head < params.heads[side]) {
      const Index offset = params.from[side].offset(work.sequence, work.token, head);
      const auto* from = static_cast<const Unit*>(params.from[side].data);
      a[i] = load<T, kWidth>(reinterpret_cast<const T*>(from + (offset + column.first)));
      if (kSplit) b[i] = load<T, kWidth>(reinterpret_cast<const T*>(from + (offset + column.second)));
    }
  }
  trigger_next_grid();
  AnglesFrom<kSource, kPairs> angles;
  angles.passthrough = passthrough_mask<kPairs>(params, work.token, column.pair);
  if (angles.passthrough != (1u << kPairs) - 1) {
    load_angles<kSource, kSplit, kPairs>(params, work.sequence, work.token - params.prefix, column.pair, angles);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const uint32_t side = side_of<kSource>(work, i), head = head_of<kSource>(params, work, i);
    if (head < params.heads[side]) {
      const Index offset = params.to[side].offset(work.sequence, work.token, head);
      auto* to = static_cast<Unit*>(const_cast<void*>(params.to[side].data));
      rotate_column<kSplit>(angles, a[i], b[i]);
      store(reinterpret_cast<T*>(to + (offset + column.first)), a[i]);
      if (kSplit) store(reinterpret_cast<T*>(to + (offset + column.second)), b[i]);
    }
  }
}

}  // namespace rope3d
