// RMSNorm on the CPU.
//
// Reads:    the rows of a problem, each once, and the weight once per call.
// Writes:   `normed` and `sum`, or `grad_x`, `partial` and `grad_weight`.
// Must not: start threads, or keep state between calls.
//
// A row is converted to floats, which stay in the cache. The compiler vectorizes the loops (-fopenmp-simd);
// -fno-trapping-math lets it compute both sides of a condition. They are compiled once per instruction set, and one is
// selected at run time. Results may differ between instruction sets in the last bit, since sums are split and products
// fused differently.
#include <algorithm>
#include <vector>

#include "kit/cpu.h"
#include "rmsnorm/problem.h"

namespace rmsnorm {
namespace {

using namespace kit;

// Returns the address at which a row is written: in the contiguous `rows`, or over the row of `over` if `rows` is null.
template <class T>
INLINE typename T::Storage* destination(void* rows, const Rows& over, int64_t row, int64_t hidden) {
  return rows == nullptr ? const_cast<typename T::Storage*>(at<T>(over, row)) : row_at<T>(rows, row, hidden);
}

// Writes a row of x + residual, and reads it again, rounded.
template <class T>
INLINE void read_sum(const Forward& problem, int64_t row, float* values) {
  const auto *x = at<T>(problem.x, row), *residual = at<T>(problem.residual, row);
  auto* sum = destination<T>(problem.sum, problem.residual, row, problem.hidden);
  for_blocks(problem.hidden, [&](int64_t start, int64_t length) ALWAYS_INLINE {
    Block terms, others;
    decode_all<T>(x + start, length, terms);
    decode_all<T>(residual + start, length, others);
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) terms[i] += others[i];
    encode_all<T>(terms, length, sum + start);
    decode_all<T>(sum + start, length, values + start);
  });
}

// Writes values[i] * rstd * factors[i]; if `rounded`, the first product is rounded, too. T: the dtype of x.
template <class T, class Result>
INLINE void write_normed(const float* values, float rstd, const float* factors, bool rounded, int64_t hidden,
                         typename Result::Storage* to) {
  for_blocks(hidden, [&](int64_t start, int64_t length) ALWAYS_INLINE {
    Block results;
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) results[i] = values[start + i] * rstd;
    if (rounded) round_all<T>(results, length);
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) results[i] *= factors[start + i];
    encode_all<Result>(results, length, to + start);
  });
}

template <class T>
INLINE void run_rows(const Forward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  const Floats factors = load_factors<T>(problem.weight, problem.weight.offset, hidden);
  Floats row_values(hidden);
  float* values = row_values.data();
  for (int64_t row = begin; row < end; ++row) {
    if (problem.residual.data == nullptr) {
      decode_all<T>(at<T>(problem.x, row), hidden, values);
    } else {
      read_sum<T>(problem, row, values);
    }
    const double squares = sum_of(hidden, [=](int64_t i) ALWAYS_INLINE { return values[i] * values[i]; });
    const float rstd = reciprocal_norm(squares, hidden, problem.eps);
    if (problem.normed_type != problem.type) {
      write_normed<T, Float32>(values, rstd, factors.data(), true, hidden,
                               row_at<Float32>(problem.normed, row, hidden));
    } else {
      const bool rounded = problem.rounded_before_weight && problem.weight.data != nullptr;
      auto* to = destination<T>(problem.normed, problem.x, row, hidden);
      write_normed<T, T>(values, rstd, factors.data(), rounded, hidden, to);
    }
  }
}

// Adds the terms of the weight's gradient to `partial`, unless that is null.
template <class T>
INLINE void run_rows(const Backward& problem, float* partial, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  const Floats weights = load_factors<T>(problem.weight, problem.weight.offset, hidden);
  const float* factors = weights.data();
  Floats x_values(hidden), grad_values(hidden), more_values(hidden);
  float *x = x_values.data(), *grad = grad_values.data(), *more = more_values.data();
  std::vector<double> sums(partial == nullptr ? 0 : hidden);
  for (int64_t row = begin; row < end; ++row) {
    decode_all<T>(at<T>(problem.x, row), hidden, x);
    decode_all<T>(at<T>(problem.grad, row), hidden, grad);
    if (problem.grad_sum.data != nullptr) decode_all<T>(at<T>(problem.grad_sum, row), hidden, more);
    const double squares = sum_of(hidden, [=](int64_t i) ALWAYS_INLINE { return x[i] * x[i]; });
    const double products = sum_of(hidden, [=](int64_t i) ALWAYS_INLINE { return x[i] * (grad[i] * factors[i]); });
    const float rstd = reciprocal_norm(squares, hidden, problem.eps);
    const float projection = rstd * rstd * static_cast<float>(products / static_cast<double>(hidden));
    if (partial != nullptr) {
      double* of_columns = sums.data();
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) of_columns[i] += static_cast<double>(grad[i] * (x[i] * rstd));
    }
    write_values<T>(row_at<T>(problem.grad_x, row, hidden), hidden, [=](int64_t i) ALWAYS_INLINE {
      return rstd * (grad[i] * factors[i] - x[i] * projection) + more[i];
    });
  }
  std::copy(sums.begin(), sums.end(), partial);
}

}  // namespace

void run(const Forward& problem, int64_t begin, int64_t end) {
  run_on_cpu(problem.type, [&](auto type) ALWAYS_INLINE { run_rows<decltype(type)>(problem, begin, end); });
}

int partial_sums(const Backward& problem, int64_t* parts) {
  *parts = std::min<int64_t>((problem.rows + 3) / 4, 64);
  return 0;
}

void run(const Backward& problem, int64_t begin, int64_t end) {
  for (int64_t part = begin; part < end; ++part) {
    const Part rows = part_of(problem.rows, problem.parts, part);
    float* partial = problem.partial == nullptr ? nullptr : problem.partial + part * problem.hidden;
    run_on_cpu(problem.type,
               [&](auto type) ALWAYS_INLINE { run_rows<decltype(type)>(problem, partial, rows.first, rows.last); });
  }
}

void reduce_weight_gradient(const Backward& problem, int64_t begin, int64_t end) {
  reduce_columns(problem.weight.type, problem.partial, problem.parts, problem.hidden, begin, end, problem.grad_weight);
}

}  // namespace rmsnorm
