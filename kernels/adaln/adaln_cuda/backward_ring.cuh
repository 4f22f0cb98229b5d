// Backward of modulated norms of rows that fit in shared memory: the fast path.
//
// Reads:    grad, x, grad_sum and the branch, each once, through a ring buffer in shared memory. The norm is computed
//           again, from x.
// Writes:   `grad_x` and `grad_branch`, with streaming stores, and `partial` when sums are requested.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Each part of a group of rows is one block, which loops over its rows and sums their columns in registers. A block
// processes several rows at a time. Each of them has its own threads and its own ring, into which the next rows are
// copied. The first rows are prefetched into L2 while the preceding kernel still runs. The order of all sums is fixed.
//
// Included by backward.cu.
#pragma once

#include "adaln_cuda/device_limits.cuh"
#include "adaln_cuda/strided_rows.cuh"
#include "kit/vectors.cuh"

namespace adaln {
namespace {

constexpr int kMaxRows = 15;                   // of a block: named barriers 1 to 15
constexpr size_t kRingStaticBytes = 2 * 1024;  // of shared memory, at most

enum RingTensor : int { kRingX, kRingGrad, kRingGradSum, kRingBranch, kRingTensors };

struct RingBackward {
  StridedRows rows[kRingTensors];  // data null where there is none
  int64_t steps[kRingTensors];     // from a row of a thread to its next one, in bytes
  StridedRows scale, gate;
  const void* weight;
  Type scale_type, gate_type, weight_type;
  void *grad_x, *grad_branch;
  float* partial;
  int sum_count;
  uint32_t group_rows, parts;  // of a group
  int hidden;
  uint32_t stages;
  Average average;
  float eps;
  bool centered;
};

// Synchronizes the threads of one row. All rows of a block execute the same number of these barriers: compute-sanitizer
// counts them when it looks for races on the shared memory that all threads use at the end.
__device__ __forceinline__ void synchronize_row(int row, int threads) { synchronize_warps(row, threads); }

// The tensors of which the ring has rows.
constexpr int ring_tensors(Branch branch) { return branch == Branch::none ? 2 : branch == Branch::plain ? 3 : 4; }

// Constants derived from a row of the launch table.
template <typename T, int kRow, Branch kBranch>
struct RingTypes {
  static constexpr RingKernelConfig kConfig = kRingKernelTable[kRow];
  static constexpr int kWidth = kConfig.vector_bytes / static_cast<int>(sizeof(T)), kVectors = kConfig.vectors;
  static constexpr int kLast = kVectors - 1, kQuads = kVectors * kWidth / 4;
  static constexpr int kTensors = ring_tensors(kBranch), kSums = kBranch == Branch::gated ? 3 : 2;
  // Whether the kernel takes problems without a gate, too, because no other kernel takes such rows.
  static constexpr bool kOptionalGate = (kPlainRingDtypes & dtype_bit(kTypeOf<T>)) == 0;
  static constexpr int kMaxWarps = kConfig.max_threads / kWarp;
  using Slot = typename Word<sizeof(T) * kWidth>::Type;
  // Sums of warps, in two halves that rows alternate between. A row's warps are padded to a multiple of four.
  using Scratch = float4[2][4 * kMaxWarps];
  using Elements = float[kVectors][kWidth];
  using Sums = float[kSums][kVectors][kWidth];
};

// The position of a thread's part of its rows. Blocks are (threads of a row, rows).
template <typename T, int kRow, Branch kBranch>
struct RingPosition : RingTypes<T, kRow, kBranch> {
  using Types = RingTypes<T, kRow, kBranch>;
  using Types::kWidth, Types::kLast, Types::kVectors, Types::kTensors, Types::kQuads;
  using Slot = typename Types::Slot;

  int hidden, group, threads, thread, lane;
  int padded_warps;               // of a row, a multiple of four
  int first_column, column_step;  // of the first vector; to the next one
  bool whole;                     // the last vector is in the row; else it is zero, and is not written
  uint32_t rows_group, part;      // rows_group: the group of rows, as of a span
  uint32_t first_row, stride;
  // Shared memory: [quads of a thread][threads of a row] of factors, twice with a branch; the rings,
  // [rows][stages][tensors][vectors of a thread][threads of a row].
  uint32_t slot_bytes, stage_bytes;
  SharedAddress factors;
  uint32_t factor_bytes;
  SharedAddress ring;

