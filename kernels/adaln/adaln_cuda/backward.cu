// Modulated norms, backward, with and without the gated branch that was added before, on CUDA.
//
// Reads:    grad, x, grad_sum and the branch, each once from memory: a row stays in registers between its sums and its
//           result. Rows that are too long for that, or lie unfavourably, are read again. The norm is computed again,
//           from x.
// Writes:   `grad_x` and `grad_branch`; gradients of modulations that every row has of its own; `partial` when sums are
//           asked for, and what they are summed to.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Bytes, for elements of e bytes: rows * hidden * 3e, with a branch 6e. Sums take another 8 (12) for each column of
// each part, written and read: with one part for each processor, less than a hundredth of the rest.
//
// Each part of a group of rows is a block, which stays for all of its rows and adds up their sums in registers;
// reduce.cu adds up what the blocks leave. The order of both is fixed, so that equal inputs give equal bits. A block
// has several rows in work at a time, and the vectors of the next ones on their way into shared memory, where each
// thread finds its own: no thread waits for another but for the sums of a row.
#include "adaln_cuda/adaln.h"
#include "adaln_cuda/device.cuh"
#include "adaln_cuda/reduce.cuh"

namespace adaln {
namespace {

constexpr int kMostWarps = 16;  // of a row that registers hold
constexpr int kMostRows = 15;   // of a block at a time: there are so many barriers
// Of what is on its way to a processor, where more was measured to be slower.
constexpr int kRingBytes = 76 * 1024;

// Threads of a block, at most: a branch takes more registers.
template <bool kBranch>
constexpr int kMostThreads = kBranch ? 384 : 512;
constexpr int kStages = 2;  // rows of a thread: one in work, the other on its way

// Rows that registers hold.
struct Ring {
  Lines x, grad, grad_sum, branch, scale, gate;  // all but x and grad: data null where there is none
  const void* weight;
  void *grad_x, *grad_branch;
  float* partial;
  int kinds;             // of sums
  uint32_t rows, parts;  // of a group
  int hidden;
  Average average;
  float eps;
  bool centered;
};

// For the threads of one row of a block of several.
__device__ __forceinline__ void synchronize_row(int row, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + row), "r"(threads) : "memory");
}

template <typename T, int kWidth, typename Word>
__device__ __forceinline__ void decode_word(const Word& word, float (&values)[kWidth]) {
  Vector<T, kWidth> vector;
  memcpy(&vector, &word, sizeof(word));
  decode_all(vector.elements, values);
}

