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
#pragma once

#include "adaln_cuda/ring_rows.cuh"

namespace adaln {
namespace {

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

// Sums over the threads of a row. All rows of a block execute the same number of these barriers: compute-sanitizer
// counts them when it looks for races on the shared memory that all threads use at the end.
struct RowSums {
  int lane, padded_warps;
  bool high, odd;          // of the lane's quarter of the warp
  uint32_t own;            // offset of the thread's own slot
  SharedAddress exchange;  // the half in use
  int other;               // from it to the other half

  template <typename Scratch>
  __device__ __forceinline__ RowSums(Scratch& scratch, int lane, int padded_warps)
      : lane(lane), padded_warps(padded_warps) {
    high = (lane & 16) != 0;
    odd = (lane & 8) != 0;
    own = threadIdx.x / kWarp * sizeof(float4) + lane / 8 * sizeof(float);
    exchange = shared_address(&scratch[0][threadIdx.y * padded_warps]);
    other = sizeof(scratch[0]);
  }

  __device__ __forceinline__ void add(const float (&totals)[4], int group, float (&sums)[4]) {
    // Each quarter of the lanes keeps one of the four.
    const float first = (high ? totals[2] : totals[0]) + shuffle_xor(high ? totals[0] : totals[2], 16);
    const float second = (high ? totals[3] : totals[1]) + shuffle_xor(high ? totals[1] : totals[3], 16);
    float total = (odd ? second : first) + shuffle_xor(odd ? first : second, 8);
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) total += shuffle_xor(total, distance);
    if (lane % 8 == 0) store_shared(exchange + own, total);
    synchronize_warps(threadIdx.y, group);
    sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll 1
    for (int warp = 0; warp < padded_warps; warp += 4) {
      float four[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) decode_shared<float>(exchange + (warp + i) * sizeof(float4), four[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[k] += (four[0][k] + four[1][k]) + (four[2][k] + four[3][k]);
    }
    exchange += other;  // a slow warp may still read this half while the next sums are written
    other = -other;
  }
};

// The values computed from a row's sums. The gradient of x is slope * rstd + x * x_factor + constant, and the normed
// row is x * rstd - mean_times_rstd.
struct RingMoments {
  float rstd, x_factor, constant, mean_times_rstd;
};

// Computes the moments of a row. Where the row is far from zero, replaces x by x - mean.
template <typename Types>
__device__ __forceinline__ RingMoments find_moments(const RingBackward& problem, const RingPosition<Types>& at,
                                                    RowSums& row_sums, typename Types::Elements& x,
                                                    typename Types::Elements& slope) {
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
      synchronize_warps(threadIdx.y, at.group);  // matches the barrier of rows that compute their sums again
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
template <typename Types, int kWidth>
__device__ __forceinline__ void write_vector(const RingPosition<Types>& at, void* to, int64_t index, int i,
                                             const float (&total)[kWidth]) {
  using T = typename Types::T;
  if (at.in_row(i)) store_streaming(static_cast<T*>(to) + index, encode_all<T>(total));
}

// Writes the gradients of a row, from its stage of the ring, and adds to the sums over rows.
template <typename Types>
__device__ __forceinline__ void finish_row(const RingBackward& problem, const RingPosition<Types>& at,
                                           SharedAddress slot, int64_t offset, const RingMoments& moments,
                                           const typename Types::Elements& x, const typename Types::Elements& slope,
                                           typename Types::Sums& sums) {
  using T = typename Types::T;
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
    if (Types::kBranch != Branch::none && has(problem, kRingGradSum)) {
      float grad_sum[kWidth];
      decode_shared<T>(slot + (kRingGradSum * kVectors + i) * at.slot_bytes, grad_sum);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] += grad_sum[j];
    }
    const int64_t index = offset + i * at.column_step;
    write_vector(at, problem.grad_x, index, i, total);
    if constexpr (Types::kBranch == Branch::gated) {
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
template <typename Types>
__device__ __forceinline__ void share_sums(const RingBackward& problem, const RingPosition<Types>& at, int vectors,
                                           const typename Types::Sums& sums, float4* memory) {
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

// Writes the block's partial sums. `missed`: the thread had no row in the block's last iteration.
template <typename Types>
__device__ __forceinline__ void store_sums(const RingBackward& problem, const RingPosition<Types>& at, bool missed,
                                           const typename Types::Sums& sums, float4* memory) {
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
    synchronize_warps(threadIdx.y, at.group);
    if (problem.centered) synchronize_warps(threadIdx.y, at.group);
  }
  __syncthreads();
  share_sums(problem, at, vectors, sums, memory);
  __syncthreads();
  store_partial_sums(memory, at.thread, at.threads, problem.sum_count, vectors, partial);
}

template <typename T, int kRow, Branch kBranch>
__global__ void __launch_bounds__(kRingKernelTable[kRow].max_threads)
    backward_ring_kernel(const __grid_constant__ RingBackward problem) {
  if constexpr (!kInThisCode<kRingKernelTable, kRow>) return;
  using Types = RingTypes<T, kRow, kBranch>;
  constexpr int kVectors = Types::kVectors, kWidth = Types::kWidth, kTensors = Types::kTensors;
  extern __shared__ float4 memory[];
  __shared__ typename Types::Scratch scratch;
  const RingPosition<Types> at(problem, shared_address(memory));
  prefetch_first(problem, at);
  for (int i = at.thread; i < 8 * Types::kMaxWarps; i += at.threads) reinterpret_cast<float4*>(scratch)[i] = float4{};
  grid_wait();
  trigger_next_grid();  // in this order: reduce_kernel reads factors before its own wait
  const char* next[kTensors];
  RingLoader<Types> loader(problem, at, next);
  const RingFactors<Types> factors(problem, at);
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
