// Modulated norms and gates on the CPU.
//
// Reads:    the rows, parameters and modulations of a problem; a row several times, from the cache after the first.
// Writes:   the results of a problem and its partial sums, nothing beside them.
// Must not: start threads, or keep anything between calls.
//
// Parameters and modulations are read as float32 once for all rows of a span that a call meets, so that the loops know
// only the rows' type. These are plain, and `omp simd` lets the compiler vectorize their sums (-fopenmp-simd; there is
// no OpenMP runtime behind it). They are compiled once for each instruction set, and which one runs is found out when
// it runs. Results may differ between instruction sets in the last bit, because sums are split and products fused
// differently. With -fno-trapping-math the compiler may compute both sides of a choice, without which float16 does not
// vectorize.
#include "adaln_cpu/adaln.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kit/cpu.h"

namespace adaln {
namespace {

using namespace kit;

// A row is summed in float32 over this many elements at a time, and in float64 beyond: a longer float32 sum would be
// off by more than the roundings of a result, in the same direction for a whole row.
constexpr int64_t kSumLength = 256;

template <class T>
INLINE void decode_all(const void* data, int64_t begin, int64_t count, float* __restrict__ values) {
  const auto* from = static_cast<const typename T::Storage*>(data) + begin;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = T::decode(from[i]);
}

template <class T>
INLINE void encode_all(const float* values, void* data, int64_t begin, int64_t count) {
  auto* __restrict__ to = static_cast<typename T::Storage*>(data) + begin;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = T::encode(values[i]);
}

INLINE void read(const void* data, Type type, int64_t begin, int64_t count, float* values) {
  if (type == Type::float32) return decode_all<Float32>(data, begin, count, values);
  if (type == Type::float16) return decode_all<Float16>(data, begin, count, values);
  decode_all<BFloat16>(data, begin, count, values);
}

INLINE void write(const float* values, void* data, Type type, int64_t begin, int64_t count) {
  if (type == Type::float32) return encode_all<Float32>(values, data, begin, count);
  if (type == Type::float16) return encode_all<Float16>(values, data, begin, count);
  encode_all<BFloat16>(values, data, begin, count);
}

INLINE void read(const Parameter& parameter, int64_t begin, int64_t count, float otherwise, float* values) {
  if (parameter.data == nullptr) {
    std::fill_n(values, count, otherwise);
  } else {
    read(parameter.data, parameter.type, begin, count, values);
  }
}

// Zeros where there is no such modulation.
INLINE void read(const Modulation& modulation, int64_t span, int64_t begin, int64_t count, float* values) {
  if (modulation.rows.data == nullptr) {
    std::fill_n(values, count, 0.0f);
  } else {
    read(modulation.rows.data, modulation.type, modulation.rows.offset(span) + begin, count, values);
  }
}

INLINE float reciprocal_norm(double sum_of_squares, int64_t hidden, float eps) {
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares / static_cast<double>(hidden) + static_cast<double>(eps)));
}

template <class T>
INLINE typename T::Storage* row_to(void* data, int64_t row, int64_t hidden) {
  return static_cast<typename T::Storage*>(data) + row * hidden;
}

template <class T>
INLINE void add_gated(const typename T::Storage* residual, const typename T::Storage* branch, const float* gate,
                      typename T::Storage* __restrict__ sum, int64_t hidden) {
#pragma omp simd
  for (int64_t i = 0; i < hidden; ++i) sum[i] = T::encode(T::decode(residual[i]) + T::decode(branch[i]) * gate[i]);
}

INLINE float mean_of(const float* values, int64_t hidden) {
  double total = 0.0;
  for (int64_t start = 0; start < hidden; start += kSumLength) {
    const int64_t stop = std::min(hidden, start + kSumLength);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < stop; ++i) sum += values[i];
    total += sum;
  }
  return static_cast<float>(total / static_cast<double>(hidden));
}

