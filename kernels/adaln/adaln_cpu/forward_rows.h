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

// Writes a block of residual + branch.
template <class T>
INLINE void add_ungated(const typename T::Storage* residual, const typename T::Storage* branch, int64_t count,
                        typename T::Storage* to) {
  Block sum, added;
  decode_all<T>(residual, count, sum);
  decode_all<T>(branch, count, added);
  add(added, count, sum);
  encode_all<T>(sum, count, to);
}

// Writes a block of residual + branch * gate.
template <class T>
INLINE void add_gated(const typename T::Storage* residual, const typename T::Storage* branch, const float* gate,
                      int64_t count, bool stepwise, typename T::Storage* to) {
  Block sum, product;
  decode_all<T>(residual, count, sum);
  decode_all<T>(branch, count, product);
  multiply(product, gate, count, product);
  if (stepwise) round_all<T>(product, count);
  add(product, count, sum);
  encode_all<T>(sum, count, to);
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
    for_blocks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
      add_gated<T>(residual + start, branch + start, gate.data() + start, count, problem.stepwise, sum + start);
    });
  }
}

// Rows of `hidden` elements for the rows of a span. `gate`, `weight` and `bias` are null if there are none.
struct ForwardFactors {
  float *factor, *offset;  // stepwise: 1 + scale, rounded, and shift; else with weight and bias in them
  float *gate, *weight, *bias;
};

// Converts the modulations of a span.
template <class T>
INLINE void load_span(const Forward& problem, int64_t span, const ForwardFactors& factors) {
  const int64_t hidden = problem.hidden;
  float* __restrict__ factor = factors.factor, * __restrict__ offset = factors.offset;
  read<T>(problem.scale, span, 0, hidden, factor);
  read<T>(problem.shift, span, 0, hidden, offset);
  if (factors.gate != nullptr) read<T>(problem.gate, span, 0, hidden, factors.gate);
#pragma omp simd
  for (int64_t i = 0; i < hidden; ++i) factor[i] += 1.0f;
  if (problem.stepwise) return round_all<T>(factor, hidden);
  if (factors.bias != nullptr) add_products(factors.bias, factor, hidden, offset);
  if (factors.weight != nullptr) multiply(factor, factors.weight, hidden, factor);
}

// Writes a block of a normed row.
template <class T>
INLINE void write_normed(const typename T::Storage* from, float mean, float rstd, const ForwardFactors& of_row,
                         bool stepwise, int64_t start, int64_t count, typename T::Storage* normed) {
  const float *factors = of_row.factor + start, *offsets = of_row.offset + start;
  Block values;
  decode_all<T>(from + start, count, values);
  if (stepwise) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) values[i] = (values[i] - mean) * rstd;
    if (of_row.weight != nullptr) multiply(values, of_row.weight + start, count, values);
    if (of_row.bias != nullptr) add(of_row.bias + start, count, values);
    round_all<T>(values, count);
    multiply(values, factors, count, values);
    round_all<T>(values, count);
    add(offsets, count, values);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) values[i] = (values[i] - mean) * rstd * factors[i] + offsets[i];
  }
  encode_all<T>(values, count, normed + start);
}

template <class T>
INLINE void run_rows(const Forward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  std::vector<float> buffers(5 * hidden);
  const auto buffer = [&](int i, const void* data) { return data == nullptr ? nullptr : buffers.data() + i * hidden; };
  const ForwardFactors factors{buffers.data(), buffers.data() + hidden, buffer(2, problem.gate.rows.data),
                               buffer(3, problem.weight.data), buffer(4, problem.bias.data)};
  if (factors.weight != nullptr) read<T>(problem.weight, 0, hidden, 1.0f, factors.weight);
  if (factors.bias != nullptr) read<T>(problem.bias, 0, hidden, 0.0f, factors.bias);
  Spans spans(problem.span);
  for (int64_t row = begin; row < end; ++row) {
    if (spans.enter(row)) load_span<T>(problem, spans.current(), factors);
    const Storage* x = at<T>(problem.x, row);
    const Storage* branch = row_or_null<T>(problem.branch, row, end);
    const Storage *next_x = row_or_null<T>(problem.x, row + 1, end),
                  *next_branch = row_or_null<T>(problem.branch, row + 1, end);
    Storage *sum = result_row<T>(problem.sum, row, hidden), *normed = result_row<T>(problem.normed, row, hidden);
    const Storage* values_row = branch == nullptr ? x : sum;
    Moments moments;
    for_chunks(hidden, [&](int64_t chunk, int64_t chunk_count) ALWAYS_INLINE {
      float values[kChunk];
      for_blocks(chunk_count, [&](int64_t start, int64_t count) ALWAYS_INLINE {
        const int64_t first = chunk + start;
        if (branch != nullptr && factors.gate == nullptr) {
          add_ungated<T>(x + first, branch + first, count, sum + first);
        } else if (branch != nullptr) {
          add_gated<T>(x + first, branch + first, factors.gate + first, count, problem.stepwise, sum + first);
        }
        decode_all<T>(values_row + first, count, values + start);
      });
      const float mean = problem.centered ? mean_of(values, chunk_count) : 0.0f;
      moments.add(chunk_count, mean, squares_of(values, mean, chunk_count));
    });
    const auto mean = static_cast<float>(moments.mean());
    const float rstd = moments.reciprocal_norm(problem.eps);
    for_blocks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
      prefetch<T>(next_x, start, count);
      prefetch<T>(next_branch, start, count);
      write_normed<T>(values_row, mean, rstd, factors, problem.stepwise, start, count, normed);
    });
  }
}

}  // namespace
}  // namespace adaln