// Blocks of (threads of a row, rows).
template <typename T, typename M, int kWidth, int kLoads, bool kBranch>
__global__ void __launch_bounds__(kMostThreads<kBranch>) backward_kernel(const __grid_constant__ Ring problem) {
  constexpr int kTensors = kBranch ? 4 : 2, kKinds = kBranch ? 3 : 2, kLast = kLoads - 1;
  using Slot = typename Word<sizeof(T) * kWidth>::Type;
  extern __shared__ uint4 memory[];
  auto* ring = reinterpret_cast<Slot*>(memory);  // [slots][vectors of a thread][tensors][threads]; at the end, sums
  __shared__ float4 of_warps[2][kMostThreads<kBranch> / kWarp];
  const int hidden = problem.hidden, group = blockDim.x, threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  // The last vector of a thread may lie past the row's end. It is then read at the row's start, and does not count.
  const int first_column = threadIdx.x * kWidth, last_column = first_column + kLast * group * kWidth;
  const bool whole = last_column < hidden;
  const auto column_of = [&](int i) { return i < kLast ? first_column + i * group * kWidth : whole ? last_column : 0; };
  const uint32_t rows_group = blockIdx.x / problem.parts, part = blockIdx.x - rows_group * problem.parts;
  const uint32_t first_row = part * blockDim.y, stride = problem.parts * blockDim.y;
  const auto fetch = [&](uint32_t stage, uint32_t row) {
    if (row < problem.rows) {
      Slot* to = ring + stage * kLoads * kTensors * threads + thread;
      const Lines* lines[] = {&problem.x, &problem.grad, &problem.grad_sum, &problem.branch};
#pragma unroll
      for (int k = 0; k < kTensors; ++k) {
        if (k < 2 || lines[k]->data != nullptr) {
          const T* from = lines[k]->template at<T>(rows_group, row);
#pragma unroll
          for (int i = 0; i < kLoads; ++i) copy_word(to + (i * kTensors + k) * threads, from + column_of(i));
        }
      }
    }
    close_copies();
  };
  wait_for_previous();
  let_next_begin();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(stage, first_row + stage * stride + threadIdx.y);

  float factor[kLoads][kWidth];  // of the gradient of a normed row
  Elements<M, kWidth> gate[kBranch ? kLoads : 1];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) factor[i][j] = 1.0f;
    if (problem.scale.data != nullptr) {
      decode_all(load_elements<M, kWidth>(problem.scale.at<M>(rows_group) + column_of(i)).values, factor[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) factor[i][j] += 1.0f;
    }
    if (problem.weight != nullptr) {
      float weight[kWidth];
      decode_all(load_elements<M, kWidth>(static_cast<const M*>(problem.weight) + column_of(i)).values, weight);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) factor[i][j] *= weight[j];
    }
    if constexpr (kBranch) gate[i] = load_elements<M, kWidth>(problem.gate.at<M>(rows_group) + column_of(i));
  }

  const int warps = group / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first_warp = threadIdx.y * warps, other = lane % kMostWarps;
  const auto count_in = [&](int of_warp) {
    constexpr int kFull = kWarp * kWidth;
    return kLast * kFull + min(max(hidden - (kLast * group + of_warp * kWarp) * kWidth, 0), kFull);
  };
  const float inverse_count = __fdividef(1.0f, static_cast<float>(count_in(warp)));
  const float count_of_other = other < warps ? static_cast<float>(count_in(other)) : 0.0f;
  float sums[kKinds][kLoads][kWidth] = {};
  uint32_t stage = 0, next_stage = kStages - 1;
  int half = 0;
  for (uint32_t start = first_row; start < problem.rows; start += stride) {
    const uint32_t row = start + threadIdx.y;
    const bool there = row < problem.rows;
    fetch(next_stage, row + (kStages - 1) * stride);
    wait_for_copies<kStages - 1>();
    const Slot* from = ring + stage * kLoads * kTensors * threads + thread;
    next_stage = stage;
    stage = stage + 1 < kStages ? stage + 1 : 0;

    float x[kLoads][kWidth], slope[kLoads][kWidth];  // slope: the gradient of the normed row
    float pivot[1] = {0.0f};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      decode_word<T>(from[i * kTensors * threads], x[i]);
      decode_word<T>(from[(i * kTensors + 1) * threads], slope[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const bool counts = i < kLast || whole;
        x[i][j] = counts ? x[i][j] : 0.0f;
        slope[i][j] = counts ? __fmul_rn(slope[i][j], factor[i][j]) : 0.0f;
        pivot[0] += x[i][j];
      }
    }
    // Sums of deviations from the mean of the warp, so that a row far from zero keeps its digits.
    if (problem.centered) {
      sum_over_lanes(pivot, kWarp);
      pivot[0] *= inverse_count;
    } else {
      pivot[0] = 0.0f;
    }
    float totals[3] = {0.0f, 0.0f, 0.0f};  // of squares, of slopes, and of their products with x
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        x[i][j] = i < kLast || whole ? x[i][j] - pivot[0] : 0.0f;
        totals[0] += x[i][j] * x[i][j];
        totals[1] += slope[i][j];
        totals[2] += slope[i][j] * x[i][j];
      }
    }
    sum_over_lanes(totals, kWarp);
    float mean = 0.0f;  // beyond the pivot
    if (warps > 1) {
      float4* parts_of_row = of_warps[half] + first_warp;
      half ^= 1;  // the next row may be written while a slow warp still reads
      if (lane == 0) parts_of_row[warp] = make_float4(pivot[0], totals[0], totals[1], totals[2]);
      synchronize_row(threadIdx.y, group);
      const float base = parts_of_row[0].x;
      const float4 part_of_row = other < warps ? parts_of_row[other] : make_float4(base, 0.0f, 0.0f, 0.0f);
      const float away = part_of_row.x - base, moved = count_of_other * away;
      float all[4] = {moved, part_of_row.y + moved * away, part_of_row.z, part_of_row.w + part_of_row.z * away};
#pragma unroll
      for (int distance = kMostWarps / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int k = 0; k < 4; ++k) all[k] += __shfl_xor_sync(kAllLanes, all[k], distance);
      }
      const float mean_away = problem.average(all[0]);
      mean = base + mean_away - pivot[0];
      totals[0] = all[1] - all[0] * mean_away;
      totals[1] = all[2];
      totals[2] = all[3] - all[2] * mean_away;
    }
    const float rstd = rsqrtf(problem.average(totals[0]) + problem.eps);
    const float along = rstd * rstd * problem.average(totals[2]);
    const float mean_slope = problem.centered ? problem.average(totals[1]) : 0.0f;
    const float constant = mean_slope - mean * along, mean_times_rstd = mean * rstd;
    const int64_t index = (static_cast<int64_t>(rows_group) * problem.rows + row) * hidden;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool written = there && (i < kLast || whole);
      float grad[kWidth], total[kWidth];
      decode_word<T>(from[(i * kTensors + 1) * threads], grad);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        // In this order, and with the slope as it was summed: of a row of one element nothing may be left, and rstd is
        // large.
        total[j] = rstd * ((slope[i][j] - constant) - x[i][j] * along);
        if (there) {
          sums[kSlopeTimesNormed][i][j] += grad[j] * (x[i][j] * rstd - mean_times_rstd);
          sums[kSlope][i][j] += grad[j];
        }
      }
      if constexpr (kBranch) {
        if (problem.grad_sum.data != nullptr) {
          float more[kWidth];
          decode_word<T>(from[(i * kTensors + 2) * threads], more);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) total[j] += more[j];
        }
      }
      if (written) store_once(static_cast<T*>(problem.grad_x) + index + column_of(i), encode_all<T>(total));
      if constexpr (kBranch) {
        if (problem.branch.data != nullptr && there) {
          float branch[kWidth];
          decode_word<T>(from[(i * kTensors + 3) * threads], branch);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sums[kGate][i][j] += total[j] * branch[j];
        }
        float factor_of_total[kWidth];
        decode_all(gate[i].values, factor_of_total);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) total[j] *= factor_of_total[j];
        if (written) store_once(static_cast<T*>(problem.grad_branch) + index + column_of(i), encode_all<T>(total));
      }
    }
  }

  if (problem.partial == nullptr) return;
  float* partial = problem.partial + static_cast<int64_t>(blockIdx.x) * problem.kinds * hidden;
  if (blockDim.y == 1) {
#pragma unroll
    for (int k = 0; k < kKinds; ++k) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (k < problem.kinds && (i < kLast || whole)) store_floats(partial + k * hidden + column_of(i), sums[k][i]);
      }
    }
    return;
  }
  auto* rows_of_sums = reinterpret_cast<float4*>(memory);
  const int vectors = hidden / 4;
