// Backward on the CPU: gradients of the rows of some parts, their partial sums, and the gradients that are the totals
// of these sums.
//
// Reads:    the rows of a problem, twice, the second time from the cache. Modulations are converted once for all rows
//           of a span.
// Writes:   gradients and partial sums.
// Must not: start threads, or keep state between calls. The order of every sum is fixed.
// Included by adaln.cpp.
#pragma once

#include <vector>

#include "adaln_cpu/chunks.h"

namespace adaln {
namespace {

struct Range {
  int64_t begin, end;
};

// Returns the rows of a part. `part_of_all` counts the parts of all groups.
template <class Problem>
INLINE Range rows_of_part(const Problem& problem, int64_t part_of_all) {
  const Sums& sums = problem.sums;
  const int64_t group = part_of_all / sums.parts, part = part_of_all % sums.parts;
  const int64_t rows = problem.rows / sums.groups, share = rows / sums.parts, longer = rows % sums.parts;
  const int64_t begin = group * rows + part * share + std::min(part, longer);
  return {begin, begin + share + (part < longer ? 1 : 0)};
}

template <class T>
INLINE void run_rows(const GateBackward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  std::vector<float> gate(hidden);
  for (int64_t part = begin; part < end; ++part) {
    const Range rows = rows_of_part(problem, part);
    float* sums = problem.sums.partial == nullptr ? nullptr : problem.sums.partial + part * hidden;
    if (sums != nullptr) std::memset(sums, 0, hidden * sizeof(float));
    Spans spans(problem.span);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (spans.enter(row)) read<T>(problem.gate, spans.current(), 0, hidden, gate.data());
      const auto *grad_row = at<T>(problem.grad, row), *branch_row = at<T>(problem.branch, row);
      auto* grad_branch_row = result_row<T>(problem.grad_branch, row, hidden);
      for_blocks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
        Block grad, branch, product;
        decode_all<T>(grad_row + start, count, grad);
        multiply(grad, gate.data() + start, count, product);
        encode_all<T>(product, count, grad_branch_row + start);
        if (problem.grad_gate == nullptr) return;
        decode_all<T>(branch_row + start, count, branch);
        if (sums != nullptr) {
          add_products(grad, branch, count, sums + start);
        } else {
          multiply(grad, branch, count, product);
          write<T>(product, problem.grad_gate, problem.gate.type, row * hidden + start, count);
        }
      });
    }
  }
}

// Rows of float32, of `hidden` elements each, for the rows of a span. factor: of the gradient of the normed row.
struct BackwardFactors {
  const float *weight, *bias, *gate, *scale, *factor;
};

// The values per row from which its gradients are computed: rstd * (slope - mean_slope - (x - mean) * projection).
struct BackwardMoments {
  float mean, rstd, mean_slope, projection;
};

template <class T>
INLINE BackwardMoments moments_of(const Backward& problem, int64_t row, const float* factor) {
  const auto *grad_row = at<T>(problem.grad, row), *x_row = at<T>(problem.x, row);
  const auto* grad_sum_row = row_or_null<T>(problem.grad_sum, row, problem.rows);
  const auto* branch_row = row_or_null<T>(problem.branch, row, problem.rows);
  const int64_t hidden = problem.hidden;
  Moments moments;
  double slopes = 0.0, products = 0.0;  // products: of slopes and x
  for_chunks(hidden, [&](int64_t chunk, int64_t chunk_count) ALWAYS_INLINE {
    float x[kChunk], slope[kChunk];
    for_blocks(chunk_count, [&](int64_t start, int64_t count) ALWAYS_INLINE {
      prefetch<T>(grad_sum_row, chunk + start, count);
      prefetch<T>(branch_row, chunk + start, count);
      decode_all<T>(x_row + chunk + start, count, x + start);
      decode_all<T>(grad_row + chunk + start, count, slope + start);
      multiply(slope + start, factor + chunk + start, count, slope + start);
    });
    const float mean = problem.centered ? mean_of(x, chunk_count) : 0.0f;
    const Products of_chunk = products_of(x, slope, mean, chunk_count);
    moments.add(chunk_count, mean, of_chunk.squares);
    slopes += of_chunk.slopes;
    products += of_chunk.products + static_cast<double>(of_chunk.slopes) * mean;
  });
  products -= slopes * moments.mean();
  const auto mean = static_cast<float>(moments.mean());
  const float rstd = moments.reciprocal_norm(problem.eps);
  const float mean_slope = problem.centered ? static_cast<float>(slopes / static_cast<double>(hidden)) : 0.0f;
  const float projection = rstd * rstd * static_cast<float>(products / static_cast<double>(hidden));
  return {mean, rstd, mean_slope, projection};
}

