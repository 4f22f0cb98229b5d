// Modulated norms, backward, with and without the gated branch that was added before, on CUDA.
//
// Reads:    grad, x, grad_sum and the branch, each once from memory: a row lies in shared memory between its sums and
//           its result. The norm is computed again, from x. Short rows and rows that lie unfavourably have kernels of
//           their own.
// Writes:   `grad_x` and `grad_branch`; gradients of modulations that every row has of its own; `partial` when sums are
//           asked for, and what they are summed to.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Bytes, for elements of e bytes: rows * hidden * 3e, with a branch 6e. Sums take another 8 (12) for each column of
// each part, written and read: with one part for each processor, less than a hundredth of the rest.
//
// Each part of a group of rows is a block, which stays for all of its rows and adds up their sums in registers;
// reduce.cu adds up what the blocks leave. The order of both is fixed, so that equal inputs give equal bits. A block
// has several rows in work at a time, each with threads of its own and a ring in shared memory, through which its next
// rows come. What the first rows need is on its way into the L2 cache before the kernel in front has ended.
#include <type_traits>
#include <utility>

#include "adaln_cuda/adaln.h"
#include "adaln_cuda/backward_any.cuh"
#include "adaln_cuda/backward_short.cuh"
#include "adaln_cuda/device.cuh"
#include "adaln_cuda/reduce.cuh"
#include "kit/unaligned_rows.cuh"

namespace adaln {
namespace {

constexpr int kMostRows = 15;  // of a block at a time: there are so many barriers
// Where a processor has fewer bytes to read, more is on its way from memory; with more of them, blocks get out of step,
// and memory is slower the more they ask for.
constexpr int kFewBytes = 768 * 1024;
constexpr int kFewStages = 3, kStages = 2;  // rows of a ring: one in work, and the next ones on their way
constexpr int kManyBytes = 76 * 1024;       // of the rings of a block, if there is much to read
// Rows with a branch are long: then, where so many bytes are work enough for a turn, rows are rather fewer, and rings
// longer, with so much in them that is on its way.
constexpr int kWorkBytes = 13 * 1024, kManyAhead = 32 * 1024;
constexpr size_t kOwnBytes = 2 * 1024;  // of shared memory, at most, besides the dynamic

// Elements of bfloat16 that memory moves together. The threads of a shifted row begin at a multiple of them.
constexpr int kPlaces = 16;

constexpr int kMostThreads = 512;     // of a block
constexpr int kMostWithBranch = 384;  // of a block of several rows
// So many threads of the kernels that need most registers leave room for those of the second kernel. Where a
// processor's rows are done in fewer turns of a full block, it is worth more that they are there already; and in very
// few turns, that some rows are on their way while others are in work.
constexpr int kFullTurns = 7, kMostOfFew = 384, kFewTurns = 4, kMostOfFewest = 288;

// Rows that shared memory holds.
struct Ring {
  Lines lines[4];    // x, grad, grad_sum, branch; data null where there is none
  int64_t steps[4];  // from a row of a thread to its next one, in bytes
  Lines scale, gate;
  const void* weight;
  Type scale_type, gate_type, weight_type;
  void *grad_x, *grad_branch;
  float* partial;
  int kinds;             // of sums
  uint32_t rows, parts;  // of a group
  int hidden;
  uint32_t stages;  // rows of a ring
  Average average;
  float eps;
  bool centered;
};

// For the threads of one row of a block of several. All rows of a block take as many of these: the sanitizer counts
// them when it looks for races on what all threads share at the end.
__device__ __forceinline__ void synchronize_row(int row, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + row), "r"(threads) : "memory");
}

// How many elements behind a multiple of kPlaces the rows of a block begin, as those of grad_x do.
__device__ __forceinline__ int shift_of(const Ring& problem) {
  const uint32_t rows_group = blockIdx.x / problem.parts, part = blockIdx.x - rows_group * problem.parts;
  return static_cast<int>((rows_group * problem.rows + part) * problem.hidden % kPlaces);
}