#pragma unroll
  for (int k = 0; k < kKinds; ++k) {
    if (k == problem.kinds) return;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (i < kLast || whole) {
#pragma unroll
        for (int j = 0; j < kWidth; j += 4) {
          rows_of_sums[threadIdx.y * vectors + (column_of(i) + j) / 4] =
              make_float4(sums[k][i][j], sums[k][i][j + 1], sums[k][i][j + 2], sums[k][i][j + 3]);
        }
      }
    }
    __syncthreads();
    for (int vector = thread; vector < vectors; vector += threads) {
      float4 sum = rows_of_sums[vector];
      for (int row = 1; row < static_cast<int>(blockDim.y); ++row) {
        const float4 more = rows_of_sums[row * vectors + vector];
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
      }
      reinterpret_cast<float4*>(partial + k * hidden)[vector] = sum;
    }
  }
}

__device__ __forceinline__ bool own_modulations(const Backward& problem) { return problem.span == 1; }

// The gradient of a row's own modulation.
template <typename T, int kWidth>
__device__ __forceinline__ void write_own(void* gradient, Type type, int64_t offset, const Part<kWidth>& part,
                                          const float (&values)[kWidth]) {
  if (sizeof(T) < sizeof(float) && type != Type::float32) {
    store_part(static_cast<T*>(gradient) + offset, part, encode_all<T>(values));
    return;
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (part.has(j)) static_cast<float*>(gradient)[offset + part.column + j] = values[j];
  }
}