  __device__ __forceinline__ RingPosition(const RingBackward& problem, SharedAddress memory) {
    hidden = problem.hidden;
    group = blockDim.x;
    threads = blockDim.x * blockDim.y;
    thread = threadIdx.y * blockDim.x + threadIdx.x;
    lane = threadIdx.x % kWarp;
    padded_warps = (group / kWarp + 3) / 4 * 4;
    rows_group = blockIdx.x / problem.parts;
    part = blockIdx.x - rows_group * problem.parts;
    first_column = threadIdx.x * kWidth;
    column_step = group * kWidth;
    whole = first_column + kLast * column_step < hidden;
    first_row = part + threadIdx.y * problem.parts;
    stride = problem.parts * blockDim.y;
    slot_bytes = group * sizeof(Slot);
    stage_bytes = kTensors * kVectors * slot_bytes;
    factors = memory + threadIdx.x * sizeof(float4);
    factor_bytes = kQuads * group * sizeof(float4);
    ring = memory + (kBranch == Branch::gated ? 2 : 1) * factor_bytes + threadIdx.y * problem.stages * stage_bytes +
           threadIdx.x * sizeof(Slot);
  }

  __device__ __forceinline__ bool in_row(int vector) const { return vector < kLast || whole; }
};

// Whether the problem has the tensor. x and grad are always present.
__device__ __forceinline__ bool has(const RingBackward& problem, int tensor) {
  return tensor < kRingGradSum || problem.rows[tensor].data != nullptr;
}

template <typename T>
__device__ __forceinline__ int64_t size_of(Type type) {
  return type == Type::float32 ? sizeof(float) : sizeof(T);
}

// Prefetches modulations, the weight, and the rows that the ring takes first.
template <typename T, int kRow, Branch kBranch>
__device__ __forceinline__ void prefetch_first(const RingBackward& problem, const RingPosition<T, kRow, kBranch>& at) {
  using Types = RingTypes<T, kRow, kBranch>;
  if (threadIdx.x != 0) return;
  if (threadIdx.y == 0) {
    const auto prefetch = [&](const void* data, Type type, int64_t begin) {
      if (data == nullptr) return;
      prefetch_row_to_l2(static_cast<const char*>(data) + begin * size_of<T>(type), at.hidden * size_of<T>(type));
    };
    prefetch(problem.scale.data, problem.scale_type, at.rows_group * problem.scale.span_stride);
    prefetch(problem.weight, problem.weight_type, 0);
    if (kBranch == Branch::gated)
      prefetch(problem.gate.data, problem.gate_type, at.rows_group * problem.gate.span_stride);
  }
  uint32_t row = at.first_row;
  for (uint32_t stage = 1; stage < problem.stages && row < problem.group_rows; row += at.stride, ++stage) {
#pragma unroll
    for (int k = 0; k < Types::kTensors; ++k) {
      if (has(problem, k)) prefetch_row_to_l2(problem.rows[k].template at<T>(at.rows_group, row), at.hidden);
    }
  }
}

// Copies rows into the ring.
template <typename T, int kRow, Branch kBranch>
struct RingLoader : RingTypes<T, kRow, kBranch> {
  using Types = RingTypes<T, kRow, kBranch>;
  using Types::kTensors, Types::kVectors, Types::kLast, Types::kConfig;
  using Slot = typename Types::Slot;

  const RingBackward& problem;
  const RingPosition<T, kRow, kBranch>& at;
  const char* (&next)[kTensors];  // a reference: with the array in the struct, nvcc 13.0 unrolls no other loops
  uint32_t next_row;

  __device__ __forceinline__ RingLoader(const RingBackward& problem, const RingPosition<T, kRow, kBranch>& at,
                                        const char* (&next)[kTensors])
      : problem(problem), at(at), next(next), next_row(at.first_row) {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) {
      next[k] =
          reinterpret_cast<const char*>(problem.rows[k].template at<T>(at.rows_group, at.first_row) + at.first_column);
    }
  }