// Blocks of (threads of a row, rows).
//
// kShifted: rows begin and end within a vector, all rows of a block at the same place of it. What else it holds counts
// as zero, and is not written. There is one such kernel, with and without a branch, and it is empty where `kAllKernels`
// is false.
template <typename T, int kWidth, int kLoads, bool kBranch, bool kShifted>
__global__ void __launch_bounds__(kMostThreads) backward_kernel(const __grid_constant__ Ring problem) {
  if constexpr (kShifted && !kAllKernels) return;
  constexpr int kTensors = kBranch ? 4 : 2, kKinds = kBranch ? 3 : 2, kLast = kLoads - 1;
  constexpr int kMostWarps = kMostThreads / kWarp, kQuads = kLoads * kWidth / 4;
  using Slot = typename Word<sizeof(T) * kWidth>::Type;
  // The factors of gradients, [quads of a thread][threads of a row], and those of branches; the rings,
  // [rows][stages][tensors][vectors of a thread][threads of a row]; at the end, sums.
  extern __shared__ float4 memory[];
  // In two halves, of which the next row's sums take the other one. A row's warps are filled up to a multiple of four.
  __shared__ float4 of_warps[2][4 * kMostWarps];
  const int hidden = problem.hidden, group = blockDim.x, threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = threadIdx.x % kWarp;
  const int filled_up = (group / kWarp + 3) / 4 * 4;
  // The last vector of a thread may lie past the row's end. It is zero then, as if it were not there.
  const int shift = kShifted ? shift_of(problem) : 0;  // of the first vector, before the row
  const int first_column = threadIdx.x * kWidth - shift, from_load_to_load = group * kWidth;
  const bool whole = first_column + kLast * from_load_to_load < hidden;
  const uint32_t rows_group = blockIdx.x / problem.parts, part = blockIdx.x - rows_group * problem.parts;
  const int left = hidden - first_column - kLast * from_load_to_load;  // columns for the last vector
  const bool begins = kShifted && first_column < 0, ends = kShifted && whole && left < kWidth;
  // The row whose last vector goes on behind the tensors.
  const uint32_t last_row = ends && blockIdx.x + problem.parts >= gridDim.x ? problem.rows - 1 : UINT32_MAX;
  const uint32_t first_row = part + threadIdx.y * problem.parts, stride = problem.parts * blockDim.y;
  const uint32_t slots = group * sizeof(Slot), of_stage = kTensors * kLoads * slots;
  const uint32_t factors = shared_address(memory) + threadIdx.x * sizeof(float4),
                 of_factors = kQuads * group * sizeof(float4);
  const uint32_t ring = shared_address(memory) + (kBranch ? 2 : 1) * of_factors +
                        threadIdx.y * problem.stages * of_stage + threadIdx.x * sizeof(Slot);
  const auto has = [&](int tensor) { return tensor < 2 || problem.lines[tensor].data != nullptr; };

  if (threadIdx.x == 0) {
    if (!kShifted && threadIdx.y == 0) {
      const auto size = [](Type type) { return type == Type::float32 ? sizeof(float) : sizeof(T); };
      const auto ask_for = [&](const void* rows, Type type, int64_t begin) {
        if (rows != nullptr)
          prefetch_row_to_l2(static_cast<const char*>(rows) + begin * size(type), hidden * size(type));
      };
      ask_for(problem.scale.data, problem.scale_type, rows_group * problem.scale.span_stride);
      ask_for(problem.weight, problem.weight_type, 0);
      if (kBranch) ask_for(problem.gate.data, problem.gate_type, rows_group * problem.gate.span_stride);
    }
    for (uint32_t row = first_row, stage = 1; stage < problem.stages && row < problem.rows; row += stride, ++stage) {
#pragma unroll
      for (int k = 0; k < kTensors; ++k) {
        if (has(k)) prefetch_row_to_l2(problem.lines[k].template at<T>(rows_group, row), hidden);
      }
    }
  }
  for (int i = thread; i < 8 * kMostWarps; i += threads) of_warps[0][i] = float4{};
  grid_wait();
  trigger_next_grid();
  const char* next[kTensors];  // what is fetched next
  uint32_t next_row = first_row;
#pragma unroll
  for (int k = 0; k < kTensors; ++k) {
    next[k] = reinterpret_cast<const char*>(problem.lines[k].template at<T>(rows_group, first_row) + first_column);
  }
  const auto fetch = [&](uint32_t to) {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) {
      if (next_row < problem.rows && has(k)) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (kShifted && i == kLast && next_row == last_row) continue;
          if (i < kLast || whole) cp_async<Slot>(to + (k * kLoads + i) * slots, next[k] + i * slots);
        }
      }
      next[k] += problem.steps[k];
    }
    next_row += stride;
    cp_async_commit();
  };
  const auto wait_for_oldest = [&] {  // but for the rows that are on their way behind it
    if (problem.stages == kStages) {
      cp_async_wait<kStages - 1>();
    } else {
      cp_async_wait<kFewStages - 1>();
    }
  };
  if constexpr (kShifted) {
    for (uint32_t stage = 1; stage < problem.stages; ++stage) fetch(ring + (stage - 1) * of_stage);
#pragma unroll 1
    for (int i = threadIdx.y; i < kLoads; i += blockDim.y) {
      float factor[kWidth];
#pragma unroll
      for (float& value : factor) value = 1.0f;
#pragma unroll 1
      for (int k = 0; k < 3; ++k) {
        const void* const data = k == 0 ? problem.scale.data : k == 1 ? problem.weight : problem.gate.data;
        const Type type = k == 0 ? problem.scale_type : k == 1 ? problem.weight_type : problem.gate_type;
        const int64_t begin = k == 0 ? problem.scale.span_stride : k == 1 ? 0 : problem.gate.span_stride;
        if (data != nullptr) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const int one = min(max(first_column + i * from_load_to_load + j, 0), hidden - 1);
            float value[1];
            load_either<T>(data, type, rows_group * begin + one, value);
            factor[j] = k == 0 ? 1.0f + value[0] : k == 1 ? factor[j] * value[0] : value[0];
          }
        }
        if (k == 0) continue;
#pragma unroll
        for (int j = 0; j < kWidth; j += 4) {
          memory[((k - 1) * kQuads + (i * kWidth + j) / 4) * group + threadIdx.x] =
              make_float4(factor[j], factor[j + 1], factor[j + 2], factor[j + 3]);
        }
      }
    }
  } else {
    // What factors are made of comes before the rows, all of it together, four columns at a time: scale and gate to
    // where factors are going to be, the weight to the row of the ring that is still free.
    using Four = typename Word<4 * sizeof(T)>::Type;
    const auto is_wide = [](Type type) { return sizeof(T) != sizeof(float) && type == Type::float32; };
    const auto bring = [&](uint32_t to, const void* data, Type type, int64_t index) {
      if (data == nullptr) return;
      if (is_wide(type)) {
        cp_async<float4>(to, static_cast<const float*>(data) + index);
      } else {
        cp_async<Four>(to, static_cast<const T*>(data) + index);
      }
    };
    const auto brought = [&](uint32_t from, Type type, float (&values)[4]) {
      if (is_wide(type)) {
        decode_shared<float>(from, values);
      } else {
        decode_shared<T>(from, values);
      }
    };
    constexpr int kQuadsOfLoad = kWidth / 4;
    const uint32_t of_quad = group * sizeof(float4);
    const uint32_t weights =
        ring + (problem.stages - 1) * of_stage + threadIdx.x * static_cast<uint32_t>(sizeof(float4) - sizeof(Slot));
#pragma unroll 1
    for (int quad = threadIdx.y; quad < kQuads; quad += blockDim.y) {
      const int i = quad / kQuadsOfLoad;
      const int column = i < kLast || whole ? first_column + i * from_load_to_load + quad % kQuadsOfLoad * 4 : 0;
      bring(factors + quad * of_quad, problem.scale.data, problem.scale_type,
            rows_group * problem.scale.span_stride + column);
      bring(weights + quad * of_quad, problem.weight, problem.weight_type, column);
      if constexpr (kBranch) {
        bring(factors + of_factors + quad * of_quad, problem.gate.data, problem.gate_type,
              rows_group * problem.gate.span_stride + column);
      }
    }
    cp_async_commit();
    for (uint32_t stage = 1; stage < problem.stages; ++stage) fetch(ring + (stage - 1) * of_stage);
    wait_for_oldest();
#pragma unroll 1
    for (int quad = threadIdx.y; quad < kQuads; quad += blockDim.y) {
      float factor[4] = {}, weight[4] = {1.0f, 1.0f, 1.0f, 1.0f};
      if (problem.scale.data != nullptr) brought(factors + quad * of_quad, problem.scale_type, factor);
      if (problem.weight != nullptr) brought(weights + quad * of_quad, problem.weight_type, weight);
#pragma unroll
      for (int j = 0; j < 4; ++j) factor[j] = (1.0f + factor[j]) * weight[j];
      memory[quad * group + threadIdx.x] = make_float4(factor[0], factor[1], factor[2], factor[3]);
      if constexpr (kBranch) {
        brought(factors + of_factors + quad * of_quad, problem.gate_type, factor);
        memory[(kQuads + quad) * group + threadIdx.x] = make_float4(factor[0], factor[1], factor[2], factor[3]);
      }
    }
  }
  __syncthreads();
  if (!whole) {
    for (uint32_t i = 0; i < problem.stages * kTensors; ++i) {
      store_shared(ring + (i * kLoads + kLast) * slots, Slot{});
    }
  }

  const bool high = (lane & 16) != 0, odd = (lane & 8) != 0;
  const uint32_t own = threadIdx.x / kWarp * sizeof(float4) + lane / 8 * sizeof(float);
  uint32_t exchange = shared_address(&of_warps[0][threadIdx.y * filled_up]);
  const uint32_t halves = exchange ^ (exchange + sizeof(of_warps[0]));
  const auto multiply = [&](uint32_t from, float (&values)[kWidth]) {
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      float factor[4];
      decode_shared<float>(from + j / 4 * group * static_cast<int>(sizeof(float4)), factor);
#pragma unroll
      for (int k = 0; k < 4; ++k) values[j + k] = __fmul_rn(values[j + k], factor[k]);
    }
  };
  float sums[kKinds][kLoads][kWidth] = {};
  int64_t offset = (static_cast<int64_t>(rows_group) * problem.rows + first_row) * hidden + first_column;
  const uint32_t end = ring + problem.stages * of_stage;
  uint32_t slot = ring, free_slot = end - of_stage;
  for (uint32_t row = first_row; row < problem.rows; row += stride) {
    fetch(free_slot);
    free_slot = slot;
    if (kShifted && row == last_row) {
#pragma unroll 1
      for (int k = 0; k < kTensors; ++k) {
        const T* const from = problem.lines[k].template at<T>(rows_group, row) + hidden - left;
        if (has(k))
          copy_zero_filled<Slot>(slot + (k * kLoads + kLast) * slots, from, left * static_cast<int>(sizeof(T)));
      }
    }
    wait_for_oldest();
    float x[kLoads][kWidth], slope[kLoads][kWidth];  // slope: the gradient of the normed row
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      decode_shared<T>(slot + i * slots, x[i]);
      decode_shared<T>(slot + (kLoads + i) * slots, slope[i]);
      multiply(factors + i * kWidth / 4 * group * static_cast<int>(sizeof(float4)), slope[i]);
    }
    float mean, variance, all[4];
    for (bool again = false;; again = true) {
      if (kShifted && (begins || ends)) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (begins && first_column + j < 0) x[0][j] = slope[0][j] = 0.0f;
          if (ends && j >= left) x[kLast][j] = slope[kLast][j] = 0.0f;
        }
      }
      float totals[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of x, its squares, slopes, and their products with x
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          totals[0] += x[i][j];
          totals[1] += x[i][j] * x[i][j];
          totals[2] += slope[i][j];
          totals[3] += slope[i][j] * x[i][j];
        }
      }
      // Each quarter of the lanes is left with one of them.
      const float first = (high ? totals[2] : totals[0]) + __shfl_xor_sync(kAllLanes, high ? totals[0] : totals[2], 16);
      const float second =
          (high ? totals[3] : totals[1]) + __shfl_xor_sync(kAllLanes, high ? totals[1] : totals[3], 16);
      float total = (odd ? second : first) + __shfl_xor_sync(kAllLanes, odd ? first : second, 8);
