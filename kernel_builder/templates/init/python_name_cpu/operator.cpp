// `${operator}` on the CPU, forward and backward.
//
// Reads:    x, for the backward pass also grad; each element once.
// Writes:   `out`.
// Must not: start threads, allocate, or keep state between calls.
//
// The compiler vectorizes the loops because of `omp simd` (-fopenmp-simd needs no OpenMP runtime) and
// -fno-trapping-math, which lets it evaluate both sides of a conditional. They are compiled once per instruction set,
// and selected at run time.
#include <algorithm>
#include <type_traits>

#include "${python_name}_cpu/${operator}.h"
#include "kit/cpu.h"

namespace op {
namespace {

// Elements of 16 bits are converted in blocks, outside of the loop that computes. The floats of a block stay in the
// cache.
constexpr int64_t kBlock = 512;

template <bool kBackward>
INLINE void compute(const float* x, const float* grad, int64_t count, float* __restrict__ out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (kBackward) {
      out[i] = grad[i] * derivative(x[i]);
    } else {
      out[i] = value(x[i]);
    }
  }
}

template <class T, bool kBackward>
INLINE void run_range(const Problem& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const auto* x = static_cast<const Storage*>(problem.x);
  const auto* grad = static_cast<const Storage*>(problem.grad);
  auto* out = static_cast<Storage*>(problem.out);
  if constexpr (std::is_same_v<T, kit::Float32>) {
    compute<kBackward>(x + begin, kBackward ? grad + begin : nullptr, end - begin, out + begin);
  } else {
    float xs[kBlock], grads[kBlock], results[kBlock];
    for (; begin < end; begin += kBlock) {
      const int64_t count = std::min(kBlock, end - begin);
      kit::decode_all<T>(x + begin, count, xs);
      if constexpr (kBackward) kit::decode_all<T>(grad + begin, count, grads);
      compute<kBackward>(xs, grads, count, results);
      kit::encode_all<T>(results, count, out + begin);
    }
  }
}

struct OnElements {
  template <class T>
  static INLINE void run(const Problem& problem, int64_t begin, int64_t end) {
    if (problem.grad == nullptr) {
      run_range<T, false>(problem, begin, end);
    } else {
      run_range<T, true>(problem, begin, end);
    }
  }
};

}  // namespace

void run(const Problem& problem, int64_t begin, int64_t end) {
  kit::run_on_cpu<OnElements>(problem.type, problem, begin, end);
}

}  // namespace op
