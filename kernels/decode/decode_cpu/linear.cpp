// Linear layers of at most eight rows of x on the CPU.
//
// Reads:    each weight once; x once per call, and from a copy in float32 that stays in the cache.
// Writes:   the columns `begin` to `end` of `out`.
// Must not: start threads, or keep state between calls.
//
// The time is that of reading the weights: each is converted once, and multiplied with all rows of x. Functions are
// compiled once per instruction set and dispatched at run time. Results may differ between instruction sets in the last
// bit.
#include <algorithm>
#include <vector>

#include "decode/problem.h"
#include "kit/cpu.h"

namespace decode_step {
namespace {

using namespace kit;

// Sets `sums` to the products of all rows of x with a row of weights, plus its bias.
template <class T>
INLINE void multiply(const Linear& problem, const float* x, const Weight& layer, int64_t row, float* sums) {
  constexpr int64_t kPart = 512;
  using Storage = typename T::Storage;
  const auto* weights = static_cast<const Storage*>(layer.data) + row * layer.stride;
  const float bias = layer.bias == nullptr ? 0.0f : T::decode(static_cast<const Storage*>(layer.bias)[row]);
  std::fill_n(sums, problem.rows, bias);
  for (int64_t start = 0; start < problem.inputs; start += kPart) {
    const int64_t count = std::min(kPart, problem.inputs - start);
    float values[kPart];
    decode_all<T>(weights + start, count, values);
    for (int64_t r = 0; r < problem.rows; ++r) {
      const float* of_row = x + r * problem.inputs + start;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < count; ++i) sum += of_row[i] * values[i];
      sums[r] += sum;
    }
  }
}

template <class T>
INLINE void run_columns(const Linear& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  std::vector<float> x(problem.rows * problem.inputs);
  decode_all<T>(static_cast<const Storage*>(problem.x), problem.rows * problem.inputs, x.data());
  const bool gated = problem.activation != Activation::none;
  int layer = 0;
  int64_t first = 0;  // column of the layer
  for (int64_t column = begin; column < end; ++column) {
    while (column >= first + problem.weights[layer].rows) first += problem.weights[layer++].rows;
    float sums[kMostRows], projected[kMostRows];
    multiply<T>(problem, x.data(), problem.weights[layer], column - first, sums);
    if (gated) multiply<T>(problem, x.data(), problem.weights[1], column, projected);
    for (int64_t row = 0; row < problem.rows; ++row) {
      const int64_t at = row * problem.outputs + column;
      float result = gated ? activated(sums[row], problem.activation) * projected[row] : sums[row];
      if (problem.residual != nullptr) result += T::decode(static_cast<const Storage*>(problem.residual)[at]);
      static_cast<Storage*>(problem.out)[at] = T::encode(result);
    }
  }
}

}  // namespace

void run(const Linear& problem, int64_t begin, int64_t end) {
  run_on_cpu(problem.type, [&](auto type) ALWAYS_INLINE { run_columns<decltype(type)>(problem, begin, end); });
}

}  // namespace decode_step