#pragma unroll
      for (int distance = 4; distance > 0; distance /= 2) total += __shfl_xor_sync(kAllLanes, total, distance);
      if (lane % 8 == 0) store_shared(exchange + own, total);
      synchronize_row(threadIdx.y, group);
      all[0] = all[1] = all[2] = all[3] = 0.0f;
#pragma unroll 1
      for (int warp = 0; warp < filled_up; warp += 4) {
        float four[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) decode_shared<float>(exchange + (warp + i) * sizeof(float4), four[i]);
#pragma unroll
        for (int k = 0; k < 4; ++k) all[k] += (four[0][k] + four[1][k]) + (four[2][k] + four[3][k]);
      }
      exchange ^= halves;  // a slow warp may still read the one half while the next sums are written
      mean = problem.centered ? problem.average(all[0]) : 0.0f;
      variance = problem.average(all[1]) - mean * mean;
      if (!problem.centered || again) break;
      if (4.0f * mean * mean <= variance) {
        synchronize_row(threadIdx.y, group);  // instead of that of the other rows' second time
        break;
      }
      // A row far from zero has lost digits: its sums are taken again, of what it is beside its mean.
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) x[i][j] = i < kLast || whole ? x[i][j] - mean : 0.0f;
      }
    }
    const float rstd = rsqrtf(variance + problem.eps);
    const float slant = -rstd * (rstd * rstd * problem.average(all[3] - all[2] * mean));
    const float mean_slope = problem.centered ? problem.average(all[2]) : 0.0f;
    const float constant = -rstd * mean_slope - mean * slant, mean_times_rstd = mean * rstd;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float grad[kWidth], total[kWidth];
      decode_shared<T>(slot + (kLoads + i) * slots, grad);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        total[j] = slope[i][j] * rstd + (x[i][j] * slant + constant);
        sums[kSlopeTimesNormed][i][j] += grad[j] * (x[i][j] * rstd - mean_times_rstd);
        sums[kSlope][i][j] += grad[j];
      }
      if (kBranch && has(2)) {
        float more[kWidth];
        decode_shared<T>(slot + (2 * kLoads + i) * slots, more);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) total[j] += more[j];
      }
      const int64_t index = offset + i * from_load_to_load;
      const bool written = i < kLast || whole;
      const auto write = [&](void* to) {
        if constexpr (kShifted) {
          T* const at = static_cast<T*>(to) + index;
          const auto vector = encode_all<T>(total);
          if (i == 0 ? begins : ends) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
              if (i == 0 ? first_column + j >= 0 : j < left) at[j] = vector.elements[j];
            }
          } else if (written) {
            store_streaming(at, vector);
          }
        } else {
          if (written) store_streaming(static_cast<T*>(to) + index, encode_all<T>(total));
        }
      };
      write(problem.grad_x);
      if constexpr (kBranch) {
        if (kShifted && problem.grad_branch == nullptr) continue;
        if (has(3)) {
          float branch[kWidth];
          decode_shared<T>(slot + (3 * kLoads + i) * slots, branch);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sums[kGate][i][j] += total[j] * branch[j];
        }
        multiply(factors + of_factors + i * kWidth / 4 * group * static_cast<int>(sizeof(float4)), total);
        write(problem.grad_branch);
      }
    }
    offset += static_cast<int64_t>(stride) * hidden;
    slot = slot + of_stage < end ? slot + of_stage : ring;
  }

  if (problem.partial == nullptr) return;
  float* const partial = problem.partial + static_cast<int64_t>(blockIdx.x) * problem.kinds * hidden;
  if (!kShifted && blockDim.y == 1) {
#pragma unroll
    for (int k = 0; k < kKinds; ++k) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (k < problem.kinds && (i < kLast || whole)) {
          store_floats(partial + k * hidden + first_column + i * from_load_to_load, sums[k][i]);
        }
      }
    }
    return;
  }
  const int vectors = kShifted ? (shift + hidden + kWidth - 1) / kWidth * (kWidth / 4) : hidden / 4, rows = blockDim.y;
  // Rows that have none left in the block's last turn.
  if (next_row - (problem.stages - 1) * stride - first_row + part < problem.rows) {
    synchronize_row(threadIdx.y, group);
    if (problem.centered) synchronize_row(threadIdx.y, group);
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kKinds; ++k) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (k < problem.kinds && (i < kLast || whole)) {
#pragma unroll
        for (int j = 0; j < kWidth; j += 4) {  // [kinds][rows][vectors]
          memory[(k * rows + threadIdx.y) * vectors + (shift + first_column + i * from_load_to_load + j) / 4] =
              make_float4(sums[k][i][j], sums[k][i][j + 1], sums[k][i][j + 2], sums[k][i][j + 3]);
        }
      }
    }
  }
  __syncthreads();
  if constexpr (kShifted) {
    const float* of_row = reinterpret_cast<const float*>(memory) + shift;
#pragma unroll 1
    for (int k = 0; k < problem.kinds; ++k, of_row += rows * 4 * vectors) {
#pragma unroll 2
      for (int column = thread; column < hidden; column += threads) {
        float sum = of_row[column];
#pragma unroll 1
        for (int row = 1; row < rows; ++row) sum += of_row[row * 4 * vectors + column];
        partial[k * hidden + column] = sum;
      }
    }
  } else {
#pragma unroll 1
    for (int vector = thread; vector < vectors * problem.kinds; vector += threads) {
      const float4* const of_rows = memory + vector + vector / vectors * (rows - 1) * vectors;
      float4 sum = of_rows[0];
#pragma unroll 4
      for (int row = 1; row < rows; ++row) {
        const float4 more = of_rows[row * vectors];
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
      }
      reinterpret_cast<float4*>(partial)[vector] = sum;
    }
  }
}