  // Starts the copies of the next row.
  __device__ __forceinline__ void fetch(SharedAddress to) {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) {
      if (next_row < problem.group_rows && has(problem, k)) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (at.in_row(i)) cp_async<Slot>(to + (k * kVectors + i) * at.slot_bytes, next[k] + i * at.slot_bytes);
        }
      }
      next[k] += problem.steps[k];
    }
    next_row += at.stride;
    cp_async_commit();
  }

  __device__ __forceinline__ void fetch_first() {
    for (uint32_t stage = 1; stage < problem.stages; ++stage) fetch(at.ring + (stage - 1) * at.stage_bytes);
  }

  // Waits for the oldest row in flight.
  __device__ __forceinline__ void wait() const {
    if (problem.stages == kConfig.stages) {
      cp_async_wait<kConfig.stages - 1>();
    } else {
      cp_async_wait<kConfig.max_stages - 1>();
    }
  }
};

// Computes the factors (1 + scale) * weight, and the gate. Scale, gate and weight are first copied to shared memory,
// together and before the rows, four columns at a time: scale and gate to the memory of the factors, the weight to the
// stage that is still free.
template <typename T, int kRow, Branch kBranch>
struct RingFactors : RingTypes<T, kRow, kBranch> {
  using Types = RingTypes<T, kRow, kBranch>;
  using Types::kQuads;

  const RingBackward& problem;
  const RingPosition<T, kRow, kBranch>& at;
  uint32_t quad_bytes;
  SharedAddress weights;

  __device__ __forceinline__ RingFactors(const RingBackward& problem, const RingPosition<T, kRow, kBranch>& at)
      : problem(problem), at(at), quad_bytes(at.group * sizeof(float4)) {
    weights = at.ring + (problem.stages - 1) * at.stage_bytes +
              threadIdx.x * static_cast<uint32_t>(sizeof(float4) - sizeof(typename Types::Slot));
  }

  static __device__ __forceinline__ bool is_mixed(Type type) {
    return sizeof(T) != sizeof(float) && type == Type::float32;
  }
  static __device__ __forceinline__ void copy(SharedAddress to, const void* data, Type type, int64_t index) {
    using Four = typename Word<4 * sizeof(T)>::Type;
    if (data == nullptr) return;
    if (is_mixed(type)) {
      cp_async<float4>(to, static_cast<const float*>(data) + index);
    } else {
      cp_async<Four>(to, static_cast<const T*>(data) + index);
    }
  }
  static __device__ __forceinline__ void read(SharedAddress from, Type type, float (&values)[4]) {
    if (is_mixed(type)) {
      decode_shared<float>(from, values);
    } else {
      decode_shared<T>(from, values);
    }
  }