template <class T>
INLINE void run_rows(const Gate& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  std::vector<float> gate(hidden);
  int64_t span_end = 0;
  for (int64_t row = begin; row < end; ++row) {
    if (row >= span_end) {
      const int64_t span = row / problem.span;
      span_end = (span + 1) * problem.span;
      read(problem.gate, span, 0, hidden, gate.data());
    }
    add_gated<T>(at<T>(problem.residual, row), at<T>(problem.branch, row), gate.data(),
                 row_to<T>(problem.sum, row, hidden), hidden);
  }
}

template <class T>
INLINE void run_rows(const Forward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  // What multiplies a normed row, what is added to it, the gate, the weight, the bias, and the row.
  std::vector<float> rows_of_floats(6 * hidden);
  float* __restrict__ factor = rows_of_floats.data();
  float* __restrict__ offset = factor + hidden;
  float *gate = offset + hidden, *weight = gate + hidden, *bias = weight + hidden, *values = bias + hidden;
  read(problem.weight, 0, hidden, 1.0f, weight);
  read(problem.bias, 0, hidden, 0.0f, bias);
  int64_t span_end = 0;
  for (int64_t row = begin; row < end; ++row) {
    if (row >= span_end) {
      const int64_t span = row / problem.span;
      span_end = (span + 1) * problem.span;
      read(problem.scale, span, 0, hidden, factor);
      read(problem.shift, span, 0, hidden, offset);
      if (problem.branch.data != nullptr) read(problem.gate, span, 0, hidden, gate);
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) {
        offset[i] += bias[i] * (1.0f + factor[i]);
        factor[i] = weight[i] * (1.0f + factor[i]);
      }
    }
    const Storage* x = at<T>(problem.x, row);
    if (problem.branch.data != nullptr) {
      Storage* sum = row_to<T>(problem.sum, row, hidden);
      add_gated<T>(x, at<T>(problem.branch, row), gate, sum, hidden);
      x = sum;
    }
    decode_all<T>(x, 0, hidden, values);
    const float mean = problem.centered ? mean_of(values, hidden) : 0.0f;
    double squares = 0.0;
    for (int64_t start = 0; start < hidden; start += kSumLength) {
      const int64_t stop = std::min(hidden, start + kSumLength);
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = start; i < stop; ++i) sum += (values[i] - mean) * (values[i] - mean);
      squares += sum;
    }
    const float rstd = reciprocal_norm(squares, hidden, problem.eps);
    Storage* __restrict__ normed = row_to<T>(problem.normed, row, hidden);
#pragma omp simd
    for (int64_t i = 0; i < hidden; ++i) {
      normed[i] = T::encode((values[i] - mean) * rstd * factor[i] + offset[i]);
    }
  }
}

struct Range {
  int64_t begin, end;
};

// The rows of a part.
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
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  std::vector<float> rows_of_floats(2 * hidden);
  float *gate = rows_of_floats.data(), *__restrict__ product = gate + hidden;
  for (int64_t part = begin; part < end; ++part) {
    const Range rows = rows_of_part(problem, part);
    float* __restrict__ sums = problem.sums.partial == nullptr ? nullptr : problem.sums.partial + part * hidden;
    if (sums != nullptr) std::memset(sums, 0, hidden * sizeof(float));
    int64_t span_end = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (row >= span_end) {
        const int64_t span = row / problem.span;
        span_end = (span + 1) * problem.span;
        read(problem.gate, span, 0, hidden, gate);
      }
      const Storage* grad = at<T>(problem.grad, row);
      Storage* __restrict__ grad_branch = row_to<T>(problem.grad_branch, row, hidden);
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) grad_branch[i] = T::encode(T::decode(grad[i]) * gate[i]);
      if (problem.grad_gate == nullptr) continue;
      const Storage* branch = at<T>(problem.branch, row);
      if (sums != nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) sums[i] += T::decode(grad[i]) * T::decode(branch[i]);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) product[i] = T::decode(grad[i]) * T::decode(branch[i]);
        write(product, problem.grad_gate, problem.gate.type, row * hidden, hidden);
      }
    }
  }
}