// How rows that shared memory holds are laid over blocks.
struct Layout {
  int width, group, rows;  // of a vector; threads of a row; rows of a block. No rows: they do not fit.
  int stages;              // rows of a ring
  bool shifted;            // whether rows begin within vectors
  size_t shared;           // bytes of a block
};

// After how many rows shifted ones lie as before.
int64_t alignment_period(const Backward& problem) { return kit::alignment_period(problem.hidden, kPlaces); }

Layout layout_of(const Backward& problem) {
  const int64_t hidden = problem.hidden;
  const bool branch = problem.grad_branch != nullptr;
  const int bytes = static_cast<int>(bytes_of(problem.type));
  Layout layout{kVectorBytes / bytes, 0, 0, 0, false, 0};
  layout.shifted = hidden % layout.width != 0;
  // Shifted rows with what else is in their first and last vector, at most.
  const int64_t read = layout.shifted ? hidden + kPlaces + layout.width - 2 : hidden;
  const auto threads = [&](int width, int loads) {
    return static_cast<int>((read / width + loads * kWarp - 1) / (loads * kWarp) * kWarp);
  };
  if (read > int64_t{2} * layout.width * kMostThreads) return layout;
  const void* const of_shifted = reinterpret_cast<const void*>(backward_kernel<__nv_bfloat16, 8, 2, true, true>);
  if (layout.shifted && !(problem.type == Type::bfloat16 && has_all_kernels(of_shifted))) return layout;
  int loads = 2;
  layout.group = threads(layout.width, loads);
  if (hidden / layout.width < layout.group) return layout;
  if (layout.width == 8 && !layout.shifted) {
    // Where vectors of half the width leave fewer threads without one.
    const int narrow = threads(4, 3);
    if (narrow <= kMostThreads && hidden / 4 >= 2 * narrow && 33 * narrow < 40 * layout.group) {
      layout.width = 4;
      layout.group = narrow;
      loads = 3;
    }
  }
  const int columns = layout.group * loads * layout.width,
            of_factors = columns * 4 * (branch || layout.shifted ? 2 : 1);
  const int read_bytes = columns * bytes * (branch ? 4 : 2),
            row_bytes = layout.shifted ? columns * bytes * 4 : read_bytes;
  const int most_bytes = static_cast<int>(most_shared_bytes() - kOwnBytes) - of_factors;
  const auto rows_in = [&](int all_bytes) {
    return std::min({all_bytes / (kStages * row_bytes),
                     std::max(1, (branch ? kMostWithBranch : kMostThreads) / layout.group), kMostRows});
  };
  layout.stages = kStages;
  layout.rows = rows_in(most_bytes);
  int processors;
  if (layout.rows <= 0 || sm_count(&processors) != cudaSuccess) return layout;
  const int64_t of_processor = (problem.rows + processors - 1) / processors;
  if (of_processor * row_bytes > kFewBytes) {
    layout.rows = std::max(1, rows_in(std::min(kManyBytes / read_bytes * row_bytes, most_bytes)));
    const int ahead = kManyAhead / ((kFewStages - 1) * row_bytes);
    if (branch && !layout.shifted && ahead * row_bytes >= kWorkBytes && kFewStages * ahead * row_bytes <= most_bytes) {
      layout.rows = ahead;
      layout.stages = kFewStages;
    }
  } else {
    const auto at_most = [&](int most) {
      if (2 * layout.group <= most) layout.rows = std::min(layout.rows, most / layout.group);
    };
    if (layout.width == 8 && !layout.shifted) {
      if (of_processor < kFullTurns * layout.rows) at_most(kMostOfFew);
      if (of_processor < kFewTurns * layout.rows) at_most(kMostOfFewest);
    }
    if (kFewStages * row_bytes * layout.rows <= most_bytes) layout.stages = kFewStages;
  }
  // At least half of a processor's: of two blocks that begin early on one processor, another would go without.
  layout.shared =
      std::max<size_t>(of_factors + row_bytes * layout.stages * layout.rows, shared_bytes_of_processor() / 2);
  return layout;
}

