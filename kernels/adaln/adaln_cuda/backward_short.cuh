// Backward of modulated norms of short rows, of a single row, and of rows with a modulation each. Rows are aligned, and
// a thread has one vector of a row.
//
// Reads:    grad, x, grad_sum and the branch, and modulations of rows, each once.
// Writes:   see backward.cu.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// A row has a group of threads, up to a warp or several warps. A block has several groups and loops over its rows. Each
// thread has a ring buffer in shared memory for its own vectors of the next rows, and sums its columns in registers.
#pragma once

#include "adaln_cuda/strided_rows.cuh"
#include "kit/group_sums.cuh"
#include "kit/vectors.cuh"

namespace adaln {
namespace {

constexpr size_t kShortStaticBytes = 2 * 1024;  // of shared memory, at most

// The inputs of which a thread reads one vector per row.
enum Stream : int { kStreamX, kStreamGrad, kStreamScale, kStreamGradSum, kStreamGate, kStreamBranch, kStreams };

struct ShortBackward : BackwardRows {
  StridedRows streams[kStreams];  // data null where there is none; modulations: where every row has its own
  const void* bias;
  DynamicType stream_types[kStreams], bias_type;
  void *grad_scale, *grad_gate, *grad_weight, *grad_bias;  // null: not written by this kernel
  int words = 0, stages = 0;                               // words of a row and thread, of all streams
};

// A thread's columns of the rows of its group, and the ring through which they come. kBfloat16: all inputs that are
// read by rows are bfloat16, a compile-time constant.
template <bool kBfloat16>
struct ShortRows {
  static constexpr int kWidth = kDynamicWidth;

  const ShortBackward& problem;
  int hidden, column;
  bool in_row;
  uint32_t rows_group, first_row, stride;  // rows_group: the group of rows, as of a span
  // Of the thread; stages of x | grad | scale | grad_sum | gate | branch, without absent ones: of each, one slot or, if
  // it is float32, two; a slot is [threads] of 16 bytes.
  SharedAddress ring, ring_end;
  uint32_t slot_bytes, stage_bytes;
  uint32_t next_row;  // the next to copy
  SharedAddress next_slot;

  __device__ __forceinline__ ShortRows(const ShortBackward& problem, SharedAddress memory)
      : problem(problem), hidden(problem.hidden) {
    const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    column = threadIdx.x * kWidth;
    in_row = column < hidden;
    rows_group = blockIdx.x / problem.parts;
    const uint32_t part = blockIdx.x - rows_group * problem.parts;
    first_row = part * blockDim.y + threadIdx.y;
    stride = problem.parts * blockDim.y;
    ring = memory + thread * kVectorBytes;
    slot_bytes = threads * kVectorBytes;
    stage_bytes = problem.words * slot_bytes;
    ring_end = ring + problem.stages * stage_bytes;
    next_row = first_row;
    next_slot = ring;
  }

  __device__ __forceinline__ DynamicType type_of(int stream) const {
    return kBfloat16 ? DynamicType{false, false} : problem.stream_types[stream];
  }
  __device__ __forceinline__ bool has(int stream) const {
    return stream < kStreamScale || problem.streams[stream].data != nullptr;
  }
  __device__ __forceinline__ const char* address_of(int stream, uint32_t row) const {
    const StridedRows& rows = problem.streams[stream];
    return static_cast<const char*>(rows.data) +
           (rows_group * rows.span_stride + row * rows.row_stride) * type_of(stream).element_bytes();
  }

  // Prefetches the first row into L2, by one thread.
  __device__ __forceinline__ void prefetch() const {
    if (threadIdx.x == 0 && first_row < problem.group_rows) {
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        if (has(k)) {
          prefetch_to_l2(address_of(k, first_row), static_cast<uint32_t>(hidden) * type_of(k).element_bytes());
        }
      }
    }
  }

  __device__ __forceinline__ SharedAddress slot_after(SharedAddress slot) const {
    return slot + stage_bytes < ring_end ? slot + stage_bytes : ring;
  }