template <class T>
INLINE void run_rows(const Backward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  const bool own = problem.span == 1;  // every row has modulations of its own
  std::vector<float> rows_of_floats(10 * hidden);
  float* weight = rows_of_floats.data();
  float *bias = weight + hidden, *gate = bias + hidden, *scale = gate + hidden;
  float* __restrict__ factor = scale + hidden;  // of the gradient of the normed row
  float* __restrict__ slope = factor + hidden;  // that gradient
  float* __restrict__ grad = slope + hidden;
  float* __restrict__ normed = grad + hidden;   // first x
  float* __restrict__ total = normed + hidden;  // the gradient of x
  float* __restrict__ product = total + hidden;
  read(problem.weight, 0, hidden, 1.0f, weight);
  read(problem.bias, 0, hidden, 0.0f, bias);
  for (int64_t part = begin; part < end; ++part) {
    const Range rows = rows_of_part(problem, part);
    const Sums& sums = problem.sums;
    float* __restrict__ partial = sums.partial == nullptr ? nullptr : sums.partial + part * sums.count * hidden;
    if (partial != nullptr) std::memset(partial, 0, sums.count * hidden * sizeof(float));
    int64_t span_end = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (row >= span_end) {
        const int64_t span = row / problem.span;
        span_end = (span + 1) * problem.span;
        read(problem.scale, span, 0, hidden, scale);
        if (problem.grad_branch != nullptr) read(problem.gate, span, 0, hidden, gate);
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) factor[i] = weight[i] * (1.0f + scale[i]);
      }
      decode_all<T>(at<T>(problem.grad, row), 0, hidden, grad);
      decode_all<T>(at<T>(problem.x, row), 0, hidden, normed);
      const float mean = problem.centered ? mean_of(normed, hidden) : 0.0f;
      double squares = 0.0, slopes = 0.0, products = 0.0;
      for (int64_t start = 0; start < hidden; start += kSumLength) {
        const int64_t stop = std::min(hidden, start + kSumLength);
        float square_sum = 0.0f, slope_sum = 0.0f, product_sum = 0.0f;
#pragma omp simd reduction(+ : square_sum, slope_sum, product_sum)
        for (int64_t i = start; i < stop; ++i) {
          const float value = normed[i] - mean;
          slope[i] = grad[i] * factor[i];
          square_sum += value * value;
          slope_sum += slope[i];
          product_sum += slope[i] * value;
        }
        squares += square_sum;
        slopes += slope_sum;
        products += product_sum;
      }
      const float rstd = reciprocal_norm(squares, hidden, problem.eps);
      const float mean_slope = problem.centered ? static_cast<float>(slopes / static_cast<double>(hidden)) : 0.0f;
      const float along = rstd * rstd * static_cast<float>(products / static_cast<double>(hidden));
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = normed[i] - mean;
        normed[i] = value * rstd;
        total[i] = rstd * (slope[i] - mean_slope - value * along);
      }
      if (problem.grad_sum.data != nullptr) {
        const Storage* grad_sum = at<T>(problem.grad_sum, row);
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) total[i] += T::decode(grad_sum[i]);
      }
      encode_all<T>(total, problem.grad_x, row * hidden, hidden);
      if (partial != nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) {
          const float summed = grad[i] * (own ? 1.0f + scale[i] : 1.0f);
          partial[kSlopeTimesNormed * hidden + i] += summed * normed[i];
          partial[kSlope * hidden + i] += summed;
        }
      }
      if (own && problem.grad_scale != nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) product[i] = grad[i] * (normed[i] * weight[i] + bias[i]);
        write(product, problem.grad_scale, problem.scale.type, row * hidden, hidden);
      }
      if (problem.grad_branch == nullptr) continue;
      Storage* __restrict__ grad_branch = row_to<T>(problem.grad_branch, row, hidden);
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) grad_branch[i] = T::encode(total[i] * gate[i]);
      if (problem.grad_gate == nullptr) continue;
      const Storage* branch = at<T>(problem.branch, row);
      if (own) {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) product[i] = total[i] * T::decode(branch[i]);
        write(product, problem.grad_gate, problem.gate.type, row * hidden, hidden);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) partial[kGate * hidden + i] += total[i] * T::decode(branch[i]);
      }
    }
  }
}

