// The rows and factors of backward_ring.cuh in shared memory.
//
// Reads:    rows, modulations and the weight, into a ring buffer and beside it.
// Writes:   shared memory.
// Must not: allocate, synchronize, or use another stream than the one given.
#pragma once

#include "adaln_cuda/strided_rows.cuh"
#include "kit/group_sums.cuh"
#include "kit/vectors.cuh"

namespace adaln {
namespace {

constexpr int kMaxRows = 15;                   // of a block: named barriers 1 to 15
constexpr size_t kRingStaticBytes = 2 * 1024;  // of shared memory, at most

enum RingTensor : int { kRingX, kRingGrad, kRingGradSum, kRingBranch, kRingTensors };

struct RingBackward : BackwardRows {
  StridedRows rows[kRingTensors];  // data null where there is none
  int64_t steps[kRingTensors];     // from a row of a thread to its next one, in bytes
  uint32_t stages;
};

// The tensors of which the ring has rows.
constexpr int ring_tensors(Branch branch) { return branch == Branch::none ? 2 : branch == Branch::plain ? 3 : 4; }

// Constants derived from a row of the launch table.
template <typename T_, int kRow, Branch kBranch_>
struct RingTypes {
  using T = T_;
  static constexpr Branch kBranch = kBranch_;
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
template <typename Types>
struct RingPosition {
  static constexpr int kWidth = Types::kWidth, kLast = Types::kLast;

  int hidden, group, threads, thread, lane;
  int padded_warps;               // of a row, a multiple of four
  int first_column, column_step;  // of the first vector; to the next one
  bool whole;                     // the last vector is in the row; else it is zero, and is not written
  uint32_t rows_group, part;      // rows_group: the group of rows, as of a span
  uint32_t first_row, stride;
  // Shared memory, from `factors`, and from `ring` on; a part is [threads of a row] of 16 bytes or of a Slot:
  //   factor_bytes: kQuads parts of factors | the same of gates, if gated | for each row: for each stage:
  //   stage_bytes:  x | grad | grad_sum | branch, as many as kTensors, of kVectors parts of slot_bytes each
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
    slot_bytes = group * sizeof(typename Types::Slot);
    stage_bytes = Types::kTensors * Types::kVectors * slot_bytes;
    factors = memory + threadIdx.x * sizeof(float4);
    factor_bytes = Types::kQuads * group * sizeof(float4);
    ring = memory + (Types::kBranch == Branch::gated ? 2 : 1) * factor_bytes +
           threadIdx.y * problem.stages * stage_bytes + threadIdx.x * sizeof(typename Types::Slot);
  }

  __device__ __forceinline__ bool in_row(int vector) const { return vector < kLast || whole; }
};

// Whether the problem has the tensor. x and grad are always present.
__device__ __forceinline__ bool has(const RingBackward& problem, int tensor) {
  return tensor < kRingGradSum || problem.rows[tensor].data != nullptr;
}

// Prefetches modulations, the weight, and the rows that the ring takes first.
template <typename Types>
__device__ __forceinline__ void prefetch_first(const RingBackward& problem, const RingPosition<Types>& at) {
  using T = typename Types::T;
  if (threadIdx.x != 0) return;
  if (threadIdx.y == 0) {
    const auto prefetch = [&](const void* data, DynamicType type, int64_t begin) {
      if (data == nullptr) return;
      const int64_t bytes = type.element_bytes();
      prefetch_row_to_l2(static_cast<const char*>(data) + begin * bytes, at.hidden * bytes);
    };
    prefetch(problem.scale.data, problem.scale_type, at.rows_group * problem.scale.span_stride);
    prefetch(problem.weight, problem.weight_type, 0);
    if (Types::kBranch == Branch::gated) {
      prefetch(problem.gate.data, problem.gate_type, at.rows_group * problem.gate.span_stride);
    }
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
template <typename Types>
struct RingLoader {
  static constexpr int kTensors = Types::kTensors, kVectors = Types::kVectors;

  const RingBackward& problem;
  const RingPosition<Types>& at;
  const char* (&next)[kTensors];  // a reference: with the array in the struct, nvcc 13.0 unrolls no other loops
  uint32_t next_row;

  __device__ __forceinline__ RingLoader(const RingBackward& problem, const RingPosition<Types>& at,
                                        const char* (&next)[kTensors])
      : problem(problem), at(at), next(next), next_row(at.first_row) {
    using T = typename Types::T;
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
          if (!at.in_row(i)) continue;
          cp_async<typename Types::Slot>(to + (k * kVectors + i) * at.slot_bytes, next[k] + i * at.slot_bytes);
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
    if (problem.stages == Types::kConfig.stages) {
      cp_async_wait<Types::kConfig.stages - 1>();
    } else {
      cp_async_wait<Types::kConfig.max_stages - 1>();
    }
  }
};

// Computes the factors (1 + scale) * weight, and the gate. Scale, gate and weight are first copied to shared memory,
// together and before the rows, four columns at a time: scale and gate to the memory of the factors, the weight to the
// stage that is still free.
template <typename Types>
struct RingFactors {
  using T = typename Types::T;
  static constexpr int kQuads = Types::kQuads;

  const RingBackward& problem;
  const RingPosition<Types>& at;
  uint32_t quad_bytes;
  SharedAddress weights;

  __device__ __forceinline__ RingFactors(const RingBackward& problem, const RingPosition<Types>& at)
      : problem(problem), at(at), quad_bytes(at.group * sizeof(float4)) {
    weights = at.ring + (problem.stages - 1) * at.stage_bytes +
              threadIdx.x * static_cast<uint32_t>(sizeof(float4) - sizeof(typename Types::Slot));
  }

  static __device__ __forceinline__ void copy(SharedAddress to, const void* data, DynamicType type, int64_t index) {
    using Four = typename Word<4 * sizeof(T)>::Type;
    if (data == nullptr) return;
    if (sizeof(T) != sizeof(float) && type.is_float32) {
      cp_async<float4>(to, static_cast<const float*>(data) + index);
    } else {
      cp_async<Four>(to, static_cast<const T*>(data) + index);
    }
  }
  static __device__ __forceinline__ void read(SharedAddress from, DynamicType type, float (&values)[4]) {
    if (sizeof(T) != sizeof(float) && type.is_float32) {
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
      if constexpr (Types::kBranch == Branch::gated) {
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
      if constexpr (Types::kBranch == Branch::gated) {
        read(at.factors + at.factor_bytes + quad * quad_bytes, problem.gate_type, factor);
        memory[(kQuads + quad) * at.group + threadIdx.x] = make_float4(factor[0], factor[1], factor[2], factor[3]);
      }
    }
  }
};

}  // namespace
}  // namespace adaln
