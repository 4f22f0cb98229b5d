// Backward of modulated norms of short rows, of a single row, and of rows that each have a modulation of their own, on
// CUDA: where all rows consist of whole vectors, and a row is not too long for a vector in each thread.
//
// Reads:    grad, x, grad_sum and the branch, and modulations of rows, each once from memory.
// Writes:   what backward.cu says.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// A row has a group of threads, up to a warp of them or several warps, and a block several groups, which stay for all
// of its rows. A thread finds the vectors of its next rows in shared memory, where nobody else looks at them, and adds
// up the sums of its columns.
//
// Included by backward.cu.
#pragma once

#include "adaln_cuda/device.cuh"

namespace adaln {
namespace {

constexpr int kShortThreads = 512;           // of a block, of which a processor has one
constexpr size_t kShortOwnBytes = 2 * 1024;  // of shared memory, at most, besides the dynamic

// What a thread has a vector of for each row.
enum Stream : int { kOfX, kOfGrad, kOfScale, kOfGradSum, kOfGate, kOfBranch, kStreams };

struct Short {
  Lines lines[kStreams];  // data null where there is none; of modulations, where every row has its own
  Lines scale, gate;      // of groups
  const void *weight, *bias;
  Kind kinds_of[kStreams], scale_kind, gate_kind, weight_kind, bias_kind;
  void *grad_x, *grad_branch, *grad_scale, *grad_gate, *grad_weight, *grad_bias;  // null: not written here
  float* partial;
  int kinds;                  // of sums
  uint32_t rows, parts;       // of a group
  int hidden, words, stages;  // words of a thread, of all streams
  Average average;
  float eps;
  bool centered;
};

constexpr int kShortStages = 4;  // rows that wait, or are on their way

// kPlain: what comes by rows is bfloat16.
template <bool kPlain>
__device__ __forceinline__ void short_rows(const Short& problem) {
  constexpr int kWidth = kAnyWidth, kQuads = kWidth / 4, kKinds = 3;
  extern __shared__ float4 memory[];  // [stages][streams][threads], and at the end sums
  __shared__ float4 of_warps[2][kShortThreads / kWarp];
  const int group = blockDim.x, threads = blockDim.x * blockDim.y, number = threadIdx.y * group + threadIdx.x;
  const int hidden = problem.hidden, column = threadIdx.x * kWidth;
  const bool inside = column < hidden;
  const uint32_t rows_group = blockIdx.x / problem.parts, part = blockIdx.x - rows_group * problem.parts;
  const uint32_t first_row = part * blockDim.y + threadIdx.y, stride = problem.parts * blockDim.y;
  const uint32_t own = shared_address(memory) + number * kVectorBytes, of_slot = threads * kVectorBytes;
  const uint32_t of_stage = problem.words * of_slot, end = own + problem.stages * of_stage;
  const auto kind_of_stream = [&](int k) { return kPlain ? Kind{false, false} : problem.kinds_of[k]; };
  const auto has = [&](int k) { return k < kOfScale || problem.lines[k].data != nullptr; };
  const auto address_of = [&](int k, uint32_t row) {
    const Lines& lines = problem.lines[k];
    return static_cast<const char*>(lines.data) +
           (rows_group * lines.span_stride + row * lines.row_stride) * kind_of_stream(k).bytes();
  };
  if (threadIdx.x == 0 && first_row < problem.rows) {
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      if (has(k)) {
        prefetch_to_l2(address_of(k, first_row), static_cast<uint32_t>(hidden) * kind_of_stream(k).bytes());
      }
    }
  }
  grid_wait();
  trigger_next_grid();

  uint32_t next_row = first_row, next_slot = own;
  const auto fetch = [&] {
    if (inside && next_row < problem.rows) {
      uint32_t to = next_slot;
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        if (has(k)) {
          const char* const from = address_of(k, next_row) + column * kind_of_stream(k).bytes();
          cp_async<uint4>(to, from);
          if (kind_of_stream(k).wide) cp_async<uint4>(to += of_slot, from + kVectorBytes);
          to += of_slot;
        }
      }
    }
    cp_async_commit();
    next_row += stride;
    next_slot = next_slot + of_stage < end ? next_slot + of_stage : own;
  };
  if (!inside) {
#pragma unroll 1
    for (int i = 0; i < problem.stages * problem.words; ++i) store_shared(own + i * of_slot, uint4{});
  }
#pragma unroll 1
  for (int stage = 1; stage < kShortStages; ++stage) fetch();