  // Starts the copies of the next row.
  __device__ __forceinline__ void fetch() {
    if (in_row && next_row < problem.group_rows) {
      SharedAddress to = next_slot;
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        if (has(k)) {
          const char* const from = address_of(k, next_row) + column * type_of(k).element_bytes();
          cp_async<uint4>(to, from);
          if (type_of(k).is_float32) cp_async<uint4>(to += slot_bytes, from + kVectorBytes);
          to += slot_bytes;
        }
      }
    }
    cp_async_commit();
    next_row += stride;
    next_slot = slot_after(next_slot);
  }

  __device__ __forceinline__ void fill_ring() {
    if (!in_row) {
#pragma unroll 1
      for (int i = 0; i < problem.stages * problem.words; ++i) store_shared(ring + i * slot_bytes, uint4{});
    }
#pragma unroll 1
    for (int stage = 1; stage < kShortStages; ++stage) fetch();
  }

  // Reads a vector of a stream from its slot, and moves on to the next stream.
  __device__ __forceinline__ void read(SharedAddress& slot, Stream stream, float (&values)[kWidth]) const {
    const DynamicType type = type_of(stream);
    read_shared(slot, slot_bytes, type, values);
    slot += slot_bytes * type.words();
  }

  // Loads the values that the rows of the group share: factor, (1 + scale) * weight, and the gate.
  __device__ __forceinline__ void load_factors(float (&factor)[kWidth], float (&gate)[kWidth]) const {
#pragma unroll
    for (float& value : factor) value = 0.0f;
    if (in_row) {
      if (problem.scale.data != nullptr) {
        load_words(problem.scale.data, rows_group * problem.scale.span_stride + column, problem.scale_type, factor);
      }
#pragma unroll
      for (float& value : factor) value += 1.0f;
      if (problem.weight != nullptr) {
        float weight[kWidth];
        load_words(problem.weight, column, problem.weight_type, weight);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) factor[j] *= weight[j];
      }
      if (problem.gate.data != nullptr) {
        load_words(problem.gate.data, rows_group * problem.gate.span_stride + column, problem.gate_type, gate);
      }
    }
  }
};

// The values computed from a row's sums.
struct RowMoments {
  float mean, rstd, projection, mean_slope;  // projection: of slope onto the normed row, times rstd
};

// Computes the moments of a row. Where the row is far from zero, replaces x by x - mean.
template <int kWidth, typename Scratch>
__device__ __forceinline__ RowMoments find_moments(const ShortBackward& problem, bool in_row, float (&x)[kWidth],
                                                   const float (&slope)[kWidth], Scratch (&scratch)[2], int& half) {
  float mean, variance, totals[4];
  bool far = false;
#pragma unroll 1
  for (bool again = false;; again = true) {
#pragma unroll
    for (float& total : totals) total = 0.0f;  // of x, its squares, slopes, and their products with x
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      totals[0] += x[j];
      totals[1] += x[j] * x[j];
      totals[2] += slope[j];
      totals[3] += slope[j] * x[j];
    }
    sum_over_group(totals, scratch[half]);
    half ^= 1;  // a slow warp may still read this half while the next sums are written
    mean = problem.centered ? problem.average(totals[0]) : 0.0f;
    variance = problem.average(totals[1]) - mean * mean;
    if (again) break;
    // The squares of a row far from zero have lost digits: its sums are computed again, from differences from the mean.
    far = problem.centered && !(4.0f * mean * mean <= variance);
    if (!(blockDim.x > kWarp ? far : any_lane(far))) break;
    const float pivot = far && in_row ? mean : 0.0f;
#pragma unroll
    for (float& value : x) value -= pivot;
  }
  const float rstd = rsqrtf(variance + problem.eps);
  return {mean, rstd, rstd * rstd * problem.average(totals[3] - totals[2] * mean),
          problem.centered ? problem.average(totals[2]) : 0.0f};
}