// Adds a block of a row to the sums over rows.
INLINE void add_to_sums(const Backward& problem, const float* slope, const float* x, const BackwardMoments& moments,
                        int64_t start, int64_t count, float* partial) {
  const float mean = moments.mean, rstd = moments.rstd;
  float* __restrict__ slope_times_normed_sums = partial + kSlopeTimesNormed * problem.hidden + start;
  float* __restrict__ slope_sums = partial + kSlope * problem.hidden + start;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    slope_times_normed_sums[i] += slope[i] * ((x[i] - mean) * rstd);
    slope_sums[i] += slope[i];
  }
}

// Writes a block of the gradient of a scale that has a row for each row of x.
template <class T>
INLINE void write_grad_scale(const Backward& problem, int64_t row, const float* grad, const float* x,
                             const BackwardFactors& factors, const BackwardMoments& moments, int64_t start,
                             int64_t count) {
  const float *weights = factors.weight + start, *biases = factors.bias + start;
  const float mean = moments.mean, rstd = moments.rstd;
  Block values;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = grad[i] * ((x[i] - mean) * rstd * weights[i] + biases[i]);
  write<T>(values, problem.grad_scale, problem.scale.type, row * problem.hidden + start, count);
}

// Writes a block of the gradients of branch and gate, from the gradient of x.
template <class T>
INLINE void write_grad_branch(const Backward& problem, int64_t row, const float* total, const float* gates,
                              int64_t start, int64_t count, float* partial) {
  Block product, branch;
  multiply(total, gates, count, product);
  encode_all<T>(product, count, result_row<T>(problem.grad_branch, row, problem.hidden) + start);
  if (problem.grad_gate == nullptr) return;
  decode_all<T>(at<T>(problem.branch, row) + start, count, branch);
  if (problem.span == 1) {
    multiply(total, branch, count, product);
    write<T>(product, problem.grad_gate, problem.gate.type, row * problem.hidden + start, count);
  } else {
    add_products(total, branch, count, partial + kGate * problem.hidden + start);
  }
}

// Writes the gradients of a block of a row and adds to the sums over rows.
template <class T>
INLINE void finish_block(const Backward& problem, int64_t row, const typename T::Storage* grad_row,
                         const typename T::Storage* x_row, const BackwardFactors& factors,
                         const BackwardMoments& moments, int64_t start, int64_t count, float* partial) {
  Block grad, x, total;
  decode_all<T>(grad_row + start, count, grad);
  decode_all<T>(x_row + start, count, x);
  if (partial != nullptr && problem.span == 1) {
    const float* scale = factors.scale + start;
    Block slope;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) slope[i] = grad[i] * (1.0f + scale[i]);
    add_to_sums(problem, slope, x, moments, start, count, partial);
  } else if (partial != nullptr) {
    add_to_sums(problem, grad, x, moments, start, count, partial);
  }
  if (problem.span == 1 && problem.grad_scale != nullptr) {
    write_grad_scale<T>(problem, row, grad, x, factors, moments, start, count);
  }
  const float* factor = factors.factor + start;
  const float mean = moments.mean, rstd = moments.rstd, mean_slope = moments.mean_slope,
              projection = moments.projection;
  // Without contraction, slope (grad * factor) is rounded as it was for the sums: in a row of one element it must
  // cancel exactly.
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) total[i] = rstd * (grad[i] * factor[i] - mean_slope - (x[i] - mean) * projection);
  if (problem.grad_sum.data != nullptr) {
    Block grad_sum;
    decode_all<T>(at<T>(problem.grad_sum, row) + start, count, grad_sum);
    add(grad_sum, count, total);
  }
  encode_all<T>(total, count, result_row<T>(problem.grad_x, row, problem.hidden) + start);
  if (problem.grad_branch == nullptr) return;
  write_grad_branch<T>(problem, row, total, factors.gate + start, start, count, partial);
}