// Whether every row has a modulation of its own. Without modulations there is one group, whatever the span.
bool own_modulations(const Backward& problem) {
  return problem.span == 1 && (problem.scale.rows.data != nullptr || problem.grad_branch != nullptr);
}

bool short_fits(const Backward& problem, const Layout& layout) {
  return layout.rows <= 0 || problem.rows == 1 || own_modulations(problem);
}

template <typename T, int kWidth, int kLoads, bool kBranch, bool kShifted = false>
cudaError_t launch_ring(const Ring& problem, const Layout& layout, int64_t blocks, cudaStream_t stream) {
  const auto kernel = backward_kernel<T, kWidth, kLoads, kBranch, kShifted>;
  // Beyond what every kernel may have, it has to be asked for. What is not dynamic counts as well.
  if (layout.shared + kOwnBytes > kUsualBytes) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(layout.shared));
    if (error != cudaSuccess) return error;
  }
  return launch_with_pdl(kernel, dim3(static_cast<unsigned>(blocks)), dim3(layout.group, layout.rows), layout.shared,
                         stream, problem);
}

template <typename T, bool kBranch>
cudaError_t launch_fitting(const Ring& problem, const Layout& layout, int64_t blocks, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (layout.shifted) return launch_ring<T, kWidth, 2, true, true>(problem, layout, blocks, stream);
  }
  if constexpr (kWidth == 8) {
    if (layout.width == 4) return launch_ring<T, 4, 3, kBranch>(problem, layout, blocks, stream);
  }
  return launch_ring<T, kWidth, 2, kBranch>(problem, layout, blocks, stream);
}