// Writes the gradients of a row and adds to the sums over rows. `slot` is that of the streams after grad; x and slope
// are those from which the moments were computed.
template <bool kBfloat16, int kWidth>
__device__ __forceinline__ void finish_row(const ShortRows<kBfloat16>& rows, SharedAddress slot, uint32_t row,
                                           const RowMoments& moments, const float (&factor)[kWidth],
                                           float (&gate)[kWidth], float (&x)[kWidth], float (&grad)[kWidth],
                                           float (&slope)[kWidth], float (&sums)[3][kWidth]) {
  const ShortBackward& problem = rows.problem;
  const bool written = rows.in_row && row < problem.group_rows;
  const int64_t index = (static_cast<int64_t>(rows.rows_group) * problem.group_rows + row) * rows.hidden + rows.column;
  float values[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    x[j] -= moments.mean;
    slope[j] = moments.rstd * (slope[j] - moments.mean_slope - x[j] * moments.projection);
    x[j] *= moments.rstd;
  }
  if (rows.has(kStreamScale)) {
    rows.read(slot, kStreamScale, values);
    if (problem.grad_scale != nullptr && written) {
      float grad_scale[kWidth] = {};
      if (problem.bias != nullptr) load_words(problem.bias, rows.column, problem.bias_type, grad_scale);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) grad_scale[j] = grad[j] * (x[j] * factor[j] + grad_scale[j]);
      store_words(problem.grad_scale, index, rows.type_of(kStreamScale), grad_scale);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) grad[j] *= 1.0f + values[j];
  }
  if (rows.has(kStreamGradSum)) {
    rows.read(slot, kStreamGradSum, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) slope[j] += values[j];
  }
  if (written) store_words(problem.grad_x, index, rows.type_of(kStreamX), slope);
  if (row < problem.group_rows) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sums[kSlope][j] += grad[j];
      sums[kSlopeTimesNormed][j] += grad[j] * x[j];
    }
  }
  if (problem.grad_branch != nullptr) {
    if (rows.has(kStreamGate)) rows.read(slot, kStreamGate, gate);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = slope[j] * gate[j];
    if (written) store_words(problem.grad_branch, index, rows.type_of(kStreamX), values);
    if (rows.has(kStreamBranch)) {
      rows.read(slot, kStreamBranch, values);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] *= slope[j];
      if (problem.grad_gate != nullptr && written) {
        store_words(problem.grad_gate, index, rows.type_of(kStreamGate), values);
      }
      if (row < problem.group_rows) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[kGate][j] += values[j];
      }
    }
  }
}

// Writes the gradients of weight and bias of a single row.
template <bool kBfloat16, int kWidth>
__device__ __forceinline__ void write_parameters(const ShortRows<kBfloat16>& rows, const float (&sums)[3][kWidth]) {
  const ShortBackward& problem = rows.problem;
  if (rows.in_row && threadIdx.y == 0 && problem.grad_weight != nullptr) {
    store_words(problem.grad_weight, rows.column, problem.weight_type, sums[kSlopeTimesNormed]);
  }
  if (rows.in_row && threadIdx.y == 0 && problem.grad_bias != nullptr) {
    store_words(problem.grad_bias, rows.column, problem.bias_type, sums[kSlope]);
  }
}

template <bool kBfloat16>
__global__ void __launch_bounds__(kShortThreads) backward_short_kernel(const __grid_constant__ ShortBackward problem) {
  constexpr int kWidth = kDynamicWidth, kSums = 3;
  extern __shared__ float4 memory[];  // the rings, and at the end sums
  __shared__ float4 scratch[2][kShortThreads / kWarp];
  ShortRows<kBfloat16> rows(problem, shared_address(memory));
  rows.prefetch();
  grid_wait();
  trigger_next_grid();  // in this order: reduce_kernel reads factors before its own wait
  rows.fill_ring();
  float factor[kWidth], gate[kWidth];
  rows.load_factors(factor, gate);
  float sums[kSums][kWidth] = {};
  int half = 0;
  SharedAddress stage = rows.ring;
#pragma unroll 1
  for (uint32_t block_row = rows.first_row - threadIdx.y; block_row < problem.group_rows; block_row += rows.stride) {
    cp_async_wait<kShortStages - 2>();
    if (problem.stages > 1) rows.fetch();
    float x[kWidth], grad[kWidth], slope[kWidth];
    SharedAddress slot = stage;
    rows.read(slot, kStreamX, x);
    rows.read(slot, kStreamGrad, grad);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) slope[j] = factor[j];
    if (rows.has(kStreamScale)) {
      float scale[kWidth];
      SharedAddress scale_slot = slot;  // read again by finish_row
      rows.read(scale_slot, kStreamScale, scale);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) slope[j] *= 1.0f + scale[j];
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) slope[j] = rounded_product(grad[j], slope[j]);
    const RowMoments moments = find_moments(problem, rows.in_row, x, slope, scratch, half);
    finish_row(rows, slot, block_row + threadIdx.y, moments, factor, gate, x, grad, slope, sums);
    stage = rows.slot_after(stage);
  }
  if (problem.partial == nullptr) return write_parameters(rows, sums);
  cp_async_wait<0>();
  __syncthreads();
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int quads = rows.hidden / 4;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    if (k >= problem.sum_count || !rows.in_row) continue;
    float* const own = reinterpret_cast<float*>(memory + (k * blockDim.y + threadIdx.y) * quads) + rows.column;
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      *reinterpret_cast<float4*>(own + j) = make_float4(sums[k][j], sums[k][j + 1], sums[k][j + 2], sums[k][j + 3]);
    }
  }
  __syncthreads();
  store_partial_sums(memory, thread, threads, problem.sum_count, quads,
                     problem.partial + static_cast<int64_t>(blockIdx.x) * problem.sum_count * rows.hidden);
}