// Rows of any length, wherever they lie, with modulations and parameters of any types. Their vectors are those of
// `grad_x`.
template <typename T>
__global__ void __launch_bounds__(kLongBlock) backward_long_kernel(const __grid_constant__ Backward problem) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  let_next_begin();
  __shared__ GroupSum<3>::Scratch scratch;
  GroupSum<3> sum_over_group(scratch, blockDim.x);
  const int64_t hidden = problem.hidden, step = static_cast<int64_t>(blockDim.x) * kWidth;
  const int64_t group_rows = problem.rows / problem.sums.groups, rows_group = blockIdx.x / problem.sums.parts;
  const int64_t first = rows_group * group_rows + blockIdx.x % problem.sums.parts;
  const bool own = own_modulations(problem);
  float* partial = problem.sums.partial == nullptr
                       ? nullptr
                       : problem.sums.partial + static_cast<int64_t>(blockIdx.x) * problem.sums.count * hidden;
  for (int64_t row = first; row < (rows_group + 1) * group_rows; row += problem.sums.parts) {
    const int64_t span = own ? row : rows_group;
    const T *x_row = row_of<T>(problem.x, row), *grad_row = row_of<T>(problem.grad, row);
    T* grad_x_row = static_cast<T*>(problem.grad_x) + row * hidden;
    const EitherRow scale_row(problem.scale, span), gate_row(problem.gate, span);
    const EitherRow weight_row(problem.weight), bias_row(problem.bias);
    const int64_t start = static_cast<int64_t>(threadIdx.x) * kWidth - before<kWidth>(grad_x_row);
    // x counted from the mean, which the first pass finds; the gradient as it came and as that of the normed row, which
    // is rounded alike wherever it is needed: of a row of one element nothing may be left, and rstd is large.
    float mean = 0.0f, mean_slope = 0.0f;
    const auto read = [&](const Part<kWidth>& part, float (&x)[kWidth], float (&grad)[kWidth], float (&slope)[kWidth],
                          float (&factor)[kWidth], float (&weight)[kWidth]) {
      decode_all(load_part(x_row, part).elements, x);
      decode_all(load_part(grad_row, part).elements, grad);
      scale_row.load<T>(part, 0.0f, factor);
      weight_row.load<T>(part, 1.0f, weight);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        x[j] -= mean;
        factor[j] += 1.0f;
        slope[j] = __fmul_rn(grad[j], weight[j] * factor[j]);
      }
    };
    float sums[3];  // of squares, slopes, and their products with x; first, of x instead of its squares
#pragma unroll 1
    for (int pass = problem.centered ? 0 : 1; pass < 2; ++pass) {
#pragma unroll
      for (float& sum : sums) sum = 0.0f;
#pragma unroll 1
      for (int64_t column = start; column < hidden; column += step) {
        const Part<kWidth> part(column, hidden);
        float x[kWidth], grad[kWidth], slope[kWidth], factor[kWidth], weight[kWidth];
        read(part, x, grad, slope, factor, weight);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          x[j] = part.has(j) ? x[j] : 0.0f;
          sums[0] += pass == 0 ? x[j] : x[j] * x[j];
          sums[1] += slope[j];
          sums[2] += slope[j] * x[j];
        }
      }
      sum_over_group(sums);
      if (pass == 0) mean = sums[0] / static_cast<float>(hidden);
    }
    if (problem.centered) mean_slope = sums[1] / static_cast<float>(hidden);
    const float rstd = rsqrtf(sums[0] / static_cast<float>(hidden) + problem.eps);
    const float along = rstd * rstd * (sums[2] / static_cast<float>(hidden));
    __syncthreads();  // a column is another thread's in the next row, where that begins elsewhere
#pragma unroll 1
    for (int64_t column = start; column < hidden; column += step) {
      const Part<kWidth> part(column, hidden);
      float x[kWidth], grad[kWidth], total[kWidth], factor[kWidth], weight[kWidth], more[kWidth];
      read(part, x, grad, total, factor, weight);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        total[j] = rstd * (total[j] - mean_slope - x[j] * along);
        x[j] *= rstd;
      }
      if (problem.grad_sum.data != nullptr) {
        decode_all(load_part(row_of<T>(problem.grad_sum, row), part).elements, more);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) total[j] += more[j];
      }
      store_part(grad_x_row, part, encode_all<T>(total));
      if (own && problem.grad_scale != nullptr) {
        bias_row.load<T>(part, 0.0f, more);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) more[j] = grad[j] * (x[j] * weight[j] + more[j]);
        write_own<T>(problem.grad_scale, problem.scale.type, row * hidden, part, more);
      }
      const auto add_up = [&](int kind, const float (&values)[kWidth]) {
        if (partial == nullptr || kind >= problem.sums.count) return;
        float* to = partial + kind * hidden;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (part.has(j)) to[column + j] = row == first ? values[j] : to[column + j] + values[j];
        }
      };
      if (own) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) grad[j] *= factor[j];
      }
      add_up(kSlope, grad);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) grad[j] *= x[j];
      add_up(kSlopeTimesNormed, grad);
      if (problem.grad_branch == nullptr) continue;
      gate_row.load<T>(part, 0.0f, more);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) more[j] *= total[j];
      store_part(static_cast<T*>(problem.grad_branch) + row * hidden, part, encode_all<T>(more));
      if (problem.grad_gate == nullptr) continue;
      decode_all(load_part(row_of<T>(problem.branch, row), part).elements, more);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) more[j] *= total[j];
      add_up(kGate, more);
      if (own) write_own<T>(problem.grad_gate, problem.gate.type, row * hidden, part, more);
    }
  }
}

