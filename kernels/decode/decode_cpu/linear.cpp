// Linear layers of at most eight rows of x on the CPU.
//
// Reads:    each weight once; x once per call, and from a copy in float32 that stays in the cache.
// Writes:   the columns `begin` to `end` of `out`.
// Must not: start threads, or keep state between calls.
//
// The time is that of reading the weights. A tile of a few rows of weights is multiplied with all rows of x, so that
// each weight is converted once, and each element of x is loaded once per tile. Functions are compiled once per
// instruction set and dispatched at run time. Results may differ between instruction sets in the last bit.
#include <algorithm>
#include <cmath>
#include <vector>

#include "decode_cpu/decode.h"
#include "kit/cpu.h"

namespace decode_step {
namespace {

using namespace kit;

// There are so few gates that calls of the math library cost no time.
float activated(float x, Activation activation) {
  switch (activation) {
    case Activation::silu:
      return x / (1.0f + std::exp(-x));
    case Activation::gelu:
      return 0.5f * x * std::erfc(-0.707106781f * x);
    case Activation::gelu_tanh:
      // x / 2 * (1 + tanh(y)) is x * sigmoid(2 * y), which does not cancel.
      return x / (1.0f + std::exp(-1.5957691216f * (x + 0.044715f * x * x * x)));
    case Activation::none:
      break;
  }
  return x;
}

// Columns whose sums are kept until they are stored.
constexpr int64_t kColumns = 64;

// The sums of a part of a layer, for each row of x.
using Sums = float[kMostRows][kColumns];

// Functions of vectors are compiled with the target in force where they are written, not where they are inlined.
namespace portable {
constexpr int kLanes = 4;
#include "decode_cpu/vector.h"
//
#include "decode_cpu/linear_rows.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
constexpr int kLanes = 8;
#include "decode_cpu/vector.h"
//
#include "decode_cpu/linear_rows.h"
}  // namespace avx2
#pragma GCC pop_options
#endif

template <class T>
void run(const Linear& problem, int64_t begin, int64_t end) {
  std::vector<float> x(problem.rows * problem.inputs);
  decode_all<T>(static_cast<const typename T::Storage*>(problem.x), problem.rows * problem.inputs, x.data());
#if defined(__x86_64__)
  if (has_avx2()) return avx2::run<ForAvx2<T>>(problem, x.data(), begin, end);
#endif
  portable::run<T>(problem, x.data(), begin, end);
}

}  // namespace

void linear(const Linear& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run<Float32>(problem, begin, end);
    case Type::float16:
      return run<Float16>(problem, begin, end);
    case Type::bfloat16:
      return run<BFloat16>(problem, begin, end);
  }
}

}  // namespace decode_step
