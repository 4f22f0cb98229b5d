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
#include "decode_cpu/vectors.h"
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

// Sets `sums` from column `column` on to the products of kRows rows of x and kWeights rows of weights. kParts sums of
// each product are added up apart from each other, because a processor adds several at a time.
template <class T, int kLanes, int kRows, int kWeights, int kParts>
INLINE void multiply_tile(const Linear& problem, const float* x, const typename T::Storage* weights, int64_t stride,
                          Sums& sums, int64_t column) {
  using Vector = Vector<kLanes>;
  Vector totals[kRows][kWeights][kParts];
  for (auto& row : totals) {
    for (auto& weight : row) {
      for (auto& part : weight) part = Vector::zeros();
    }
  }
  const int64_t inputs = problem.inputs;
  int64_t i = 0;
  for (; i + kLanes * kParts <= inputs; i += kLanes * kParts) {
#pragma GCC unroll 8
    for (int part = 0; part < kParts; ++part) {
      const int64_t at = i + part * kLanes;
      Vector multiplicands[kWeights];
#pragma GCC unroll 8
      for (int weight = 0; weight < kWeights; ++weight) {
        multiplicands[weight] = Vector::template decode<T>(weights + weight * stride + at);
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const auto values = Vector::load(x + row * inputs + at);
#pragma GCC unroll 8
        for (int weight = 0; weight < kWeights; ++weight) {
          totals[row][weight][part].add_product(values, multiplicands[weight]);
        }
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int weight = 0; weight < kWeights; ++weight) {
      Vector sum = totals[row][weight][0];
      for (int part = 1; part < kParts; ++part) sum.lanes += totals[row][weight][part].lanes;
      float total = sum.sum();
      for (int64_t j = i; j < inputs; ++j) total += x[row * inputs + j] * T::decode(weights[weight * stride + j]);
      sums[row][column + weight] = total;
    }
  }
}

// Sets `sums` to the products of all rows of x and `count` rows of a layer's weights.
template <class T, int kLanes, int kRows>
INLINE void multiply(const Linear& problem, const float* x, const Weight& layer, int64_t first, int64_t count,
                     Sums& sums) {
  // Sums, multiplicands and a vector of x fit in the 16 registers of AVX2.
  constexpr int kWeights = kRows <= 2 ? 4 : kRows <= 4 ? 2 : 1, kParts = kRows == 1 ? 2 : 1;
  const auto* weights = static_cast<const typename T::Storage*>(layer.data) + first * layer.stride;
  int64_t column = 0;
  for (; column + kWeights <= count; column += kWeights) {
    multiply_tile<T, kLanes, kRows, kWeights, kParts>(problem, x, weights + column * layer.stride, layer.stride, sums,
                                                      column);
  }
  for (; column < count; ++column) {
    multiply_tile<T, kLanes, kRows, 1, kParts>(problem, x, weights + column * layer.stride, layer.stride, sums, column);
  }
}

template <class T>
INLINE void add_bias(Sums& sums, const Linear& problem, const Weight& layer, int64_t first, int64_t count) {
  if (layer.bias == nullptr) return;
  const auto* bias = static_cast<const typename T::Storage*>(layer.bias) + first;
  for (int64_t row = 0; row < problem.rows; ++row) {
    for (int64_t i = 0; i < count; ++i) sums[row][i] += T::decode(bias[i]);
  }
}

// Computes `count` columns of `out` from `column` on, which are those of the rows `first` and following of `layer`.
template <class T, int kLanes, int kRows>
INLINE void run_columns(const Linear& problem, const float* x, const Weight& layer, int64_t first, int64_t column,
                        int64_t count) {
  Sums sums;
  multiply<T, kLanes, kRows>(problem, x, layer, first, count, sums);
  add_bias<T>(sums, problem, layer, first, count);
  if (problem.activation != Activation::none) {
    Sums projected;
    multiply<T, kLanes, kRows>(problem, x, problem.weights[1], first, count, projected);
    add_bias<T>(projected, problem, problem.weights[1], first, count);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = 0; i < count; ++i) {
        sums[row][i] = activated(sums[row][i], problem.activation) * projected[row][i];
      }
    }
  }
  using Storage = typename T::Storage;
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t at = row * problem.outputs + column;
    if (problem.residual != nullptr) {
      const auto* residual = static_cast<const Storage*>(problem.residual) + at;
      for (int64_t i = 0; i < count; ++i) sums[row][i] += T::decode(residual[i]);
    }
    encode_all<T>(sums[row], count, static_cast<Storage*>(problem.out) + at);
  }
}

template <class T, int kLanes, int kRows>
INLINE void run_rows(const Linear& problem, const float* x, int64_t begin, int64_t end) {
  const int layers = problem.activation == Activation::none ? problem.count : 1;
  int64_t before = 0;  // columns of the layers before
  for (int i = 0; i < layers; ++i) {
    const Weight& layer = problem.weights[i];
    const int64_t stop = std::min(end, before + layer.rows);
    for (int64_t column = std::max(begin, before); column < stop; column += kColumns) {
      run_columns<T, kLanes, kRows>(problem, x, layer, column - before, column, std::min(kColumns, stop - column));
    }
    before += layer.rows;
  }
}

#if defined(__x86_64__)
template <class T, int kRows>
__attribute__((target("avx2,fma,f16c"))) void run_avx2(const Linear& problem, const float* x, int64_t begin,
                                                       int64_t end) {
  run_rows<T, 8, kRows>(problem, x, begin, end);
}
template <class T, int kRows>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void run_avx512(
    const Linear& problem, const float* x, int64_t begin, int64_t end) {
  run_rows<T, 16, kRows>(problem, x, begin, end);
}
#endif

template <class T, int kRows>
void run(const Linear& problem, const float* x, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx512()) return run_avx512<ForAvx512<T>, kRows>(problem, x, begin, end);
  if (has_avx2()) return run_avx2<ForAvx2<T>, kRows>(problem, x, begin, end);
#endif
  run_rows<T, 4, kRows>(problem, x, begin, end);
}

template <class T>
void run_with_rows(const Linear& problem, int64_t begin, int64_t end) {
  std::vector<float> x(problem.rows * problem.inputs);
  decode_all<T>(static_cast<const typename T::Storage*>(problem.x), problem.rows * problem.inputs, x.data());
  switch (problem.rows) {
    case 1:
      return run<T, 1>(problem, x.data(), begin, end);
    case 2:
      return run<T, 2>(problem, x.data(), begin, end);
    case 3:
      return run<T, 3>(problem, x.data(), begin, end);
    case 4:
      return run<T, 4>(problem, x.data(), begin, end);
    case 5:
      return run<T, 5>(problem, x.data(), begin, end);
    case 6:
      return run<T, 6>(problem, x.data(), begin, end);
    case 7:
      return run<T, 7>(problem, x.data(), begin, end);
    case 8:
      return run<T, 8>(problem, x.data(), begin, end);
  }
}

}  // namespace

void linear(const Linear& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run_with_rows<Float32>(problem, begin, end);
    case Type::float16:
      return run_with_rows<Float16>(problem, begin, end);
    case Type::bfloat16:
      return run_with_rows<BFloat16>(problem, begin, end);
  }
}

}  // namespace decode_step