  __device__ __forceinline__ void fetch() const {
    constexpr int kQuadsOfVector = Types::kWidth / 4;
#pragma unroll 1
    for (int quad = threadIdx.y; quad < kQuads; quad += blockDim.y) {
      const int i = quad / kQuadsOfVector;
      const int column = at.in_row(i) ? at.first_column + i * at.column_step + quad % kQuadsOfVector * 4 : 0;
      copy(at.factors + quad * quad_bytes, problem.scale.data, problem.scale_type,
           at.rows_group * problem.scale.span_stride + column);
      copy(weights + quad * quad_bytes, problem.weight, problem.weight_type, column);
      if constexpr (kBranch == Branch::gated) {
        copy(at.factors + at.factor_bytes + quad * quad_bytes, problem.gate.data, problem.gate_type,
             at.rows_group * problem.gate.span_stride + column);
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void compute(float4* memory) const {
#pragma unroll 1
    for (int quad = threadIdx.y; quad < kQuads; quad += blockDim.y) {
      float factor[4] = {}, weight[4] = {1.0f, 1.0f, 1.0f, 1.0f};
      if (problem.scale.data != nullptr) read(at.factors + quad * quad_bytes, problem.scale_type, factor);
      if (problem.weight != nullptr) read(weights + quad * quad_bytes, problem.weight_type, weight);
#pragma unroll
      for (int j = 0; j < 4; ++j) factor[j] = (1.0f + factor[j]) * weight[j];
      memory[quad * at.group + threadIdx.x] = make_float4(factor[0], factor[1], factor[2], factor[3]);
      if constexpr (kBranch == Branch::gated) {
        read(at.factors + at.factor_bytes + quad * quad_bytes, problem.gate_type, factor);
        memory[(kQuads + quad) * at.group + threadIdx.x] = make_float4(factor[0], factor[1], factor[2], factor[3]);
      }
    }
  }
};

// Multiplies a vector by its factors in shared memory.
template <int kWidth>
__device__ __forceinline__ void multiply_by_factors(SharedAddress from, int group, float (&values)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; j += 4) {
    float factor[4];
    decode_shared<float>(from + j / 4 * group * static_cast<int>(sizeof(float4)), factor);
#pragma unroll
    for (int k = 0; k < 4; ++k) values[j + k] = rounded_product(values[j + k], factor[k]);
  }
}

// Sums over the threads of a row.
struct RowSums {
  int lane, padded_warps;
  bool high, odd;           // of the lane's quarter of the warp
  uint32_t own;             // offset of the thread's own slot
  SharedAddress exchange;   // the half in use
  SharedDifference halves;  // to the other

  template <typename Scratch>
  __device__ __forceinline__ RowSums(Scratch& scratch, int lane, int padded_warps)
      : lane(lane), padded_warps(padded_warps) {
    high = (lane & 16) != 0;
    odd = (lane & 8) != 0;
    own = threadIdx.x / kWarp * sizeof(float4) + lane / 8 * sizeof(float);
    exchange = shared_address(&scratch[0][threadIdx.y * padded_warps]);
    halves = shared_difference(exchange, exchange + sizeof(scratch[0]));
  }

  __device__ __forceinline__ void add(const float (&totals)[4], int group, float (&sums)[4]) {
    // Each quarter of the lanes keeps one of the four.
    const float first = (high ? totals[2] : totals[0]) + shuffle_xor(high ? totals[0] : totals[2], 16);
    const float second = (high ? totals[3] : totals[1]) + shuffle_xor(high ? totals[1] : totals[3], 16);
    float total = (odd ? second : first) + shuffle_xor(odd ? first : second, 8);
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) total += shuffle_xor(total, distance);
    if (lane % 8 == 0) store_shared(exchange + own, total);
    synchronize_row(threadIdx.y, group);
    sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll 1
    for (int warp = 0; warp < padded_warps; warp += 4) {
      float four[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) decode_shared<float>(exchange + (warp + i) * sizeof(float4), four[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[k] += (four[0][k] + four[1][k]) + (four[2][k] + four[3][k]);
    }
    move_to_other(exchange, halves);  // a slow warp may still read this half while the next sums are written
  }
};

// The values computed from a row's sums. The gradient of x is slope * rstd + x * x_factor + constant, and the normed
// row is x * rstd - mean_times_rstd.
struct RingMoments {
  float rstd, x_factor, constant, mean_times_rstd;
};

// Computes the moments of a row. Where the row is far from zero, replaces x by x - mean.
template <typename T, int kRow, Branch kBranch>
__device__ __forceinline__ RingMoments find_moments(const RingBackward& problem,
                                                    const RingPosition<T, kRow, kBranch>& at, RowSums& row_sums,
                                                    typename RingTypes<T, kRow, kBranch>::Elements& x,
                                                    typename RingTypes<T, kRow, kBranch>::Elements& slope) {
  using Types = RingTypes<T, kRow, kBranch>;
  constexpr int kVectors = Types::kVectors, kWidth = Types::kWidth;
  float mean, variance, all[4];
  for (bool again = false;; again = true) {
    float totals[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of x, its squares, slopes, and their products with x
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        totals[0] += x[i][j];
        totals[1] += x[i][j] * x[i][j];
        totals[2] += slope[i][j];
        totals[3] += slope[i][j] * x[i][j];
      }
    }
    row_sums.add(totals, at.group, all);
    mean = problem.centered ? problem.average(all[0]) : 0.0f;
    variance = problem.average(all[1]) - mean * mean;
    if (!problem.centered || again) break;
    if (4.0f * mean * mean <= variance) {
      synchronize_row(threadIdx.y, at.group);  // matches the barrier of rows that compute their sums again
      break;
    }
    // The squares of a row far from zero have lost digits: its sums are computed again, from differences from the mean.
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[i][j] = at.in_row(i) ? x[i][j] - mean : 0.0f;
    }
  }
  const float rstd = rsqrtf(variance + problem.eps);
  const float x_factor = -rstd * (rstd * rstd * problem.average(all[3] - all[2] * mean));
  const float mean_slope = problem.centered ? problem.average(all[2]) : 0.0f;
  const float constant = -rstd * mean_slope - mean * x_factor;
  return {rstd, x_factor, constant, mean * rstd};
}

// Writes a vector of a result, `index` elements from its start.
template <typename T, int kRow, Branch kBranch, int kWidth>
__device__ __forceinline__ void write_vector(const RingPosition<T, kRow, kBranch>& at, void* to, int64_t index, int i,
                                             const float (&total)[kWidth]) {
  if (at.in_row(i)) store_streaming(static_cast<T*>(to) + index, encode_all<T>(total));
}

// Writes the gradients of a row, from its stage of the ring, and adds to the sums over rows.
template <typename T, int kRow, Branch kBranch>
__device__ __forceinline__ void finish_row(const RingBackward& problem, const RingPosition<T, kRow, kBranch>& at,
                                           SharedAddress slot, int64_t offset, const RingMoments& moments,
                                           const typename RingTypes<T, kRow, kBranch>::Elements& x,
                                           const typename RingTypes<T, kRow, kBranch>::Elements& slope,
                                           typename RingTypes<T, kRow, kBranch>::Sums& sums) {
  using Types = RingTypes<T, kRow, kBranch>;
  constexpr int kVectors = Types::kVectors, kWidth = Types::kWidth;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float grad[kWidth], total[kWidth];
    decode_shared<T>(slot + (kRingGrad * kVectors + i) * at.slot_bytes, grad);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      total[j] = slope[i][j] * moments.rstd + (x[i][j] * moments.x_factor + moments.constant);
      sums[kSlopeTimesNormed][i][j] += grad[j] * (x[i][j] * moments.rstd - moments.mean_times_rstd);
      sums[kSlope][i][j] += grad[j];
    }
    if (kBranch != Branch::none && has(problem, kRingGradSum)) {
      float grad_sum[kWidth];
      decode_shared<T>(slot + (kRingGradSum * kVectors + i) * at.slot_bytes, grad_sum);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] += grad_sum[j];
    }
    const int64_t index = offset + i * at.column_step;
    write_vector(at, problem.grad_x, index, i, total);
    if constexpr (kBranch == Branch::gated) {
      if (Types::kOptionalGate && problem.grad_branch == nullptr) continue;
      if (has(problem, kRingBranch)) {
        float branch[kWidth];
        decode_shared<T>(slot + (kRingBranch * kVectors + i) * at.slot_bytes, branch);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[kGate][i][j] += total[j] * branch[j];
      }
      const int group = computed_here(at.group);
      multiply_by_factors(at.factors + at.factor_bytes + i * kWidth / 4 * group * static_cast<int>(sizeof(float4)),
                          group, total);
      write_vector(at, problem.grad_branch, index, i, total);
    }
  }
}