  float factor[kWidth], gate[kWidth];
#pragma unroll
  for (float& value : factor) value = 0.0f;
  if (inside) {
    if (problem.scale.data != nullptr) {
      load_words(problem.scale.data, rows_group * problem.scale.span_stride + column, problem.scale_kind, factor);
    }
#pragma unroll
    for (float& value : factor) value += 1.0f;
    if (problem.weight != nullptr) {
      float weight[kWidth];
      load_words(problem.weight, column, problem.weight_kind, weight);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) factor[j] *= weight[j];
    }
    if (problem.gate.data != nullptr) {
      load_words(problem.gate.data, rows_group * problem.gate.span_stride + column, problem.gate_kind, gate);
    }
  }

  float sums[kKinds][kWidth] = {};
  int half = 0;
  uint32_t slot = own;
#pragma unroll 1
  for (uint32_t turn = part * blockDim.y; turn < problem.rows; turn += stride) {
    const uint32_t row = turn + threadIdx.y;
    const bool written = inside && row < problem.rows;
    cp_async_wait<kShortStages - 2>();
    if (problem.stages > 1) fetch();
    float x[kWidth], grad[kWidth], slope[kWidth], more[kWidth];
    uint32_t stream = slot;  // the next one
    const auto read = [&](Stream k, float (&values)[kWidth]) {
      const Kind kind = kind_of_stream(k);
      read_words(stream, of_slot, kind, values);
      stream += of_slot * kind.words();
    };
    read(kOfX, x);
    read(kOfGrad, grad);
    const uint32_t others = stream;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) slope[j] = factor[j];
    if (has(kOfScale)) {
      read(kOfScale, more);
      stream = others;  // it is read again
#pragma unroll
      for (int j = 0; j < kWidth; ++j) slope[j] *= 1.0f + more[j];
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) slope[j] = __fmul_rn(grad[j], slope[j]);
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
      sum_over_group(totals, of_warps[half]);
      half ^= 1;  // a slow warp may still read the one half while the next sums are written
      mean = problem.centered ? problem.average(totals[0]) : 0.0f;
      variance = problem.average(totals[1]) - mean * mean;
      if (again) break;
      // A row far from zero has lost digits: its sums are taken again, of what it is beside its mean.
      far = problem.centered && !(4.0f * mean * mean <= variance);
      if (!(group > kWarp ? far : __any_sync(kAllLanes, far))) break;
      const float pivot = far && inside ? mean : 0.0f;
#pragma unroll
      for (float& value : x) value -= pivot;
    }
    const float rstd = rsqrtf(variance + problem.eps);
    const float along = rstd * rstd * problem.average(totals[3] - totals[2] * mean);
    const float mean_slope = problem.centered ? problem.average(totals[2]) : 0.0f;
    const int64_t index = (static_cast<int64_t>(rows_group) * problem.rows + row) * hidden + column;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      x[j] -= mean;
      slope[j] = rstd * (slope[j] - mean_slope - x[j] * along);
      x[j] *= rstd;
    }
    if (has(kOfScale)) {
      read(kOfScale, more);
      if (problem.grad_scale != nullptr && written) {
        float values[kWidth] = {};
        if (problem.bias != nullptr) load_words(problem.bias, column, problem.bias_kind, values);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[j] = grad[j] * (x[j] * factor[j] + values[j]);
        store_words(problem.grad_scale, index, kind_of_stream(kOfScale), values);
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) grad[j] *= 1.0f + more[j];
    }
    if (has(kOfGradSum)) {
      read(kOfGradSum, more);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) slope[j] += more[j];
    }
    if (written) store_words(problem.grad_x, index, kind_of_stream(kOfX), slope);
    if (row < problem.rows) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sums[kSlope][j] += grad[j];
        sums[kSlopeTimesNormed][j] += grad[j] * x[j];
      }
    }
    if (problem.grad_branch != nullptr) {
      if (has(kOfGate)) read(kOfGate, gate);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) more[j] = slope[j] * gate[j];
      if (written) store_words(problem.grad_branch, index, kind_of_stream(kOfX), more);
      if (has(kOfBranch)) {
        read(kOfBranch, more);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) more[j] *= slope[j];
        if (problem.grad_gate != nullptr && written) {
          store_words(problem.grad_gate, index, kind_of_stream(kOfGate), more);
        }
        if (row < problem.rows) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sums[kGate][j] += more[j];
        }
      }
    }
    slot = slot + of_stage < end ? slot + of_stage : own;
  }

  if (problem.partial == nullptr) {
    if (inside && threadIdx.y == 0 && problem.grad_weight != nullptr) {
      store_words(problem.grad_weight, column, problem.weight_kind, sums[kSlopeTimesNormed]);
    }
    if (inside && threadIdx.y == 0 && problem.grad_bias != nullptr) {
      store_words(problem.grad_bias, column, problem.bias_kind, sums[kSlope]);
    }
    return;
  }
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kKinds; ++k) {
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      memory[(k * kQuads + j / 4) * threads + number] =
          make_float4(sums[k][j], sums[k][j + 1], sums[k][j + 2], sums[k][j + 3]);
    }
  }
  store_sums<kQuads>(memory, 1, problem.kinds, hidden,
                     problem.partial + static_cast<int64_t>(blockIdx.x) * problem.kinds * hidden);
}

