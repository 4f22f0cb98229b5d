// RMSNorm, forward: unaligned rows that registers hold, with the same misalignment in all tensors.
//
// Reads:    x, the residual and the weight, each once.
// Writes:   `normed`, and `sum` when there is a residual.
// Must not: loop over rows or divide.
//
// A row is read in vectors, except its head (the elements before the first aligned vector) and its tail (those after
// the last).
#pragma once

#include "rmsnorm_cuda/forward.cuh"

namespace rmsnorm {

// One thread's vector, or element, of a row.
template <typename T, int kWidth, bool kAdd>
struct RowPart {
  int column;  // negative: none
  Vector<T, kWidth> x;

  __device__ __forceinline__ void read(const FastForwardArguments& arguments, const ForwardOffsets<kAdd>& offsets) {
    x = {};
    if (column >= 0) x = load<T, kWidth>(static_cast<const T*>(arguments.x) + offsets.x + column);
  }

  __device__ __forceinline__ void add_residual(const FastForwardArguments& arguments,
                                               const ForwardOffsets<kAdd>& offsets) {
    if (column < 0) return;
    x = add(x, load<T, kWidth>(static_cast<const T*>(arguments.residual) + offsets.residual + column));
    store_result(arguments, static_cast<T*>(arguments.sum) + offsets.sum + column, x);
  }

  __device__ __forceinline__ void write(const FastForwardArguments& arguments, const ForwardOffsets<kAdd>& offsets,
                                        float rstd) {
    if (column < 0) return;
    make_opaque(x);
    float factors[kWidth];
    const T* const weight = static_cast<const T*>(arguments.weight.data);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      factors[i] = (weight == nullptr ? 1.0f : decode(weight[column + i])) + arguments.weight.offset;
    }
    const bool rounded = sizeof(T) < sizeof(float) && arguments.rounded_before_weight;
    store_result(arguments, static_cast<T*>(arguments.normed) + offsets.normed + column,
                 norm(x, rstd, factors, rounded));
  }
};

template <typename Config, typename T, bool kAdd>
__global__ void __launch_bounds__(Config::kThreads)
    forward_unaligned_kernel(const __grid_constant__ FastForwardArguments arguments) {
  constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = Config::kVectors, kWarps = Config::kThreads / kWarp;
  __shared__ float4 scratch[kWarps / 4];
  const int hidden = arguments.hidden, thread = threadIdx.x;
  const ForwardOffsets<kAdd> offsets(arguments, blockIdx.x);
  const auto address = reinterpret_cast<uintptr_t>(static_cast<const T*>(arguments.x) + offsets.x) / sizeof(T);
  const int head = static_cast<int>(-address % kWidth);
  const int vectors = (hidden - head) / kWidth, tail = head + vectors * kWidth;  // columns: end of head, start of tail
  if (gridDim.x >= Config::kEarlyTriggerBlocks) trigger_next_grid();
  if (thread == 0 && blockIdx.x < arguments.prefetch_blocks) {
    prefetch_row<T, kAdd>(arguments, blockIdx.x);
  }
  grid_wait();
  if (gridDim.x < Config::kEarlyTriggerBlocks) trigger_next_grid();
  RowPart<T, kWidth, kAdd> parts[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = thread + i * static_cast<int>(blockDim.x);
    parts[i].column = vector < vectors ? head + vector * kWidth : -1;
    parts[i].read(arguments, offsets);
  }
  // The first kWidth threads take an element of the head each, the next kWidth threads an element of the tail each.
  RowPart<T, 1, kAdd> element;
  element.column = thread < head ? thread : -1;
  if (thread >= kWidth && tail + thread - kWidth < hidden) element.column = tail + thread - kWidth;
  element.read(arguments, offsets);
  if (kAdd) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) parts[i].add_residual(arguments, offsets);
    element.add_residual(arguments, offsets);
  }
  float squares = sum_of_squares(element.x);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) squares += sum_of_squares(parts[i].x);
  squares = sum_over_block<kWarps>(squares, scratch);
  const float rstd = reciprocal_norm(squares, arguments.inverse_of_hidden, arguments.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) parts[i].write(arguments, offsets, rstd);
  element.write(arguments, offsets, rstd);
}

}  // namespace rmsnorm
