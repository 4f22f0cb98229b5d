// RMSNorm on the CPU.
//
// Reads:    the rows and the weight of a problem, each row twice; the second time it is still in the cache.
// Writes:   `normed` and `sum`, or `grad_x`, `partial` and `grad_weight`, nothing beside them.
// Must not: start threads, allocate, or keep anything between calls.
//
// The loops are plain, and `omp simd` lets the compiler vectorize their sums (-fopenmp-simd; there is no OpenMP runtime
// behind it). They are compiled once for each instruction set, and which one runs is found out when it runs. Results
// may differ between instruction sets in the last bit, because sums are split and products fused differently. With
// -fno-trapping-math the compiler may compute both sides of a choice, without which float16 does not vectorize.
#include "rmsnorm_cpu/rmsnorm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kit/cpu.h"

namespace rmsnorm {
namespace {

using namespace kit;

// A row is summed in float32 over this many elements at a time, and in float64 beyond: a longer float32 sum would be
// off by more than the roundings of a result, in the same direction for a whole row.
constexpr int64_t kSumLength = 256;

// A weight of element type T, or none.
template <class T>
struct Factors {
  const typename T::Storage* data;
  INLINE float operator[](int64_t i) const { return T::decode(data[i]); }
};
template <>
struct Factors<void> {
  INLINE float operator[](int64_t) const { return 1.0f; }
};

template <class W>
INLINE Factors<W> factors(const Weight& weight) {
  if constexpr (std::is_void_v<W>) {
    return {};
  } else {
    return {static_cast<const typename W::Storage*>(weight.data)};
  }
}

INLINE float reciprocal_norm(double sum_of_squares, int64_t hidden, float eps) {
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares / static_cast<double>(hidden) + static_cast<double>(eps)));
}

template <class T, class W>
INLINE void forward_rows(const Forward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  const auto weight = factors<W>(problem.weight);
  for (int64_t row = begin; row < end; ++row) {
    const Storage* x = at<T>(problem.x, row);
    if (problem.residual.data != nullptr) {
      const Storage* residual = at<T>(problem.residual, row);
      Storage* __restrict__ sum = static_cast<Storage*>(problem.sum) + row * hidden;
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) sum[i] = T::encode(T::decode(x[i]) + T::decode(residual[i]));
      x = sum;
    }
    double squares = 0.0;
    for (int64_t start = 0; start < hidden; start += kSumLength) {
      const int64_t stop = std::min(hidden, start + kSumLength);
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = start; i < stop; ++i) sum += T::decode(x[i]) * T::decode(x[i]);
      squares += sum;
    }
    const float rstd = reciprocal_norm(squares, hidden, problem.eps);
    Storage* __restrict__ normed = static_cast<Storage*>(problem.normed) + row * hidden;
#pragma omp simd
    for (int64_t i = 0; i < hidden; ++i) normed[i] = T::encode(T::decode(x[i]) * rstd * weight[i]);
  }
}

