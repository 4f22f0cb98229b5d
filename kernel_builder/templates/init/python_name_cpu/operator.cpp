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

#include "${python_name}/${operator}.h"
#include "kit/cpu.h"

namespace op {
namespace {

// Elements are converted to floats in blocks, which stay in the cache.
constexpr int64_t kBlock = 512;

template <class T>
INLINE void run_elements(const Problem& problem, int64_t begin, int64_t end) {
  const auto* x = static_cast<const typename T::Storage*>(problem.x);
  const auto* grad = static_cast<const typename T::Storage*>(problem.grad);
  auto* out = static_cast<typename T::Storage*>(problem.out);
  float xs[kBlock], grads[kBlock], results[kBlock];
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(kBlock, end - begin);
    kit::decode_all<T>(x + begin, count, xs);
    if (grad == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) results[i] = value(xs[i]);
    } else {
      kit::decode_all<T>(grad + begin, count, grads);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) results[i] = gradient(grads[i], xs[i]);
    }
    kit::encode_all<T>(results, count, out + begin);
  }
}

}  // namespace

void run_on_cpu(const Problem& problem, int64_t begin, int64_t end) {
  kit::run_on_cpu(problem.type, [&](auto type) ALWAYS_INLINE { run_elements<decltype(type)>(problem, begin, end); });
}

}  // namespace op
