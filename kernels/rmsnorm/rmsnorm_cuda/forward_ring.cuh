// RMSNorm, forward: long rows that pass through a ring buffer in shared memory.
//
// Reads:    x, the residual and the weight, each once.
// Writes:   `normed`, and `sum` when there is a residual.
// Must not: run before capability 9.0.
#pragma once

#include "rmsnorm_cuda/forward.cuh"

namespace rmsnorm {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 100 == 9

// A barrier in shared memory. One thread announces the bytes of a phase, which ends when they have arrived.
class BytesBarrier {
 public:
  __device__ __forceinline__ void initialize() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(address())
                 : "memory");
  }

  __device__ __forceinline__ void expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }

  // Starts the copy of one array from global to shared memory. Addresses and size are multiples of 16.
  __device__ __forceinline__ void copy(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(address())
                 : "memory");
  }

  // Stores a value in a block of the cluster, which waits at its own barrier. A cluster's barrier would also wait until
  // the stores of earlier rows have reached the memory: rows of 65,536 bfloat16 elements took 13 % longer (H200).
  __device__ __forceinline__ void store(float* to, float value, unsigned block) {
    uint32_t remote, barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(to)), "r"(block));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(address()), "r"(block));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
  }

  // Waits for the end of the phase. Phases have parity 0 and 1 in turn.
  __device__ __forceinline__ void wait(int parity) {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
          : "=r"(done)
          : "r"(address()), "r"(parity)
          : "memory");
    }
  }

 private:
  __device__ __forceinline__ SharedAddress address() { return shared_address(&word_); }

  uint64_t word_;
};

#endif

// A cluster takes row after row: the copy of the next one is in flight while it reduces and stores a row, and the
// weight stays in registers. SMs differ in speed, so of many rows the first clusters take seven eighths, `first_rows`
// each, and the next clusters take a few each, as those end.
template <int kRow, typename T, bool kAdd>
__global__ void __launch_bounds__(kForwardLaunches[kRow].threads)
    forward_ring_kernel([[maybe_unused]] const __grid_constant__ FastForwardArguments arguments) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 100 == 9
  constexpr ForwardLaunch kLaunch = kForwardLaunches[kRow];
  constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = kLaunch.held, kWarps = kLaunch.threads / kWarp;
  constexpr int kTensors = kAdd ? 2 : 1;
  extern __shared__ uint4 memory[];  // [2][kTensors][chunk]
  __shared__ float4 scratch[2][kWarps / 4];
  __shared__ float block_sums[2][8];  // the most blocks of any cluster
  __shared__ BytesBarrier copies[2], sums[2];
  unsigned number, rank, blocks;  // of clusters, and of the blocks of this one
  asm("mov.u32 %0, %%clusterid.x;\nmov.u32 %1, %%cluster_ctarank;" : "=r"(number), "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      copies[i].initialize();
      sums[i].initialize();
    }
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  __syncthreads();
  // Each block of a cluster has adjacent columns.
  const int lanes = blockDim.x, chunk = arguments.chunk, first = rank * chunk, lane = first + threadIdx.x;
  const int columns = min(arguments.hidden, (first + chunk) * kWidth);
  const int bytes = max(columns / kWidth - first, 0) * kVectorBytes;
  const int first_clusters = arguments.prefetch_blocks / blocks, next = static_cast<int>(number) - first_clusters;
  const int step = next < 0 ? first_clusters : 1, each = next < 0 ? arguments.first_rows : kLaunch.next_rows;
  int row = next < 0 ? number : first_clusters * arguments.first_rows + next * each;
  const int end = min(static_cast<int>(arguments.rows), next < 0 ? step * each : row + each);
  const auto copy = [&](int of_row, int stage) {
    if (threadIdx.x != 0 || of_row >= end) return;
    const ForwardOffsets<kAdd> offsets(arguments, of_row);
    uint4* const to = memory + stage * kTensors * chunk;
    copies[stage].expect(kTensors * bytes);
    if (bytes == 0) return;
    copies[stage].copy(to, static_cast<const T*>(arguments.x) + offsets.x + first * kWidth, bytes);
    if constexpr (!kAdd) return;
    copies[stage].copy(to + chunk, static_cast<const T*>(arguments.residual) + offsets.residual + first * kWidth,
                       bytes);
  };
  trigger_next_grid();
  if (next < 0 && lane == 0) prefetch_row<T, kAdd>(arguments, row);
  grid_wait();
  copy(row, 0);
  copy(row + step, 1);
  Factors<T, kWidth> factors[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (lane + i * lanes) * kWidth;
    factors[i].load_weight_if(arguments.weight, column, arguments.weight.data != nullptr && column < columns);
  }
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#pragma unroll 1
  for (int turn = 0; row < end; row += step, ++turn) {
    const int stage = turn % 2, parity = turn / 2 % 2;
    const T* const own = reinterpret_cast<const T*>(memory + stage * kTensors * chunk + threadIdx.x);
    const ForwardOffsets<kAdd> offsets(arguments, row);
    Vector<T, kWidth> x[kVectors];
    float squares = 0.0f;
    copies[stage].wait(parity);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = (lane + i * lanes) * kWidth;
      x[i] = {};
      if (column < columns) {
        x[i] = load<T, kWidth>(own + i * lanes * kWidth);
        if constexpr (kAdd) {
          x[i] = add(x[i], load<T, kWidth>(own + (chunk + i * lanes) * kWidth));
          store(static_cast<T*>(arguments.sum) + offsets.sum + column, x[i]);
        }
      }
      squares += sum_of_squares(x[i]);
    }
    squares = sum_over_block<kWarps>(squares, scratch[stage]);
    copy(row + 2 * step, stage);
    if (blocks > 1) {
      if (threadIdx.x == 0) sums[stage].expect(blocks * sizeof(float));
      if (threadIdx.x < blocks) sums[stage].store(&block_sums[stage][rank], squares, threadIdx.x);
      sums[stage].wait(parity);
      squares = 0.0f;
      for (unsigned i = 0; i < blocks; ++i) squares += block_sums[stage][i];
    }
    const float rstd = reciprocal_norm(squares, arguments.inverse_of_hidden, arguments.eps);
    __builtin_assume(arguments.exceeds_l2);  // by the launch table
    store_row(arguments, offsets.normed, lane, lanes, columns, rstd, x, factors);
  }
#endif
}

}  // namespace rmsnorm