template <class T, class W>
INLINE void backward_parts(const Backward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  const auto weight = factors<W>(problem.weight);
  for (int64_t part = begin; part < end; ++part) {
    float* __restrict__ partial = problem.partial == nullptr ? nullptr : problem.partial + part * hidden;
    if (partial != nullptr) std::memset(partial, 0, hidden * sizeof(float));
    const int64_t share = problem.rows / problem.parts, longer = problem.rows % problem.parts;
    const int64_t first = part * share + std::min(part, longer);
    const int64_t last = first + share + (part < longer ? 1 : 0);
    for (int64_t row = first; row < last; ++row) {
      const Storage* grad = at<T>(problem.grad, row);
      const Storage* x = at<T>(problem.x, row);
      double squares = 0.0, products = 0.0;
      for (int64_t start = 0; start < hidden; start += kSumLength) {
        const int64_t stop = std::min(hidden, start + kSumLength);
        float square_sum = 0.0f, product_sum = 0.0f;
#pragma omp simd reduction(+ : square_sum, product_sum)
        for (int64_t i = start; i < stop; ++i) {
          const float value = T::decode(x[i]);
          square_sum += value * value;
          product_sum += value * T::decode(grad[i]) * weight[i];
        }
        squares += square_sum;
        products += product_sum;
      }
      const float rstd = reciprocal_norm(squares, hidden, problem.eps);
      const float along = rstd * rstd * static_cast<float>(products / static_cast<double>(hidden));
      Storage* __restrict__ grad_x = static_cast<Storage*>(problem.grad_x) + row * hidden;
      if (problem.grad_sum.data == nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) {
          grad_x[i] = T::encode(rstd * (T::decode(grad[i]) * weight[i] - T::decode(x[i]) * along));
        }
      } else {
        const Storage* grad_sum = at<T>(problem.grad_sum, row);
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) {
          const float own = rstd * (T::decode(grad[i]) * weight[i] - T::decode(x[i]) * along);
          grad_x[i] = T::encode(own + T::decode(grad_sum[i]));
        }
      }
      if (partial != nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) partial[i] += T::decode(grad[i]) * (T::decode(x[i]) * rstd);
      }
    }
  }
}

// Writes over the first of the partial sums on its way.
template <class W>
void reduce_columns(const Backward& problem, int64_t begin, int64_t end) {
  float* __restrict__ sums = problem.partial;
  for (int64_t part = 1; part < problem.parts; ++part) {
    const float* partial = problem.partial + part * problem.hidden;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) sums[i] += partial[i];
  }
  auto* __restrict__ out = static_cast<typename W::Storage*>(problem.grad_weight);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) out[i] = W::encode(sums[i]);
}

#if defined(__x86_64__)
template <class T, class W>
__attribute__((target("avx2,fma"))) void forward_avx2(const Forward& problem, int64_t begin, int64_t end) {
  forward_rows<T, W>(problem, begin, end);
}
template <class T, class W>
__attribute__((target("avx2,fma"))) void backward_avx2(const Backward& problem, int64_t begin, int64_t end) {
  backward_parts<T, W>(problem, begin, end);
}
#endif

template <class T, class W>
void run(const Forward& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx2()) return forward_avx2<T, W>(problem, begin, end);
#endif
  forward_rows<T, W>(problem, begin, end);
}

template <class T, class W>
void run(const Backward& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx2()) return backward_avx2<T, W>(problem, begin, end);
#endif
  backward_parts<T, W>(problem, begin, end);
}

template <class T, class Problem>
void run_with_weight(const Problem& problem, int64_t begin, int64_t end) {
  if (problem.weight.data == nullptr) return run<T, void>(problem, begin, end);
  if (problem.weight.type == problem.type) return run<T, T>(problem, begin, end);
  run<T, Float32>(problem, begin, end);
}

template <class Problem>
void run_with_type(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run_with_weight<Float32>(problem, begin, end);
    case Type::float16:
      return run_with_weight<Float16>(problem, begin, end);
    case Type::bfloat16:
      return run_with_weight<BFloat16>(problem, begin, end);
  }
}

}  // namespace

void forward(const Forward& problem, int64_t begin, int64_t end) { run_with_type(problem, begin, end); }

int64_t partial_sums(int64_t rows) { return std::min<int64_t>(64, (rows + 3) / 4); }

void backward(const Backward& problem, int64_t begin, int64_t end) { run_with_type(problem, begin, end); }

void reduce_weight_gradient(const Backward& problem, int64_t begin, int64_t end) {
  switch (problem.weight.type) {
    case Type::float32:
      return reduce_columns<Float32>(problem, begin, end);
    case Type::float16:
      return reduce_columns<Float16>(problem, begin, end);
    case Type::bfloat16:
      return reduce_columns<BFloat16>(problem, begin, end);
  }
}

}  // namespace rmsnorm