template <bool kPlain>
__global__ void __launch_bounds__(kShortThreads) backward_short_kernel(const __grid_constant__ Short problem) {
  if constexpr (kPlain || kAllKernels) short_rows<kPlain>(problem);
}

// How many threads a row has, and how many rows a block; none where a row is too long.
struct ShortShape {
  int group, rows;
};

inline int short_words(const Backward& problem) {  // of a thread, for each row
  const auto words = [](bool has, Type type) { return has ? kind_of(type).words() : 0; };
  const bool own = problem.span == 1;
  return words(true, problem.type) * (2 + (problem.grad_sum.data != nullptr) + (problem.grad_gate != nullptr)) +
         words(own && problem.scale.rows.data != nullptr, problem.scale.type) +
         words(own && problem.grad_branch != nullptr, problem.gate.type);
}

inline bool short_plain(const Backward& problem) {
  const auto plain = [](const void* data, Type type) { return data == nullptr || type == Type::bfloat16; };
  return problem.type == Type::bfloat16 && (problem.span > 1 || (plain(problem.scale.rows.data, problem.scale.type) &&
                                                                 plain(problem.gate.rows.data, problem.gate.type)));
}

inline ShortShape short_shape(const Backward& problem) {
  const void* const all = reinterpret_cast<const void*>(backward_short_kernel<false>);
  if (!short_plain(problem) && !has_all_kernels(all)) return {0, 0};
  const int64_t vectors = problem.hidden / kAnyWidth;
  if (problem.hidden % kAnyWidth != 0 || vectors > kShortThreads) return {0, 0};
  ShortShape shape{1, 1};
  int step = 1;
  if (vectors <= kWarp) {
    while (shape.group < vectors) shape.group *= 2;
    step = kWarp / shape.group;
  } else {
    shape.group = static_cast<int>((vectors + kWarp - 1) / kWarp * kWarp);
  }
  int processors = 1;
  sm_count(&processors);
  const int64_t blocks = std::max<int64_t>(1, processors / problem.sums.groups);
  const int64_t useful = (problem.rows / problem.sums.groups + blocks - 1) / blocks;  // if there are few
  shape.rows = static_cast<int>(std::min<int64_t>(kShortThreads / shape.group, (useful + step - 1) / step * step));
  const auto most = static_cast<int>(most_shared_bytes() - kShortOwnBytes);
  const int of_thread = short_words(problem) * kShortStages * kVectorBytes;
  while (shape.rows > 0 && shape.rows * shape.group * of_thread > most) shape.rows -= step;
  return shape;
}

inline cudaError_t launch_short(const Backward& problem, Short& of_rows, const ShortShape& shape, cudaStream_t stream) {
  of_rows.words = short_words(problem);
  of_rows.stages = of_rows.rows <= of_rows.parts * shape.rows ? 1 : kShortStages;
  constexpr int kOfSums = 3 * kAnyWidth * static_cast<int>(sizeof(float));
  const int bytes = shape.group * shape.rows * std::max(of_rows.words * of_rows.stages * kVectorBytes, kOfSums);
  const auto kernel = short_plain(problem) ? backward_short_kernel<true> : backward_short_kernel<false>;
  if (bytes + kShortOwnBytes > kUsualBytes) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  return launch_with_pdl(kernel, dim3(static_cast<unsigned>(problem.sums.groups * problem.sums.parts)),
                         dim3(shape.group, shape.rows), bytes, stream, of_rows);
}

}  // namespace
}  // namespace adaln