// How rows that registers hold are laid over blocks.
struct Layout {
  int width, group, rows;  // of a vector; threads of a row; rows of a block. No rows: registers do not hold them.
};

CommonType common_type(const Backward& problem) {
  CommonType common(problem.type);
  for (const Modulation* modulation : {&problem.gate, &problem.scale}) common.add(*modulation);
  common.add(problem.weight);
  return common;
}

Layout layout_of(const Backward& problem) {
  const int64_t hidden = problem.hidden;
  const bool branch = problem.grad_branch != nullptr;
  const int bytes = static_cast<int>(bytes_of(problem.type)), width = kVectorBytes / bytes;
  const int most = branch ? kMostThreads<true> : kMostThreads<false>;
  const Layout none{width, 0, 0};
  if (hidden % width != 0 || hidden > int64_t{2} * width * most) return none;
  const auto threads = [](int64_t vectors, int loads) {
    return static_cast<int>((vectors + loads * kWarp - 1) / (loads * kWarp) * kWarp);
  };
  Layout layout{width, threads(hidden / width, 2), 0};
  int loads = 2;
  if (hidden / width < layout.group) return none;
  if (width == 8 && common_type(problem).type() == problem.type) {
    // Where vectors of half the width leave fewer threads without one.
    const int narrow = threads(hidden / 4, 3);
    if (narrow <= most && hidden / 4 >= 2 * narrow && 33 * narrow < 40 * layout.group) {
      layout = {4, narrow, 0};
      loads = 3;
    }
  }
  const int row_bytes = layout.group * loads * layout.width * bytes * (branch ? 4 : 2) * kStages;
  const int most_bytes = static_cast<int>(most_shared_bytes() - kStaticBytes);
  if (row_bytes > most_bytes) return none;
  layout.rows = std::max(1, std::min({std::min(kRingBytes, most_bytes) / row_bytes, most / layout.group, kMostRows}));
  return layout;
}

template <typename T, typename M, int kWidth, int kLoads, bool kBranch>
cudaError_t launch_ring(const Ring& problem, const Layout& layout, int64_t blocks, cudaStream_t stream) {
  const auto kernel = backward_kernel<T, M, kWidth, kLoads, kBranch>;
  const size_t threads = static_cast<size_t>(layout.group) * layout.rows;
  const size_t slots = sizeof(T) * kWidth * kStages * kLoads * (kBranch ? 4 : 2) * threads;
  const size_t sums = layout.rows > 1 ? sizeof(float) * layout.rows * problem.hidden : 0;
  // Half of a processor's: of two blocks that begin early on one processor, another would go without.
  const size_t shared = std::max({slots, sums, shared_bytes_of_processor() / 2});
  // Beyond what every kernel may have, it has to be asked for. The sums between warps count as well.
  if (shared + kStaticBytes > kUsualBytes) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  return launch_early(kernel, dim3(static_cast<unsigned>(blocks)), dim3(layout.group, layout.rows), shared, stream,
                      problem);
}

template <typename T, typename M, bool kBranch>
cudaError_t launch_fitting(const Ring& problem, const Layout& layout, int64_t blocks, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  if constexpr (kWidth == 8 && std::is_same_v<T, M>) {
    if (layout.width == 4) return launch_ring<T, M, 4, 3, kBranch>(problem, layout, blocks, stream);
  }
  return launch_ring<T, M, kWidth, 2, kBranch>(problem, layout, blocks, stream);
}

template <typename T, bool kBranch>
cudaError_t launch_typed(const Ring& problem, Type type, const Layout& layout, int64_t blocks, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, float>) {
    if (type != Type::float32) return launch_fitting<T, T, kBranch>(problem, layout, blocks, stream);
  }
  return launch_fitting<T, float, kBranch>(problem, layout, blocks, stream);
}

