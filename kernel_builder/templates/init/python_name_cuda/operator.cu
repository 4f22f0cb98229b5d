// `${operator}` on CUDA, forward and backward.
//
// Reads:    x, for the backward pass also grad; each element once.
// Writes:   `out`.
// Must not: allocate, synchronize, or use another stream than the one given.
#include "${python_name}/${operator}.h"
#include "kit/elements.cuh"
#include "kit/launch.cuh"

namespace op {
namespace {

using namespace kit;

constexpr int kThreads = 256;  // of a block

template <bool kBackward, typename T>
__device__ __forceinline__ T result(T x, T grad) {
  return encode<T>(kBackward ? gradient(decode(grad), decode(x)) : value(decode(x)));
}

// Each thread loads and stores one vector of kWidth elements.
template <typename T, int kWidth, bool kBackward>
__global__ void __launch_bounds__(kThreads) kernel(const T* x, const T* grad, T* out, int64_t elements) {
  const int64_t start = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  trigger_next_grid();
  grid_wait();
  if (start + kWidth <= elements) {
    const auto xs = load<T, kWidth>(x + start);
    Vector<T, kWidth> grads, results;
    if constexpr (kBackward) grads = load<T, kWidth>(grad + start);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      results.elements[i] = result<kBackward>(xs.elements[i], kBackward ? grads.elements[i] : T{});
    }
    store(out + start, results);
  } else {  // the tail: fewer elements than a vector
    for (int64_t i = start; i < elements; ++i) out[i] = result<kBackward>(x[i], kBackward ? grad[i] : T{});
  }
}

template <typename T, int kWidth>
void launch(const Problem& problem, cudaStream_t stream) {
  const int64_t step = kThreads * kWidth;
  const auto blocks = static_cast<unsigned>((problem.elements + step - 1) / step);
  launch_with_pdl(problem.grad == nullptr ? kernel<T, kWidth, false> : kernel<T, kWidth, true>, blocks, kThreads, 0,
                  stream, static_cast<const T*>(problem.x), static_cast<const T*>(problem.grad),
                  static_cast<T*>(problem.out), problem.elements);
}

}  // namespace

int run_on_cuda(const Problem& problem, void* stream) {
  const bool is_aligned = aligned(problem.x) && aligned(problem.grad) && aligned(problem.out);
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    if (is_aligned) {
      launch<T, kVectorBytes / sizeof(T)>(problem, static_cast<cudaStream_t>(stream));
    } else {
      launch<T, 1>(problem, static_cast<cudaStream_t>(stream));
    }
  });
}

}  // namespace op