template <typename T>
cudaError_t launch(const Backward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.grad, sizeof(T)) &&
                       aligned(problem.x, sizeof(T)) && aligned(problem.grad_sum, sizeof(T)) &&
                       aligned(problem.branch, sizeof(T)) && aligned(problem.gate) && aligned(problem.scale) &&
                       aligned(problem.weight.data) && aligned(problem.bias.data) && aligned(problem.grad_x) &&
                       aligned(problem.grad_branch) && aligned(problem.grad_scale) && aligned(problem.grad_gate) &&
                       aligned(problem.grad_weight) && aligned(problem.grad_bias);
  const bool branch = problem.grad_branch != nullptr;
  const Layout layout = layout_of(problem);
  const int64_t rows = problem.rows / problem.sums.groups;
  // Rows of a block begin alike, in all tensors.
  const auto alike = [&](const Rows& tensor) {
    return same_alignment(tensor, problem.grad_x, problem.hidden, sizeof(T));
  };
  const bool shifted = layout.shifted &&
                       (rows <= problem.sums.parts || problem.sums.parts % alignment_period(problem) == 0) &&
                       alike(problem.grad) && alike(problem.x) && alike(problem.grad_sum) && alike(problem.branch) &&
                       aligned(problem.grad_x) && aligned(problem.grad_branch);
  Lines x, grad, grad_sum, added_branch, scale, gate;
  const bool lined = (vectors || shifted) && problem.rows < INT32_MAX && lines_of(problem.x, rows, &x) &&
                     lines_of(problem.grad, rows, &grad) && lines_of(problem.grad_sum, rows, &grad_sum) &&
                     lines_of(problem.branch, rows, &added_branch);
  if (problem.grad_gate == nullptr) added_branch.data = nullptr;
  const ShortShape shape = short_fits(problem, layout) ? short_shape(problem) : ShortShape{};
  const bool own = own_modulations(problem);
  const int64_t of_modulations = own ? rows : 1;
  if (lined && vectors && shape.rows > 0 && lines_of(problem.scale.rows, of_modulations, &scale) &&
      lines_of(problem.gate.rows, of_modulations, &gate)) {
    const Kind rows_kind = kind_of(problem.type);
    Short of_rows{{x, grad, {}, grad_sum, {}, added_branch},
                  scale,
                  gate,
                  problem.weight.data,
                  problem.bias.data,
                  {rows_kind, rows_kind, kind_of(problem.scale.type), rows_kind, kind_of(problem.gate.type), rows_kind},
                  kind_of(problem.scale.type),
                  kind_of(problem.gate.type),
                  kind_of(problem.weight.type),
                  kind_of(problem.bias.type),
                  problem.grad_x,
                  problem.grad_branch,
                  nullptr,
                  nullptr,
                  nullptr,
                  nullptr,
                  problem.sums.partial,
                  problem.sums.count,
                  static_cast<uint32_t>(rows),
                  static_cast<uint32_t>(problem.sums.parts),
                  static_cast<int>(problem.hidden),
                  0,
                  0,
                  Average(problem.hidden),
                  problem.eps,
                  problem.centered};
    if (own) {
      std::swap(of_rows.scale, of_rows.lines[kOfScale]);
      std::swap(of_rows.gate, of_rows.lines[kOfGate]);
      of_rows.grad_scale = problem.grad_scale;
      of_rows.grad_gate = problem.grad_gate;
    }
    if (problem.rows == 1) {
      of_rows.partial = nullptr;
      of_rows.grad_weight = problem.grad_weight;
      of_rows.grad_bias = problem.grad_bias;
    }
    return launch_short(problem, of_rows, shape, stream);
  }
  if (lined && layout.rows > 0 && !own && problem.rows > 1 && lines_of(problem.scale, &scale) &&
      lines_of(problem.gate, &gate)) {
    const int64_t step = problem.sums.parts * layout.rows * static_cast<int64_t>(sizeof(T));
    const Ring ring{
        {x, grad, grad_sum, added_branch},
        {step * x.row_stride, step * grad.row_stride, step * grad_sum.row_stride, step * added_branch.row_stride},
        scale,
        gate,
        problem.weight.data,
        problem.scale.type,
        problem.gate.type,
        problem.weight.type,
        problem.grad_x,
        problem.grad_branch,
        problem.sums.partial,
        problem.sums.count,
        static_cast<uint32_t>(rows),
        static_cast<uint32_t>(problem.sums.parts),
        static_cast<int>(problem.hidden),
        static_cast<uint32_t>(layout.stages),
        Average(problem.hidden),
        problem.eps,
        problem.centered};
    const int64_t blocks = problem.sums.groups * problem.sums.parts;
    return branch ? launch_fitting<T, true>(ring, layout, blocks, stream)
                  : launch_fitting<T, false>(ring, layout, blocks, stream);
  }
  return launch_any(problem, stream);
}

}  // namespace