template <typename T>
cudaError_t launch(const Backward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.grad, sizeof(T)) &&
                       aligned(problem.x, sizeof(T)) && aligned(problem.grad_sum, sizeof(T)) &&
                       aligned(problem.branch, sizeof(T)) && aligned(problem.gate) && aligned(problem.scale) &&
                       aligned(problem.weight.data) && aligned(problem.bias.data) && aligned(problem.grad_x) &&
                       aligned(problem.grad_branch) && aligned(problem.grad_scale) && aligned(problem.grad_gate);
  const bool branch = problem.grad_branch != nullptr;
  const Layout layout = layout_of(problem);
  const CommonType common = common_type(problem);
  const int64_t rows = problem.rows / problem.sums.groups;
  // Without modulations there is one group, whatever the span.
  const bool modulated = problem.scale.rows.data != nullptr || branch;
  Lines x, grad, grad_sum, added_branch, scale, gate;
  if (vectors && layout.rows > 0 && common.one() && !(modulated && problem.span == 1) && problem.rows < INT32_MAX &&
      lines_of(problem.x, rows, &x) && lines_of(problem.grad, rows, &grad) &&
      lines_of(problem.grad_sum, rows, &grad_sum) && lines_of(problem.branch, rows, &added_branch) &&
      lines_of(problem.scale, &scale) && lines_of(problem.gate, &gate)) {
    if (problem.grad_gate == nullptr) added_branch.data = nullptr;
    const Ring ring{x,
                    grad,
                    grad_sum,
                    added_branch,
                    scale,
                    gate,
                    problem.weight.data,
                    problem.grad_x,
                    problem.grad_branch,
                    problem.sums.partial,
                    problem.sums.count,
                    static_cast<uint32_t>(rows),
                    static_cast<uint32_t>(problem.sums.parts),
                    static_cast<int>(problem.hidden),
                    Average(problem.hidden),
                    problem.eps,
                    problem.centered};
    const int64_t blocks = problem.sums.groups * problem.sums.parts;
    return branch ? launch_typed<T, true>(ring, common.type(), layout, blocks, stream)
                  : launch_typed<T, false>(ring, common.type(), layout, blocks, stream);
  }
  const auto blocks = static_cast<unsigned>(problem.sums.groups * problem.sums.parts);
  const auto threads = static_cast<unsigned>(long_shape(problem.hidden, kWidth).block());
  backward_long_kernel<T><<<blocks, threads, 0, stream>>>(problem);
  return cudaGetLastError();
}

}  // namespace

int partial_sums(const Backward& problem, int64_t* parts) {
  int processors;
  const cudaError_t error = processors_of_device(&processors);
  if (error != cudaSuccess) return error;
  const Layout layout = layout_of(problem);
  const int64_t at_once = std::max(1, layout.rows), blocks = layout.rows > 0 ? processors : 2 * processors;
  const int64_t groups = problem.sums.groups, most = (problem.rows / groups + at_once - 1) / at_once;
  *parts = std::max<int64_t>(1, std::min(blocks / groups, most));
  return cudaSuccess;
}

int backward(const Backward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaSuccess;
  with_type(problem.type, [&](auto tag) { error = launch<typename decltype(tag)::Element>(problem, cuda_stream); });
  if (error != cudaSuccess || problem.sums.partial == nullptr) return error;
  Reduction reduction{};
  reduction.hidden = problem.hidden;
  reduction.sums = problem.sums;
  reduction.add(problem.grad_weight, problem.weight.type, true, {kSlopeTimesNormed, {}});
  reduction.add(problem.grad_bias, problem.bias.type, true, {kSlope, {}});
  if (problem.span > 1) {
    reduction.scale = problem.scale;
    const Term slope_times_normed{kSlopeTimesNormed, problem.weight};
    if (problem.bias.data == nullptr) {
      reduction.add(problem.grad_scale, problem.scale.type, false, slope_times_normed);
    } else {
      reduction.add(problem.grad_scale, problem.scale.type, false, slope_times_normed, {kSlope, problem.bias});
    }
    reduction.add(problem.grad_shift, problem.scale.type, false, {kSlope, {}});
    reduction.add(problem.grad_gate, problem.gate.type, false, {kGate, {}});
  }
  return reduce(reduction, cuda_stream);
}

}  // namespace adaln
