// Forward on the CPU: gates and modulated norms of a range of rows.
//
// Reads:    the rows of a problem; x again from the cache. Modulations are converted once for all rows of a span.
// Writes:   the results of these rows.
// Must not: start threads, or keep state between calls.
//
// Included by adaln.cpp.
#pragma once

#include <vector>

#include "adaln_cpu/chunks.h"

namespace adaln {
namespace {

// Writes residual + branch * gate.
template <class T>
INLINE void add_gated(const typename T::Storage* residual, const typename T::Storage* branch, const float* gate,
                      int64_t count, bool stepwise, typename T::Storage* to) {
  float residual_buffer[kChunk], branch_buffer[kChunk];
  const auto added = as_floats<T>(residual, count, residual_buffer);
  const auto gated = as_floats<T>(branch, count, branch_buffer);
  if (stepwise) {
    float product[kChunk];
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) product[i] = gated[i] * gate[i];
    round_to<T>(product, count);
    write_each<T>(to, count, [&](int64_t i) ALWAYS_INLINE { return added[i] + product[i]; });
  } else {
    write_each<T>(to, count, [=](int64_t i) ALWAYS_INLINE { return added[i] + gated[i] * gate[i]; });
  }
}

template <class T>
INLINE void run_rows(const Gate& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  std::vector<float> gate(hidden);
  Spans spans(problem.span);
  for (int64_t row = begin; row < end; ++row) {
    if (spans.enter(row)) read<T>(problem.gate, spans.current(), 0, hidden, gate.data());
    const auto *residual = at<T>(problem.residual, row), *branch = at<T>(problem.branch, row);
    auto* sum = result_row<T>(problem.sum, row, hidden);
    for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
      add_gated<T>(residual + start, branch + start, gate.data() + start, count, problem.stepwise, sum + start);
    });
  }
}

// The factors and offsets of the normed rows of a span, `hidden` elements each.
struct ForwardFactors {
  float *factor, *offset;  // stepwise: 1 + scale, rounded, and shift; else with weight and bias in them
  const float *gate, *weight, *bias;
};

// Converts the modulations of a span.
template <class T>
INLINE void load_span(const Forward& problem, int64_t span, float* __restrict__ factor, float* __restrict__ offset,
                      float* gate, const float* weight, const float* bias) {
  const int64_t hidden = problem.hidden;
  read<T>(problem.scale, span, 0, hidden, factor);
  read<T>(problem.shift, span, 0, hidden, offset);
  if (problem.gate.rows.data != nullptr) read<T>(problem.gate, span, 0, hidden, gate);
#pragma omp simd
  for (int64_t i = 0; i < hidden; ++i) factor[i] += 1.0f;
  if (problem.stepwise) {
    for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE { round_to<T>(factor + start, count); });
  } else {
#pragma omp simd
    for (int64_t i = 0; i < hidden; ++i) {
      offset[i] += bias[i] * factor[i];
      factor[i] *= weight[i];
    }
  }
}

// Writes a chunk of a normed row.
template <class T, class Values>
INLINE void write_normed(const Forward& problem, Values values, float mean, float rstd, const ForwardFactors& of_row,
                         int64_t start, int64_t count, typename T::Storage* normed) {
  const float *factors = of_row.factor + start, *offsets = of_row.offset + start;
  if (problem.stepwise) {
    const float *weights = of_row.weight + start, *biases = of_row.bias + start;
    float result[kChunk];
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) result[i] = (values[i] - mean) * rstd * weights[i] + biases[i];
    round_to<T>(result, count);
    multiply(result, factors, count, result);
    round_to<T>(result, count);
    write_each<T>(normed + start, count, [&](int64_t i) ALWAYS_INLINE { return result[i] + offsets[i]; });
  } else {
    write_each<T>(normed + start, count,
                  [=](int64_t i) ALWAYS_INLINE { return (values[i] - mean) * rstd * factors[i] + offsets[i]; });
  }
}

template <class T>
INLINE void run_rows(const Forward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  std::vector<float> buffers(5 * hidden);
  float* factor = buffers.data();
  float *offset = factor + hidden, *gate = offset + hidden, *weight = gate + hidden, *bias = weight + hidden;
  const ForwardFactors factors{factor, offset, gate, weight, bias};
  read<T>(problem.weight, 0, hidden, 1.0f, weight);
  read<T>(problem.bias, 0, hidden, 0.0f, bias);
  std::fill_n(gate, hidden, 1.0f);
  Spans spans(problem.span);
  for (int64_t row = begin; row < end; ++row) {
    if (spans.enter(row)) load_span<T>(problem, spans.current(), factor, offset, gate, weight, bias);
    const Storage* x = at<T>(problem.x, row);
    const Storage* branch = problem.branch.data == nullptr ? nullptr : at<T>(problem.branch, row);
    Storage *sum = result_row<T>(problem.sum, row, hidden), *normed = result_row<T>(problem.normed, row, hidden);
    float buffer[kChunk];
    Moments moments;
    for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
      if (branch != nullptr) {
        add_gated<T>(x + start, branch + start, gate + start, count, problem.stepwise, sum + start);
      }
      const auto values = as_floats<T>((branch == nullptr ? x : sum) + start, count, buffer);
      const float mean = problem.centered ? mean_of(values, count) : 0.0f;
      moments.add(count, mean, squares_of(values, mean, count));
    });
    const auto mean = static_cast<float>(moments.mean());
    const float rstd = moments.reciprocal_norm(problem.eps);
    for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
      const auto values = as_floats<T>((branch == nullptr ? x : sum) + start, count, buffer);
      write_normed<T>(problem, values, mean, rstd, factors, start, count, normed);
    });
  }
}

}  // namespace
}  // namespace adaln