// Puts the sums of all threads into shared memory, [sums][rows][vectors].
template <typename T, int kRow, Branch kBranch>
__device__ __forceinline__ void share_sums(const RingBackward& problem, const RingPosition<T, kRow, kBranch>& at,
                                           int vectors, const typename RingTypes<T, kRow, kBranch>::Sums& sums,
                                           float4* memory) {
  using Types = RingTypes<T, kRow, kBranch>;
  const int rows = blockDim.y;
#pragma unroll
  for (int k = 0; k < Types::kSums; ++k) {
#pragma unroll
    for (int i = 0; i < Types::kVectors; ++i) {
      if (k < problem.sum_count && at.in_row(i)) {
#pragma unroll
        for (int j = 0; j < Types::kWidth; j += 4) {
          memory[(k * rows + threadIdx.y) * vectors + (at.first_column + i * at.column_step + j) / 4] =
              make_float4(sums[k][i][j], sums[k][i][j + 1], sums[k][i][j + 2], sums[k][i][j + 3]);
        }
      }
    }
  }
}

// Adds up the sums of the block's rows and writes them.
template <typename Position>
__device__ __forceinline__ void add_shared_sums(const Position& at, int sum_count, int vectors, const float4* memory,
                                                float* partial) {
  const int rows = blockDim.y;
#pragma unroll 1
  for (int vector = at.thread; vector < vectors * sum_count; vector += at.threads) {
    const float4* const row_sums = memory + vector + vector / vectors * (rows - 1) * vectors;
    float4 sum = row_sums[0];
#pragma unroll 4
    for (int row = 1; row < rows; ++row) {
      const float4 other = row_sums[row * vectors];
      sum.x += other.x;
      sum.y += other.y;
      sum.z += other.z;
      sum.w += other.w;
    }
    reinterpret_cast<float4*>(partial)[vector] = sum;
  }
}