// Adds the other parts' sums of a group to those of its first part, and returns these.
float* sum_of_parts(const Sums& sums, int64_t group, int64_t hidden, int64_t begin, int64_t end) {
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

#if defined(__x86_64__)
template <class T, class Problem>
__attribute__((target("avx2,fma"))) void run_avx2(const Problem& problem, int64_t begin, int64_t end) {
  run_rows<T>(problem, begin, end);
}
#endif

template <class T, class Problem>
void run(const Problem& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx2()) return run_avx2<T>(problem, begin, end);
#endif
  run_rows<T>(problem, begin, end);
}

template <class Problem>
void run_with_type(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run<Float32>(problem, begin, end);
    case Type::float16:
      return run<Float16>(problem, begin, end);
    case Type::bfloat16:
      return run<BFloat16>(problem, begin, end);
  }
}

}  // namespace

void gate(const Gate& problem, int64_t begin, int64_t end) { run_with_type(problem, begin, end); }

void forward(const Forward& problem, int64_t begin, int64_t end) { run_with_type(problem, begin, end); }

int64_t partial_sums(int64_t groups, int64_t rows) {
  return std::max<int64_t>(1, std::min(64 / groups, (rows / groups + 3) / 4));
}

void backward(const Backward& problem, int64_t begin, int64_t end) { run_with_type(problem, begin, end); }

void gate_backward(const GateBackward& problem, int64_t begin, int64_t end) { run_with_type(problem, begin, end); }

void reduce(const Backward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden, count = end - begin;
  const bool own = problem.span == 1;
  std::vector<float> rows_of_floats(6 * count);
  float* weight = rows_of_floats.data();
  float *bias = weight + count, *scale = bias + count, *__restrict__ grad_scale = scale + count;
  float* __restrict__ grad_weight = grad_scale + count, * __restrict__ grad_bias = grad_weight + count;
  read(problem.weight, begin, count, 1.0f, weight);
  read(problem.bias, begin, count, 0.0f, bias);
  for (int64_t group = 0; group < problem.sums.groups; ++group) {
    const float* sums = sum_of_parts(problem.sums, group, hidden, begin, end);
    const float* slope = sums + kSlope * hidden + begin;
    const float* slope_times_normed = sums + kSlopeTimesNormed * hidden + begin;
    read(own ? Modulation{} : problem.scale, group, begin, count, scale);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      grad_scale[i] = weight[i] * slope_times_normed[i] + bias[i] * slope[i];
      grad_weight[i] += (1.0f + scale[i]) * slope_times_normed[i];
      grad_bias[i] += (1.0f + scale[i]) * slope[i];
    }
    if (own) continue;
    const int64_t to = group * hidden + begin;
    if (problem.grad_scale != nullptr) write(grad_scale, problem.grad_scale, problem.scale.type, to, count);
    if (problem.grad_shift != nullptr) write(slope, problem.grad_shift, problem.scale.type, to, count);
    if (problem.grad_gate != nullptr) {
      write(sums + kGate * hidden + begin, problem.grad_gate, problem.gate.type, to, count);
    }
  }
  if (problem.grad_weight != nullptr) write(grad_weight, problem.grad_weight, problem.weight.type, begin, count);
  if (problem.grad_bias != nullptr) write(grad_bias, problem.grad_bias, problem.bias.type, begin, count);
}

void reduce(const GateBackward& problem, int64_t begin, int64_t end) {
  for (int64_t group = 0; group < problem.sums.groups; ++group) {
    const float* sums = sum_of_parts(problem.sums, group, problem.hidden, begin, end);
    write(sums + begin, problem.grad_gate, problem.gate.type, group * problem.hidden + begin, end - begin);
  }
}

}  // namespace adaln