// The mapping of rows to blocks; no rows where the kernel does not take the problem.
struct ShortLayout {
  int group, rows;  // threads of a row; rows of a block
};

// Words of a thread for each row.
inline int short_words(const Backward& problem) {
  const auto words = [](bool has, Type type) { return has ? dynamic_type(type).words() : 0; };
  const bool per_row = problem.span == 1;
  return words(true, problem.type) * (2 + (problem.grad_sum.data != nullptr) + (problem.grad_gate != nullptr)) +
         words(per_row && problem.scale.rows.data != nullptr, problem.scale.type) +
         words(per_row && problem.grad_branch != nullptr, problem.gate.type);
}

// Whether all inputs that are read by rows are bfloat16.
inline bool reads_bfloat16_only(const Backward& problem) {
  const auto bfloat16 = [](const Modulation& one) { return one.rows.data == nullptr || one.type == Type::bfloat16; };
  return problem.type == Type::bfloat16 && (problem.span > 1 || (bfloat16(problem.scale) && bfloat16(problem.gate)));
}

inline ShortLayout short_layout(const Backward& problem, const DeviceProperties& device) {
  const int64_t vectors = problem.hidden / kDynamicWidth;
  if (problem.hidden % kDynamicWidth != 0 || vectors > kShortThreads) return {};
  ShortLayout layout{1, 1};
  int step = 1;  // rows of a warp
  if (vectors <= kWarp) {
    while (layout.group < vectors) layout.group *= 2;
    step = kWarp / layout.group;
  } else {
    layout.group = static_cast<int>((vectors + kWarp - 1) / kWarp * kWarp);
  }
  const int64_t blocks = std::max<int64_t>(1, device.sms / problem.sums.groups);
  const int64_t useful = (problem.rows / problem.sums.groups + blocks - 1) / blocks;  // rows, where there are few
  layout.rows = static_cast<int>(std::min<int64_t>(kShortThreads / layout.group, (useful + step - 1) / step * step));
  layout.rows = rows_with_barriers(layout.rows, layout.group);
  const auto max_bytes = device.max_shared_bytes_per_block - static_cast<int>(kShortStaticBytes);
  const int thread_bytes = short_words(problem) * kShortStages * kVectorBytes;
  while (layout.rows > 0 && layout.rows * layout.group * thread_bytes > max_bytes) layout.rows -= step;
  return layout;
}

inline cudaError_t launch_short(const Backward& problem, ShortBackward& rows, const ShortLayout& layout,
                                const DeviceProperties& device, cudaStream_t stream) {
  rows.words = short_words(problem);
  rows.stages = rows.group_rows <= rows.parts * layout.rows ? 1 : kShortStages;
  constexpr int kSumBytes = 3 * kDynamicWidth * static_cast<int>(sizeof(float));
  const int bytes = layout.group * layout.rows * std::max(rows.words * rows.stages * kVectorBytes, kSumBytes);
  const auto kernel = reads_bfloat16_only(problem) ? backward_short_kernel<true> : backward_short_kernel<false>;
  const cudaError_t error = allow_shared_bytes(kernel, bytes, kShortStaticBytes, device);
  if (error != cudaSuccess) return error;
  return launch_with_pdl(kernel, dim3(static_cast<unsigned>(problem.sums.groups * problem.sums.parts)),
                         dim3(layout.group, layout.rows), bytes, stream, rows);
}

}  // namespace
}  // namespace adaln