int partial_sums(const Backward& problem, int64_t* parts) {
  int processors;
  const cudaError_t error = sm_count(&processors);
  if (error != cudaSuccess) return error;
  const Layout layout = layout_of(problem);
  int64_t at_once = layout.rows;
  const ShortShape shape = short_fits(problem, layout) ? short_shape(problem) : ShortShape{};
  if (shape.rows > 0) {
    at_once = shape.rows;
  } else if (layout.rows <= 0 || problem.rows == 1 || own_modulations(problem)) {
    Source sources[kOperands];
    const AnyLayout any = any_layout(problem, problem.hidden % kAnyWidth != 0, sources);
    at_once = any.rows;
  }
  const int64_t groups = problem.sums.groups, most = (problem.rows / groups + at_once - 1) / at_once;
  *parts = std::max<int64_t>(1, std::min(processors / groups, most));
  if (layout.rows > 0 && layout.shifted) {
    const int64_t period = alignment_period(problem);
    const auto periods = [&](int64_t count) { return std::max<int64_t>(count / period, 1) * period; };
    *parts = std::min({periods(processors / groups), periods(most + period - 1), problem.rows / groups});
  }
  return cudaSuccess;
}

int backward(const Backward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaSuccess;
  dispatch_dtype(problem.type,
                 [&](auto tag) { error = launch<typename decltype(tag)::Element>(problem, cuda_stream); });
  if (error != cudaSuccess || problem.sums.partial == nullptr || problem.rows == 1) return error;
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