// Writes the block's partial sums. `missed`: the thread had no row in the block's last iteration.
template <typename T, int kRow, Branch kBranch>
__device__ __forceinline__ void store_sums(const RingBackward& problem, const RingPosition<T, kRow, kBranch>& at,
                                           bool missed, const typename RingTypes<T, kRow, kBranch>::Sums& sums,
                                           float4* memory) {
  using Types = RingTypes<T, kRow, kBranch>;
  float* const partial = problem.partial + static_cast<int64_t>(blockIdx.x) * problem.sum_count * at.hidden;
  if (blockDim.y == 1) {
#pragma unroll
    for (int k = 0; k < Types::kSums; ++k) {
#pragma unroll
      for (int i = 0; i < Types::kVectors; ++i) {
        if (k < problem.sum_count && at.in_row(i)) {
          store_floats(partial + k * at.hidden + at.first_column + i * at.column_step, sums[k][i]);
        }
      }
    }
    return;
  }
  const int vectors = at.hidden / 4;
  if (missed) {  // the barriers of the missing row
    synchronize_row(threadIdx.y, at.group);
    if (problem.centered) synchronize_row(threadIdx.y, at.group);
  }
  __syncthreads();
  share_sums<T, kRow, kBranch>(problem, at, vectors, sums, memory);
  __syncthreads();
  add_shared_sums(at, problem.sum_count, vectors, memory, partial);
}

template <typename T, int kRow, Branch kBranch>
__global__ void __launch_bounds__(kRingKernelTable[kRow].max_threads)
    backward_ring_kernel(const __grid_constant__ RingBackward problem) {
  if constexpr (!kInThisCode<kRingKernelTable, kRow>) return;
  using Types = RingTypes<T, kRow, kBranch>;
  constexpr int kVectors = Types::kVectors, kWidth = Types::kWidth, kTensors = Types::kTensors;
  extern __shared__ float4 memory[];
  __shared__ typename Types::Scratch scratch;
  const RingPosition<T, kRow, kBranch> at(problem, shared_address(memory));
  prefetch_first(problem, at);
  for (int i = at.thread; i < 8 * Types::kMaxWarps; i += at.threads) reinterpret_cast<float4*>(scratch)[i] = float4{};
  grid_wait();
  trigger_next_grid();
  const char* next[kTensors];
  RingLoader<T, kRow, kBranch> loader(problem, at, next);
  const RingFactors<T, kRow, kBranch> factors(problem, at);
  factors.fetch();
  loader.fetch_first();
  loader.wait();
  factors.compute(memory);
  __syncthreads();
  if (!at.whole) {
    for (uint32_t i = 0; i < problem.stages * kTensors; ++i) {
      store_shared(at.ring + (i * kVectors + Types::kLast) * at.slot_bytes, typename Types::Slot{});
    }
  }
  RowSums row_sums(scratch, at.lane, at.padded_warps);
  typename Types::Sums sums = {};
  int64_t offset =
      (static_cast<int64_t>(at.rows_group) * problem.group_rows + at.first_row) * at.hidden + at.first_column;
  const SharedAddress end = at.ring + problem.stages * at.stage_bytes;
  SharedAddress slot = at.ring, free_slot = end - at.stage_bytes;
  for (uint32_t row = at.first_row; row < problem.group_rows; row += at.stride) {
    loader.fetch(free_slot);
    free_slot = slot;
    loader.wait();
    typename Types::Elements x, slope;  // slope: the gradient of the normed row
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      decode_shared<T>(slot + i * at.slot_bytes, x[i]);
      decode_shared<T>(slot + (kVectors + i) * at.slot_bytes, slope[i]);
      multiply_by_factors(at.factors + i * kWidth / 4 * at.group * static_cast<int>(sizeof(float4)), at.group,
                          slope[i]);
    }
    const RingMoments moments = find_moments(problem, at, row_sums, x, slope);
    finish_row(problem, at, slot, offset, moments, x, slope, sums);
    offset += static_cast<int64_t>(at.stride) * at.hidden;
    slot = slot + at.stage_bytes < end ? slot + at.stage_bytes : at.ring;
  }
  if (problem.partial == nullptr) return;
  const uint32_t fetched = loader.next_row - (problem.stages - 1) * at.stride;
  store_sums(problem, at, fetched - at.first_row + at.part < problem.group_rows, sums, memory);
}

}  // namespace
}  // namespace adaln