template <class T>
INLINE void run_rows(const Backward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  const Sums& sums = problem.sums;
  std::vector<float> buffers(5 * hidden);
  float* weight = buffers.data();
  float *bias = weight + hidden, *gate = bias + hidden, *scale = gate + hidden;
  float* __restrict__ factor = scale + hidden;
  const BackwardFactors factors{weight, bias, gate, scale, factor};
  read<T>(problem.weight, 0, hidden, 1.0f, weight);
  read<T>(problem.bias, 0, hidden, 0.0f, bias);
  for (int64_t part = begin; part < end; ++part) {
    const Range rows = rows_of_part(problem, part);
    float* partial = sums.partial == nullptr ? nullptr : sums.partial + part * sums.count * hidden;
    if (partial != nullptr) std::memset(partial, 0, sums.count * hidden * sizeof(float));
    Spans spans(problem.span);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (spans.enter(row)) {
        read<T>(problem.scale, spans.current(), 0, hidden, scale);
        if (problem.grad_branch != nullptr) read<T>(problem.gate, spans.current(), 0, hidden, gate);
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) factor[i] = weight[i] * (1.0f + scale[i]);
      }
      const auto *grad_row = at<T>(problem.grad, row), *x_row = at<T>(problem.x, row);
      const BackwardMoments moments = moments_of<T>(problem, row, factor);
      const auto* next_grad = row_or_null<T>(problem.grad, row + 1, rows.end);
      const auto* next_x = row_or_null<T>(problem.x, row + 1, rows.end);
      for_blocks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
        prefetch<T>(next_grad, start, count);
        prefetch<T>(next_x, start, count);
        finish_block<T>(problem, row, grad_row, x_row, factors, moments, start, count, partial);
      });
    }
  }
}

// Adds the sums of a group's other parts to those of its first part, and returns these.
INLINE float* sum_of_parts(const Sums& sums, int64_t group, int64_t hidden, int64_t begin, int64_t end) {
  float* first = sums.partial + group * sums.parts * sums.count * hidden;
  for (int64_t part = 1; part < sums.parts; ++part) {
    for (int k = 0; k < sums.count; ++k) {
      const float* from = first + (part * sums.count + k) * hidden;
      float* __restrict__ to = first + k * hidden;
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) to[i] += from[i];
    }
  }
  return first;
}

template <class T>
INLINE void reduce_columns(const Backward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden, count = end - begin;
  const bool per_row = problem.span == 1;
  std::vector<float> buffers(6 * count);
  float* weight = buffers.data();
  float *bias = weight + count, *scale = bias + count, *__restrict__ grad_scale = scale + count;
  float* __restrict__ grad_weight = grad_scale + count, * __restrict__ grad_bias = grad_weight + count;
  read<T>(problem.weight, begin, count, 1.0f, weight);
  read<T>(problem.bias, begin, count, 0.0f, bias);
  for (int64_t group = 0; group < problem.sums.groups; ++group) {
    const float* sums = sum_of_parts(problem.sums, group, hidden, begin, end);
    const float* slope = sums + kSlope * hidden + begin;
    const float* slope_times_normed = sums + kSlopeTimesNormed * hidden + begin;
    read<T>(per_row ? Modulation{} : problem.scale, group, begin, count, scale);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      grad_scale[i] = weight[i] * slope_times_normed[i] + bias[i] * slope[i];
      grad_weight[i] += (1.0f + scale[i]) * slope_times_normed[i];
      grad_bias[i] += (1.0f + scale[i]) * slope[i];
    }
    if (per_row) continue;
    const int64_t to = group * hidden + begin;
    if (problem.grad_scale != nullptr) write<T>(grad_scale, problem.grad_scale, problem.scale.type, to, count);
    if (problem.grad_shift != nullptr) write<T>(slope, problem.grad_shift, problem.scale.type, to, count);
    if (problem.grad_gate != nullptr) {
      write<T>(sums + kGate * hidden + begin, problem.grad_gate, problem.gate.type, to, count);
    }
  }
  if (problem.grad_weight != nullptr) write<T>(grad_weight, problem.grad_weight, problem.weight.type, begin, count);
  if (problem.grad_bias != nullptr) write<T>(grad_bias, problem.grad_bias, problem.bias.type, begin, count);
}

template <class T>
INLINE void reduce_columns(const GateBackward& problem, int64_t begin, int64_t end) {
  for (int64_t group = 0; group < problem.sums.groups; ++group) {
    const float* sums = sum_of_parts(problem.sums, group, problem.hidden, begin, end);
    write<T>(sums + begin, problem.grad_gate, problem.gate.type, group * problem.hidden + begin, end - begin);
  }
}

}  // namespace
}  // namespace adaln
