// `${operator}` on CUDA, forward and backward.
//
// Reads:    x, for the backward pass also grad; each element once.
// Writes:   `out`.
// Must not: allocate, synchronize, or use another stream than the one given.
#include "${python_name}_cuda/${operator}.h"
#include "${python_name}_cuda/launch_table.h"
#include "kit/elements.cuh"
#include "kit/launch.cuh"

namespace op {
namespace {

using namespace kit;

template <bool kBackward, typename T>
__device__ __forceinline__ T result(T x, T grad) {
  return encode<T>(kBackward ? decode(grad) * derivative(decode(x)) : value(decode(x)));
}

// Each thread takes `loads` vectors of kWidth elements; the vectors of a block's threads are adjacent.
template <typename T, int kWidth, int kRow, bool kBackward>
__global__ void __launch_bounds__(kLaunchTable[kRow].threads)
    kernel(const T* x, const T* grad, T* out, int64_t elements) {
  constexpr LaunchConfig kConfig = kLaunchTable[kRow];
  constexpr int64_t kStep = kConfig.threads * kWidth;
  const int64_t first = blockIdx.x * (kStep * kConfig.loads) + threadIdx.x * kWidth;
  trigger_next_grid();
  grid_wait();
  Vector<T, kWidth> xs[kConfig.loads], grads[kConfig.loads];
#pragma unroll
  for (int i = 0; i < kConfig.loads; ++i) {
    const int64_t start = first + i * kStep;
    if (start + kWidth > elements) continue;
    xs[i] = load<T, kWidth>(x + start);
    if constexpr (kBackward) grads[i] = load<T, kWidth>(grad + start);
  }
#pragma unroll
  for (int i = 0; i < kConfig.loads; ++i) {
    const int64_t start = first + i * kStep;
    if (start + kWidth <= elements) {
      Vector<T, kWidth> results;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        results.elements[j] = result<kBackward>(xs[i].elements[j], kBackward ? grads[i].elements[j] : T{});
      }
      store(out + start, results);
    } else {  // the tail: fewer elements than a vector
      for (int64_t j = start; j < elements; ++j) out[j] = result<kBackward>(x[j], kBackward ? grad[j] : T{});
    }
  }
}

template <typename T, int kWidth, bool kBackward>
void launch(const Problem& problem, cudaStream_t stream) {
  const int row = find_row(kLaunchTable, {compiled_capability(), problem.type});
  with_row<kLaunchTable, dtype_bit(kTypeOf<T>)>(row, [&](auto index) {
    constexpr LaunchConfig kConfig = kLaunchTable[index()];
    constexpr int64_t kTile = kConfig.threads * kConfig.loads * kWidth;
    const auto blocks = static_cast<unsigned>((problem.elements + kTile - 1) / kTile);
    launch_with_pdl(kernel<T, kWidth, index(), kBackward>, blocks, kConfig.threads, 0, stream,
                    static_cast<const T*>(problem.x), static_cast<const T*>(problem.grad), static_cast<T*>(problem.out),
                    problem.elements);
  });
}

template <typename T, bool kBackward>
void launch_pass(const Problem& problem, cudaStream_t stream) {
  if (aligned(problem.x) && aligned(problem.grad) && aligned(problem.out)) {
    launch<T, kVectorBytes / sizeof(T), kBackward>(problem, stream);
  } else {
    launch<T, 1, kBackward>(problem, stream);
  }
}

}  // namespace

int run(const Problem& problem, void* stream) {
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    if (problem.grad) {
      launch_pass<T, true>(problem, static_cast<cudaStream_t>(stream));
    } else {
      launch_pass<T, false>(problem, static_cast<cudaStream_t>(stream));
    }
  });
}

}  // namespace op
