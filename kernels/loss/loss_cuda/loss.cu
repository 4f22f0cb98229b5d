// Cross entropy and its gradient on CUDA: a block for each row.
//
// Reads:    each logit twice, the second time from its end, which is in the L2 cache; each target once.
// Writes:   gradients in place of the logits, and a loss for each row.
// Must not: allocate, synchronize, or use another stream than the one given.
#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "loss/problem.h"

namespace loss {
namespace {

using namespace kit;

// With so many threads an SM has one row in work, and the L2 cache holds the rows of all SMs.
constexpr int kThreads = 1024, kLoads = 4;
constexpr float kLog2E = 1.44269504088896f;

// The parts of a row's sums that a thread has seen.
struct Sums {
  float largest, exponentials, logits;  // the second: sum(exp(s - largest))
};

__device__ __forceinline__ Sums joined(const Sums& a, const Sums& b) {
  const float largest = fmaxf(a.largest, b.largest);
  // Without a logit, or with -infinity alone, the difference would be NaN.
  const float shift = largest == -INFINITY ? 0.0f : largest;
  return {largest,
          a.exponentials * exp2_approximate((a.largest - shift) * kLog2E) +
              b.exponentials * exp2_approximate((b.largest - shift) * kLog2E),
          a.logits + b.logits};
}

__device__ __forceinline__ Sums shuffled(const Sums& sums, int distance) {
  return {shuffle_xor(sums.largest, distance), shuffle_xor(sums.exponentials, distance),
          shuffle_xor(sums.logits, distance)};
}

// Sums over the threads of a block; each thread gets them.
__device__ __forceinline__ Sums joined_by_block(Sums sums) {
  __shared__ Sums of_warps[kThreads / kWarp];
  const int lane = threadIdx.x % kWarp;
  for (int distance = kWarp / 2; distance > 0; distance /= 2) sums = joined(sums, shuffled(sums, distance));
  if (lane == 0) of_warps[threadIdx.x / kWarp] = sums;
  __syncthreads();
  sums = of_warps[lane % (kThreads / kWarp)];
  for (int distance = kThreads / kWarp / 2; distance > 0; distance /= 2) sums = joined(sums, shuffled(sums, distance));
  return sums;
}

template <bool kCapped>
__device__ __forceinline__ float capped(float logit, float softcap) {
  if constexpr (kCapped) return softcap * tanhf(logit / softcap);
  return logit;
}

template <typename T, int kWidth, bool kCapped>
__global__ void __launch_bounds__(kThreads) row_kernel(const __grid_constant__ CrossEntropy problem) {
  trigger_next_grid();
  grid_wait();
  const int64_t row = blockIdx.x, count = problem.vocabulary, target = problem.targets[row];
  T* const logits = static_cast<T*>(problem.logits) + row * count;
  // Less than 2^31: a step past the last one fits 32 bits without a sign.
  const auto vectors = static_cast<unsigned>(count / kWidth);
  if (target == problem.ignored) {
    const float zeros[kWidth] = {};
    for (unsigned i = threadIdx.x; i < vectors; i += kThreads)
      store(logits + int64_t{i} * kWidth, encode_all<T>(zeros));
    if (threadIdx.x == 0) problem.losses[row] = 0.0f;
    return;
  }
  const bool is_class = target >= 0 && target < count;
  const float at_target = is_class ? capped<kCapped>(decode(logits[target]), problem.softcap) : NAN;

  Sums sums{-INFINITY, 0.0f, 0.0f};
  for (unsigned start = threadIdx.x; start < vectors; start += kLoads * kThreads) {
    Vector<T, kWidth> loaded[kLoads];
#pragma unroll
    for (int load_index = 0; load_index < kLoads; ++load_index) {
      const unsigned i = min(start + load_index * kThreads, vectors - 1);
      loaded[load_index] = load<T, kWidth>(logits + int64_t{i} * kWidth);
    }
#pragma unroll
    for (int load_index = 0; load_index < kLoads; ++load_index) {
      if (start + load_index * kThreads >= vectors) break;
      float values[kWidth], largest = sums.largest;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values[j] = capped<kCapped>(decode(loaded[load_index], j), problem.softcap);
        largest = fmaxf(largest, values[j]);
      }
      const float shift = largest == -INFINITY ? 0.0f : largest;
      sums.exponentials *= exp2_approximate((sums.largest - shift) * kLog2E);
      sums.largest = largest;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sums.exponentials += exp2_approximate((values[j] - shift) * kLog2E);
        sums.logits += values[j];
      }
    }
  }
  sums = joined_by_block(sums);  // no thread writes before all have read
  const float lse = sums.largest + logf(sums.exponentials), smoothing = problem.smoothing;
  if (threadIdx.x == 0) {
    float value = (1.0f - smoothing) * (lse - at_target) + problem.z_loss * lse * lse;
    if (smoothing > 0.0f) value += smoothing * (lse - sums.logits / static_cast<float>(count));
    problem.losses[row] = value;
  }

  const float scale = is_class ? *problem.scale : NAN;
  const float of_lse = 1.0f + 2.0f * problem.z_loss * lse, smooth = smoothing / static_cast<float>(count);
  for (int i = static_cast<int>(vectors) - 1 - static_cast<int>(threadIdx.x); i >= 0; i -= kThreads) {
    T* const at = logits + int64_t{i} * kWidth;
    const auto loaded = load<T, kWidth>(at);
    float grads[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float s = capped<kCapped>(decode(loaded, j), problem.softcap);
      float grad = of_lse * exp2_approximate((s - lse) * kLog2E) - smooth;
      if (int64_t{i} * kWidth + j == target) grad -= 1.0f - smoothing;
      if constexpr (kCapped) grad *= 1.0f - (s / problem.softcap) * (s / problem.softcap);
      grads[j] = scale * grad;
    }
    store(at, encode_all<T>(grads));
  }
}

template <typename T, int kWidth>
void launch(const CrossEntropy& problem, cudaStream_t stream) {
  const auto kernel = problem.softcap > 0.0f ? row_kernel<T, kWidth, true> : row_kernel<T, kWidth, false>;
  launch_with_pdl(kernel, static_cast<unsigned>(problem.rows), kThreads, 0, stream, problem);
}

}  // namespace

int run(const CrossEntropy& problem, void* stream) {
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    constexpr int kWidth = kVectorBytes / sizeof(T);
    const auto on = static_cast<cudaStream_t>(stream);
    if (problem.vocabulary % kWidth == 0 && aligned(problem.logits)) {
      launch<T, kWidth>(problem, on);
    } else {
      launch<T, 1>(problem, on);
    }
  });
}

}  // namespace loss
